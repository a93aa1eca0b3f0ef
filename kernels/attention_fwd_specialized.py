"""Forward of attention by warps with different tasks: one group of warps loads tiles, two others multiply.

It computes and writes the same as kernels/attention_fwd.py, with its functions. Hopper's compiler splits a loop between
warps (``tl.range(warp_specialize=True)``) under conditions that shape this kernel and the calls it takes:

- There is one loop, without a branch, and it reads through tensor descriptors only. A mask is applied to every block;
  without a mask, the keys must be whole blocks.
- There is no second pass after a NaN. Under a mask, a row whose result has a NaN gets NaN as its sum, and attention_fwd
  is launched after this kernel for tiles with such rows. Without a mask each query sees all values, so a NaN is right.
- A rotation of queries does not compile everywhere: they arrive rotated.

    q, k, v, results    as in kernels/attention_fwd.py, of 16 bits; descriptors can address q, k and v
    grid                (tiles of queries * nheads_q * sequences,)

kernels/guard.py inspects the compiled kernel before it is launched.
"""

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from fusedattn.kernels import attention_fwd, guard, replay
from fusedattn.kernels.attention_fwd import accumulate, no_sums
from fusedattn.kernels.call import Problem, constants_of, sizes_of
from fusedattn.kernels.descriptors import full_tile, is_describable, tiles_of
from fusedattn.kernels.epilogue import Results, Sums, store_results
from fusedattn.kernels.grid import tiling_of
from fusedattn.kernels.grouped import rows_of
from fusedattn.kernels.masking import bounds_of, key_blocks, load_key_visible, visible
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.primitives import Head, dot, dtype_of, head_base, program_tile, strided
from fusedattn.kernels.rope import rotated
from fusedattn.kernels.scores import UNMODIFIED
from fusedattn.kernels.sequences import place_of


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_fwd_specialized(
    q,
    k_tiles,
    v_tiles,
    results,
    call,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    together,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    softmax_scale,
    qk_scale,
    tile,
):
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head, sequence = program_tile(n_tiles, nheads_q, together, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = number * tile.BLOCK_M
    head_kv = head // (nheads_q // nheads_kv)
    MASKED: tl.constexpr = call.mask.HAS_LOWER or call.mask.HAS_UPPER
    HAS_RESIDUAL: tl.constexpr = results.rounding_residual is not None
    queries = start_m + tl.arange(0, tile.BLOCK_M)
    offs_n = tl.arange(0, tile.BLOCK_N)

    # (BLOCK_M, BLOCK_D). Each of the two groups that multiply takes half of the rows. So does its descriptor: one made
    # by the host would still copy all of them.
    q_tiles = tl.make_tensor_descriptor(
        head_base(q, sequence, head, 0), [seqlen_q, tile.HEAD_DIM], [q.stride_s, 1], [tile.BLOCK_M, tile.BLOCK_D]
    )
    q_tile = q_tiles.load([start_m, 0])

    sums = no_sums(tile.BLOCK_M, tile.BLOCK_DV, dtype_of(tile.ACC))
    kv_head = Head(0, 0, sequence, head_kv, 0)  # read by descriptors alone
    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_N)
    stop = blocks.start + (blocks.n_full + blocks.n_boundary) * tile.BLOCK_N
    for start_n in tl.range(blocks.start, stop, tile.BLOCK_N, warp_specialize=True):
        # Rows beyond the last key are zeros.
        k_tile = full_tile(kv_head, k_tiles, start_n, tile.HEAD_DIM, tile.BLOCK_N, tile.BLOCK_D)
        v_tile = full_tile(kv_head, v_tiles, start_n, tile.HEAD_DIM_V, tile.BLOCK_N, tile.BLOCK_DV)
        scores = dot(q_tile, tl.trans(k_tile), dtype_of(tile.ACC), tile.PRECISION)
        keys = start_n + offs_n
        block = Block(start_m, start_n, queries[:, None], keys[None, :])
        if MASKED:
            key_visible = load_key_visible(call.mask, place, bounds, keys)[None, :]
            # Rows beyond the last query may see keys: they are not stored.
            pairs = visible(call.mask, place, bounds, block, key_visible, key_visible)
            scores = tl.where(pairs, scores, float("-inf"))
        sums = accumulate(sums, scores, v_tile, call, place, block, qk_scale, HAS_RESIDUAL, tile)
    if MASKED:
        m_i, l_i, w_i, c_i, acc = sums
        l_i = tl.where(tl.max((acc != acc).to(tl.int32), 1) != 0, float("nan"), l_i)
        sums = Sums(m_i, l_i, w_i, c_i, acc)
    rows = rows_of(place, start_m, head, nheads_q, tile.BLOCK_M, 1)
    store_results(sums, None, results, call.dropout, place, rows, softmax_scale, qk_scale, tile)


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> bool:
    """Whether the config asks for this kernel, the kernel supports the call, and the guard knows the GPU."""
    config, call, mask = problem.configs.fwd, problem.call, problem.call.mask
    return (
        config.style == "specialized"
        and tiling_of(problem).config == config.plain  # not few queries
        and q.dtype.itemsize == 2
        and not problem.rotates_in_place
        and problem.sinks is None
        and call.score is UNMODIFIED
        and call.dropout.seed_ptr is None
        and call.sequences.cu_q_ptr is None
        and mask.valid_ptr is None
        and mask.prefix_ptr is None
        and mask.documents is None
        and not mask.BY_PAIR.value
        and (problem.band.has_lower or problem.band.has_upper or problem.shape.seqlen_k % config.BLOCK_N == 0)
        and all(map(is_describable, (q, k, v)))
        and guard.knows(q.device)
    )


def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results, problem: Problem) -> None:
    """Fill `results` of a call that this kernel takes, as attention_fwd does; by attention_fwd if the guard refuses.

    The descriptor of q needs an allocator. It is set in a context of its own, so that the user's is not replaced.
    """
    replay.give_up()  # the kernel is launched past kernels/launcher.py
    config, shape = problem.configs.fwd, problem.shape
    if problem.rotation_q is not None:
        q = rotated(q, problem.rotation_q, problem.call.sequences, shape, of_queries=True)
        problem = replace(problem, rotation_q=None)
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    of_results = results.strided()
    run = partial(
        attention_fwd_specialized.run,
        strided(q),
        tiles_of(k, config.BLOCK_N, config.style),
        tiles_of(v, config.BLOCK_N, config.style),
        of_results,
        problem.call,
        *sizes_of(q, v, problem, n_tiles),
        problem.scale,
        problem.softmax_scale,
        problem.qk_scale,
        grid=(n_tiles * shape.nheads_q * shape.n_sequences,),
        **constants_of(attention_fwd_specialized, q, v, problem, config).named,
    )
    strides = (
        *strided(q)[1:],
        *of_results.out[1:],
        *(() if of_results.rounding_residual is None else of_results.rounding_residual[1:]),
    )
    key = (
        *(q.device, q.dtype, q.shape[3], v.shape[3], config, problem.band.has_lower, problem.band.has_upper),
        *map(_kind, strides),
    )
    if not guard.accepts(key, lambda: run(warmup=True)):
        attention_fwd.launch(q, k, v, results, problem)
        return
    copy_context().run(_with_allocator, run)
    if problem.band.has_lower or problem.band.has_upper:
        attention_fwd.launch(q, k, v, results, problem, only_nan=True)


def _with_allocator(run: Callable[..., None]) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    run(warmup=False)


def _kind(x: int) -> tuple[bool, bool, bool]:
    """The properties of a number that Triton compiles different kernels for."""
    return x == 1, x % 16 == 0, x >= 2**31
