"""From the sums of a row to its results, once all of its keys are summed; or to what the sums of some keys leave.

Of each row, relative to the maximum ``m`` of its scores: ``l`` the sum of the weights, ``acc`` that of the weighted
values, ``w`` that of the weights as they are kept and rounded for the product with values, ``c`` that of the weights
which dropout keeps.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.accurate import fused, quotient
from fusedattn.kernels.grouped import row_offsets, store_rows
from fusedattn.kernels.primitives import encode_rest, halves, round_to
from fusedattn.kernels.softmax import exp_scaled, row_exactness


class Results(NamedTuple):
    """What the forward fills; `rest` may be None. Layouts as in :mod:`fusedattn.kernels.attention_fwd`.

    Tuples come last, one of which may be None: docs/decisions/0007.
    """

    lse: Any
    row_max: Any
    row_sum: Any
    out: Any
    rest: Any


class Partials(NamedTuple):
    """What a split of the keys leaves of each row, contiguous, in ACC.

    `weighted` is ``(rows, n_splits, head_dim_v)``, for ``acc``; the others are ``(rows, n_splits)``, for ``m``, ``l``,
    ``w`` (None where nothing is kept for a backward) and ``c`` (None without dropout too). Rows are those of a
    ``(batch, nheads_q, seqlen_q)`` tensor. A split that a tile visits no key of has NOTHING as its sum, and no values.
    """

    weighted: Any
    row_max: Any
    row_sum: Any
    rounded_sum: Any
    kept_sum: Any


NOTHING = tl.constexpr(-1.0)  # no sum of weights


@triton.jit
def store_results(
    acc,
    m_i,
    l_i,
    w_i,
    c_i,
    sinks_ptr,
    results,
    dropout,
    place,
    rows,
    nheads_q,
    seqlen_q,
    softmax_scale,
    qk_scale,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the :class:`Results` of a tile: `acc` is ``(BLOCK_M, BLOCK_DV)``, the other sums ``(BLOCK_M,)``."""
    # A row that saw nothing has l_i == 0 and m_i == -inf: out 0, lse -inf, and weights exp2(s - inf) = 0 again in
    # the backward.
    unseen = l_i == 0.0
    EXACT: tl.constexpr = row_exactness(results.out.ptr.dtype.element_ty)
    if dropout.seed_ptr is None:
        c_i = l_i
    if sinks_ptr is not None:
        # One more score, whose value is 0. With sinks the scores are scaled.
        sink = tl.load(sinks_ptr + rows.heads).to(ACC)
        m_new = tl.maximum(m_i, sink)
        alpha = exp_scaled(m_i, m_new, qk_scale, EXACT)
        # Without a sink either, as below.
        l_i = tl.where(m_new == float("-inf"), 1.0, l_i * alpha + exp_scaled(sink, m_new, qk_scale, EXACT))
        acc = acc * alpha[:, None]
        w_i = w_i * alpha
        c_i = c_i * alpha
        m_i = m_new
    else:
        l_i = tl.where(unseen, 1.0, l_i)
    stats = row_offsets(place, rows, nheads_q, seqlen_q)
    if EXACT == 2:
        lse = fused(m_i, softmax_scale, tl.log(l_i))
    else:
        lse = m_i * softmax_scale + tl.log(l_i)
    tl.store(results.lse + stats, lse, mask=rows.exist)
    m_i = tl.where(m_i == float("inf"), float("nan"), m_i)  # an infinite score: the row is NaN, not unseen
    m_i = tl.where(unseen, float("inf"), m_i)  # a maximum leaves NaN out: one of -inf need not be unseen
    tl.store(results.row_max + stats, m_i, mask=rows.exist)
    tl.store(results.row_sum + stats, l_i, mask=rows.exist)
    if results.rest is not None:
        # Divided by the sum of the rounded weights: these then add up to 1, and what all values have in common passes
        # unchanged, as it must for the backward to cancel it. Behind a sink the sum may have no reciprocal.
        rest_factor = c_i / l_i / tl.where(w_i < 2.0**-120, 1.0, w_i)
        if dropout.seed_ptr is not None:
            rest_factor = rest_factor * dropout.factor
    else:
        rest_factor = None
    # A large tile leaves no registers for all its results at once.
    PIECE: tl.constexpr = BLOCK_DV if BLOCK_M * BLOCK_DV <= 16384 else max(16, 4096 // BLOCK_M)
    _store_values(
        acc, unseen, l_i, rest_factor, results, dropout, place, rows, 0, HEAD_DIM_V, BLOCK_M, BLOCK_DV, PIECE, HEADS,
    )  # fmt: skip


@triton.jit
def _store_values(
    acc,
    unseen,
    l_i,
    rest_factor,
    results,
    dropout,
    place,
    rows,
    FIRST: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write WIDTH features from FIRST on, in pieces: ``acc / l_i``, and by `rest_factor` what rounding takes."""
    if WIDTH > PIECE:
        HALF: tl.constexpr = WIDTH // 2
        left, right = halves(acc, BLOCK_M, WIDTH)
        _store_values(
            left, unseen, l_i, rest_factor, results, dropout, place, rows, FIRST, HEAD_DIM_V, BLOCK_M, HALF, PIECE,
            HEADS,
        )  # fmt: skip
        _store_values(
            right, unseen, l_i, rest_factor, results, dropout, place, rows, FIRST + HALF, HEAD_DIM_V, BLOCK_M, HALF,
            PIECE, HEADS,
        )  # fmt: skip
    else:
        if results.out.ptr.dtype.element_ty.primitive_bitwidth > 16:
            out = quotient(acc, l_i[:, None])
        else:
            out = acc * (1.0 / l_i)[:, None]
        if dropout.seed_ptr is not None:
            out = out * dropout.factor
        # Not acc alone: a row of scores of -inf, whose weights are 0 too, may have a NaN there.
        out = round_to(tl.where(unseen[:, None], 0.0, out), results.out.ptr.dtype.element_ty)
        store_rows(results.out, place, rows, out, FIRST, HEAD_DIM_V, BLOCK_M, WIDTH, HEADS)
        if results.rest is not None:
            rest = encode_rest(acc * rest_factor[:, None], out)
            store_rows(results.rest, place, rows, rest, FIRST, HEAD_DIM_V, BLOCK_M, WIDTH, HEADS)


@triton.jit
def store_partials(
    acc,
    m_i,
    l_i,
    w_i,
    c_i,
    partials,
    place,
    rows,
    split,
    n_splits,
    nheads_q,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write the :class:`Partials` of a tile; sums as those of store_results."""
    stats = row_offsets(place, rows, nheads_q, seqlen_q) * n_splits + split
    tl.store(partials.row_max + stats, m_i, mask=rows.exist)
    tl.store(partials.row_sum + stats, l_i, mask=rows.exist)
    if partials.rounded_sum is not None:
        tl.store(partials.rounded_sum + stats, w_i, mask=rows.exist)
    if partials.kept_sum is not None:
        tl.store(partials.kept_sum + stats, c_i, mask=rows.exist)
    offs_d = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(
        partials.weighted + stats[:, None] * HEAD_DIM_V + offs_d, acc, mask=rows.exist[:, None] & (offs_d < HEAD_DIM_V)
    )


@triton.jit
def store_nothing(partials, place, rows, split, n_splits, nheads_q, seqlen_q, ACC: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write that a tile visited no key of a split."""
    stats = row_offsets(place, rows, nheads_q, seqlen_q) * n_splits + split
    tl.store(partials.row_max + stats, tl.full([BLOCK_M], float("-inf"), ACC), mask=rows.exist)
    tl.store(partials.row_sum + stats, tl.full([BLOCK_M], NOTHING, ACC), mask=rows.exist)
