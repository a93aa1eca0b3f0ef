"""The softmax of a tile of scores: online in the forward, from what it kept of each row in the backward.

EXACT says how weights are computed:

    0    in one FMA and one ``ex2`` each: inputs of 16 bits
    1    by differences of scores: of any size, or of float64 or TF32
    2    likewise, by :mod:`fusedattn.kernels.accurate`: float32 whose products are IEEE's
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels.accurate import exp2_of_product


def exactness(dtype: torch.dtype, precision: str, unbounded: bool) -> int:
    """EXACT for inputs of `dtype`, whose float32 products have a `precision`; `unbounded` are scores of any size."""
    if dtype == torch.float32 and precision == "ieee":
        return 2
    return int(unbounded or is_exact(dtype))


def is_exact(dtype: torch.dtype) -> bool:
    """Whether weights of inputs of `dtype` are not rounded to 16 bits: worth more than one instruction each."""
    return dtype.itemsize > 2


@triton.constexpr_function
def row_exactness(dtype):
    """EXACT for what is computed once a row, by the dtype of the results."""
    return 2 if dtype == tl.float32 else 1


@triton.jit
def exp_scaled(scores, row_max, qk_scale, EXACT: tl.constexpr):
    """``exp2(qk_scale * (scores - row_max))``, of tiles ``(BLOCK_M, BLOCK_N)`` and ``(BLOCK_M, 1)``."""
    if EXACT == 2:
        return exp2_of_product(scores - row_max, qk_scale)
    elif EXACT:
        # The heaviest weights have the smallest differences, hence the smallest errors. The other formula overflows at
        # the largest finite scores, and rounds its two products apart at large ones.
        return tl.math.exp2((scores - row_max) * qk_scale)
    else:
        return tl.math.exp2(scores * qk_scale - row_max * qk_scale)  # one instruction an element


@triton.jit
def softmax_update(scores, m_i, l_i, qk_scale, EXACT: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018), in base 2.

    Args:
        scores: ``(BLOCK_M, BLOCK_N)``; `qk_scale` (positive) brings them to base-2 logits.
        m_i, l_i: ``(BLOCK_M,)`` running maximum of the scores, and sum of the weights relative to it.

    Returns:
        ``(p, alpha, m_i, l_i)``: the unnormalised weights, and what earlier sums must be multiplied by.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    # A row that has seen nothing has a maximum of -inf; -inf - -inf would be NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp_scaled(scores, shift[:, None], qk_scale, EXACT)
    alpha = exp_scaled(m_i, shift, qk_scale, EXACT)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def load_softmax(shift_ptr, factor_ptr, row_base, rows, exists, EXACT: tl.constexpr):
    """(shift, factor) of rows, for softmax_weights; see attention_bwd_rows."""
    shift = tl.load(shift_ptr + row_base + rows, mask=exists, other=float("inf"))
    if EXACT:
        return shift, tl.load(factor_ptr + row_base + rows, mask=exists, other=0.0)
    else:
        return shift, shift


@triton.jit
def softmax_weights(scores, qk_scale, shift, factor, EXACT: tl.constexpr):
    """The weights of a tile of scores; `shift` and `factor` come from load_softmax.

    With EXACT, shift is the maximum of the row's scores, and factor 1 over its sum; else shift has both in it, in
    base 2, and there is no factor.
    """
    if EXACT:
        return exp_scaled(scores, shift, qk_scale, EXACT) * factor
    else:
        return tl.math.exp2(scores * qk_scale - shift)
