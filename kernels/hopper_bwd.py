"""Backward of attention for Hopper: dk and dv, and dq, defined by kernels/attention_bwd.py, by warps of three kinds.

One warp requests tiles, two groups of four warps own 64 keys (queries) each and walk over blocks of queries (keys):
boundary blocks first, then full blocks, in one loop. Products that add to dk, dv or dq run on while the next block
begins. On every way into the loop the sums must come from products, or ptxas waits for each: the first block stands
apart.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.attention_bwd_rows import BackwardRows
from fusedattn.kernels.epilogue import OptionalRows
from fusedattn.kernels.hopper import hides_rows, hides_values
from fusedattn.kernels.hopper_configs import DKDV, DQ, ROWS
from fusedattn.kernels.hopper_parts import (
    MOST_REGISTERS,
    REGISTERS,
    boxes_of,
    layout_of,
    operand_of,
    request,
    ring_of,
    store_rows,
)
from fusedattn.kernels.masking import (
    boundary_keys,
    boundary_queries,
    bounds_of,
    key_blocks,
    load_key_visible,
    query_blocks,
    visible,
)
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.primitives import program_tile, strided
from fusedattn.kernels.problem import Problem, sizes_of
from fusedattn.kernels.sequences import key_row_base, place_of, row_base, with_head

OWN = 2 * ROWS  # keys or queries of a program
_ROWS, _OWN = tl.constexpr(ROWS), tl.constexpr(OWN)


class Boxes(NamedTuple):
    """Tensors as the tensor memory accelerator reads them; Triton passes no descriptor in a tuple."""

    q: Any
    k: Any
    v: Any
    dout: Any


class Sizes(NamedTuple):
    """Numbers of a call, as in attention_bwd."""

    nheads_q: Any
    nheads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    n_tiles: Any
    heads_in_l2: Any


class Walk(NamedTuple):
    """What a program owns, from `start` on, and the blocks that it visits, of `group` heads."""

    place: Any
    head_kv: Any
    group: Any
    start: Any
    bounds: Any
    blocks: Any


@gluon.jit
def _of_keys(call, sizes, numbers, BLOCK: gl.constexpr):
    """The :class:`Walk` of a program that owns keys."""
    number, head_kv, sequence = program_tile(sizes.n_tiles, sizes.nheads_kv, sizes.heads_in_l2, REVERSED=False)
    group = sizes.nheads_q // sizes.nheads_kv
    place = place_of(call.sequences, sequence, head_kv * group, sizes.nheads_q, sizes.seqlen_q, sizes.seqlen_k)
    bounds = bounds_of(call.mask, place, numbers)
    blocks = query_blocks(call.mask, place, bounds, group, number * _OWN, BLOCK, _OWN, BLOCK)
    return Walk(place, head_kv, group, number * _OWN, bounds, blocks)


@gluon.jit
def _queries_of(i, walk, call, BLOCK: gl.constexpr):
    """(head, first query) of block `i`: boundary blocks of all heads, then full ones."""
    n_boundary = walk.blocks.n_boundary
    all_boundary = walk.group * n_boundary
    n_full = tl.maximum(walk.blocks.n_full, 1)
    j = i - all_boundary
    first_head = walk.head_kv * walk.group
    start = walk.blocks.start + (walk.blocks.n_left + j % n_full) * BLOCK
    head = first_head + j // n_full
    if i < all_boundary:
        start = boundary_queries(i % n_boundary, walk.blocks, call.mask, walk.place, walk.start, BLOCK)
        head = first_head + i // n_boundary
    return head, start


@gluon.jit
def _requests_of_queries(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine):
    """The warp that requests tiles: keys and values once, then queries and dout. It copies their statistics itself:
    the accelerator reads lines from multiples of 16 bytes on only."""
    STAGES: gl.constexpr = q.tiles.shape[0]
    BLOCK: gl.constexpr = q.tiles.shape[1]
    walk = _of_keys(call, sizes, numbers, BLOCK)
    n = walk.group * (walk.blocks.n_boundary + walk.blocks.n_full)
    key = walk.place.first_k + walk.start
    request(boxes.k, walk.place.batch, walk.head_kv, key, own, 0)
    request(boxes.v, walk.place.batch, walk.head_kv, key, own, 1)
    columns = gl.arange(0, BLOCK, layout=gl.BlockedLayout([BLOCK // 32], [32], [1], [0]))
    for i in range(n):
        slot = i % STAGES
        phase = i // STAGES & 1
        head, start = _queries_of(i, walk, call, BLOCK)
        queries = start + columns
        exist = (queries >= 0) & (queries < walk.place.seqlen_q)
        stats = row_base(with_head(walk.place, head)) + queries
        row = walk.place.first_q + start
        mbarrier.wait(q.empty.index(slot), phase ^ 1)
        request(boxes.q, walk.place.batch, head, row, q, slot)
        mbarrier.wait(dout.empty.index(slot), phase ^ 1)
        request(boxes.dout, walk.place.batch, head, row, dout, slot)
        mine.shift.index(slot).store(gl.load(rows.shift + stats, mask=exist, other=float("inf")))
        mine.delta.index(slot).store(gl.load(rows.delta + stats, mask=exist, other=0.0))
        mbarrier.arrive(dout.full.index(slot), count=1)


class Lines(NamedTuple):
    """Statistics of the rows of each tile of a ring, ``(n, BLOCK)``; inf and 0 for rows that do not exist."""

    shift: Any
    delta: Any


@gluon.jit
def _pairs_of_keys(i, walk, call, keys, BLOCK: gl.constexpr):
    """Which pairs of boundary block `i` are visible, ``(ROWS, BLOCK)``."""
    head, start = _queries_of(i, walk, call, BLOCK)
    queries = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, keys.type.layout.parent))
    exist = (queries >= 0) & (queries < walk.place.seqlen_q)
    key_visible = load_key_visible(call.mask, walk.place, walk.bounds, keys)
    block = Block(start, walk.start, queries[None, :], keys[:, None])
    place = with_head(walk.place, head)
    return visible(call.mask, place, walk.bounds, block, exist[None, :], key_visible[:, None])


@gluon.jit
def _dkdv_step(dkt, dvt, i, n_boundary, walk, call, qk_scale, keys, k_tile, v_tile, q, dout, mine):
    """Add a block of queries to the products in flight of dk and dv."""
    HEAD_DIM: gl.constexpr = q.tiles.shape[2]
    STAGES: gl.constexpr = q.tiles.shape[0]
    BLOCK: gl.constexpr = q.tiles.shape[1]
    SCORES: gl.constexpr = layout_of(BLOCK)
    WEIGHTS: gl.constexpr = operand_of(HEAD_DIM)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    DTYPE: gl.constexpr = q.tiles.dtype
    slot = i % STAGES
    before = (i + STAGES - 1) % STAGES
    phase = i // STAGES & 1
    q_tile = q.tiles.index(slot)
    dout_tile = dout.tiles.index(slot)
    zeros = gl.zeros([_ROWS, BLOCK], gl.float32, layout=SCORES)
    mbarrier.wait(q.full.index(slot), phase)
    scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Operands of the products before are free from here on.
    s, dk, dv = warpgroup_mma_wait(0, deps=[scores, dkt, dvt])
    mbarrier.wait(dout.full.index(slot), phase)
    delta = mine.delta.index(slot).load(BY_COLUMN)
    # The sum begins at -delta, which thus needs no registers beside p.
    dpt = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros - delta[None, :], is_async=True)
    mbarrier.arrive(dout.empty.index(before), count=1, pred=i > 0)
    mbarrier.arrive(q.empty.index(before), count=1, pred=i > 0)
    shift = mine.shift.index(slot).load(BY_COLUMN)
    p = gl.exp2(s * qk_scale - shift[None, :])
    if i < n_boundary:
        p = tl.where(_pairs_of_keys(i, walk, call, keys, BLOCK), p, 0.0)
    dvt = warpgroup_mma(gl.convert_layout(p.to(DTYPE), WEIGHTS), dout_tile, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dpt])
    ds = p * dp
    dkt = warpgroup_mma(gl.convert_layout(ds.to(DTYPE), WEIGHTS), q_tile, dk, is_async=True)
    return dkt, dvt


@gluon.jit
def _dkdv(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine, GROUP: gl.constexpr):
    """A group of warps: the gradients of 64 keys and values."""
    HEAD_DIM: gl.constexpr = q.tiles.shape[2]
    BLOCK: gl.constexpr = q.tiles.shape[1]
    SUMS: gl.constexpr = layout_of(HEAD_DIM)
    walk = _of_keys(call, sizes, numbers, BLOCK)
    n_boundary = walk.group * walk.blocks.n_boundary
    n = n_boundary + walk.group * walk.blocks.n_full
    keys = walk.start + GROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout_of(BLOCK)))
    k_tile = own.tiles.index(0).slice(GROUP * _ROWS, _ROWS, dim=0)
    v_tile = own.tiles.index(1).slice(GROUP * _ROWS, _ROWS, dim=0)
    dk = gl.zeros([_ROWS, HEAD_DIM], gl.float32, layout=SUMS)
    dv = gl.zeros([_ROWS, HEAD_DIM], gl.float32, layout=SUMS)
    mbarrier.wait(own.full.index(0), 0)
    mbarrier.wait(own.full.index(1), 0)
    if n > 0:
        dkt = warpgroup_mma_init(dk)
        dvt = warpgroup_mma_init(dv)
        qk_scale = numbers.qk_scale
        dkt, dvt = _dkdv_step(dkt, dvt, 0, n_boundary, walk, call, qk_scale, keys, k_tile, v_tile, q, dout, mine)
        for i in range(1, n):
            dkt, dvt = _dkdv_step(dkt, dvt, i, n_boundary, walk, call, qk_scale, keys, k_tile, v_tile, q, dout, mine)
        dk, dv = warpgroup_mma_wait(0, deps=[dkt, dvt])
    place = walk.place
    of_rows = walk.start + GROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SUMS))
    exist = of_rows < place.seqlen_k
    dk *= numbers.scale
    store_rows(outs.dk, place.batch, walk.head_kv, place.first_k, walk.start, of_rows, exist, dk)
    store_rows(outs.dv, place.batch, walk.head_kv, place.first_k, walk.start, of_rows, exist, dv)
    if outs.nan_rows is not None:
        bad = tl.maximum(gl.max((dk != dk).to(gl.int32), 1), gl.max((dv != dv).to(gl.int32), 1)).to(gl.int8)
        first = key_row_base(place, walk.head_kv, sizes.nheads_kv, sizes.seqlen_k)
        gl.store(outs.nan_rows.ptr + first + of_rows, bad, mask=exist)


class Gradients(NamedTuple):
    """Tensors that a kernel fills, each a Strided; nan_rows, of queries or keys, as in hopper_fwd."""

    dq: Any
    dk: Any
    dv: Any
    nan_rows: Any


@gluon.jit
def _first_of_keys(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine):
    _dkdv(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine, 0)


@gluon.jit
def _second_of_keys(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine):
    _dkdv(boxes, rows, outs, call, sizes, numbers, q, dout, own, mine, 1)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def hopper_bwd_dkdv(
    q_boxes,
    k_boxes,
    v_boxes,
    dout_boxes,
    rows,
    outs,
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
    scale,
    qk_scale,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    sizes = Sizes(nheads_q, nheads_kv, seqlen_q, seqlen_k, n_tiles, heads_in_l2)
    boxes = Boxes(q_boxes, k_boxes, v_boxes, dout_boxes)
    BLOCK: gl.constexpr = q_boxes.block_type.shape[2]
    q = ring_of(boxes.q, STAGES, 2)
    dout = ring_of(boxes.dout, STAGES, 2, WRITERS=2)
    own = ring_of(boxes.k, 2, 0)  # the keys, then the values
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    mine = Lines(
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], LINES),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], LINES),
    )
    fence_async_shared()
    arguments = (boxes, rows, outs, call, sizes, numbers, q, dout, own, mine)
    gl.warp_specialize(
        [(_first_of_keys, arguments), (_second_of_keys, arguments), (_requests_of_queries, arguments)],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )


@gluon.jit
def _of_queries(call, sizes, numbers, BLOCK: gl.constexpr):
    """The :class:`Walk` of a program that owns queries."""
    number, head, sequence = program_tile(
        sizes.n_tiles, sizes.nheads_q, sizes.heads_in_l2, REVERSED=call.mask.HAS_UPPER
    )
    place = place_of(call.sequences, sequence, head, sizes.nheads_q, sizes.seqlen_q, sizes.seqlen_k)
    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, number * _OWN, _OWN, BLOCK, BLOCK)
    return Walk(place, head // (sizes.nheads_q // sizes.nheads_kv), 1, number * _OWN, bounds, blocks)


@gluon.jit
def _n_keys(walk):
    """The number of blocks of keys that the queries of a program visit: none if there are no such queries."""
    return tl.where(walk.start < walk.place.seqlen_q, walk.blocks.n_boundary + walk.blocks.n_full, 0)


@gluon.jit
def _keys_of(i, walk, call, BLOCK: gl.constexpr):
    """The first key of block `i`: boundary blocks, then full ones."""
    start = walk.blocks.start + (walk.blocks.n_left + i - walk.blocks.n_boundary) * BLOCK
    if i < walk.blocks.n_boundary:
        start = boundary_keys(i, walk.blocks, call.mask, walk.place, walk.start, BLOCK)
    return start


@gluon.jit
def _requests_of_keys(boxes, rows, outs, call, sizes, numbers, q, dout, k, v):
    """The warp that requests tiles: queries and dout once, then keys and values."""
    STAGES: gl.constexpr = k.tiles.shape[0]
    BLOCK: gl.constexpr = k.tiles.shape[1]
    walk = _of_queries(call, sizes, numbers, BLOCK)
    for group in gl.static_range(2):
        row = walk.place.first_q + walk.start + group * _ROWS
        request(boxes.q, walk.place.batch, walk.place.head, row, q, group)
        request(boxes.dout, walk.place.batch, walk.place.head, row, dout, group)
    for i in range(_n_keys(walk)):
        slot = i % STAGES
        phase = i // STAGES & 1
        row = walk.place.first_k + _keys_of(i, walk, call, BLOCK)
        mbarrier.wait(k.empty.index(slot), phase ^ 1)
        request(boxes.k, walk.place.batch, walk.head_kv, row, k, slot)
        mbarrier.wait(v.empty.index(slot), phase ^ 1)
        request(boxes.v, walk.place.batch, walk.head_kv, row, v, slot)


@gluon.jit
def _pairs_of_queries(i, walk, call, queries, BLOCK: gl.constexpr):
    """Which pairs of boundary block `i` are visible, ``(ROWS, BLOCK)``."""
    start = _keys_of(i, walk, call, BLOCK)
    keys = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, queries.type.layout.parent))
    exist = queries < walk.place.seqlen_q
    key_visible = load_key_visible(call.mask, walk.place, walk.bounds, keys)
    block = Block(walk.start, start, queries[:, None], keys[None, :])
    return visible(call.mask, walk.place, walk.bounds, block, exist[:, None], key_visible[None, :])


@gluon.jit
def _dq_step(
    dqt, i, n_boundary, walk, call, qk_scale, queries, shift, delta, q_tile, dout_tile, k, v
):  # fmt: skip
    """Add a block of keys to the product in flight of dq."""
    STAGES: gl.constexpr = k.tiles.shape[0]
    BLOCK: gl.constexpr = k.tiles.shape[1]
    SCORES: gl.constexpr = layout_of(BLOCK)
    WEIGHTS: gl.constexpr = operand_of(k.tiles.shape[2])
    slot = i % STAGES
    phase = i // STAGES & 1
    zeros = gl.zeros([_ROWS, BLOCK], gl.float32, layout=SCORES)
    k_tile = k.tiles.index(slot)
    mbarrier.wait(k.full.index(slot), phase)
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # The operand of the product before is free from here on.
    s, dq = warpgroup_mma_wait(0, deps=[scores, dqt])
    mbarrier.wait(v.full.index(slot), phase)
    dpt = warpgroup_mma(dout_tile, v.tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(k.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    p = gl.exp2(s * qk_scale - shift[:, None])
    mbarrier.wait(v.full.index(slot), phase)  # a branch, over which the assembler moves nothing
    dp = warpgroup_mma_wait(0, deps=[dpt])
    mbarrier.arrive(v.empty.index(slot), count=1)
    ds = p * (dp - delta[:, None])
    if i < n_boundary:
        ds = tl.where(_pairs_of_queries(i, walk, call, queries, BLOCK), ds, 0.0)
    return warpgroup_mma(gl.convert_layout(ds.to(k.tiles.dtype), WEIGHTS), k_tile, dq, is_async=True)


@gluon.jit
def _dq(boxes, rows, outs, call, sizes, numbers, q, dout, k, v, GROUP: gl.constexpr):
    """A group of warps: the gradients of 64 queries."""
    HEAD_DIM: gl.constexpr = q.tiles.shape[2]
    BLOCK: gl.constexpr = k.tiles.shape[1]
    SUMS: gl.constexpr = layout_of(HEAD_DIM)
    walk = _of_queries(call, sizes, numbers, BLOCK)
    n_boundary = walk.blocks.n_boundary
    n = _n_keys(walk)
    queries = walk.start + GROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout_of(BLOCK)))
    stats = row_base(walk.place) + queries
    exist = queries < walk.place.seqlen_q
    shift = gl.load(rows.shift + stats, mask=exist, other=float("inf"))
    delta = gl.load(rows.delta + stats, mask=exist, other=0.0)
    q_tile = q.tiles.index(GROUP)
    dout_tile = dout.tiles.index(GROUP)
    dq = gl.zeros([_ROWS, HEAD_DIM], gl.float32, layout=SUMS)
    mbarrier.wait(q.full.index(GROUP), 0)
    mbarrier.wait(dout.full.index(GROUP), 0)
    if n > 0:
        qk_scale = numbers.qk_scale
        dqt = warpgroup_mma_init(dq)
        dqt = _dq_step(dqt, 0, n_boundary, walk, call, qk_scale, queries, shift, delta, q_tile, dout_tile, k, v)
        for i in range(1, n):
            dqt = _dq_step(dqt, i, n_boundary, walk, call, qk_scale, queries, shift, delta, q_tile, dout_tile, k, v)
        dq = warpgroup_mma_wait(0, deps=[dqt])
    place = walk.place
    of_rows = walk.start + GROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SUMS))
    exist = of_rows < place.seqlen_q
    dq *= numbers.scale
    store_rows(outs.dq, place.batch, place.head, place.first_q, walk.start, of_rows, exist, dq)
    if outs.nan_rows is not None:
        bad = gl.max((dq != dq).to(gl.int32), 1).to(gl.int8)
        gl.store(outs.nan_rows.ptr + row_base(place) + of_rows, bad, mask=exist)


@gluon.jit
def _first_of_queries(boxes, rows, outs, call, sizes, numbers, q, dout, k, v):
    _dq(boxes, rows, outs, call, sizes, numbers, q, dout, k, v, 0)


@gluon.jit
def _second_of_queries(boxes, rows, outs, call, sizes, numbers, q, dout, k, v):
    _dq(boxes, rows, outs, call, sizes, numbers, q, dout, k, v, 1)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def hopper_bwd_dq(
    q_boxes,
    k_boxes,
    v_boxes,
    dout_boxes,
    rows,
    outs,
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
    scale,
    qk_scale,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    sizes = Sizes(nheads_q, nheads_kv, seqlen_q, seqlen_k, n_tiles, heads_in_l2)
    boxes = Boxes(q_boxes, k_boxes, v_boxes, dout_boxes)
    q = ring_of(boxes.q, 2, 0)
    dout = ring_of(boxes.dout, 2, 0)
    k = ring_of(boxes.k, STAGES, 2)
    v = ring_of(boxes.v, STAGES, 2)
    fence_async_shared()
    arguments = (boxes, rows, outs, call, sizes, numbers, q, dout, k, v)
    gl.warp_specialize(
        [(_first_of_queries, arguments), (_second_of_queries, arguments), (_requests_of_keys, arguments)],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )


@lru_cache(maxsize=16)
def _constants(kernel: Any, stages: int) -> launcher.KernelConstants:
    return launcher.KernelConstants(kernel, num_warps=4, maxnreg=MOST_REGISTERS, STAGES=stages, REGISTERS=REGISTERS)


def launch_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    dkdv: tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
) -> torch.Tensor | None:
    """Fill `dkdv`; returns rows of them that have a NaN, as :func:`fusedattn.kernels.hopper_fwd.launch` does."""
    shape, config, (dk, dv) = problem.shape, DKDV[q.shape[3]], dkdv
    n_tiles = triton.cdiv(shape.max_seqlen_k, OWN)
    nan_rows = replay.scratch(k, k.shape[:3], torch.int8) if hides_rows(problem) else None
    launcher.launch(
        _constants(hopper_bwd_dkdv, config.STAGES),
        n_tiles * shape.nheads_kv * shape.n_sequences,
        (
            *(boxes_of(x, n) for x, n in ((q, config.BLOCK), (k, OWN), (v, OWN), (dout, config.BLOCK))),
            rows,
            Gradients(None, strided(dk), strided(dv), None if nan_rows is None else OptionalRows(nan_rows)),
            problem.call,
        ),
        (*sizes_of(q, v, problem, n_tiles, of_keys=True), problem.scale, problem.qk_scale),
        problem.known_call,
    )
    problem.prologue_k.prepared(dk, back=True)  # without a norm: it is undone later
    return nan_rows


def launch_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    dq: torch.Tensor,
    problem: Problem,
) -> torch.Tensor | None:
    """Fill `dq`; returns rows that have a NaN, as :func:`fusedattn.kernels.hopper_fwd.launch` does."""
    shape, config = problem.shape, DQ[q.shape[3]]
    n_tiles = triton.cdiv(shape.max_seqlen_q, OWN)
    nan_rows = replay.scratch(q, q.shape[:3], torch.int8) if hides_values(problem) else None
    launcher.launch(
        _constants(hopper_bwd_dq, config.STAGES),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (
            *(boxes_of(x, n) for x, n in ((q, ROWS), (k, config.BLOCK), (v, config.BLOCK), (dout, ROWS))),
            rows,
            Gradients(strided(dq), None, None, None if nan_rows is None else OptionalRows(nan_rows)),
            problem.call,
        ),
        (*sizes_of(q, v, problem, n_tiles), problem.scale, problem.qk_scale),
        problem.known_call,
    )
    problem.prologue_q.prepared(dq, back=True)
    return nan_rows
