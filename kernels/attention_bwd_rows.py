"""Delta and the softmax constants of each query row, which attention_bwd needs: one program per tile of rows.

Later kernels recompute the weights from scores, by ``softmax_weights(scores, qk_scale, shift, factor)``, and::

    delta = rowsum(p * drop(dout v^T)) - dlse = rowsum(dout * out) - dlse

For 16-bit inputs the right-hand side is used, which needs no matrix product. For float32 and float64, the left-hand
side is worth two products: with p and dp as the later kernels compute them, the part that all values share cancels to
the last digit in ``dp - delta``. It is summed as a difference from the right-hand side. A row that saw nothing has
shift inf, hence weights 0, and delta 0.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.accurate_math import divide, fma
from fusedattn.kernels.masking import any_keys, bounds_of, key_blocks, load_key_visible, visible
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.primitives import (
    accumulator,
    block_d,
    dot_in_pieces,
    dtype_of,
    end_of_pieces,
    head_of,
    load_tile,
    program_tile,
    row_dot,
    strided,
)
from fusedattn.kernels.problem import Problem, constants_of, sizes_of
from fusedattn.kernels.rounding_residual import decode_residual
from fusedattn.kernels.sequences import place_of, row_base
from fusedattn.kernels.softmax import exp_scaled, is_exact
from fusedattn.kernels.weights import block_weights, drop

BLOCK_M = 32


@triton.jit(do_not_specialize=["nheads_q", "seqlen_q", "seqlen_k", "n_tiles"])
def attention_bwd_rows(
    out,
    rounding_residual,
    dout,
    row_max_ptr,
    row_sum_ptr,
    dlse_ptr,
    delta_ptr,
    shift_ptr,
    reciprocal_ptr,
    sequences,
    nheads_q,
    seqlen_q,
    seqlen_k,
    n_tiles,
    qk_scale,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
):
    """For 16-bit inputs: delta from out, and one number, ``qk_scale * row_max + log2(row_sum)``, as shift.

    Rounding that number moves the exponents of all weights of the row equally, which does not matter if weights are
    rounded to 16 bits and scores are bounded. If scores may have any size, row_max itself is the shift, and
    `reciprocal_ptr` gets ``1 / row_sum``. Rounding out does matter: with a `rounding_residual`, delta is computed from
    out before rounding.
    """
    tile, head, sequence = program_tile(n_tiles, nheads_q, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    exists = offs_m < place.seqlen_q
    rows = row_base(place) + offs_m
    row_max = tl.load(row_max_ptr + rows, mask=exists, other=float("inf"))
    row_sum = tl.load(row_sum_ptr + rows, mask=exists, other=1.0)
    seen = row_max != float("inf")

    out_head = head_of(out, place.batch, head, place.first_q)
    dout_head = head_of(dout, place.batch, head, place.first_q)
    out_tile = load_tile(out_head, start_m, seen, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    dout_tile = load_tile(dout_head, start_m, seen, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    if rounding_residual is not None:
        residual_head = head_of(rounding_residual, place.batch, head, place.first_q)
        residual = load_tile(residual_head, start_m, seen, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
        out_tile = decode_residual(out_tile, residual)
    delta = row_dot(out_tile, dout_tile, ACC)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + rows, mask=seen, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=exists)
    if reciprocal_ptr is not None:
        tl.store(reciprocal_ptr + rows, 1.0 / row_sum, mask=exists)
    else:
        tl.store(shift_ptr + rows, row_max * qk_scale + tl.math.log2(row_sum), mask=exists)


@triton.jit
def _delta_of_out(out, dout, start_m, seen, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ACC: tl.constexpr):
    """``rowsum(dout * out)`` of a tile, in pieces; both are a :class:`~fusedattn.kernels.primitives.Head`."""
    BLOCK_M: tl.constexpr = seen.shape[0]
    WIDTH: tl.constexpr = 32 if BLOCK_DV > 32 else BLOCK_DV
    delta = tl.zeros([BLOCK_M], ACC)
    for first in tl.range(0, end_of_pieces(HEAD_DIM_V, BLOCK_DV, WIDTH), WIDTH, num_stages=1, disable_licm=True):
        out_tile = load_tile(out, start_m, seen, HEAD_DIM_V, BLOCK_M, WIDTH, first)
        dout_tile = load_tile(dout, start_m, seen, HEAD_DIM_V, BLOCK_M, WIDTH, first)
        delta += row_dot(out_tile, dout_tile, ACC)
    return delta


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_bwd_exact_rows(
    q,
    k,
    v,
    out,
    dout,
    row_max_ptr,
    row_sum_ptr,
    dlse_ptr,
    sinks_ptr,
    delta_ptr,
    factor_ptr,
    call,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    heads_in_l2,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    qk_scale,
    tile,
):
    """For float32 and float64: delta from the weights themselves, shift ``row_max`` and factor ``1 / row_sum``.

    q and k arrive rotated. All blocks are treated as boundary blocks: the products cost far more than the mask.
    """
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head, sequence = program_tile(n_tiles, nheads_q, heads_in_l2, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = number * tile.BLOCK_M
    offs_m = start_m + tl.arange(0, tile.BLOCK_M)
    offs_n = tl.arange(0, tile.BLOCK_N)
    exists = offs_m < place.seqlen_q
    head_kv = head // (nheads_q // nheads_kv)
    k_head = head_of(k, place.batch, head_kv, place.first_k)
    v_head = head_of(v, place.batch, head_kv, place.first_k)

    stats = row_base(place) + offs_m
    shift = tl.load(row_max_ptr + stats, mask=exists, other=float("inf"))
    factor = divide(1.0, tl.load(row_sum_ptr + stats, mask=exists, other=1.0))
    seen = shift != float("inf")
    q_head = head_of(q, place.batch, head, place.first_q)
    dout_head = head_of(dout, place.batch, head, place.first_q)
    out_head = head_of(out, place.batch, head, place.first_q)
    # The loop sums differences from this delta. Without it, the part that all values share would round them away.
    near = _delta_of_out(out_head, dout_head, start_m, seen, tile.HEAD_DIM_V, tile.BLOCK_DV, dtype_of(tile.ACC))
    if sinks_ptr is not None:  # the scores are then in natural units
        sink = tl.load(sinks_ptr + head).to(dtype_of(tile.ACC))
        sum_of_weights = 1.0 - exp_scaled(sink, shift, qk_scale, tile.EXACT) * factor
        near /= tl.where(sum_of_weights > 0.5, sum_of_weights, 1.0)  # a smaller sum is not exact itself
    delta = tl.zeros([tile.BLOCK_M], dtype_of(tile.ACC))

    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_N)
    for i in tl.range(0, blocks.n_full + blocks.n_boundary, disable_licm=True):
        start_n = any_keys(i, blocks, call.mask, place, start_m, tile.BLOCK_N)
        block = Block(start_m, start_n, offs_m[:, None], (start_n + offs_n)[None, :])
        key_visible = load_key_visible(call.mask, place, bounds, start_n + offs_n)
        products = dot_in_pieces(
            q_head, start_m, seen, k_head, start_n, key_visible,
            tile.HEAD_DIM, tile.BLOCK_D, dtype_of(tile.ACC), tile.PRECISION,
        )  # fmt: skip
        pairs = visible(call.mask, place, bounds, block, seen[:, None], key_visible[None, :])  # (BLOCK_M, BLOCK_N)
        p, _ = block_weights(products, call, place, numbers, block, pairs, shift[:, None], factor[:, None], tile)
        dp = dot_in_pieces(
            dout_head, start_m, seen, v_head, start_n, key_visible,
            tile.HEAD_DIM_V, tile.BLOCK_DV, dtype_of(tile.ACC), tile.PRECISION,
        )  # fmt: skip
        dp = drop(dp, call, place, block)
        delta += tl.sum(tl.where(pairs, p * (dp - near[:, None]), 0.0), 1)

    if sinks_ptr is not None:
        delta = fma(near, sum_of_weights, delta)
    else:
        delta += near
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + stats, mask=seen, other=0.0)
    tl.store(delta_ptr + stats, delta, mask=exists)
    tl.store(factor_ptr + stats, factor, mask=exists)


@dataclass(frozen=True)
class ForwardRows:
    """The row statistics of the forward, contiguous ``(batch, nheads_q, seqlen_q)``, and the gradient of lse."""

    row_max: torch.Tensor
    row_sum: torch.Tensor
    dlse: torch.Tensor | None


class BackwardRows(NamedTuple):
    """The row statistics that the later kernels read, contiguous ``(batch, nheads_q, seqlen_q)``.

    `shift` and `factor` (None unless EXACT) give the weights: :func:`~fusedattn.kernels.softmax.load_softmax`.
    """

    shift: Any
    factor: Any
    delta: Any


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rounding_residual: torch.Tensor | None,
    dout: torch.Tensor,
    forward_rows: ForwardRows,
    problem: Problem,
) -> BackwardRows:
    """The :class:`BackwardRows` of a call; q and k arrive rotated, and `rounding_residual` refines 16-bit `out`."""
    return (
        _launch_exact(q, k, v, out, dout, forward_rows, problem)
        if is_exact(q.dtype)
        else _launch(out, rounding_residual, dout, forward_rows, problem)
    )


def _launch(
    out: torch.Tensor,
    rounding_residual: torch.Tensor | None,
    dout: torch.Tensor,
    forward_rows: ForwardRows,
    problem: Problem,
) -> BackwardRows:
    shape, row_max = problem.shape, forward_rows.row_max
    delta, other = (replay.scratch(row_max, row_max.shape, row_max.dtype) for _ in range(2))
    shift, factor = (row_max, other) if problem.call.score.UNBOUNDED.value else (other, None)
    n_tiles = triton.cdiv(shape.max_seqlen_q, BLOCK_M)
    launcher.launch(
        _constants(out.shape[3], out.dtype),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (
            strided(out),
            None if rounding_residual is None else strided(rounding_residual),
            strided(dout),
            row_max,
            forward_rows.row_sum,
            forward_rows.dlse,
            delta,
            None if shift is row_max else shift,
            factor,
            problem.call.sequences,
        ),
        (shape.nheads_q, shape.seqlen_q, shape.seqlen_k, n_tiles, problem.qk_scale),
    )
    return BackwardRows(shift, factor, delta)


@lru_cache(maxsize=1024)
def _constants(head_dim_v: int, dtype: torch.dtype) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        attention_bwd_rows,
        HEAD_DIM_V=head_dim_v,
        BLOCK_M=BLOCK_M,
        BLOCK_DV=block_d(head_dim_v),
        ACC=accumulator(dtype),
        num_warps=4,
    )


def _launch_exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    forward_rows: ForwardRows,
    problem: Problem,
) -> BackwardRows:
    shape, config = problem.shape, problem.exact_rows
    row_max = forward_rows.row_max
    delta, factor = (replay.scratch(row_max, row_max.shape, row_max.dtype) for _ in range(2))
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    launcher.launch(
        constants_of(attention_bwd_exact_rows, q, v, problem, config),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (
            *map(strided, (q, k, v, out, dout)),
            forward_rows.row_max,
            forward_rows.row_sum,
            forward_rows.dlse,
            problem.sinks,
            delta,
            factor,
            problem.call,
        ),
        (*sizes_of(q, v, problem, n_tiles), problem.scale, problem.qk_scale),
        problem.known_call,
    )
    return BackwardRows(forward_rows.row_max, factor, delta)
