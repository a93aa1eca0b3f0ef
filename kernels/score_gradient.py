"""Gradients of the scores of a tile: what the gradients of all that the scores are made of are summed from.

    ds = p * (drop(dout v^T) - delta)

as in attention_bwd; q and k arrive rotated.
"""

import triton
import triton.language as tl

from fusedattn.kernels.masking import load_key_visible, visible
from fusedattn.kernels.primitives import dot_in_pieces, head_base
from fusedattn.kernels.sequences import row_base
from fusedattn.kernels.softmax import load_softmax
from fusedattn.kernels.weights import drop, tile_weights


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
    products = dot_in_pieces(
        q, q_head, start_m, seen, k, k_head, start_n, key_visible,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, ACC, PRECISION,
    )  # fmt: skip
    pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, seen[:, None], key_visible[None, :])
    p, _ = tile_weights(
        products, call, place, scale, qk_scale, start_m, start_n, rows, keys, pairs,
        shift[:, None], factor[:, None], ACC, EXACT,
    )  # fmt: skip
    v_head = head_base(v, place.batch, head_kv, place.first_k)
    dout_head = head_base(dout, place.batch, place.head, place.first_q)
    dp = dot_in_pieces(
        dout, dout_head, start_m, seen, v, v_head, start_n, key_visible,
        HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_DV, ACC, PRECISION,
    )  # fmt: skip
    dp = drop(dp, call, place, nheads_q, rows, keys)
    return tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs, products
