"""What each query row contributes to its gradients: one program per tile of rows, before the products of attention_bwd.

The weights are recomputed from scores, by ``softmax_weights(scores, qk_scale, shift, factor)``, and::

    delta = rowsum(p * dout v^T) - dlse = rowsum(dout * out) - dlse

For 16-bit inputs the right-hand side needs no matrix product. For float32 and float64 ones the left-hand side is worth
two: with p and dp as the later kernels compute them, what all values have in common cancels to the last digit in
``dp - delta``. A row that saw nothing has shift inf, hence weights 0, and delta 0.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedattn.kernels.configs import LAUNCH_OPTIONS, TileConfig
from fusedattn.kernels.masking import DeviceMask, key_blocks, load_key_range, load_key_visible, visible
from fusedattn.kernels.primitives import (
    LOG2E,
    accumulator,
    block_d,
    decode_rest,
    dot,
    head_base,
    load_tile,
    program_tile,
    row_dot,
    softmax_weights,
)

BLOCK_M = 32


@triton.jit(do_not_specialize=["seqlen_q", "n_tiles"])
def attention_bwd_rows(
    out_ptr,
    rest_ptr,
    dout_ptr,
    row_max_ptr,
    row_sum_ptr,
    dlse_ptr,
    delta_ptr,
    shift_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_gb,
    stride_gh,
    stride_gs,
    nheads_q,
    seqlen_q,
    n_tiles,
    qk_scale,
    HAS_REST: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """For 16-bit inputs: delta from out, and one number, ``qk_scale * row_max + log2(row_sum)``, as shift.

    Rounding that number moves the exponent of every weight of the row the same way, which does not matter where
    weights are rounded to 16 bits. Rounding out does: delta is taken from out as it was before, with HAS_REST.
    """
    tile, head, batch = program_tile(n_tiles, nheads_q, REVERSED=False)
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    exists = offs_m < seqlen_q
    rows = (batch.to(tl.int64) * nheads_q + head) * seqlen_q + offs_m
    row_max = tl.load(row_max_ptr + rows, mask=exists, other=float("inf"))
    row_sum = tl.load(row_sum_ptr + rows, mask=exists, other=1.0)
    seen = row_max != float("inf")

    out_head = head_base(out_ptr, batch, head, stride_ob, stride_oh)
    dout_head = head_base(dout_ptr, batch, head, stride_gb, stride_gh)
    out = load_tile(out_head, start_m, stride_os, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    dout = load_tile(dout_head, start_m, stride_gs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    if HAS_REST:
        rest_head = head_base(rest_ptr, batch, head, stride_ob, stride_oh)
        rest = load_tile(rest_head, start_m, stride_os, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        out = decode_rest(out, rest)
    delta = row_dot(out, dout, ACC)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=seen, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=exists)
    tl.store(shift_ptr + rows, row_max * qk_scale + tl.math.log2(row_sum), mask=exists)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "diagonal", "n_tiles"])
def attention_bwd_exact_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    row_max_ptr,
    row_sum_ptr,
    dlse_ptr,
    delta_ptr,
    factor_ptr,
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
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
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
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For float32 and float64: delta from the weights themselves, shift ``row_max`` and factor ``1 / row_sum``.

    q and k come rotated. All blocks are taken for boundary blocks: the products are far dearer than the mask.
    """
    tile, head, batch = program_tile(n_tiles, nheads_q, REVERSED=IS_CAUSAL)
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    exists = offs_m < seqlen_q
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_base(k_ptr, batch, head_kv, stride_kb, stride_kh)
    v_head = head_base(v_ptr, batch, head_kv, stride_vb, stride_vh)
    if HAS_PADDING:
        valid_ptr += batch.to(tl.int64) * seqlen_k
    if HAS_ALLOWED:
        allowed_ptr = head_base(allowed_ptr, batch, head, stride_ab, stride_ah)

    rows = (batch.to(tl.int64) * nheads_q + head) * seqlen_q + offs_m
    shift = tl.load(row_max_ptr + rows, mask=exists, other=float("inf"))
    factor = 1.0 / tl.load(row_sum_ptr + rows, mask=exists, other=1.0)
    seen = shift != float("inf")
    # (BLOCK_M, BLOCK_D)
    q_head = head_base(q_ptr, batch, head, stride_qb, stride_qh)
    dout_head = head_base(dout_ptr, batch, head, stride_gb, stride_gh)
    q = load_tile(q_head, start_m, stride_qs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    dout = load_tile(dout_head, start_m, stride_gs, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    delta = tl.zeros([BLOCK_M], ACC)
    total = tl.zeros([BLOCK_M], ACC)

    key_start, key_stop, contiguous = load_key_range(key_range_ptr, batch, seqlen_k, HAS_PADDING)
    start, _, stop = key_blocks(
        start_m, seqlen_q, key_start, key_stop, contiguous, diagonal, IS_CAUSAL, HAS_ALLOWED, BLOCK_M, BLOCK_N
    )
    for start_n in range(start, stop, BLOCK_N):
        keys = start_n + offs_n
        key_visible = load_key_visible(keys, key_start, key_stop, valid_ptr, HAS_PADDING)
        k = load_tile(k_head, start_n, stride_ks, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = dot(q, tl.trans(k), ACC, PRECISION)  # (BLOCK_M, BLOCK_N)
        pairs = visible(
            start_m, start_n, offs_m[:, None], keys[None, :], seen[:, None], key_visible[None, :], diagonal,
            allowed_ptr, stride_aq, stride_ak, IS_CAUSAL, HAS_ALLOWED,
        )  # fmt: skip
        p = tl.where(pairs, softmax_weights(scores, qk_scale, shift[:, None], factor[:, None], True), 0.0)
        v = load_tile(v_head, start_n, stride_vs, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        dp = dot(dout, tl.trans(v), ACC, PRECISION)
        delta += tl.sum(tl.where(pairs, p * dp, 0.0), 1)
        total += tl.sum(p, 1)

    # The weights add up to 1 but for rounding, which is as common to the row as the values' common part.
    delta = delta / tl.where(total == 0.0, 1.0, total)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=seen, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=exists)
    tl.store(factor_ptr + rows, factor, mask=exists)


@dataclass(frozen=True)
class Rows:
    """What the later kernels read, each contiguous ``(batch, nheads_q, seqlen_q)``; no factor for 16-bit inputs."""

    delta: torch.Tensor
    shift: torch.Tensor
    factor: torch.Tensor | None


def launch(
    out: torch.Tensor,
    rest: torch.Tensor | None,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
) -> Rows:
    """The rows of 16-bit `out`, which `rest` makes more precise, and its gradient."""
    batch, nheads_q, seqlen_q, head_dim = out.shape
    delta, shift = torch.empty_like(row_max), torch.empty_like(row_max)
    n_tiles = triton.cdiv(seqlen_q, BLOCK_M)
    attention_bwd_rows[(n_tiles * nheads_q * batch,)](
        out,
        rest,
        dout,
        row_max,
        row_sum,
        dlse,
        delta,
        shift,
        *out.stride()[:3],
        *dout.stride()[:3],
        nheads_q,
        seqlen_q,
        n_tiles,
        scale * LOG2E.value,
        HAS_REST=rest is not None,
        HAS_DLSE=dlse is not None,
        HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M,
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(out.dtype),
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return Rows(delta, shift, None)


def launch_exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    dlse: torch.Tensor | None,
    mask: DeviceMask,
    scale: float,
    precision: str,
    config: TileConfig,
) -> Rows:
    """The rows of float32 or float64 inputs, q and k rotated; nothing is empty."""
    batch, nheads_q, seqlen_q, head_dim = q.shape
    nheads_kv, seqlen_k = k.shape[1:3]
    delta, factor = torch.empty_like(row_max), torch.empty_like(row_max)
    n_tiles = triton.cdiv(seqlen_q, config.BLOCK_M)
    attention_bwd_exact_rows[(n_tiles * nheads_q * batch,)](
        q,
        k,
        v,
        dout,
        row_max,
        row_sum,
        dlse,
        delta,
        factor,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        nheads_q,
        nheads_kv,
        seqlen_q,
        seqlen_k,
        n_tiles,
        scale * LOG2E.value,
        HAS_DLSE=dlse is not None,
        HEAD_DIM=head_dim,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(q.dtype),
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **LAUNCH_OPTIONS,
        **mask.arguments(),
    )
    return Rows(delta, row_max, factor)
