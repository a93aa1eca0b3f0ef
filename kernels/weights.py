"""One tile of scores and what follows from them, for queries by keys or, transposed, keys by queries.

Every kernel of the backward recomputes the weights of a tile and their gradients; only what it sums them into differs.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.dropout import NO_DROPOUT, DropoutArguments, kept
from fusedattn.kernels.masking import MaskArguments
from fusedattn.kernels.scores import UNMODIFIED, ScoreArguments, modified
from fusedattn.kernels.sequences import NOT_PACKED, Sequences
from fusedattn.kernels.softmax import softmax_weights


class Call(NamedTuple):
    """What all kernels of one call of ``attention()`` read besides q, k and v."""

    mask: MaskArguments
    score: ScoreArguments = UNMODIFIED
    dropout: DropoutArguments = NO_DROPOUT
    sequences: Sequences = NOT_PACKED


# Arguments that change with the heads or the lengths, or are counted from a bound: no kernel is compiled anew for one.
NOT_SPECIALIZED = (
    "nheads_q",
    "nheads_kv",
    "seqlen_q",
    "seqlen_k",
    "n_tiles",
    "together",
    "lower_start",
    "upper_start",
    "lower_end",
    "upper_end",
    "n_positions",
)


@triton.jit
def tile_weights(
    products,
    call,
    place,
    scale,
    qk_scale,
    start_m,
    start_n,
    rows,
    keys,
    readable,
    shift,
    factor,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(weights, derivative) of the products of q and k, or of k and q.

    `rows`, `keys`, `shift` and `factor` broadcast to the tile; the derivative is that of :func:`modified`.
    """
    scores, derivative = modified(products, call.score, scale, place, start_m, start_n, rows, keys, readable, ACC)
    return softmax_weights(scores, qk_scale, shift, factor, EXACT), derivative


@triton.jit
def kept_only(p, call, place, nheads, rows, keys):
    """Weights with 0 for those that dropout drops, and no factor for the others."""
    if call.dropout.seed_ptr is not None:
        return tl.where(kept(call.dropout, place, nheads, rows, keys), p, 0.0)
    else:
        return p


@triton.jit
def drop(p, call, place, nheads, rows, keys):
    """Weights, or their gradients, as dropout leaves them; by a product, as a NaN stays one for who sees it."""
    if call.dropout.seed_ptr is not None:
        # The factor is no operand of where(), which would round it to float32.
        return p * call.dropout.factor * tl.where(kept(call.dropout, place, nheads, rows, keys), 1.0, 0.0)
    else:
        return p
