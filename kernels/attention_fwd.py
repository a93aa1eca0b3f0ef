"""Forward of attention: ``out = softmax(scale * rope(q) k^T, masked) v`` with the online softmax.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), in the loop
order of FlashAttention-2: one program owns one tile of BLOCK_M queries of one head, keeps it in registers, and
walks over the key blocks that the tile may see.

    q, out  (batch, nheads_q, seqlen_q, head_dim)     any strides, last dimension contiguous
    k, v    (batch, nheads_kv, seqlen_k, head_dim)    likewise; k already rotated
    lse     (batch, nheads_q, seqlen_q)               contiguous, natural logarithm
    row_max, row_sum                                  likewise: the softmax of each row, kept for the backward
    rest    like out, int8: what rounding took from out, kept for the backward of 16-bit inputs (KEEP_REST)
    grid    (tiles of queries * nheads_q * batch,)
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels.configs import LAUNCH_OPTIONS, TileConfig
from fusedattn.kernels.masking import (
    DeviceMask,
    key_blocks,
    load_key_range,
    load_key_visible,
    visible,
)
from fusedattn.kernels.primitives import (
    LOG2E,
    accumulator,
    block_d,
    dot,
    dot_add,
    encode_rest,
    exp_scaled,
    has_nan,
    head_base,
    is_exact,
    load_tile,
    program_tile,
    round_to,
    softmax_update,
    split_poison,
    store_tile,
)
from fusedattn.kernels.rope import Rotation, rotate_tile, rotation_arguments


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
def attention_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    row_max_ptr,
    row_sum_ptr,
    rest_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
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
    KEEP_REST: tl.constexpr,
):
    tile, head, batch = program_tile(n_tiles, nheads_q, REVERSED=IS_CAUSAL)
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    query_exists = offs_m < seqlen_q
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_base(k_ptr, batch, head_kv, stride_kb, stride_kh)
    v_head = head_base(v_ptr, batch, head_kv, stride_vb, stride_vh)
    if HAS_PADDING:
        valid_ptr += batch.to(tl.int64) * seqlen_k
    if HAS_ALLOWED:
        allowed_ptr = head_base(allowed_ptr, batch, head, stride_ab, stride_ah)

    # (BLOCK_M, BLOCK_D)
    q_head = head_base(q_ptr, batch, head, stride_qb, stride_qh)
    q = load_tile(q_head, start_m, stride_qs, query_exists, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    if ROTARY_DIM > 0:
        q = rotate_tile(
            q, start_m, seqlen_q, batch, cos_ptr, sin_ptr, positions_ptr, stride_tb, stride_pb, n_positions,
            position_offset, False, INTERLEAVED, HAS_POSITIONS, ROTARY_DIM, BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
    q = round_to(q, q_ptr.dtype.element_ty)

    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    # Summed by a narrow matrix product, which costs less than widening the weights again.
    ones = round_to(tl.full([BLOCK_N, 16], 1.0, tl.float32), v_ptr.dtype.element_ty)
    w_i = tl.zeros([BLOCK_M, 16], ACC)  # as l_i, of the weights as they are rounded for the product with v
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)

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
        scores = dot(q, tl.trans(k), ACC, PRECISION)  # (BLOCK_M, BLOCK_N)
        p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, qk_scale, EXACT)
        v = load_tile(v_head, start_n, stride_vs, offs_n, False, HEAD_DIM, BLOCK_N, BLOCK_D)
        p = round_to(p, v.dtype)
        if KEEP_REST:
            w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)
        acc = dot_add(p, v, acc * alpha[:, None], ACC, PRECISION)

    for start_n in range(full_stop, stop, BLOCK_N):
        keys = start_n + offs_n
        key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)
        k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k), ACC, PRECISION)
        pairs = visible(
            start_m, start_n, offs_m[:, None], keys[None, :], query_exists[:, None], key_visible[None, :], diagonal,
            allowed_ptr, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
        )  # fmt: skip
        scores = tl.where(pairs, scores, float("-inf"))
        p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, qk_scale, EXACT)
        v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        p = round_to(p, v.dtype)
        if KEEP_REST:
            w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)
        acc = dot_add(p, v, acc * alpha[:, None], ACC, PRECISION)

    if has_nan(acc):
        # A NaN or Inf in a value, multiplied with the zero weight of a query of this tile that may not see it, has
        # become a NaN of that query. Rare enough to start over: zeros for such values, NaN for who may see them.
        acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
        shift = tl.where(m_i == float("-inf"), 0.0, m_i)
        for start_n in tl.range(start, stop, BLOCK_N, num_stages=1):
            keys = start_n + offs_n
            key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)
            k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
            v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
            v, poisoned = split_poison(v, ACC)
            pairs = visible(
                start_m, start_n, offs_m[:, None], keys[None, :], query_exists[:, None], key_visible[None, :], diagonal,
                allowed_ptr, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
            )  # fmt: skip
            p = exp_scaled(dot(q, tl.trans(k), ACC, PRECISION), shift[:, None], qk_scale, EXACT)
            p = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), p), 0.0)
            acc = dot_add(round_to(p, v.dtype), v, acc, ACC, PRECISION)

    # A row that saw nothing has l_i == 0 and m_i == -inf: out 0, lse -inf, and weights exp2(s - inf) = 0 again in
    # the backward.
    unseen = l_i == 0.0
    l_i = tl.where(unseen, 1.0, l_i)
    # Not acc alone: a row of scores of -inf, whose weights are 0 too, may have a NaN there.
    out = round_to(tl.where(unseen[:, None], 0.0, acc / l_i[:, None]), out_ptr.dtype.element_ty)
    row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q
    tl.store(lse_ptr + row_base + offs_m, m_i * scale + tl.log(l_i), mask=query_exists)
    m_i = tl.where(m_i == float("inf"), float("nan"), m_i)  # an infinite score: the row is NaN, not unseen
    m_i = tl.where(unseen, float("inf"), m_i)  # a maximum leaves NaN out: one of -inf need not be unseen
    tl.store(row_max_ptr + row_base + offs_m, m_i, mask=query_exists)
    tl.store(row_sum_ptr + row_base + offs_m, l_i, mask=query_exists)
    out_head = head_base(out_ptr, batch, head, stride_ob, stride_oh)
    store_tile(out_head, start_m, stride_os, seqlen_q, out, HEAD_DIM, BLOCK_M, BLOCK_D)
    if KEEP_REST:
        w_i = tl.max(w_i, 1)
        # Divided by the sum of the rounded weights: these then add up to 1, and what all values have in common
        # passes unchanged, as it must for the backward to cancel it.
        rest = encode_rest(acc / tl.where(unseen, 1.0, w_i)[:, None], out)
        rest_head = head_base(rest_ptr, batch, head, stride_ob, stride_oh)
        store_tile(rest_head, start_m, stride_os, seqlen_q, rest, HEAD_DIM, BLOCK_M, BLOCK_D)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    rest: torch.Tensor | None,
    mask: DeviceMask,
    rotation_q: Rotation | None,
    scale: float,
    precision: str,
    config: TileConfig,
) -> None:
    """Fill the results, `rest` where it is given; layouts as in the module docstring.

    There is at least one query, and `scale` is positive: the kernel takes maxima before it scales.
    """
    batch, nheads_q, seqlen_q, head_dim = q.shape
    n_tiles = triton.cdiv(seqlen_q, config.BLOCK_M)
    attention_fwd[(n_tiles * nheads_q * batch,)](
        q,
        k,
        v,
        out,
        lse,
        row_max,
        row_sum,
        rest,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        nheads_q,
        k.shape[1],
        seqlen_q,
        k.shape[2],
        n_tiles,
        scale,
        scale * LOG2E.value,
        HEAD_DIM=head_dim,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(q.dtype),
        PRECISION=precision,
        EXACT=is_exact(q.dtype),
        KEEP_REST=rest is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **LAUNCH_OPTIONS,
        **mask.arguments(),
        **rotation_arguments(rotation_q),
    )
