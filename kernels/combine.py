"""The results of rows whose keys were split, from the partial sums of the splits: one program for each row.

    m = max_s m_s        l = sum_s l_s exp(m_s - m)        acc = sum_s acc_s exp(m_s - m)

From there on, results are computed as if one program had summed all keys (kernels/epilogue.py). Splits are summed in
order, in blocks that do not depend on their number: splits beyond the last that has keys change no bit.

    grid    (max_seqlen_q * nheads_q * sequences,)
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.epilogue import NOTHING, Partials, Results, store_results
from fusedattn.kernels.grouped_heads import rows_of
from fusedattn.kernels.primitives import accumulator, block_d, dtype_of, program_tile
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.sequences import place_of, row_base
from fusedattn.kernels.softmax import exp_scaled, row_exactness
from fusedattn.kernels.sums import Sums


class RowTile(NamedTuple):
    """Constants of a program that owns one row: the fields of a Tile that the epilogue reads."""

    HEAD_DIM_V: Any
    BLOCK_DV: Any
    ACC: Any
    BLOCK_M: Any = tl.constexpr(1)
    HEADS: Any = tl.constexpr(1)
    BLOCK_SPLITS: Any = tl.constexpr(16)


@triton.jit
def _sum_of(ptr, first, alpha, visited, offs):
    """The sum of one number of each split in a block, times the factor `alpha` of the split."""
    return tl.sum(tl.load(ptr + first + offs, mask=visited, other=0.0) * alpha, 0)


@triton.jit(do_not_specialize=["nheads_q", "seqlen_q", "seqlen_k", "n_tiles", "n_splits"])
def attention_combine(
    partials,
    sinks_ptr,
    results,
    dropout,
    sequences,
    nheads_q,
    seqlen_q,
    seqlen_k,
    n_tiles,
    n_splits,
    softmax_scale,
    qk_scale,
    tile,
):
    ACC: tl.constexpr = dtype_of(tile.ACC)
    BLOCK_SPLITS: tl.constexpr = tile.BLOCK_SPLITS
    query, head, sequence = program_tile(n_tiles, nheads_q, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    if sequences.cu_q_ptr is not None:
        if query >= place.seqlen_q:
            return
    rows = rows_of(place, query, head, nheads_q, 1, 1)
    first = (row_base(place) + query) * n_splits
    offs = tl.arange(0, BLOCK_SPLITS)
    offs_d = tl.arange(0, tile.BLOCK_DV)[None, :]

    largest = tl.full([BLOCK_SPLITS], float("-inf"), ACC)
    for start in range(0, n_splits, BLOCK_SPLITS):
        exists = start + offs < n_splits
        largest = tl.maximum(
            largest, tl.load(partials.row_max + first + start + offs, mask=exists, other=float("-inf"))
        )
    m_i = tl.max(largest, 0)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)  # -inf - -inf would be NaN

    EXACT: tl.constexpr = row_exactness(results.out.ptr.dtype.element_ty)
    one = tl.zeros([1], ACC)
    l_i = one
    rounded_l_i = one
    kept_l_i = one
    acc = tl.zeros([1, tile.BLOCK_DV], ACC)
    for start in range(0, n_splits, BLOCK_SPLITS):
        here = first + start
        exists = start + offs < n_splits
        l_s = tl.load(partials.row_sum + here + offs, mask=exists, other=NOTHING)
        visited = exists & ((l_s >= 0.0) | (l_s != l_s))  # NaN is a sum too
        m_s = tl.load(partials.row_max + here + offs, mask=visited, other=float("-inf"))
        # By the exact formula: if only one split has seen a row, its factor is 1.
        alpha = tl.where(visited, exp_scaled(m_s, shift, qk_scale, EXACT), 0.0)
        l_i += tl.sum(tl.where(visited, l_s, 0.0) * alpha, 0)
        if partials.rounded_sum is not None:
            rounded_l_i += _sum_of(partials.rounded_sum, here, alpha, visited, offs)
        if partials.kept_sum is not None:
            kept_l_i += _sum_of(partials.kept_sum, here, alpha, visited, offs)
        # (BLOCK_SPLITS, BLOCK_DV)
        ptrs = partials.weighted + (here + offs)[:, None] * tile.HEAD_DIM_V + offs_d
        values = tl.load(ptrs, mask=visited[:, None] & (offs_d < tile.HEAD_DIM_V), other=0.0)
        acc += tl.sum(values * alpha[:, None], 0)[None, :]
    sums = Sums(one + m_i, l_i, rounded_l_i[:, None], kept_l_i, acc)
    store_results(sums, sinks_ptr, results, dropout, place, rows, softmax_scale, qk_scale, tile)


def empty_partials(results: Results, n_splits: int, *, dropped: bool) -> Partials:
    """Uninitialised partials of `n_splits` splits, for `results`, which are tensors."""
    out = results.out
    n_rows, head_dim_v = out.shape[:3].numel(), out.shape[3]
    dtype = torch.promote_types(out.dtype, torch.float32)

    def new(*shape: int) -> torch.Tensor:
        return replay.scratch(out, (n_rows, n_splits, *shape), dtype)

    has_residual = results.rounding_residual is not None
    rounded_sum = new() if has_residual else None
    return Partials(new(head_dim_v), new(), new(), rounded_sum, new() if has_residual and dropped else None)


def launch(partials: Partials, results: Results, problem: Problem) -> None:
    """Fill `results`, which are tensors, from the partials of all splits."""
    shape, out = problem.shape, results.out
    launcher.launch(
        _constants(out.shape[3], out.dtype),
        shape.max_seqlen_q * shape.nheads_q * shape.n_sequences,
        (
            partials,
            problem.sinks,
            results.strided(),
            problem.call.dropout,
            problem.call.sequences,
        ),
        (
            shape.nheads_q,
            shape.seqlen_q,
            shape.seqlen_k,
            shape.max_seqlen_q,
            partials.row_max.shape[1],
            problem.softmax_scale,
            problem.qk_scale,
        ),
    )


@lru_cache(maxsize=1024)
def _constants(head_dim_v: int, dtype: torch.dtype) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        attention_combine,
        tile=RowTile(
            HEAD_DIM_V=tl.constexpr(head_dim_v),
            BLOCK_DV=tl.constexpr(block_d(head_dim_v)),
            ACC=tl.constexpr(accumulator(dtype).name),
        ),
        num_warps=4,
    )
