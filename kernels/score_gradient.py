"""The gradient of the scores of a block, from which the gradients of biases and learned numbers are summed.

    ds = p * (drop(dout v^T) - delta)

Terms are those of attention_bwd; q and k arrive rotated.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.masking import load_key_visible, visible
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.primitives import dot_in_pieces, dtype_of, head_of
from fusedattn.kernels.sequences import row_base
from fusedattn.kernels.softmax import load_softmax
from fusedattn.kernels.weights import block_weights, drop


class QKVDout(NamedTuple):
    """The tensors that ds is computed from, each a :class:`~fusedattn.kernels.primitives.Strided`."""

    q: Any
    k: Any
    v: Any
    dout: Any


@triton.jit
def score_gradient(inputs, rows, call, place, bounds, numbers, nheads_kv, start_m, start_n, tile):
    """(ds, visible pairs, products of q and k, block), the first three ``(BLOCK_M, BLOCK_N)``.

    `rows` is a :class:`~fusedattn.kernels.attention_bwd_rows.BackwardRows`.
    """
    offs_m = start_m + tl.arange(0, tile.BLOCK_M)
    offs_n = start_n + tl.arange(0, tile.BLOCK_N)
    block = Block(start_m, start_n, offs_m[:, None], offs_n[None, :])
    head_kv = place.head // (place.nheads // nheads_kv)
    stats = row_base(place)
    shift, factor = load_softmax(rows.shift, rows.factor, stats, offs_m, offs_m < place.seqlen_q, tile.EXACT)
    seen = shift != float("inf")
    delta = tl.load(rows.delta + stats + offs_m, mask=seen, other=0.0)
    key_visible = load_key_visible(call.mask, place, bounds, offs_n)
    q = head_of(inputs.q, place.batch, place.head, place.first_q)
    k = head_of(inputs.k, place.batch, head_kv, place.first_k)
    products = dot_in_pieces(
        q, start_m, seen, k, start_n, key_visible, tile.HEAD_DIM, tile.BLOCK_D, dtype_of(tile.ACC), tile.PRECISION
    )
    pairs = visible(call.mask, place, bounds, block, seen[:, None], key_visible[None, :])
    p, _ = block_weights(products, call, place, numbers, block, pairs, shift[:, None], factor[:, None], tile)
    v = head_of(inputs.v, place.batch, head_kv, place.first_k)
    dout = head_of(inputs.dout, place.batch, place.head, place.first_q)
    dp = dot_in_pieces(
        dout, start_m, seen, v, start_n, key_visible, tile.HEAD_DIM_V, tile.BLOCK_DV, dtype_of(tile.ACC), tile.PRECISION
    )
    dp = drop(dp, call, place, block)
    return tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs, products, block
