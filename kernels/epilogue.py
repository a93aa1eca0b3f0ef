"""From the sums of a row to its results or, if its keys are split among programs, to partial sums."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import fma, quotient
from fusedattn.kernels.grouped_heads import row_offsets, store_rows
from fusedattn.kernels.primitives import dtype_of, halves, round_to, strided
from fusedattn.kernels.rounding_residual import encode_residual
from fusedattn.kernels.softmax import exp_scaled, row_exactness


class OptionalRows(NamedTuple):
    """One number for each row. A field that is None or this tuple may stand behind tuples, a mere pointer may not."""

    ptr: Any


@triton.jit
def has_marked(marks, offs, exist):
    """Whether one of the rows at offsets that `exist` is marked in `marks`, OptionalRows of int8."""
    return tl.max(tl.load(marks.ptr + offs, mask=exist, other=0).to(tl.int32), 0) != 0


class Results(NamedTuple):
    """The results of the forward; all but out may be None. Layouts as in :mod:`fusedattn.kernels.attention_fwd`."""

    lse: Any
    row_max: Any
    row_sum: Any
    out: Any
    rounding_residual: Any
    largest: Any

    def strided(self) -> "Results":
        """Results that are tensors, as a kernel takes them."""
        residual = None if self.rounding_residual is None else strided(self.rounding_residual)
        return Results(
            None if self.lse is None else OptionalRows(self.lse),
            None if self.row_max is None else OptionalRows(self.row_max),
            None if self.row_sum is None else OptionalRows(self.row_sum),
            strided(self.out),
            residual,
            None if self.largest is None else OptionalRows(self.largest),
        )


NO_RESULTS = Results(None, None, None, None, None, None)


class Partials(NamedTuple):
    """The sums of each split of the keys, contiguous, in ACC.

    `weighted` is ``(rows, n_splits, head_dim_v)``, for acc; the others are ``(rows, n_splits)``, for m_i, l_i,
    rounded_l_i (None without a rounding residual) and kept_l_i (None without dropout too). Rows are those of a
    ``(batch, nheads_q, seqlen_q)`` tensor. If a tile visits no key of a split, row_max is -inf, row_sum is NOTHING, and
    the others are not written.
    """

    weighted: Any
    row_max: Any
    row_sum: Any
    rounded_sum: Any
    kept_sum: Any


NO_PARTIALS = Partials(None, None, None, None, None)
NOTHING = tl.constexpr(-1.0)  # cannot be a sum of weights


@triton.jit
def store_results(sums, sinks_ptr, results, dropout, place, rows, softmax_scale, qk_scale, tile):
    """Write the :class:`Results` of a tile.

    `tile` has ACC, HEAD_DIM_V, BLOCK_M, BLOCK_DV and HEADS, as :class:`~fusedattn.kernels.parameters.Tile` has.
    """
    m_i, l_i, rounded_l_i, kept_l_i, acc = sums
    rounded_l_i = tl.max(rounded_l_i, 1)
    # A row that saw nothing has l_i == 0 and m_i == -inf. Its out is 0, its lse -inf; weights in the backward are
    # exp2(s - inf) = 0.
    unseen = l_i == 0.0
    EXACT: tl.constexpr = row_exactness(results.out.ptr.dtype.element_ty)
    if dropout.seed_ptr is None:
        kept_l_i = l_i
    if results.largest is not None:
        # Without the sink. A maximum ignores NaN, a sum does not; an infinite score makes a sum of NaN too.
        largest = tl.where(l_i == l_i, m_i * softmax_scale, float("nan"))
        tl.store(results.largest.ptr + row_offsets(place, rows), largest, mask=rows.exist)
    if sinks_ptr is not None:
        # One more score, whose value is 0. With sinks the scores are scaled.
        sink = tl.load(sinks_ptr + rows.heads).to(dtype_of(tile.ACC))
        m_new = tl.maximum(m_i, sink)
        alpha = exp_scaled(m_i, m_new, qk_scale, EXACT)
        # If the sink is -inf too, as below.
        l_i = tl.where(m_new == float("-inf"), 1.0, l_i * alpha + exp_scaled(sink, m_new, qk_scale, EXACT))
        acc = acc * alpha[:, None]
        rounded_l_i = rounded_l_i * alpha
        kept_l_i = kept_l_i * alpha
        m_i = m_new
    else:
        l_i = tl.where(unseen, 1.0, l_i)
    store_statistics(m_i, l_i, unseen, results, row_offsets(place, rows), rows.exist, softmax_scale, EXACT)
    if results.rounding_residual is not None:
        exact_factor = residual_factor(kept_l_i, l_i, rounded_l_i)
        if dropout.seed_ptr is not None:
            exact_factor = exact_factor * dropout.factor
    else:
        exact_factor = None
    _store_values(acc, unseen, l_i, exact_factor, results, dropout, place, rows, 0, tile.BLOCK_DV, tile)


@triton.jit
def store_statistics(m_i, l_i, unseen, results, stats, exist, softmax_scale, EXACT: tl.constexpr):
    """Write lse, row_max and row_sum of rows at the offsets `stats`; l_i is 1 if a row is `unseen`."""
    if results.lse is not None:
        if EXACT == 2:
            lse = fma(m_i, softmax_scale, tl.log(l_i))
        else:
            lse = m_i * softmax_scale + tl.log(l_i)
        tl.store(results.lse.ptr + stats, lse, mask=exist)
    if results.row_max is not None:
        m_i = tl.where(m_i == float("inf"), float("nan"), m_i)  # an infinite score: the row is NaN, not unseen
        m_i = tl.where(unseen, float("inf"), m_i)  # a maximum ignores NaN: one of -inf need not be unseen
        tl.store(results.row_max.ptr + stats, m_i, mask=exist)
        tl.store(results.row_sum.ptr + stats, l_i, mask=exist)


@triton.jit
def residual_factor(kept_l_i, l_i, rounded_l_i):
    """The factor of acc for out before rounding.

    Divided by their sum, the rounded weights add up to 1, and the part that all values share passes unchanged, so that
    the backward can cancel it. With a sink the sum may have no reciprocal.
    """
    return kept_l_i / l_i / tl.where(rounded_l_i < 2.0**-120, 1.0, rounded_l_i)


@triton.jit
def _store_values(
    acc, unseen, l_i, exact_factor, results, dropout, place, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, tile
):
    """Write WIDTH features from FIRST on: ``acc / l_i`` and, by `exact_factor`, its rounding residual."""
    # Registers cannot hold all results of a large tile at once.
    SIZE: tl.constexpr = tile.BLOCK_M * tile.BLOCK_DV
    PIECE: tl.constexpr = tile.BLOCK_DV if SIZE <= 16384 else max(16, 4096 // tile.BLOCK_M)
    if WIDTH > PIECE:
        HALF: tl.constexpr = WIDTH // 2
        left, right = halves(acc, tile.BLOCK_M, WIDTH)
        _store_values(left, unseen, l_i, exact_factor, results, dropout, place, rows, FIRST, HALF, tile)
        _store_values(right, unseen, l_i, exact_factor, results, dropout, place, rows, FIRST + HALF, HALF, tile)
    else:
        if results.out.ptr.dtype.element_ty.primitive_bitwidth > 16:
            out = quotient(acc, l_i[:, None])
        else:
            out = acc * (1.0 / l_i)[:, None]
        if dropout.seed_ptr is not None:
            out = out * dropout.factor
        # A row whose scores are all -inf has weights 0 too, but its acc may have a NaN.
        out = round_to(tl.where(unseen[:, None], 0.0, out), results.out.ptr.dtype.element_ty)
        store_rows(results.out, place, rows, out, FIRST, tile.HEAD_DIM_V, tile.BLOCK_M, WIDTH, tile.HEADS)
        if results.rounding_residual is not None:
            residual = encode_residual(acc * exact_factor[:, None], out)
            into = results.rounding_residual
            store_rows(into, place, rows, residual, FIRST, tile.HEAD_DIM_V, tile.BLOCK_M, WIDTH, tile.HEADS)


@triton.jit
def store_partials(sums, partials, place, rows, split, n_splits, tile):
    """Write the :class:`Partials` of a tile."""
    rounded_l_i = tl.max(sums.rounded_l_i, 1)
    stats = row_offsets(place, rows) * n_splits + split
    tl.store(partials.row_max + stats, sums.m_i, mask=rows.exist)
    tl.store(partials.row_sum + stats, sums.l_i, mask=rows.exist)
    if partials.rounded_sum is not None:
        tl.store(partials.rounded_sum + stats, rounded_l_i, mask=rows.exist)
    if partials.kept_sum is not None:
        tl.store(partials.kept_sum + stats, sums.kept_l_i, mask=rows.exist)
    offs_d = tl.arange(0, tile.BLOCK_DV)[None, :]
    ptrs = partials.weighted + stats[:, None] * tile.HEAD_DIM_V + offs_d
    tl.store(ptrs, sums.acc, mask=rows.exist[:, None] & (offs_d < tile.HEAD_DIM_V))


@triton.jit
def store_nothing(partials, place, rows, split, n_splits, tile):
    """Record that a tile visited no key of a split."""
    stats = row_offsets(place, rows) * n_splits + split
    tl.store(partials.row_max + stats, tl.full([tile.BLOCK_M], float("-inf"), dtype_of(tile.ACC)), mask=rows.exist)
    tl.store(partials.row_sum + stats, tl.full([tile.BLOCK_M], NOTHING, dtype_of(tile.ACC)), mask=rows.exist)
