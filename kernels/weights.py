"""The weights of a block, queries by keys or, transposed, keys by queries, before and after dropout.

All kernels of the backward recompute the weights of a block and their gradients; they differ in the sums they form.
"""

import triton
import triton.language as tl

from fusedattn.kernels.dropout import kept
from fusedattn.kernels.primitives import dtype_of
from fusedattn.kernels.scores import modified
from fusedattn.kernels.softmax import softmax_weights


@triton.jit
def block_weights(products, call, place, numbers, block, readable, shift, factor, tile):
    """(weights, derivative) of the products of q and k, or of k and q.

    `shift` and `factor` broadcast to the block; the derivative is that of :func:`modified`.
    """
    # Tensors are read where they are added: before the user's function they take registers (dq spilled 88 bytes).
    scores, derivative = modified(products, None, call.score, numbers.scale, place, block, readable, dtype_of(tile.ACC))
    return softmax_weights(scores, numbers.qk_scale, shift, factor, tile.EXACT), derivative


@triton.jit
def kept_only(p, call, place, block):
    """Weights with 0 for those that dropout drops; the others are not scaled."""
    if call.dropout.seed_ptr is not None:
        return tl.where(kept(call.dropout, place, block), p, 0.0)
    else:
        return p


@triton.jit
def drop(p, call, place, block):
    """Weights, or their gradients, after dropout: by a product, so that a NaN stays NaN for queries that see it."""
    if call.dropout.seed_ptr is not None:
        # The factor stays outside where(), which would round it to float32.
        return p * call.dropout.factor * tl.where(kept(call.dropout, place, block), 1.0, 0.0)
    else:
        return p
