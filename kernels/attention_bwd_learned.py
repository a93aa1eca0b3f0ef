"""Gradients of learned numbers in the scores: ALiBi's slopes, and tensors that a user's function reads.

Each gradient sums ds (score_gradient) times a derivative over the pairs that read the number::

    dslope[sequence, head] = -sum of ds * |distance|
    darg[entry]            = sum of ds * derivative(score, ...)      over the pairs with index(...) = entry

One program owns a tile of queries and walks over its keys. If the index depends on the query alone, the key alone or
neither, a tile is first summed along the other dimensions. Then programs add to :mod:`exact_sum`, in any order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels import exact_sum, launcher
from fusedattn.kernels.attention_bwd_rows import BackwardRows
from fusedattn.kernels.exact_sum import ExactSums, add_exactly
from fusedattn.kernels.masking import any_keys, bounds_of, key_blocks, numbers_of_pairs
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.pipelining import fenced
from fusedattn.kernels.primitives import dtype_of, program_tile, strided
from fusedattn.kernels.problem import Problem, constants_of, sizes_of
from fusedattn.kernels.score_gradient import QKVDout, score_gradient
from fusedattn.kernels.scores import capped, distance_of
from fusedattn.kernels.sequences import place_of


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "n_entries"])
def attention_bwd_learned(
    q,
    k,
    v,
    dout,
    rows,
    sums,
    call,
    n_entries,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    heads_in_l2,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    qk_scale,
    INDEX: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    tile,
):
    """Add the terms of a tile of queries to `sums`; those of the slopes if INDEX is None."""
    inputs = QKVDout(q, k, v, dout)
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head, sequence = program_tile(n_tiles, nheads_q, heads_in_l2, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = number * tile.BLOCK_M
    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_N)
    for i in tl.range(0, blocks.n_full + blocks.n_boundary, disable_licm=True):
        start_n = any_keys(i, blocks, call.mask, place, start_m, tile.BLOCK_N)
        ds, pairs, products, block = score_gradient(
            inputs, rows, call, place, bounds, numbers, nheads_kv, start_m, start_n, tile
        )
        if INDEX is None:
            index = sequence * call.score.slopes_stride + head
            terms = -ds * tl.abs(distance_of(place, block)).to(dtype_of(tile.ACC))
        else:
            scores, _ = capped(products, call.score, scale)
            of_sequence, of_head, query, key = numbers_of_pairs(place, block.rows, block.keys)
            index = INDEX(of_sequence, of_head, query, key, call.score.function_args)
            derivative = DERIVATIVE(scores, of_sequence, of_head, query, key, call.score.function_args)
            # The derivative of a hidden pair may be any number, or NaN.
            terms = tl.where(pairs, ds * tl.cast(derivative, dtype_of(tile.ACC)), 0.0)
        index += tl.zeros([1, 1], tl.int32)  # a number gets a shape too, which says what the index depends on
        if index.shape[0] == 1:
            terms = tl.sum(terms, 0, keep_dims=True)
        if index.shape[1] == 1:
            terms = tl.sum(terms, 1, keep_dims=True)
        add_exactly(sums, index, terms, (index >= 0) & (index < n_entries))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    learned: torch.Tensor,
    readers: list[tuple[int, int, Any, Any]],
    problem: Problem,
) -> torch.Tensor:
    """The gradient of `learned`, contiguous, in its shape and dtype; no tensor is empty.

    `readers` has (first entry, number of entries, index, derivative) for each part of it; for slopes, no functions.
    """
    shape, config = problem.shape, problem.configs.dq
    config = fenced(config, problem.async_products, config.BLOCK_M, k, v)
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    sums = exact_sum.zeros(learned.numel(), rows.delta.dtype, q.device)
    for start, n_entries, index, derivative in readers:
        own = ExactSums(*(x[start:] for x in sums))
        launcher.launch(
            constants_of(attention_bwd_learned, q, v, problem, config, INDEX=index, DERIVATIVE=derivative),
            n_tiles * shape.nheads_q * shape.n_sequences,
            (*map(strided, (q, k, v, dout)), rows, own, problem.call),
            (n_entries, *sizes_of(q, v, problem, n_tiles), problem.scale, problem.qk_scale),
            problem.known_call,
        )
    return exact_sum.rounded(sums).view(learned.shape).to(learned.dtype)
