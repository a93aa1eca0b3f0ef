"""Backward of attention without atomics: the result is the same bit for bit on every run.

With the weights ``p`` recomputed tile by tile from the maximum and the sum of each row that the forward kept,
and ``dlse`` the gradient of the returned lse::

    delta = rowsum(p * dout v^T) - dlse                    attention_bwd_rows
    dv = p^T dout,   ds = p * (dout v^T - delta)
    dk = scale * R_k^T (ds^T q)                            attention_bwd_dkdv, one program per tile of keys
    dq = scale * R_q^T (ds k)                              attention_bwd_dq, one program per tile of queries

(Dao, "FlashAttention-2", 2023, algorithm 2; the split in two kernels costs two more products and saves the
atomics.) ``q`` and ``k`` arrive rotated, ``R^T`` is the transposed rotation. Layouts as in attention_fwd; row_max,
row_sum and delta are contiguous ``(batch, nheads_q, seqlen_q)``. The gradient of a KV head sums over its query heads
inside one program.
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels.attention_bwd_rows import Rows
from fusedattn.kernels.configs import LAUNCH_OPTIONS, KernelConfigs
from fusedattn.kernels.masking import (
    DeviceMask,
    key_blocks,
    load_key_range,
    load_key_visible,
    query_blocks,
    visible,
)
from fusedattn.kernels.primitives import (
    LOG2E,
    accumulator,
    block_d,
    dot,
    dot_add,
    has_nan,
    head_base,
    is_exact,
    load_softmax,
    load_tile,
    program_tile,
    round_to,
    softmax_weights,
    split_poison,
    store_tile,
)
from fusedattn.kernels.rope import Rotation, rotate_tile, rotation_arguments


@triton.jit
def _dkdv_add(
    dk,
    dv,
    p,
    q,
    dout,
    dp,
    delta,
    pairs,
    MASKED: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one query block to dk and dv; everything transposed: p, dp, pairs ``(BLOCK_N, BLOCK_M)``."""
    dv = dot_add(round_to(p, dout.dtype), dout, dv, ACC, PRECISION)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(pairs, ds, 0.0)
    # ds is computed transposed, rather than transposed here: Triton before 3.7.1 miscompiles
    # dot(trans(x), ...) on Hopper when x comes from a product.
    dk = dot_add(round_to(ds, q.dtype), q, dk, ACC, PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "n_positions",
        "position_offset",
        "n_tiles",
    ]
)
def attention_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    shift_ptr,
    factor_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    scale,
    qk_scale,
    # masking.DeviceMask.arguments()
    key_range_ptr,
    valid_ptr,
    allowed_ptr,
    stride_ab,
    stride_ah,
    stride_aq,
    stride_ak,
    diagonal,
    IS_CAUSAL: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    # rope.Rotation.arguments(), of k
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_tb,
    stride_pb,
    n_positions,
    position_offset,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile, head_kv, batch = program_tile(n_tiles, nheads_kv, REVERSED=False)
    start_n = tile * BLOCK_N
    keys = start_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    group = nheads_q // nheads_kv
    if HAS_PADDING:
        valid_ptr += batch.to(tl.int64) * seqlen_k
    key_start, key_stop, contiguous = load_key_range(key_range_ptr, batch, seqlen_k, HAS_PADDING)
    key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)

    # (BLOCK_N, BLOCK_D)
    k_head = head_base(k_ptr, batch, head_kv, stride_kb, stride_kh)
    v_head = head_base(v_ptr, batch, head_kv, stride_vb, stride_vh)
    k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_D], ACC)

    start, n_boundary, n_full = query_blocks(
        start_n, seqlen_q, key_start, key_stop, contiguous, diagonal, IS_CAUSAL, HAS_ALLOWED, BLOCK_M, BLOCK_N
    )
    # Each loop runs through the query heads of this KV head one after the other: nested loops cost registers.
    for i in range(0, group * n_boundary):
        head = head_kv * group + i // n_boundary
        start_m = start + i % n_boundary * BLOCK_M
        rows = start_m + offs_m
        row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q
        seen = (rows >= 0) & (rows < seqlen_q)
        if IS_CAUSAL:
            seen = seen & (rows + diagonal >= key_start)
        shift, factor = load_softmax(shift_ptr, factor_ptr, row_base, rows, seen, EXACT)
        if HAS_ALLOWED:
            seen = seen & (shift != float("inf"))
            allowed_head = head_base(allowed_ptr, batch, head, stride_ab, stride_ah)
        else:
            allowed_head = allowed_ptr
        q_head = head_base(q_ptr, batch, head, stride_qb, stride_qh)
        q = load_tile(q_head, start_m, stride_qs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        scores = dot(k, tl.trans(q), ACC, PRECISION)  # (BLOCK_N, BLOCK_M)
        pairs = visible(
            start_m, start_n, rows[None, :], keys[:, None], seen[None, :], key_visible[:, None], diagonal,
            allowed_head, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
        )  # fmt: skip
        p = tl.where(pairs, softmax_weights(scores, qk_scale, shift[None, :], factor[None, :], EXACT), 0.0)
        dout_head = head_base(dout_ptr, batch, head, stride_gb, stride_gh)
        dout = load_tile(dout_head, start_m, stride_gs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        dp = dot(v, tl.trans(dout), ACC, PRECISION)
        delta = tl.load(delta_ptr + row_base + rows, mask=seen, other=0.0)
        dk, dv = _dkdv_add(dk, dv, p, q, dout, dp, delta, pairs, True, ACC, PRECISION)

    start += n_boundary * BLOCK_M
    for i in range(0, group * n_full):
        head = head_kv * group + i // n_full
        start_m = start + i % n_full * BLOCK_M
        rows = start_m + offs_m
        row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q
        shift, factor = load_softmax(shift_ptr, factor_ptr, row_base, rows, rows >= 0, EXACT)
        q_head = head_base(q_ptr, batch, head, stride_qb, stride_qh)
        q = load_tile(q_head, start_m, stride_qs, rows, False, HEAD_DIM, BLOCK_M, BLOCK_D)
        scores = dot(k, tl.trans(q), ACC, PRECISION)
        p = softmax_weights(scores, qk_scale, shift[None, :], factor[None, :], EXACT)
        dout_head = head_base(dout_ptr, batch, head, stride_gb, stride_gh)
        dout = load_tile(dout_head, start_m, stride_gs, rows, False, HEAD_DIM, BLOCK_M, BLOCK_D)
        dp = dot(v, tl.trans(dout), ACC, PRECISION)
        delta = tl.load(delta_ptr + row_base + rows)
        dk, dv = _dkdv_add(dk, dv, p, q, dout, dp, delta, p, False, ACC, PRECISION)

    if ROTARY_DIM > 0:
        dk = rotate_tile(
            dk, start_n, seqlen_k, batch, cos_ptr, sin_ptr, positions_ptr, stride_tb, stride_pb, n_positions,
            position_offset, True, INTERLEAVED, HAS_POSITIONS, ROTARY_DIM, BLOCK_N, BLOCK_D, ACC,
        )  # fmt: skip
    dk_head = head_base(dk_ptr, batch, head_kv, stride_dkb, stride_dkh)
    dv_head = head_base(dv_ptr, batch, head_kv, stride_dvb, stride_dvh)
    store_tile(dk_head, start_n, stride_dks, seqlen_k, dk * scale, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv_head, start_n, stride_dvs, seqlen_k, dv, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "n_positions",
        "position_offset",
        "n_tiles",
    ]
)
def attention_bwd_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    shift_ptr,
    factor_ptr,
    delta_ptr,
    dq_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    scale,
    qk_scale,
    # masking.DeviceMask.arguments()
    key_range_ptr,
    valid_ptr,
    allowed_ptr,
    stride_ab,
    stride_ah,
    stride_aq,
    stride_ak,
    diagonal,
    IS_CAUSAL: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    # rope.Rotation.arguments(), of q
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_tb,
    stride_pb,
    n_positions,
    position_offset,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile, head, batch = program_tile(n_tiles, nheads_q, REVERSED=IS_CAUSAL)
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_base(k_ptr, batch, head_kv, stride_kb, stride_kh)
    v_head = head_base(v_ptr, batch, head_kv, stride_vb, stride_vh)
    if HAS_PADDING:
        valid_ptr += batch.to(tl.int64) * seqlen_k
    if HAS_ALLOWED:
        allowed_ptr = head_base(allowed_ptr, batch, head, stride_ab, stride_ah)

    row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q
    shift, factor = load_softmax(shift_ptr, factor_ptr, row_base, rows, rows < seqlen_q, EXACT)
    seen = shift != float("inf")
    delta = tl.load(delta_ptr + row_base + rows, mask=seen, other=0.0)
    # (BLOCK_M, BLOCK_D)
    q_head = head_base(q_ptr, batch, head, stride_qb, stride_qh)
    dout_head = head_base(dout_ptr, batch, head, stride_gb, stride_gh)
    q = load_tile(q_head, start_m, stride_qs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    dout = load_tile(dout_head, start_m, stride_gs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)

    key_start, key_stop, contiguous = load_key_range(key_range_ptr, batch, seqlen_k, HAS_PADDING)
    start, full_stop, stop = key_blocks(
        start_m,
        seqlen_q,
        key_start,
        key_stop,
        contiguous,
        diagonal,
        IS_CAUSAL,
        HAS_ALLOWED,
        BLOCK_M,
        BLOCK_N,
    )
    for start_n in range(start, full_stop, BLOCK_N):
        k = load_tile(k_head, start_n, stride_ks, offs_n, False, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = load_tile(v_head, start_n, stride_vs, offs_n, False, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k), ACC, PRECISION)  # (BLOCK_M, BLOCK_N)
        p = softmax_weights(scores, qk_scale, shift[:, None], factor[:, None], EXACT)
        dp = dot(dout, tl.trans(v), ACC, PRECISION)
        ds = p * (dp - delta[:, None])
        dq = dot_add(round_to(ds, k.dtype), k, dq, ACC, PRECISION)

    for start_n in range(full_stop, stop, BLOCK_N):
        keys = start_n + offs_n
        key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)
        k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k), ACC, PRECISION)
        pairs = visible(
            start_m, start_n, rows[:, None], keys[None, :], seen[:, None], key_visible[None, :], diagonal,
            allowed_ptr, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
        )  # fmt: skip
        p = softmax_weights(scores, qk_scale, shift[:, None], factor[:, None], EXACT)
        dp = dot(dout, tl.trans(v), ACC, PRECISION)
        ds = tl.where(pairs, p * (dp - delta[:, None]), 0.0)
        dq = dot_add(round_to(ds, k.dtype), k, dq, ACC, PRECISION)

    if has_nan(dq):
        # As in the forward: start over, with zeros for what is not finite in a key. Who may see such a key has a NaN
        # in ds.
        dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
        for start_n in tl.range(start, stop, BLOCK_N, num_stages=1):
            keys = start_n + offs_n
            key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)
            k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
            v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
            k, poisoned = split_poison(k, ACC)
            pairs = visible(
                start_m, start_n, rows[:, None], keys[None, :], seen[:, None], key_visible[None, :], diagonal,
                allowed_ptr, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
            )  # fmt: skip
            scores = dot(q, tl.trans(k), ACC, PRECISION)
            p = softmax_weights(scores, qk_scale, shift[:, None], factor[:, None], EXACT)
            ds = p * (dot(dout, tl.trans(v), ACC, PRECISION) - delta[:, None])
            ds = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), ds), 0.0)
            dq = dot_add(round_to(ds, k.dtype), k, dq, ACC, PRECISION)

    if ROTARY_DIM > 0:
        dq = rotate_tile(
            dq, start_m, seqlen_q, batch, cos_ptr, sin_ptr, positions_ptr, stride_tb, stride_pb, n_positions,
            position_offset, True, INTERLEAVED, HAS_POSITIONS, ROTARY_DIM, BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
    dq_head = head_base(dq_ptr, batch, head, stride_dqb, stride_dqh)
    store_tile(dq_head, start_m, stride_dqs, seqlen_q, dq * scale, HEAD_DIM, BLOCK_M, BLOCK_D)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: Rows,
    dq: torch.Tensor | None,
    dkdv: tuple[torch.Tensor, torch.Tensor] | None,
    mask: DeviceMask,
    rotation_q: Rotation | None,
    rotation_k: Rotation | None,
    scale: float,
    precision: str,
    configs: KernelConfigs,
) -> None:
    """Fill `dq`, and `dkdv`, where they are given. `q` and `k` come rotated; nothing is empty."""
    batch, nheads_q, seqlen_q, head_dim = q.shape
    nheads_kv, seqlen_k = k.shape[1:3]
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    sizes = (nheads_q, nheads_kv, seqlen_q, seqlen_k)
    scales = (scale, scale * LOG2E.value)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "ACC": accumulator(q.dtype),
        "PRECISION": precision,
        "EXACT": is_exact(q.dtype),
        **mask.arguments(),
    }
    if dkdv is not None:
        dk, dv = dkdv
        config = configs.dkdv
        n_tiles = triton.cdiv(seqlen_k, config.BLOCK_N)
        attention_bwd_dkdv[(n_tiles * nheads_kv * batch,)](
            q, k, v, dout, rows.shift, rows.factor, rows.delta, dk, dv,
            *strides, *dk.stride()[:3], *dv.stride()[:3], *sizes, n_tiles, *scales,
            BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, num_warps=config.num_warps, num_stages=config.num_stages,
            **constants, **LAUNCH_OPTIONS, **rotation_arguments(rotation_k),
        )  # fmt: skip
    if dq is not None:
        config = configs.dq
        n_tiles = triton.cdiv(seqlen_q, config.BLOCK_M)
        attention_bwd_dq[(n_tiles * nheads_q * batch,)](
            q, k, v, dout, rows.shift, rows.factor, rows.delta, dq,
            *strides, *dq.stride()[:3], *sizes, n_tiles, *scales,
            BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, num_warps=config.num_warps, num_stages=config.num_stages,
            **constants, **LAUNCH_OPTIONS, **rotation_arguments(rotation_q),
        )  # fmt: skip
