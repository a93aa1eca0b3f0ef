"""Backward of attention, by default without atomics: the result is the same bit for bit on every run.

The weights ``p`` are recomputed tile by tile from the maximum and the sum of each row, which the forward kept. With
``dlse``, the gradient of the returned lse::

    delta = rowsum(p * drop(dout v^T)) - dlse              attention_bwd_rows
    dv = drop(p)^T dout,   ds = p * (drop(dout v^T) - delta) * derivative of the score
    dk = scale * R_k^T (ds^T q)                            attention_bwd_dkdv, one program per tile of keys
    dq = scale * R_q^T (ds k)                              attention_bwd_dq, one program per tile of queries

(Dao, "FlashAttention-2", 2023, algorithm 2; two kernels take seven products rather than five, and no atomics.) In
nondeterministic calls attention_bwd_dkdv may accumulate dq too: kernels/dq_sum.py. ``q`` and ``k`` arrive prepared;
``R^T`` is the transposed rotation. Layouts as in attention_fwd; row_max, row_sum and delta are contiguous
``(batch, nheads_q, seqlen_q)``. One program sums the gradient of a KV head over its query heads.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import dq_sum, hopper, launcher
from fusedattn.kernels.attention_bwd_rows import BackwardRows
from fusedattn.kernels.configs import TileConfig
from fusedattn.kernels.descriptors import full_tile, tiles_of
from fusedattn.kernels.dq_sum import add_dq, add_rows
from fusedattn.kernels.epilogue import OptionalRows, has_marked
from fusedattn.kernels.masking import (
    any_keys,
    any_queries,
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
from fusedattn.kernels.pipelining import fenced, full_blocks_first
from fusedattn.kernels.primitives import (
    dot,
    dot_add,
    dot_tiles,
    dtype_of,
    has_nan,
    head_of,
    is_wide,
    load_tile,
    program_tile,
    round_to,
    split_poison,
    store_tile,
    strided,
)
from fusedattn.kernels.problem import Problem, constants_of, sizes_of
from fusedattn.kernels.rope import rotate_tile, rotation_arguments
from fusedattn.kernels.sequences import key_row_base, place_of, row_base, with_head
from fusedattn.kernels.softmax import load_softmax
from fusedattn.kernels.weights import block_weights, drop


class KeyTile(NamedTuple):
    """The keys of a program of attention_bwd_dkdv, which walks over queries.

    k_tile, v_tile    (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    finite_k_tile     k_tile; if dq is accumulated too, with 0 for keys that have a NaN or Inf
    k, v              the Head of each
    keys              (BLOCK_N, 1)
    visible           (BLOCK_N,)
    """

    k_tile: Any
    v_tile: Any
    finite_k_tile: Any
    k: Any
    v: Any
    start_n: Any
    keys: Any
    visible: Any
    place: Any
    bounds: Any
    blocks: Any
    first_full: Any
    n_full: Any


class Queries(NamedTuple):
    """The queries that attention_bwd_dkdv walks over: q and dout, strided and as a descriptor or None; their rows.

    `offs_m` is ``arange(BLOCK_M)``: computed where it is used, it costs 8 bytes of spills at head_dim 128 on sm_90.
    """

    q: Any
    dout: Any
    q_tiles: Any
    dout_tiles: Any
    rows: Any
    offs_m: Any


class QueryTile(NamedTuple):
    """The queries of a program of attention_bwd_dq, which walks over keys.

    q_tile, dout_tile             (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV)
    q, dout, k, v                 the Head of each
    queries                       (BLOCK_M, 1)
    seen, shift, factor, delta    (BLOCK_M,)
    """

    q_tile: Any
    dout_tile: Any
    q: Any
    dout: Any
    k: Any
    v: Any
    start_m: Any
    queries: Any
    seen: Any
    shift: Any
    factor: Any
    delta: Any
    place: Any
    bounds: Any
    blocks: Any


@triton.jit
def _add_dkdv(dk, dv, p, derivative, q_tile, dout_tile, dp, delta, pairs, call, place_and_block, tile):
    """Add one block of queries to dk and dv: (dk, dv, ds), with ds rounded.

    The block is transposed: p, dp, pairs and ds are ``(BLOCK_N, BLOCK_M)``; pairs is None if all are visible.
    `place_and_block` is (place, block).
    """
    place, block = place_and_block
    kept_p = drop(p, call, place, block)
    dv = dot_add(round_to(kept_p, dout_tile.dtype), dout_tile, dv, dtype_of(tile.ACC), tile.PRECISION)
    ds = p * (drop(dp, call, place, block) - delta[None, :]) * derivative
    if pairs is not None:
        ds = tl.where(pairs, ds, 0.0)
    # ds is computed transposed: Triton before 3.7.1 miscompiles dot(trans(x), ...) on Hopper if x comes from a product.
    ds = round_to(ds, q_tile.dtype)
    dk = dot_add(ds, q_tile, dk, dtype_of(tile.ACC), tile.PRECISION)
    return dk, dv, ds


@triton.jit
def _add_nan(dq_total, call, place, bounds, blocks, group, start_n, poisoned, tile):
    """Add NaN to dq of every query that sees a key with a NaN or Inf; add_dq gets zeros for such keys."""
    n_blocks = blocks.n_full + blocks.n_boundary
    keys = (start_n + tl.arange(0, tile.BLOCK_N))[:, None]
    nan = tl.full([tile.BOUNDARY, tile.BLOCK_D], float("nan"), dtype_of(tile.ACC))
    for i in tl.range(0, group * n_blocks, num_stages=1, disable_licm=True):
        of_head = with_head(place, place.head + i // n_blocks)
        start_m = any_queries(i % n_blocks, blocks, call.mask, of_head, start_n, tile.BOUNDARY)
        offs = start_m + tl.arange(0, tile.BOUNDARY)
        exists = (offs >= 0) & (offs < place.seqlen_q)
        block = Block(start_m, start_n, offs[None, :], keys)
        pairs = visible(call.mask, of_head, bounds, block, exists[None, :], poisoned[:, None])  # (BLOCK_N, BOUNDARY)
        sees = tl.max(pairs.to(tl.int32), 0) != 0
        add_rows(dq_total, of_head, start_m, sees, nan, tile.HEAD_DIM, tile.BOUNDARY, tile.BLOCK_D)


@triton.jit
def _boundary_queries(dk, dv, own, queries, dq_total, call, head_kv, group, numbers, tile):
    """Add all boundary blocks of the `group` heads that share a KV head to (dk, dv)."""
    offs_m = tl.arange(0, tile.BOUNDARY)
    blocks = own.blocks
    # A loop alone must not be pipelined; otherwise wgmma is serialised.
    STAGES: tl.constexpr = 1 if call.mask.BY_PAIR or call.mask.layout is not None else tile.BOUNDARY_STAGES
    for i in tl.range(0, group * blocks.n_boundary, num_stages=STAGES, disable_licm=True):
        place = with_head(own.place, head_kv * group + i // blocks.n_boundary)
        start_m = boundary_queries(i % blocks.n_boundary, blocks, call.mask, place, own.start_n, tile.BOUNDARY)
        offs = start_m + offs_m
        block = Block(start_m, own.start_n, offs[None, :], own.keys)
        stats = row_base(place) + start_m
        seen = (offs >= 0) & (offs < place.seqlen_q)
        if call.mask.HAS_UPPER:
            seen = seen & (offs + own.bounds.upper >= own.bounds.key_start)
        shift, factor = load_softmax(queries.rows.shift, queries.rows.factor, stats, offs_m, seen, tile.EXACT)
        if call.mask.MAY_HIDE_ROWS:
            seen = seen & (shift != float("inf"))
        q = head_of(queries.q, place.batch, place.head, place.first_q)
        q_tile = load_tile(q, start_m, seen, tile.HEAD_DIM, tile.BOUNDARY, tile.BLOCK_D)
        pairs = visible(call.mask, place, own.bounds, block, seen[None, :], own.visible[:, None])
        products = dot_tiles(
            own.k_tile, q_tile, own.k, own.start_n, own.visible, q, start_m, seen,
            tile.HEAD_DIM, dtype_of(tile.ACC), tile.PRECISION,
        )  # fmt: skip
        p, derivative = block_weights(
            products, call, place, numbers, block, pairs, shift[None, :], factor[None, :], tile
        )
        p = tl.where(pairs, p, 0.0)  # (BLOCK_N, BOUNDARY)
        dout = head_of(queries.dout, place.batch, place.head, place.first_q)
        dout_tile = load_tile(dout, start_m, seen, tile.HEAD_DIM_V, tile.BOUNDARY, tile.BLOCK_DV)
        dp = dot_tiles(
            own.v_tile, dout_tile, own.v, own.start_n, own.visible, dout, start_m, seen,
            tile.HEAD_DIM_V, dtype_of(tile.ACC), tile.PRECISION,
        )  # fmt: skip
        delta = tl.load(queries.rows.delta + stats + offs_m, mask=seen, other=0.0)
        dk, dv, ds = _add_dkdv(dk, dv, p, derivative, q_tile, dout_tile, dp, delta, pairs, call, (place, block), tile)
        if dq_total is not None:
            add_dq(dq_total, None, place, start_m, seen, own.finite_k_tile, ds, tile.BOUNDARY, tile)
    return dk, dv


@triton.jit
def _full_queries(dk, dv, own, queries, dq_total, dq_total_tiles, call, head_kv, group, numbers, tile):
    """Add all full blocks of the `group` heads that share a KV head to (dk, dv)."""
    offs_m = queries.offs_m
    n_full = own.n_full
    # Without LICM: docs/decisions/0015. Addressing statistics from the first row of a block saves registers too.
    for i in tl.range(0, group * n_full, disable_licm=True):
        place = with_head(own.place, head_kv * group + i // n_full)
        start_m = own.first_full + i % n_full * tile.BLOCK_M
        offs = start_m + offs_m
        block = Block(start_m, own.start_n, offs[None, :], own.keys)
        stats = row_base(place) + start_m
        shift, factor = load_softmax(queries.rows.shift, queries.rows.factor, stats, offs_m, offs_m >= 0, tile.EXACT)
        q = head_of(queries.q, place.batch, place.head, place.first_q)
        q_tile = full_tile(q, queries.q_tiles, start_m, tile.HEAD_DIM, tile.BLOCK_M, tile.BLOCK_D)
        products = dot(own.k_tile, tl.trans(q_tile), dtype_of(tile.ACC), tile.PRECISION)
        p, derivative = block_weights(
            products, call, place, numbers, block, block.rows >= 0, shift[None, :], factor[None, :], tile
        )
        dout = head_of(queries.dout, place.batch, place.head, place.first_q)
        dout_tile = full_tile(dout, queries.dout_tiles, start_m, tile.HEAD_DIM_V, tile.BLOCK_M, tile.BLOCK_DV)
        dp = dot(own.v_tile, tl.trans(dout_tile), dtype_of(tile.ACC), tile.PRECISION)
        delta = tl.load(queries.rows.delta + stats + offs_m)
        dk, dv, ds = _add_dkdv(dk, dv, p, derivative, q_tile, dout_tile, dp, delta, None, call, (place, block), tile)
        if dq_total is not None:
            add_dq(dq_total, dq_total_tiles, place, start_m, offs >= 0, own.finite_k_tile, ds, tile.BLOCK_M, tile)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_bwd_dkdv(
    q,
    k,
    v,
    dout,
    q_tiles,
    dout_tiles,
    rows,
    dk_out,
    dv_out,
    dq_total,
    dq_total_tiles,
    nan_rows,
    call,
    rotation,
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
    FULL_FIRST: tl.constexpr,
    tile,
):
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head_kv, sequence = program_tile(n_tiles, nheads_kv, heads_in_l2, REVERSED=False)
    group = nheads_q // nheads_kv
    place = place_of(call.sequences, sequence, head_kv * group, nheads_q, seqlen_q, seqlen_k)
    start_n = number * tile.BLOCK_N
    if call.sequences.cu_k_ptr is not None:
        if start_n >= place.seqlen_k:
            return
    queries = Queries(q, dout, q_tiles, dout_tiles, rows, tl.arange(0, tile.BLOCK_M))
    offs_n = start_n + tl.arange(0, tile.BLOCK_N)
    if nan_rows is not None:
        first = key_row_base(place, head_kv, nheads_kv, seqlen_k)
        if not has_marked(nan_rows, first + offs_n, offs_n < place.seqlen_k):
            return
    keys = offs_n[:, None]
    bounds = bounds_of(call.mask, place, numbers)
    key_visible = load_key_visible(call.mask, place, bounds, offs_n)

    k_head = head_of(k, place.batch, head_kv, place.first_k)
    v_head = head_of(v, place.batch, head_kv, place.first_k)
    k_tile = load_tile(k_head, start_n, key_visible, tile.HEAD_DIM, tile.BLOCK_N, tile.BLOCK_D)
    v_tile = load_tile(v_head, start_n, key_visible, tile.HEAD_DIM_V, tile.BLOCK_N, tile.BLOCK_DV)
    dk = tl.zeros([tile.BLOCK_N, tile.BLOCK_D], dtype_of(tile.ACC))
    dv = tl.zeros([tile.BLOCK_N, tile.BLOCK_DV], dtype_of(tile.ACC))

    # Each loop covers the query heads of this KV head one after the other: nested loops would cost registers.
    blocks = query_blocks(call.mask, place, bounds, group, start_n, tile.BOUNDARY, tile.BLOCK_N, tile.BLOCK_M)
    first_full = blocks.start + blocks.n_left * tile.BOUNDARY
    n_full = blocks.n_full * tile.BOUNDARY // tile.BLOCK_M
    finite_k_tile = k_tile
    if dq_total is not None:
        _, poisoned = split_poison(k_tile, dtype_of(tile.ACC))
        if tl.max(poisoned.to(tl.int32)) != 0:
            _add_nan(dq_total, call, place, bounds, blocks, group, start_n, key_visible & poisoned, tile)
        # ds is 0 for queries that do not see a key, but 0 times NaN is NaN. The tile is loaded again rather than
        # copied, so that it enters shared memory as it is, and is transposed on the way out.
        finite_k_tile = load_tile(k_head, start_n, key_visible & ~poisoned, tile.HEAD_DIM, tile.BLOCK_N, tile.BLOCK_D)
    own = KeyTile(
        k_tile,
        v_tile,
        finite_k_tile,
        k_head,
        v_head,
        start_n,
        keys,
        key_visible,
        place,
        bounds,
        blocks,
        first_full,
        n_full,
    )
    if FULL_FIRST:
        dk, dv = _full_queries(dk, dv, own, queries, dq_total, dq_total_tiles, call, head_kv, group, numbers, tile)
    dk, dv = _boundary_queries(dk, dv, own, queries, dq_total, call, head_kv, group, numbers, tile)
    if not FULL_FIRST:
        dk, dv = _full_queries(dk, dv, own, queries, dq_total, dq_total_tiles, call, head_kv, group, numbers, tile)

    dv_head = head_of(dv_out, place.batch, head_kv, place.first_k)
    store_tile(dv_head, start_n, place.seqlen_k, dv, tile.HEAD_DIM_V, tile.BLOCK_N, tile.BLOCK_DV)
    if rotation.ROTARY_DIM > 0:
        dk = rotate_tile(
            dk, rotation, place, start_n, n_positions, tile.BLOCK_N, tile.BLOCK_D, dtype_of(tile.ACC),
            OF_QUERIES=False, TRANSPOSE=True,
        )  # fmt: skip
    dk_head = head_of(dk_out, place.batch, head_kv, place.first_k)
    store_tile(dk_head, start_n, place.seqlen_k, dk * scale, tile.HEAD_DIM, tile.BLOCK_N, tile.BLOCK_D)


@triton.jit
def _full_keys(dq, own, k_tiles, v_tiles, call, numbers, tile):
    """Add all full blocks to dq."""
    first_full = own.blocks.start + own.blocks.n_left * tile.BOUNDARY
    stop_full = first_full + own.blocks.n_full * tile.BOUNDARY
    # Without LICM: docs/decisions/0015. The small tiles of float32 have registers for the invariants.
    FEW_REGISTERS: tl.constexpr = own.q_tile.dtype.primitive_bitwidth <= 16
    for start_n in tl.range(first_full, stop_full, tile.BLOCK_N, disable_licm=FEW_REGISTERS):
        keys = (start_n + tl.arange(0, tile.BLOCK_N))[None, :]
        block = Block(own.start_m, start_n, own.queries, keys)
        k_tile = full_tile(own.k, k_tiles, start_n, tile.HEAD_DIM, tile.BLOCK_N, tile.BLOCK_D)
        v_tile = full_tile(own.v, v_tiles, start_n, tile.HEAD_DIM_V, tile.BLOCK_N, tile.BLOCK_DV)
        products = dot(own.q_tile, tl.trans(k_tile), dtype_of(tile.ACC), tile.PRECISION)
        seen = own.seen[:, None]
        p, derivative = block_weights(
            products, call, own.place, numbers, block, seen, own.shift[:, None], own.factor[:, None], tile
        )
        dp = drop(dot(own.dout_tile, tl.trans(v_tile), dtype_of(tile.ACC), tile.PRECISION), call, own.place, block)
        ds = p * (dp - own.delta[:, None]) * derivative  # (BLOCK_M, BLOCK_N)
        dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, dtype_of(tile.ACC), tile.PRECISION)
    return dq


@triton.jit
def _masked_keys(own, start_n, call, tile):
    """(block, key_visible, k_tile, v_tile) of BOUNDARY keys; a key that no query may see is 0."""
    offs_n = start_n + tl.arange(0, tile.BOUNDARY)
    key_visible = load_key_visible(call.mask, own.place, own.bounds, offs_n)
    k_tile = load_tile(own.k, start_n, key_visible, tile.HEAD_DIM, tile.BOUNDARY, tile.BLOCK_D)
    v_tile = load_tile(own.v, start_n, key_visible, tile.HEAD_DIM_V, tile.BOUNDARY, tile.BLOCK_DV)
    return Block(own.start_m, start_n, own.queries, offs_n[None, :]), key_visible, k_tile, v_tile


@triton.jit
def _masked_ds(own, block, key_visible, k_tile, v_tile, call, numbers, tile):
    """(ds, pairs) of a block of BOUNDARY keys, ``(BLOCK_M, BOUNDARY)``; ds of hidden pairs is meaningless."""
    start_n = block.start_n
    pairs = visible(call.mask, own.place, own.bounds, block, own.seen[:, None], key_visible[None, :])
    products = dot_tiles(
        own.q_tile, k_tile, own.q, own.start_m, own.seen, own.k, start_n, key_visible,
        tile.HEAD_DIM, dtype_of(tile.ACC), tile.PRECISION,
    )  # fmt: skip
    p, derivative = block_weights(
        products, call, own.place, numbers, block, pairs, own.shift[:, None], own.factor[:, None], tile
    )
    dp = dot_tiles(
        own.dout_tile, v_tile, own.dout, own.start_m, own.seen, own.v, start_n, key_visible,
        tile.HEAD_DIM_V, dtype_of(tile.ACC), tile.PRECISION,
    )  # fmt: skip
    dp = drop(dp, call, own.place, block)
    return p * (dp - own.delta[:, None]) * derivative, pairs


@triton.jit
def _boundary_keys(dq, own, call, numbers, tile):
    """Add all boundary blocks to dq."""
    for i in tl.range(0, own.blocks.n_boundary, num_stages=tile.BOUNDARY_STAGES, disable_licm=True):
        start_n = boundary_keys(i, own.blocks, call.mask, own.place, own.start_m, tile.BOUNDARY)
        block, key_visible, k_tile, v_tile = _masked_keys(own, start_n, call, tile)
        ds, pairs = _masked_ds(own, block, key_visible, k_tile, v_tile, call, numbers, tile)
        ds = tl.where(pairs, ds, 0.0)
        if is_wide(k_tile.dtype, tile.BLOCK_D, tile.PRECISION):  # loaded only now: the products did not use it
            k_tile = load_tile(own.k, start_n, key_visible, tile.HEAD_DIM, tile.BOUNDARY, tile.BLOCK_D)
        dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, dtype_of(tile.ACC), tile.PRECISION)
    return dq


@triton.jit
def _repaired(own, call, numbers, tile):
    """Recompute dq from all blocks, with 0 in place of NaN and Inf in keys; ds is NaN where a query sees such a key."""
    dq = tl.zeros([tile.BLOCK_M, tile.BLOCK_D], dtype_of(tile.ACC))
    for i in tl.range(0, own.blocks.n_full + own.blocks.n_boundary, num_stages=1, disable_licm=True):
        start_n = any_keys(i, own.blocks, call.mask, own.place, own.start_m, tile.BOUNDARY)
        block, key_visible, k_tile, v_tile = _masked_keys(own, start_n, call, tile)
        k_tile, poisoned = split_poison(k_tile, dtype_of(tile.ACC))
        ds, pairs = _masked_ds(own, block, key_visible, k_tile, v_tile, call, numbers, tile)
        ds = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), ds), 0.0)
        dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, dtype_of(tile.ACC), tile.PRECISION)
    return dq


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_bwd_dq(
    q,
    k,
    v,
    dout,
    k_tiles,
    v_tiles,
    rows,
    dq_out,
    nan_rows,
    call,
    rotation,
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
    tile,
):
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head, sequence = program_tile(n_tiles, nheads_q, heads_in_l2, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = number * tile.BLOCK_M
    if call.sequences.cu_q_ptr is not None:
        if start_m >= place.seqlen_q:
            return
    offs_m = start_m + tl.arange(0, tile.BLOCK_M)
    if nan_rows is not None:
        if not has_marked(nan_rows, row_base(place) + offs_m, offs_m < place.seqlen_q):
            return
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_of(k, place.batch, head_kv, place.first_k)
    v_head = head_of(v, place.batch, head_kv, place.first_k)

    stats = row_base(place)
    shift, factor = load_softmax(rows.shift, rows.factor, stats, offs_m, offs_m < place.seqlen_q, tile.EXACT)
    seen = shift != float("inf")
    delta = tl.load(rows.delta + stats + offs_m, mask=seen, other=0.0)
    q_head = head_of(q, place.batch, head, place.first_q)
    dout_head = head_of(dout, place.batch, head, place.first_q)
    q_tile = load_tile(q_head, start_m, seen, tile.HEAD_DIM, tile.BLOCK_M, tile.BLOCK_D)
    dout_tile = load_tile(dout_head, start_m, seen, tile.HEAD_DIM_V, tile.BLOCK_M, tile.BLOCK_DV)

    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, tile.BLOCK_M, tile.BOUNDARY, tile.BLOCK_N)
    own = QueryTile(
        q_tile, dout_tile, q_head, dout_head, k_head, v_head, start_m, offs_m[:, None], seen, shift, factor, delta,
        place, bounds, blocks,
    )  # fmt: skip
    dq = tl.zeros([tile.BLOCK_M, tile.BLOCK_D], dtype_of(tile.ACC))
    dq = _full_keys(dq, own, k_tiles, v_tiles, call, numbers, tile)
    dq = _boundary_keys(dq, own, call, numbers, tile)
    if has_nan(dq):  # as in the forward: rare enough to start over
        dq = _repaired(own, call, numbers, tile)

    if rotation.ROTARY_DIM > 0:
        dq = rotate_tile(
            dq, rotation, place, start_m, n_positions, tile.BLOCK_M, tile.BLOCK_D, dtype_of(tile.ACC),
            OF_QUERIES=True, TRANSPOSE=True,
        )  # fmt: skip
    dq_head = head_of(dq_out, place.batch, head, place.first_q)
    store_tile(dq_head, start_m, place.seqlen_q, dq * scale, tile.HEAD_DIM, tile.BLOCK_M, tile.BLOCK_D)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    dq: torch.Tensor | None,
    dkdv: tuple[torch.Tensor, torch.Tensor] | None,
    problem: Problem,
) -> None:
    """Fill `dq` and `dkdv`, if given. `q` and `k` arrive prepared; no tensor is empty.

    If a nondeterministic call asks for both and there is a config for it, one kernel computes both.
    """
    configs = problem.configs
    if dq is not None and dkdv is not None and problem.nondeterministic and configs.one_pass is not None:
        dq_total = dq_sum.zeros(q)
        _launch_dkdv(q, k, v, dout, rows, dkdv, problem, configs.one_pass, dq_total)
        dq_sum.launch(dq_total, rows.shift, dq, problem)
        return
    by_hopper = hopper.chosen and hopper.takes_backward(q, k, v, dout, problem)
    if by_hopper:
        from fusedattn.kernels import hopper_bwd  # Gluon is loaded only where it runs
    if dkdv is not None:
        nan_rows = hopper_bwd.launch_dkdv(q, k, v, dout, rows, dkdv, problem) if by_hopper else None
        if nan_rows is not None or not by_hopper:
            _launch_dkdv(q, k, v, dout, rows, dkdv, problem, configs.dkdv, nan_rows=nan_rows)
    if dq is not None:
        nan_rows = hopper_bwd.launch_dq(q, k, v, dout, rows, dq, problem) if by_hopper else None
        if nan_rows is not None or not by_hopper:
            _launch_dq(q, k, v, dout, rows, dq, problem, configs.dq, nan_rows)


def _launch_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    dkdv: tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
    config: TileConfig,
    dq_total: torch.Tensor | None = None,
    nan_rows: torch.Tensor | None = None,
) -> None:
    """Fill `dkdv` or, if `nan_rows` is given, the tiles that have such a row (kernels/hopper_bwd.py).

    If `dq_total` is given, add dq to it (kernels/dq_sum.py).
    """
    # dq is the transpose of a product that has a row for each feature.
    rows_of_products = config.BLOCK_N if dq_total is None else max(config.BLOCK_N, triton.next_power_of_2(k.shape[3]))
    full_first = full_blocks_first(config, problem.async_products)
    config = fenced(config, problem.async_products, rows_of_products, q, dout, has_descriptors=True)
    shape, boundary = problem.shape, config.boundary_of_queries
    sums: tuple[Any, ...] = (None, None)
    if dq_total is not None:
        sums = strided(dq_total), dq_sum.reductions_of(dq_total, config.BLOCK_M, config.style)
    n_tiles = triton.cdiv(shape.max_seqlen_k, config.BLOCK_N)
    launcher.launch(
        constants_of(attention_bwd_dkdv, q, v, problem, config, boundary, FULL_FIRST=full_first),
        n_tiles * shape.nheads_kv * shape.n_sequences,
        (
            *map(strided, (q, k, v, dout)),
            *(tiles_of(x, config.BLOCK_M, config.style) for x in (q, dout)),
            rows,
            *map(strided, dkdv),
            *sums,
            None if nan_rows is None else OptionalRows(nan_rows),
            problem.call,
            rotation_arguments(problem.prologue_k.rotation),
        ),
        (*sizes_of(q, v, problem, n_tiles, of_keys=True), problem.scale, problem.qk_scale),
        problem.known_call,
    )


def _launch_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    dq: torch.Tensor,
    problem: Problem,
    config: TileConfig,
    nan_rows: torch.Tensor | None,
) -> None:
    """Fill `dq` or, if `nan_rows` is given, the tiles that have such a row (kernels/hopper_bwd.py)."""
    config = fenced(config, problem.async_products, config.BLOCK_M, k, v, has_descriptors=True)
    shape = problem.shape
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    launcher.launch(
        constants_of(attention_bwd_dq, q, v, problem, config, config.boundary_of_keys),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (
            *map(strided, (q, k, v, dout)),
            *(tiles_of(x, config.BLOCK_N, config.style) for x in (k, v)),
            rows,
            strided(dq),
            None if nan_rows is None else OptionalRows(nan_rows),
            problem.call,
            rotation_arguments(problem.prologue_q.rotation),
        ),
        (*sizes_of(q, v, problem, n_tiles), problem.scale, problem.qk_scale),
        problem.known_call,
    )
