"""The sums that the forward carries from one block of keys to the next."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.primitives import dot_add, dtype_of, round_to
from fusedattn.kernels.softmax import softmax_update
from fusedattn.kernels.weights import kept_only


class Sums(NamedTuple):
    """The sums of the rows of a tile.

    m_i            (BLOCK_M,)             maximum of the scores, to which the weights are relative
    l_i            (BLOCK_M,)             weights; between with_columns and whole, if EXACT is 2, (BLOCK_M, WIDTH)
    rounded_l_i    (BLOCK_M, 16)          weights that dropout keeps, rounded for the product with the values; columns
                                          are equal
    kept_l_i       (BLOCK_M,)             weights that dropout keeps
    acc            (BLOCK_M, BLOCK_DV)    weighted values
    """

    m_i: Any
    l_i: Any
    rounded_l_i: Any
    kept_l_i: Any
    acc: Any


@triton.jit
def empty_sums(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr):
    """The :class:`Sums` of no keys."""
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    rounded_l_i = tl.zeros([BLOCK_M, 16], ACC)
    kept_l_i = tl.zeros([BLOCK_M], ACC)
    return Sums(m_i, l_i, rounded_l_i, kept_l_i, tl.zeros([BLOCK_M, BLOCK_DV], ACC))


@triton.jit
def with_columns(sums, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """Sums to which blocks of WIDTH keys can be added.

    If EXACT is 2, l_i gets a sum for each column of the blocks. One chain of additions through all blocks would round
    each at the magnitude of the whole, and by the whole every weight of the row is divided: docs/decisions/0034.
    """
    l_i = sums.l_i
    if EXACT == 2:
        l_i = tl.zeros([l_i.shape[0], WIDTH], l_i.dtype) + (l_i * (1.0 / WIDTH))[:, None]
    return Sums(sums.m_i, l_i, sums.rounded_l_i, sums.kept_l_i, sums.acc)


@triton.jit
def whole(sums, EXACT: tl.constexpr):
    """The inverse of with_columns. Once per row, float64 costs little, also where a GPU is slow at it."""
    l_i = sums.l_i
    if EXACT == 2:
        l_i = tl.sum(l_i.to(tl.float64), 1).to(l_i.dtype)
    return Sums(sums.m_i, l_i, sums.rounded_l_i, sums.kept_l_i, sums.acc)


@triton.jit
def online_softmax(sums, scores, call, place, block, qk_scale, HAS_RESIDUAL: tl.constexpr, EXACT: tl.constexpr):
    """(p, alpha, sums): add a block of scores to all sums but acc and rounded_l_i.

    p has the weights that dropout keeps.
    """
    p, alpha, m_i, l_i = softmax_update(scores, sums.m_i, sums.l_i, qk_scale, EXACT)
    p = kept_only(p, call, place, block)
    kept_l_i = sums.kept_l_i
    if HAS_RESIDUAL and call.dropout.seed_ptr is not None:
        kept_l_i = kept_l_i * alpha + tl.sum(p, 1)
    return p, alpha, Sums(m_i, l_i, sums.rounded_l_i, kept_l_i, sums.acc)


@triton.jit
def add_values(sums, alpha, p, v_tile, tile, HAS_RESIDUAL: tl.constexpr, LAST: tl.constexpr):
    """Add a block of rounded weights to acc and rounded_l_i.

    A narrow matrix product sums the weights: it costs less than widening them again. It comes first, because tiles
    below 64 rows would spill otherwise, or LAST in a pipelined loop, which would wait for each product otherwise.
    """
    rounded_l_i = sums.rounded_l_i
    if HAS_RESIDUAL:
        ones = round_to(tl.full([v_tile.shape[0], 16], 1.0, tl.float32), v_tile.dtype)
    if HAS_RESIDUAL and not LAST:
        rounded_l_i = dot_add(p, ones, rounded_l_i * alpha[:, None], dtype_of(tile.ACC), tile.PRECISION)
    acc = dot_add(p, v_tile, sums.acc * alpha[:, None], dtype_of(tile.ACC), tile.PRECISION)
    if HAS_RESIDUAL and LAST:
        rounded_l_i = dot_add(p, ones, rounded_l_i * alpha[:, None], dtype_of(tile.ACC), tile.PRECISION)
    return Sums(sums.m_i, sums.l_i, rounded_l_i, sums.kept_l_i, acc)
