"""Normalisation of a tile of queries or keys in registers, and its derivative.

With ``share`` 1 / head_dim for the root mean square, 1 for the length, or 1 / (nheads * head_dim) across heads::

    r = 1 / sqrt(share * sum(x^2) + eps)                    y = weight * (x r)
    c = share * sum(g * weight * (x r))                     dx = r (g * weight - x r c)
    dweight = sum over rows of g * (x r)

(Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) ``g`` is the gradient of y. The sums run over the
features of a head; across heads, a kernel has summed them before, for each token (kernels/prologue.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import divide
from fusedattn.kernels.primitives import row_dot, widen


class NormArguments(NamedTuple):
    """A norm as kernels take it; NORMALIZES is False for none.

    `weight_ptr` is None for 1, otherwise ``(nheads, head_dim)``, with strides of 0 where it is broadcast. Across heads,
    `r_ptr` is ``(batch, seqlen)``; it is None if each row has a factor of its own.
    """

    weight_ptr: Any
    stride_wh: Any
    stride_wd: Any
    r_ptr: Any
    stride_rb: Any
    share: Any
    eps: Any
    NORMALIZES: Any


NO_NORM = NormArguments(None, None, None, None, None, None, None, tl.constexpr(False))


# Squares of numbers above 2^64 overflow: these are summed once more, times this factor.
SMALL = tl.constexpr(2.0**-100)


@triton.jit
def squares_of(x, ACC: tl.constexpr):
    """(sums of the squares of rows, of the same numbers times SMALL), ``(BLOCK,)`` each."""
    small = widen(x, ACC) * SMALL
    return row_dot(x, x, ACC), row_dot(small, small, ACC)


@triton.jit
def factors_from(squares, small_squares, norm):
    """``1 / sqrt(share * squares + eps)``, to a unit in the last place."""
    overflow = ~(squares < float("inf"))
    radicand = tl.where(overflow, small_squares * norm.share, squares * norm.share + norm.eps)
    above = tl.where(overflow, SMALL, 1.0)
    if squares.dtype == tl.float32:
        return divide(above, tl.math.sqrt_rn(radicand))
    else:
        return above / tl.sqrt(radicand)


@triton.jit
def factors_of(x, norm, first, rows, exist, batch, ACC: tl.constexpr):
    """The factor r of each row of a tile, ``(BLOCK,)``; `rows` are counted from row `first` of a batch."""
    if norm.r_ptr is not None:
        of_batch = norm.r_ptr + tl.cast(batch, tl.int64) * norm.stride_rb + first
        return tl.load(of_batch + rows, mask=exist, other=0.0)
    else:
        squares, small_squares = squares_of(x, ACC)
        return factors_from(squares, small_squares, norm)


@triton.jit
def load_weights(norm, head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr):
    """The weights of a head, ``(BLOCK_D,)``."""
    offs_d = tl.arange(0, BLOCK_D)
    of_head = norm.weight_ptr + tl.cast(head, tl.int64) * norm.stride_wh
    return widen(tl.load(of_head + offs_d * norm.stride_wd, mask=offs_d < HEAD_DIM, other=0.0), ACC)


@triton.jit
def normalize_tile(
    x, norm, head, first, rows, exist, batch, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr
):
    """Normalise the rows of a tile, ``(BLOCK, BLOCK_D)``, of one head, or of heads with the same weights; in ACC."""
    r = factors_of(x, norm, first, rows, exist, batch, ACC)
    y = widen(x, ACC) * r[:, None]
    if norm.weight_ptr is not None:
        y = y * load_weights(norm, head, HEAD_DIM, BLOCK_D, ACC)[None, :]
    return y


@triton.jit
def weight_terms(g, x, r, ACC: tl.constexpr):
    """What each element adds to the gradient of its weight; 0 if no gradient comes back, even for an x of NaN."""
    return tl.where(g != 0.0, g * (widen(x, ACC) * r[:, None]), 0.0)


@triton.jit
def unnormalized(g, x, terms, r, c, norm, head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr):
    """The gradient of x, ``(BLOCK, BLOCK_D)``; `c` is None unless it was summed across heads."""
    if norm.weight_ptr is not None:
        weight = load_weights(norm, head, HEAD_DIM, BLOCK_D, ACC)[None, :]
        g = g * weight
        terms = terms * weight
    if c is None:
        c = tl.sum(terms, 1) * norm.share
    has_gradient = (g != 0.0) | (c != 0.0)[:, None]
    return tl.where(has_gradient, r[:, None] * (g - widen(x, ACC) * r[:, None] * c[:, None]), 0.0)


@dataclass(frozen=True)
class Norm:
    """The norm of the rows of one tensor, q or k.

    Attributes:
        weight: ``(nheads or 1, head_dim or 1)``, any floating-point dtype; None for 1.
        eps: added to the mean or the sum of squares.
        of_mean: the mean of squares rather than their sum.
        across_heads: of all heads of a token.
    """

    weight: torch.Tensor | None
    eps: float
    of_mean: bool
    across_heads: bool

    @property
    def has_head_weights(self) -> bool:
        """Whether heads have weights of their own."""
        return self.weight is not None and self.weight.shape[0] > 1

    def arguments(self, nheads: int, head_dim: int, r: torch.Tensor | None) -> NormArguments:
        """The norm as kernels take it; `r`, ``(batch, seqlen)``, is given if it is summed across heads."""
        n = head_dim * (nheads if self.across_heads else 1) if self.of_mean else 1
        strides: tuple[int | None, int | None] = (None, None)
        if self.weight is not None:
            shape, of_weight = self.weight.shape, self.weight.stride()
            strides = 0 if shape[0] == 1 else of_weight[0], 0 if shape[1] == 1 else of_weight[1]
        stride_rb = None if r is None else r.stride(0)
        return NormArguments(self.weight, *strides, r, stride_rb, 1.0 / n, self.eps, tl.constexpr(True))
