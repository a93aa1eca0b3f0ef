"""The softmax of a tile of scores: online in the forward, from the statistics of each row in the backward.

EXACT says how weights are computed:

    0    by one FMA and one ``ex2`` each: 16-bit inputs with bounded scores
    1    from differences of scores: 16-bit inputs with unbounded scores, float64, float32 with TF32 products
    2    likewise, by :mod:`fusedattn.kernels.accurate_math`: float32 with IEEE products
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import exp2_of_product


def exactness(dtype: torch.dtype, precision: str, unbounded: bool) -> int:
    """EXACT for inputs of `dtype` with float32 products of `precision`; `unbounded` scores may have any size."""
    if dtype == torch.float32 and precision == "ieee":
        return 2
    return int(unbounded or is_exact(dtype))


def is_exact(dtype: torch.dtype) -> bool:
    """Whether weights for inputs of `dtype` keep more than 16 bits, and so are worth more than one instruction each."""
    return dtype.itemsize > 2


@triton.constexpr_function
def row_exactness(dtype):
    """EXACT for computations once per row, by the dtype of the results."""
    return 2 if dtype == tl.float32 else 1


@triton.jit
def exp_scaled(scores, row_max, qk_scale, EXACT: tl.constexpr):
    """``exp2(qk_scale * (scores - row_max))``, of tiles ``(BLOCK_M, BLOCK_N)`` and ``(BLOCK_M, 1)``."""
    if EXACT == 2:
        return exp2_of_product(scores - row_max, qk_scale)
    elif EXACT:
        # The heaviest weights have the smallest differences, hence the smallest errors. The other formula overflows at
        # the largest finite scores, and at large ones rounds its two products separately.
        return tl.math.exp2((scores - row_max) * qk_scale)
    else:
        return tl.math.exp2(scores * qk_scale - row_max * qk_scale)  # one instruction per element


@triton.jit
def softmax_update(scores, m_i, l_i, qk_scale, EXACT: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018), in base 2.

    Args:
        scores: ``(BLOCK_M, BLOCK_N)``; `qk_scale` (positive) converts them to base-2 logits.
        m_i, l_i: ``(BLOCK_M,)`` running maximum of the scores, and sum of the weights relative to it. If EXACT is 2,
            `l_i` is ``(BLOCK_M, BLOCK_N)``, the sums of the columns.

    Returns:
        ``(p, alpha, m_i, l_i)``: the unnormalised weights, and the factor for earlier sums.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    # A row that has seen nothing has a maximum of -inf; -inf - -inf would be NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp_scaled(scores, shift[:, None], qk_scale, EXACT)
    alpha = exp_scaled(m_i, shift, qk_scale, EXACT)
    if EXACT == 2:
        return p, alpha, m_new, l_i * alpha[:, None] + p
    else:
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

    With EXACT, shift is the maximum of the row's scores, and factor 1 over its sum. Otherwise shift combines both, in
    base 2, and factor is not used.
    """
    if EXACT:
        return exp_scaled(scores, shift, qk_scale, EXACT) * factor
    else:
        return tl.math.exp2(scores * qk_scale - shift)
