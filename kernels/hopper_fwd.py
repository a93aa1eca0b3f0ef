"""Forward of attention for Hopper: the online softmax of kernels/attention_fwd.py, by warps of three kinds.

One warp requests the tiles of q, k and v from the tensor memory accelerator. Two groups of four warps own 64 queries
each. Both walk over the same blocks of keys, from the last to the first. A group issues the product for the scores of a
block and the product of the weights and values of the block before, and computes weights while the other group's
products run: they take turns. (Shah et al., "FlashAttention-3", 2024, in the order of its figure for two warpgroups.)

If all tiles of 128 queries have the same work, one program for each multiprocessor walks over them, and the first tiles
of the next arrive while results are stored. Tensors, masks and results are those of attention_fwd. If a row is NaN,
attention_fwd computes its tile again, since a NaN among hidden values may have made it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.descriptors import is_addressable
from fusedattn.kernels.epilogue import OptionalRows, Results, residual_factor, store_statistics
from fusedattn.kernels.hopper import hides_values
from fusedattn.kernels.hopper_configs import FORWARD, ROWS
from fusedattn.kernels.hopper_parts import (
    MOST_REGISTERS,
    REGISTERS,
    boxes_of,
    end_stores,
    layout_of,
    operand_of,
    request,
    ring_of,
    store_box,
    store_rows,
    tiles_in_shared,
)
from fusedattn.kernels.masking import bounds_of, key_blocks, load_key_visible, visible
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.primitives import halves, numbered_tile
from fusedattn.kernels.problem import Problem, programs_of, sizes_of
from fusedattn.kernels.rounding_residual import encode_residual
from fusedattn.kernels.sequences import place_of, row_base
from fusedattn.kernels.softmax import softmax_update

BLOCK_M = 2 * ROWS
_ROWS, _BLOCK_M = tl.constexpr(ROWS), tl.constexpr(BLOCK_M)


class Stored(NamedTuple):
    """Where results go: fields of :class:`~fusedattn.kernels.epilogue.Results`, and rows that have a NaN, as int8."""

    lse: Any
    row_max: Any
    row_sum: Any
    out: Any
    rounding_residual: Any
    nan_rows: Any


class Sizes(NamedTuple):
    """Numbers of a call, as in attention_fwd."""

    nheads_q: Any
    nheads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    n_tiles: Any
    heads_in_l2: Any
    n_tile_ids: Any


class Shared(NamedTuple):
    """Shared memory: a :class:`~fusedattn.kernels.hopper_parts.Ring` each of q, k and v; ones, ``(8, BLOCK_N)``;
    mbarriers by which the groups of warps take turns, or None; for each group a tile of out, or None."""

    q: Any
    k: Any
    v: Any
    ones: Any
    turns: Any
    out: Any


class Boxes(NamedTuple):
    """Tensors as the tensor memory accelerator reads them, and out as it writes it, or None."""

    q: Any
    k: Any
    v: Any
    out: Any


class Job(NamedTuple):
    """A tile of queries, and the blocks of keys that it visits; `n` is 0 if there are none, or no queries."""

    place: Any
    head_kv: Any
    start_m: Any
    bounds: Any
    blocks: Any
    n: Any
    exists: Any


@gluon.jit
def _rounds(sizes):
    return tl.cdiv(sizes.n_tile_ids, gl.num_programs(0))


@gluon.jit
def _job(number, call, sizes, numbers, BLOCK_N: gl.constexpr):
    """The :class:`Job` of this program in round `number`."""
    tile_id = number * gl.num_programs(0) + gl.program_id(0)
    exists = tile_id < sizes.n_tile_ids
    tile_id = tl.minimum(tile_id, sizes.n_tile_ids - 1)
    tile, head, sequence = numbered_tile(
        tile_id, sizes.n_tile_ids, sizes.n_tiles, sizes.nheads_q, sizes.heads_in_l2, REVERSED=call.mask.HAS_UPPER
    )
    place = place_of(call.sequences, sequence, head, sizes.nheads_q, sizes.seqlen_q, sizes.seqlen_k)
    start_m = tile * _BLOCK_M
    exists = exists & (start_m < place.seqlen_q)
    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, _BLOCK_M, BLOCK_N, BLOCK_N)
    n = tl.where(exists, blocks.n_full + blocks.n_boundary, 0)
    return Job(place, head // (sizes.nheads_q // sizes.nheads_kv), start_m, bounds, blocks, n, exists)


@gluon.jit
def _requests(boxes, results, call, sizes, numbers, softmax_scale, shared):
    """The warp that requests tiles: queries once for each job, keys and values of its blocks from the last on."""
    q, k, v = shared.q, shared.k, shared.v
    STAGES: gl.constexpr = k.tiles.shape[0]
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    total = 0  # blocks so far
    jobs = 0
    for number in range(_rounds(sizes)):
        job = _job(number, call, sizes, numbers, BLOCK_N)
        place = job.place
        for i in range(job.n):
            slot = total % STAGES
            phase = total // STAGES & 1
            query = place.first_q + job.start_m
            key = place.first_k + job.blocks.start + (job.n - 1 - i) * BLOCK_N
            if i == 0:
                mbarrier.wait(q.empty.index(0), jobs & 1 ^ 1)
                request(boxes.q, place.batch, place.head, query, q, 0)
            mbarrier.wait(k.empty.index(slot), phase ^ 1)
            request(boxes.k, place.batch, job.head_kv, key, k, slot)
            if i == 0:
                mbarrier.wait(q.empty.index(1), jobs & 1 ^ 1)
                request(boxes.q, place.batch, place.head, query + _ROWS, q, 1)
                jobs += 1
            mbarrier.wait(v.empty.index(slot), phase ^ 1)
            request(boxes.v, place.batch, job.head_kv, key, v, slot)
            total += 1


@gluon.jit
def _masked(s, job, i, call, queries, keys, BLOCK_N: gl.constexpr):
    """The scores of block `i`, counted from the last, with -inf for pairs that are not visible."""
    start_n = job.blocks.start + (job.n - 1 - i) * BLOCK_N
    key_visible = load_key_visible(call.mask, job.place, job.bounds, start_n + keys)
    block = Block(job.start_m, start_n, queries[:, None], (start_n + keys)[None, :])
    exist = queries < job.place.seqlen_q
    pairs = visible(call.mask, job.place, job.bounds, block, exist[:, None], key_visible[None, :])
    return tl.where(pairs, s, float("-inf"))


@gluon.jit
def _blocks(
    sums, first, stop, total, job, call, qk_scale, queries, keys, shared, MASKED: gl.constexpr, GROUP: gl.constexpr,
    KEEPS: gl.constexpr,
):  # fmt: skip
    """Add the blocks from `first` to `stop`; the last has weights, but its values are still to be added."""
    q, k, v, ones, turns = shared.q, shared.k, shared.v, shared.ones, shared.turns
    q_tile = q.tiles.index(GROUP)
    acc, rounded, p, m_i, l_i = sums
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    STAGES: gl.constexpr = k.tiles.shape[0]
    SCORES: gl.constexpr = layout_of(BLOCK_N)
    VALUES: gl.constexpr = layout_of(k.tiles.shape[2])
    WEIGHTS: gl.constexpr = operand_of(k.tiles.shape[2])
    DTYPE: gl.constexpr = k.tiles.dtype
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    for i in range(first, stop):
        now = total + i
        slot = now % STAGES
        before = (now - 1) % STAGES
        mbarrier.wait(k.full.index(slot), now // STAGES & 1)
        if turns is not None:
            mbarrier.wait(turns.index(GROUP), now & 1)
        scores = warpgroup_mma(q_tile, k.tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v.full.index(before), (now - 1) // STAGES & 1)
        values = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
        if KEEPS:
            counts = warpgroup_mma(p, ones.permute((1, 0)), rounded, is_async=True)
        if turns is not None:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        if KEEPS:
            s = warpgroup_mma_wait(2, deps=[scores])
        else:
            s = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k.empty.index(slot), count=1)
        if MASKED:
            s = _masked(s, job, i, call, queries, keys, BLOCK_N)
        weights, alpha, m_i, l_i = softmax_update(s, m_i, l_i, qk_scale, 0)
        next_p = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
        mbarrier.wait(v.full.index(before), (now - 1) // STAGES & 1)  # a branch, over which ptxas moves nothing
        # p is an operand until here: the compiler must not reuse its registers before.
        if KEEPS:
            acc, rounded, p, next_p = warpgroup_mma_wait(0, deps=[values, counts, p, next_p])
            rounded = rounded * gl.convert_layout(alpha, gl.SliceLayout(1, rounded.type.layout))[:, None]
        else:
            acc, p, next_p = warpgroup_mma_wait(0, deps=[values, p, next_p])
        mbarrier.arrive(v.empty.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
        p = next_p
    return acc, rounded, p, m_i, l_i


@gluon.jit
def _multiply(
    boxes, results, call, sizes, numbers, softmax_scale, shared, GROUP: gl.constexpr
):  # fmt: skip
    """A group of warps: the weights and values of 64 queries of each job."""
    q, k, v, ones, turns = shared.q, shared.k, shared.v, shared.ones, shared.turns
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k.tiles.shape[2]
    STAGES: gl.constexpr = k.tiles.shape[0]
    SCORES: gl.constexpr = layout_of(BLOCK_N)
    VALUES: gl.constexpr = layout_of(HEAD_DIM)
    WEIGHTS: gl.constexpr = operand_of(HEAD_DIM)
    DTYPE: gl.constexpr = k.tiles.dtype
    KEEPS: gl.constexpr = results.rounding_residual is not None
    rows = GROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=SCORES)
    q_tile = q.tiles.index(GROUP)
    total = 0
    jobs = 0
    for number in range(_rounds(sizes)):
        job = _job(number, call, sizes, numbers, BLOCK_N)
        queries = job.start_m + rows
        acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, layout=VALUES)
        rounded = gl.zeros([_ROWS, 8], gl.float32, layout=layout_of(8))
        m_i = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        l_i = gl.full([_ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
        if job.n > 0:
            mbarrier.wait(q.full.index(GROUP), jobs & 1)
            mbarrier.wait(k.full.index(total % STAGES), total // STAGES & 1)
            if turns is not None:
                mbarrier.wait(turns.index(GROUP), total & 1)
            k_tile = k.tiles.index(total % STAGES).permute((1, 0))
            scores = warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
            if turns is not None:
                mbarrier.arrive(turns.index(1 - GROUP), count=1)
            s = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k.empty.index(total % STAGES), count=1)
            s = _masked(s, job, 0, call, queries, keys, BLOCK_N)
            weights, _, m_i, l_i = softmax_update(s, m_i, l_i, numbers.qk_scale, 0)
            p = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
            sums = acc, rounded, p, m_i, l_i
            last_full = tl.maximum(job.blocks.n_boundary - job.blocks.n_left, 1)
            first_left = tl.maximum(job.n - job.blocks.n_left, 1)
            sums = _blocks(
                sums, 1, last_full, total, job, call, numbers.qk_scale, queries, keys, shared, True, GROUP, KEEPS
            )
            sums = _blocks(
                sums, last_full, first_left, total, job, call, numbers.qk_scale, queries, keys, shared, False, GROUP,
                KEEPS,
            )  # fmt: skip
            if call.mask.HAS_LOWER:
                sums = _blocks(
                    sums, first_left, job.n, total, job, call, numbers.qk_scale, queries, keys, shared, True, GROUP,
                    KEEPS,
                )  # fmt: skip
            acc, rounded, p, m_i, l_i = sums
            mbarrier.arrive(q.empty.index(GROUP), count=1)
            total += job.n
            jobs += 1
            slot = (total - 1) % STAGES
            mbarrier.wait(v.full.index(slot), (total - 1) // STAGES & 1)
            values = warpgroup_mma(p, v.tiles.index(slot), acc, is_async=True)
            if KEEPS:
                counts = warpgroup_mma(p, ones.permute((1, 0)), rounded, is_async=True)
                acc, rounded = warpgroup_mma_wait(0, deps=[values, counts])
            else:
                acc = warpgroup_mma_wait(0, deps=[values])
            mbarrier.arrive(v.empty.index(slot), count=1)
        if job.exists:
            _store(acc, rounded, m_i, l_i, results, job, softmax_scale, boxes, shared, GROUP)
    if boxes.out is not None:
        end_stores()  # shared memory ends with the program


@gluon.jit
def _store(acc, rounded, m_i, l_i, results, job, softmax_scale, boxes, shared, GROUP: gl.constexpr):
    """Write the results of 64 rows, as kernels/epilogue.py does. The accelerator stores out while the next job begins.

    It stores no row behind the last of the tensor.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    place = job.place
    queries = job.start_m + GROUP * _ROWS + gl.arange(0, _ROWS, layout=BY_ROW)
    exist = queries < place.seqlen_q
    m_i = gl.convert_layout(m_i, BY_ROW)
    l_i = gl.convert_layout(l_i, BY_ROW)
    rounded_l_i = gl.convert_layout(gl.max(rounded, 1), BY_ROW)
    stats = row_base(place) + queries
    unseen = l_i == 0.0
    l_i = tl.where(unseen, 1.0, l_i)
    store_statistics(m_i, l_i, unseen, results, stats, exist, softmax_scale, 1)
    if results.nan_rows is not None:
        gl.store(results.nan_rows.ptr + stats, gl.max((acc != acc).to(gl.int32), 1).to(gl.int8), mask=exist)
    factor = 1.0 / l_i
    residual_of = residual_factor(l_i, l_i, rounded_l_i)
    if acc.shape[1] > 128:  # in pieces: registers for results do not suffice
        HALF: gl.constexpr = acc.shape[1] // 2
        left, right = halves(acc, _ROWS, acc.shape[1])
        _store_values(left, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, 0, GROUP)
        _store_values(right, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, HALF, GROUP)
    else:
        _store_values(acc, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, 0, GROUP)


@gluon.jit
def _store_values(
    acc, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, COLUMN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Write out, and what rounding took from it, from column COLUMN on."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    place = job.place
    queries = gl.convert_layout(queries, BY_ROW)
    exist = gl.convert_layout(exist, BY_ROW)
    unseen = gl.convert_layout(unseen, BY_ROW)[:, None]
    factor = gl.convert_layout(factor, BY_ROW)[:, None]
    out = tl.where(unseen, 0.0, acc * factor).to(results.out.ptr.dtype.element_ty)
    if boxes.out is not None:
        first = job.start_m + GROUP * _ROWS
        store_box(boxes.out, place.batch, place.head, first, shared.out.index(GROUP), out)
    else:
        store_rows(results.out, place.batch, place.head, place.first_q, job.start_m, queries, exist, out, COLUMN)
    if results.rounding_residual is not None:
        residual = encode_residual(acc * gl.convert_layout(residual_of, BY_ROW)[:, None], out)
        into = results.rounding_residual
        store_rows(into, place.batch, place.head, place.first_q, job.start_m, queries, exist, residual, COLUMN)


@gluon.jit
def _first_group(boxes, results, call, sizes, numbers, softmax_scale, shared):
    _multiply(boxes, results, call, sizes, numbers, softmax_scale, shared, 0)


@gluon.jit
def _second_group(boxes, results, call, sizes, numbers, softmax_scale, shared):
    _multiply(boxes, results, call, sizes, numbers, softmax_scale, shared, 1)


@gluon.jit
def _turns_of_groups():
    """An mbarrier for each group of warps, on which the other one arrives; it is the turn of the first."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    return turns


@gluon.jit(do_not_specialize=(*NOT_SPECIALIZED, "n_tile_ids"))
def hopper_fwd(
    q_boxes,
    k_boxes,
    v_boxes,
    out_boxes,
    results,
    call,
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
    softmax_scale,
    qk_scale,
    n_tile_ids,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    boxes = Boxes(q_boxes, k_boxes, v_boxes, out_boxes)  # Triton passes no descriptor in a tuple
    BLOCK_N: gl.constexpr = k_boxes.block_type.shape[2]
    DTYPE: gl.constexpr = k_boxes.dtype
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, 1.0, qk_scale)
    sizes = Sizes(nheads_q, nheads_kv, seqlen_q, seqlen_k, n_tiles, heads_in_l2, n_tile_ids)
    q = ring_of(boxes.q, 2, 1)
    k = ring_of(boxes.k, STAGES, 2)
    v = ring_of(boxes.v, STAGES, 2)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(DTYPE, [8, BLOCK_N], LAYOUT)
    if results.rounding_residual is not None:
        ones.store(gl.full([8, BLOCK_N], 1.0, DTYPE, layout=FLAT))
    out = None
    if out_boxes is not None:
        out = tiles_in_shared(out_boxes, 2)
    turns = None
    if TURNS:
        turns = _turns_of_groups()
    fence_async_shared()
    shared = Shared(q, k, v, ones, turns, out)
    arguments = (boxes, results, call, sizes, numbers, softmax_scale, shared)
    gl.warp_specialize(
        [(_first_group, arguments), (_second_group, arguments), (_requests, arguments)],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )


@lru_cache
def _constants(stages: int, turns: bool) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        hopper_fwd, num_warps=4, maxnreg=MOST_REGISTERS, STAGES=stages, TURNS=turns, REGISTERS=REGISTERS
    )


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results, problem: Problem
) -> torch.Tensor | None:
    """Fill `results`; q and k arrive rotated.

    Returns:
        int8, of the shape of lse: rows with a NaN, which may come from a hidden value. None if nothing is hidden.
    """
    shape, config = problem.shape, FORWARD[q.shape[3]]
    n_tiles = triton.cdiv(shape.max_seqlen_q, BLOCK_M)
    n_tile_ids = n_tiles * shape.nheads_q * shape.n_sequences
    nan_rows = None
    if hides_values(problem):
        nan_rows = replay.scratch(q, (q.shape[0], shape.nheads_q, shape.seqlen_q), torch.int8)
    # If tiles differ in work, the GPU hands them out one by one, and groups without turns are faster.
    even = nan_rows is None
    launcher.launch(
        _constants(config.STAGES, turns=even),
        programs_of(int(even), n_tile_ids, q.device)[0],
        (
            boxes_of(q, ROWS),
            boxes_of(k, config.BLOCK),
            boxes_of(v, config.BLOCK),
            boxes_of(results.out, ROWS) if _stores_boxes(results.out, problem) else None,
            Stored(*results.strided()[:5], None if nan_rows is None else OptionalRows(nan_rows)),
            problem.call,
        ),
        (*sizes_of(q, v, problem, n_tiles), problem.softmax_scale, problem.qk_scale, n_tile_ids),
        problem.known_call,
    )
    return nan_rows


def _stores_boxes(out: torch.Tensor, problem: Problem) -> bool:
    """Whether the accelerator stores out: not if rows of another sequence may follow, and only if tiles fit."""
    return out.shape[3] < 256 and problem.call.sequences.cu_q_ptr is None and is_addressable(out)
