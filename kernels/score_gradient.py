"""Gradients of the scores of a tile: what the gradients of all that the scores are made of are summed from.

    ds = p * (drop(dout v^T) - delta)

as in attention_bwd; q and k arrive rotated.
"""

import triton
import triton.language as tl

from fusedattn.kernels.masking import load_key_visible, visible
from fusedattn.kernels.primitives import dot, head_base, load_softmax, load_tile, softmax_weights
from fusedattn.kernels.scores import modified
from fusedattn.kernels.sequences import row_base
from fusedattn.kernels.tile import drop


@triton.jit
def score_gradient(
    q,
    k,
    v,
    dout,
    shift_ptr,
    factor_ptr,
    delta_ptr,
    call,
    place,
    bounds,
    nheads_q,
    nheads_kv,
    seqlen_q,
    start_m,
    start_n,
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
):
    """(ds, pairs, products) of a tile, ``(BLOCK_M, BLOCK_N)``: pairs are visible ones, products those of q and k."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    rows = offs_m[:, None]
    keys = offs_n[None, :]
    head_kv = place.head // (nheads_q // nheads_kv)
    stats = row_base(place, nheads_q, seqlen_q)
    shift, factor = load_softmax(shift_ptr, factor_ptr, stats, offs_m, offs_m < place.seqlen_q, EXACT)
    seen = shift != float("inf")
    delta = tl.load(delta_ptr + stats + offs_m, mask=seen, other=0.0)
    key_visible = load_key_visible(call.mask, place, bounds, offs_n)
    q_head = head_base(q, place.batch, place.head, place.first_q)
    k_head = head_base(k, place.batch, head_kv, place.first_k)
    q_tile = load_tile(q_head, start_m, q.stride_s, seen, True, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, BLOCK_N, BLOCK_D)
    pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, seen[:, None], key_visible[None, :])
    products = dot(q_tile, tl.trans(k_tile), ACC, PRECISION)
    scores, _ = modified(products, call.score, scale, place, start_m, start_n, rows, keys, pairs, ACC)
    p = softmax_weights(scores, qk_scale, shift[:, None], factor[:, None], EXACT)
    v_head = head_base(v, place.batch, head_kv, place.first_k)
    dout_head = head_base(dout, place.batch, place.head, place.first_q)
    v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
    dout_tile = load_tile(dout_head, start_m, dout.stride_s, seen, True, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    dp = drop(dot(dout_tile, tl.trans(v_tile), ACC, PRECISION), call, place, nheads_q, rows, keys)
    return tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs, products
