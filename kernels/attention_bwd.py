"""Backward of attention, by default without atomics: the result is the same bit for bit on every run.

With the weights ``p`` recomputed tile by tile from the maximum and the sum of each row that the forward kept,
and ``dlse`` the gradient of the returned lse::

    delta = rowsum(p * drop(dout v^T)) - dlse              attention_bwd_rows
    dv = drop(p)^T dout,   ds = p * (drop(dout v^T) - delta) * derivative of the score
    dk = scale * R_k^T (ds^T q)                            attention_bwd_dkdv, one program per tile of keys
    dq = scale * R_q^T (ds k)                              attention_bwd_dq, one program per tile of queries

(Dao, "FlashAttention-2", 2023, algorithm 2; the split in two kernels costs two more products, of seven, and saves the
atomics.) Where the order of sums is open, attention_bwd_dkdv adds up dq too: kernels/dq_sum.py. ``q`` and ``k`` arrive
rotated, ``R^T`` is the transposed rotation. Layouts as in attention_fwd; row_max, row_sum and delta are contiguous
``(batch, nheads_q, seqlen_q)``. The gradient of a KV head sums over its query heads inside one program.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels import dq_sum, launcher
from fusedattn.kernels.attention_bwd_rows import Rows
from fusedattn.kernels.call import Problem, constants_of, sizes_of
from fusedattn.kernels.configs import TileConfig
from fusedattn.kernels.descriptors import full_tile, tiles_of
from fusedattn.kernels.dq_sum import add_dq, add_rows
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
from fusedattn.kernels.primitives import (
    dot,
    dot_add,
    dot_tiles,
    has_nan,
    head_base,
    heads,
    is_wide,
    load_tile,
    program_tile,
    round_to,
    split_poison,
    store_tile,
)
from fusedattn.kernels.rope import rotate_tile, rotation_arguments
from fusedattn.kernels.sequences import place_of, row_base, with_head
from fusedattn.kernels.softmax import load_softmax
from fusedattn.kernels.weights import NOT_SPECIALIZED, drop, tile_weights


@triton.jit
def _dkdv_add(
    dk,
    dv,
    p,
    derivative,
    q,
    dout,
    dp,
    delta,
    pairs,
    call,
    place,
    nheads_q,
    rows,
    keys,
    MASKED: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one query block to dk and dv, and return ds as well, rounded.

    Everything is transposed: p, dp, pairs, ds ``(BLOCK_N, BLOCK_M)``.
    """
    kept_p = drop(p, call, place, nheads_q, rows, keys)
    dv = dot_add(round_to(kept_p, dout.dtype), dout, dv, ACC, PRECISION)
    ds = p * (drop(dp, call, place, nheads_q, rows, keys) - delta[None, :]) * derivative
    if MASKED:
        ds = tl.where(pairs, ds, 0.0)
    # ds is computed transposed, rather than transposed here: Triton before 3.7.1 miscompiles
    # dot(trans(x), ...) on Hopper when x comes from a product.
    ds = round_to(ds, q.dtype)
    dk = dot_add(ds, q, dk, ACC, PRECISION)
    return dk, dv, ds


@triton.jit
def _add_nan(
    total,
    call,
    place,
    bounds,
    blocks,
    group,
    start_n,
    poisoned,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    EDGE: tl.constexpr,
):
    """NaN for the dq of every query that sees a key with a NaN or Inf, of which add_dq is given zeros."""
    n_blocks = blocks.n_full + blocks.n_boundary
    keys = (start_n + tl.arange(0, BLOCK_N))[:, None]
    nan = tl.full([EDGE, BLOCK_D], float("nan"), ACC)
    for i in tl.range(0, group * n_blocks, num_stages=1, disable_licm=True):
        of_head = with_head(place, place.head + i // n_blocks)
        start_m = any_queries(i % n_blocks, blocks, call.mask, of_head, start_n, EDGE)
        offs = start_m + tl.arange(0, EDGE)
        exists = (offs >= 0) & (offs < place.seqlen_q)
        pairs = visible(
            call.mask, of_head, bounds, start_m, start_n, offs[None, :], keys, exists[None, :], poisoned[:, None]
        )  # (BLOCK_N, EDGE)
        sees = tl.max(pairs.to(tl.int32), 0) != 0
        add_rows(total, of_head, start_m, sees, nan, HEAD_DIM, EDGE, BLOCK_D)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_bwd_dkdv(
    q,
    k,
    v,
    dout,
    q_tiles,
    dout_tiles,
    shift_ptr,
    factor_ptr,
    delta_ptr,
    dk_out,
    dv_out,
    total,
    total_tiles,
    total_edges,
    call,
    rotation,
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
    qk_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    EDGE: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    tile, head_kv, sequence = program_tile(n_tiles, nheads_kv, together, REVERSED=False)
    group = nheads_q // nheads_kv
    first_place = place_of(call.sequences, sequence, head_kv * group, seqlen_q, seqlen_k)
    start_n = tile * BLOCK_N
    if call.sequences.cu_k_ptr is not None:
        if start_n >= first_place.seqlen_k:
            return
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    keys = offs_n[:, None]
    bounds = bounds_of(call.mask, first_place, lower_start, upper_start, lower_end, upper_end)
    key_visible = load_key_visible(call.mask, first_place, bounds, offs_n)

    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_head = head_base(k, first_place.batch, head_kv, first_place.first_k)
    v_head = head_base(v, first_place.batch, head_kv, first_place.first_k)
    k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], ACC)

    # Each loop runs through the query heads of this KV head one after the other: nested loops cost registers.
    blocks = query_blocks(call.mask, first_place, bounds, group, start_n, EDGE, BLOCK_N, BLOCK_M)
    first_full = blocks.start + blocks.n_left * EDGE
    n_full = blocks.n_full * EDGE // BLOCK_M
    if total is not None:
        _, poisoned = split_poison(k_tile, ACC)
        if tl.max(poisoned.to(tl.int32)) != 0:
            _add_nan(
                total, call, first_place, bounds, blocks, group, start_n, key_visible & poisoned,
                HEAD_DIM, BLOCK_N, BLOCK_D, ACC, EDGE,
            )  # fmt: skip
        # ds is 0 for queries that do not see a key, and its product with a NaN is not. Loaded once more rather than
        # copied: like that it goes into shared memory as it is, and is transposed on the way out.
        finite = load_tile(k_head, start_n, k.stride_s, key_visible & ~poisoned, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    edge_m = tl.arange(0, EDGE)
    # A loop alone must not be pipelined, and one before another must be: else wgmma is serialised.
    STAGES: tl.constexpr = 1 if call.mask.BY_PAIR or call.mask.layout is not None else EDGE_STAGES
    for i in tl.range(0, group * blocks.n_boundary, num_stages=STAGES, disable_licm=True):
        place = with_head(first_place, head_kv * group + i // blocks.n_boundary)
        start_m = boundary_queries(i % blocks.n_boundary, blocks, call.mask, place, start_n, EDGE)
        offs = start_m + edge_m
        rows = offs[None, :]
        stats = row_base(place, nheads_q, seqlen_q) + start_m
        seen = (offs >= 0) & (offs < place.seqlen_q)
        if call.mask.HAS_UPPER:
            seen = seen & (offs + bounds.upper >= bounds.key_start)
        shift, factor = load_softmax(shift_ptr, factor_ptr, stats, edge_m, seen, EXACT)
        if call.mask.MAY_HIDE_ROWS:
            seen = seen & (shift != float("inf"))
        q_head = head_base(q, place.batch, place.head, place.first_q)
        q_tile = load_tile(q_head, start_m, q.stride_s, seen, True, HEAD_DIM, EDGE, BLOCK_D)
        pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, seen[None, :], key_visible[:, None])
        products = dot_tiles(
            k_tile, q_tile, k, k_head, start_n, key_visible, q, q_head, start_m, seen,
            HEAD_DIM, BLOCK_N, EDGE, BLOCK_D, ACC, PRECISION,
        )  # fmt: skip
        p, derivative = tile_weights(
            products, call, place, scale, qk_scale, start_m, start_n, rows, keys, pairs,
            shift[None, :], factor[None, :], ACC, EXACT,
        )  # fmt: skip
        p = tl.where(pairs, p, 0.0)  # (BLOCK_N, EDGE)
        dout_head = head_base(dout, place.batch, place.head, place.first_q)
        dout_tile = load_tile(dout_head, start_m, dout.stride_s, seen, True, HEAD_DIM_V, EDGE, BLOCK_DV)
        dp = dot_tiles(
            v_tile, dout_tile, v, v_head, start_n, key_visible, dout, dout_head, start_m, seen,
            HEAD_DIM_V, BLOCK_N, EDGE, BLOCK_DV, ACC, PRECISION,
        )  # fmt: skip
        delta = tl.load(delta_ptr + stats + edge_m, mask=seen, other=0.0)
        dk, dv, ds = _dkdv_add(
            dk, dv, p, derivative, q_tile, dout_tile, dp, delta, pairs, call, place, nheads_q, rows, keys,
            True, ACC, PRECISION,
        )  # fmt: skip
        if total is not None:
            add_dq(total, total_edges, place, start_m, seen, finite, ds, HEAD_DIM, EDGE, BLOCK_D, ACC, PRECISION)

    # Without LICM: docs/decisions/0015. Statistics are addressed from the first row of a block: fewer registers too.
    for i in tl.range(0, group * n_full, disable_licm=True):
        place = with_head(first_place, head_kv * group + i // n_full)
        start_m = first_full + i % n_full * BLOCK_M
        offs = start_m + offs_m
        rows = offs[None, :]
        stats = row_base(place, nheads_q, seqlen_q) + start_m
        shift, factor = load_softmax(shift_ptr, factor_ptr, stats, offs_m, offs_m >= 0, EXACT)
        q_head = head_base(q, place.batch, place.head, place.first_q)
        q_tile = full_tile(
            q, q_tiles, q_head, place.batch, place.head, place.first_q, start_m, HEAD_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        products = dot(k_tile, tl.trans(q_tile), ACC, PRECISION)
        p, derivative = tile_weights(
            products, call, place, scale, qk_scale, start_m, start_n, rows, keys, rows >= 0,
            shift[None, :], factor[None, :], ACC, EXACT,
        )  # fmt: skip
        dout_head = head_base(dout, place.batch, place.head, place.first_q)
        dout_tile = full_tile(
            dout, dout_tiles, dout_head, place.batch, place.head, place.first_q, start_m, HEAD_DIM_V, BLOCK_M, BLOCK_DV
        )  # fmt: skip
        dp = dot(v_tile, tl.trans(dout_tile), ACC, PRECISION)
        delta = tl.load(delta_ptr + stats + offs_m)
        dk, dv, ds = _dkdv_add(
            dk, dv, p, derivative, q_tile, dout_tile, dp, delta, p, call, place, nheads_q, rows, keys,
            False, ACC, PRECISION,
        )  # fmt: skip
        if total is not None:
            add_dq(
                total, total_tiles, place, start_m, offs >= 0, finite, ds, HEAD_DIM, BLOCK_M, BLOCK_D, ACC, PRECISION
            )  # fmt: skip

    dv_head = head_base(dv_out, first_place.batch, head_kv, first_place.first_k)
    store_tile(dv_head, start_n, dv_out.stride_s, first_place.seqlen_k, dv, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
    if rotation.ROTARY_DIM > 0:
        dk = rotate_tile(
            dk, rotation, start_n, first_place.seqlen_k, first_place.batch, first_place.first_k, 0, n_positions, True,
            BLOCK_N, BLOCK_D, ACC,
        )  # fmt: skip
    dk_head = head_base(dk_out, first_place.batch, head_kv, first_place.first_k)
    store_tile(dk_head, start_n, dk_out.stride_s, first_place.seqlen_k, dk * scale, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_bwd_dq(
    q,
    k,
    v,
    dout,
    k_tiles,
    v_tiles,
    shift_ptr,
    factor_ptr,
    delta_ptr,
    dq_out,
    call,
    rotation,
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
    qk_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    EDGE: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    tile, head, sequence = program_tile(n_tiles, nheads_q, together, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, seqlen_q, seqlen_k)
    start_m = tile * BLOCK_M
    if call.sequences.cu_q_ptr is not None:
        if start_m >= place.seqlen_q:
            return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    rows = offs_m[:, None]
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_base(k, place.batch, head_kv, place.first_k)
    v_head = head_base(v, place.batch, head_kv, place.first_k)

    stats = row_base(place, nheads_q, seqlen_q)
    shift, factor = load_softmax(shift_ptr, factor_ptr, stats, offs_m, offs_m < place.seqlen_q, EXACT)
    seen = shift != float("inf")
    delta = tl.load(delta_ptr + stats + offs_m, mask=seen, other=0.0)
    # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV)
    q_head = head_base(q, place.batch, head, place.first_q)
    dout_head = head_base(dout, place.batch, head, place.first_q)
    q_tile = load_tile(q_head, start_m, q.stride_s, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    dout_tile = load_tile(dout_head, start_m, dout.stride_s, seen, True, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)

    bounds = bounds_of(call.mask, place, lower_start, upper_start, lower_end, upper_end)
    blocks = key_blocks(call.mask, place, bounds, start_m, BLOCK_M, EDGE, BLOCK_N)
    first_full = blocks.start + blocks.n_left * EDGE
    # Without LICM: docs/decisions/0015. The small tiles of float32 have registers for the invariants.
    FEW_REGISTERS: tl.constexpr = q.ptr.dtype.element_ty.primitive_bitwidth <= 16
    for start_n in tl.range(first_full, first_full + blocks.n_full * EDGE, BLOCK_N, disable_licm=FEW_REGISTERS):
        keys = (start_n + offs_n)[None, :]
        k_tile = full_tile(
            k, k_tiles, k_head, place.batch, head_kv, place.first_k, start_n, HEAD_DIM, BLOCK_N, BLOCK_D
        )  # fmt: skip
        v_tile = full_tile(
            v, v_tiles, v_head, place.batch, head_kv, place.first_k, start_n, HEAD_DIM_V, BLOCK_N, BLOCK_DV
        )  # fmt: skip
        products = dot(q_tile, tl.trans(k_tile), ACC, PRECISION)
        p, derivative = tile_weights(
            products, call, place, scale, qk_scale, start_m, start_n, rows, keys, seen[:, None],
            shift[:, None], factor[:, None], ACC, EXACT,
        )  # fmt: skip
        dp = drop(dot(dout_tile, tl.trans(v_tile), ACC, PRECISION), call, place, nheads_q, rows, keys)
        ds = p * (dp - delta[:, None]) * derivative  # (BLOCK_M, BLOCK_N)
        dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, ACC, PRECISION)

    edge_n = tl.arange(0, EDGE)
    for i in tl.range(0, blocks.n_boundary, num_stages=EDGE_STAGES, disable_licm=True):
        start_n = boundary_keys(i, blocks, call.mask, place, start_m, EDGE)
        keys = (start_n + edge_n)[None, :]
        key_visible = load_key_visible(call.mask, place, bounds, start_n + edge_n)
        k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, EDGE, BLOCK_D)
        v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, EDGE, BLOCK_DV)
        pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, seen[:, None], key_visible[None, :])
        products = dot_tiles(
            q_tile, k_tile, q, q_head, start_m, seen, k, k_head, start_n, key_visible,
            HEAD_DIM, BLOCK_M, EDGE, BLOCK_D, ACC, PRECISION,
        )  # fmt: skip
        p, derivative = tile_weights(
            products, call, place, scale, qk_scale, start_m, start_n, rows, keys, pairs,
            shift[:, None], factor[:, None], ACC, EXACT,
        )  # fmt: skip
        dp = dot_tiles(
            dout_tile, v_tile, dout, dout_head, start_m, seen, v, v_head, start_n, key_visible,
            HEAD_DIM_V, BLOCK_M, EDGE, BLOCK_DV, ACC, PRECISION,
        )  # fmt: skip
        dp = drop(dp, call, place, nheads_q, rows, keys)
        ds = tl.where(pairs, p * (dp - delta[:, None]) * derivative, 0.0)
        if is_wide(k_tile.dtype, BLOCK_D, PRECISION):  # read but now: the products were made without it
            k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, EDGE, BLOCK_D)
        dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, ACC, PRECISION)

    if has_nan(dq):
        # As in the forward: start over, with zeros for what is not finite in a key. Who may see such a key has a NaN
        # in ds.
        dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
        for i in tl.range(0, blocks.n_full + blocks.n_boundary, num_stages=1, disable_licm=True):
            start_n = any_keys(i, blocks, call.mask, place, start_m, EDGE)
            keys = (start_n + edge_n)[None, :]
            key_visible = load_key_visible(call.mask, place, bounds, start_n + edge_n)
            k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, EDGE, BLOCK_D)
            v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, EDGE, BLOCK_DV)
            k_tile, poisoned = split_poison(k_tile, ACC)
            pairs = visible(
                call.mask, place, bounds, start_m, start_n, rows, keys, seen[:, None], key_visible[None, :]
            )  # fmt: skip
            products = dot_tiles(
                q_tile, k_tile, q, q_head, start_m, seen, k, k_head, start_n, key_visible,
                HEAD_DIM, BLOCK_M, EDGE, BLOCK_D, ACC, PRECISION,
            )  # fmt: skip
            p, derivative = tile_weights(
                products, call, place, scale, qk_scale, start_m, start_n, rows, keys, pairs,
                shift[:, None], factor[:, None], ACC, EXACT,
            )  # fmt: skip
            dp = dot_tiles(
                dout_tile, v_tile, dout, dout_head, start_m, seen, v, v_head, start_n, key_visible,
                HEAD_DIM_V, BLOCK_M, EDGE, BLOCK_DV, ACC, PRECISION,
            )  # fmt: skip
            dp = drop(dp, call, place, nheads_q, rows, keys)
            ds = p * (dp - delta[:, None]) * derivative
            ds = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), ds), 0.0)
            dq = dot_add(round_to(ds, k_tile.dtype), k_tile, dq, ACC, PRECISION)

    if rotation.ROTARY_DIM > 0:
        at_end = place.seqlen_k - place.seqlen_q
        dq = rotate_tile(
            dq, rotation, start_m, place.seqlen_q, place.batch, place.first_q, at_end, n_positions, True,
            BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
    dq_head = head_base(dq_out, place.batch, head, place.first_q)
    store_tile(dq_head, start_m, dq_out.stride_s, place.seqlen_q, dq * scale, HEAD_DIM, BLOCK_M, BLOCK_D)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: Rows,
    dq: torch.Tensor | None,
    dkdv: tuple[torch.Tensor, torch.Tensor] | None,
    problem: Problem,
) -> None:
    """Fill `dq`, and `dkdv`, where they are given. `q` and `k` come rotated; nothing is empty.

    Where both are, and the order of sums is open, one kernel makes both, if there is a config for it.
    """
    configs = problem.configs
    if dq is not None and dkdv is not None and problem.open_order and configs.one_pass is not None:
        total = dq_sum.zeros(q)
        _launch_dkdv(q, k, v, dout, rows, dkdv, problem, configs.one_pass, total)
        dq_sum.launch(total, rows.shift, dq, problem)
        return
    if dkdv is not None:
        _launch_dkdv(q, k, v, dout, rows, dkdv, problem, configs.dkdv)
    if dq is not None:
        _launch_dq(q, k, v, dout, rows, dq, problem, configs.dq)


def _launch_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: Rows,
    dkdv: tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
    config: TileConfig,
    total: torch.Tensor | None = None,
) -> None:
    """Fill `dkdv`; add dq, as kernels/dq_sum.py says, to `total`, if there is one."""
    shape, boundary = problem.shape, config.boundary_of_queries
    sums: tuple[Any, ...] = (None, None, None)
    if total is not None:
        blocks = (config.BLOCK_M, boundary["EDGE"])
        sums = (heads(total), *(dq_sum.reductions_of(total, block, config.style) for block in blocks))
    n_tiles = triton.cdiv(shape.max_seqlen_k, config.BLOCK_N)
    launcher.launch(
        constants_of(attention_bwd_dkdv, q, v, problem, config, **boundary),
        n_tiles * shape.nheads_kv * shape.n_sequences,
        (
            *map(heads, (q, k, v, dout)),
            *(tiles_of(x, config.BLOCK_M, config.style) for x in (q, dout)),
            rows.shift,
            rows.factor,
            rows.delta,
            *map(heads, dkdv),
            *sums,
            problem.call,
            rotation_arguments(problem.rotation_k),
        ),
        (*sizes_of(q, v, problem, n_tiles, of_keys=True), problem.scale, problem.qk_scale),
        problem.known_call,
    )


def _launch_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: Rows,
    dq: torch.Tensor,
    problem: Problem,
    config: TileConfig,
) -> None:
    shape = problem.shape
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    launcher.launch(
        constants_of(attention_bwd_dq, q, v, problem, config, **config.boundary_of_keys),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (
            *map(heads, (q, k, v, dout)),
            *(tiles_of(x, config.BLOCK_N, config.style) for x in (k, v)),
            rows.shift,
            rows.factor,
            rows.delta,
            heads(dq),
            problem.call,
            rotation_arguments(problem.rotation_q),
        ),
        (*sizes_of(q, v, problem, n_tiles), problem.scale, problem.qk_scale),
        problem.known_call,
    )
