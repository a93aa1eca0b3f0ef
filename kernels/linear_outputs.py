"""Outputs of linear attention, and the gradient of values, from states and the products within a chunk.

    forward       out_i = (phi(q_i) S + sum_j a_ij v_j) / den_i       den_i = phi(q_i) . s + sum_j a_ij
    TRANSPOSED    dv_j  =  phi(k_j) R + sum_i a_ij dout_i / den_i     a_ij  = phi(q_i) . phi(k_j)

The sums are over the pairs j <= i of one chunk, if CAUSAL, and empty otherwise. Without `den`, it is 1.

    x         q or k, (batch, heads, seqlen, head_dim): the rows that a result is for
    w         k or q, likewise: the other rows
    y         v or dout, (batch, heads, seqlen, head_dim_v): of the rows of w
    state     S and s of each chunk or, if not CAUSAL, of each sequence, or R (kernels/linear_states.py)
    out       out or dv, (batch, heads, seqlen, head_dim_v)
    den       ACC (batch, nheads_q, seqlen)
    grid      (blocks of head_dim_v * heads of x * chunks of x,)
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.accurate_math import quotient
from fusedattn.kernels.linear_chunks import (
    ChunkCounts,
    Chunks,
    FeatureMap,
    LinearTile,
    constants_of,
    features_of,
    load_numbers,
    load_rows,
    rows_of_chunk,
    span_of_chunk,
    state_pointers,
    store_rows,
    sum_along,
    sum_pointers,
    sum_seen,
)
from fusedattn.kernels.linear_states import RowNumbers, State
from fusedattn.kernels.primitives import dot, dtype_of, strided, widen


@triton.jit
def _within_chunk(phi, w_tile, readable, feature_map, tile, ACC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``a_ij`` of a chunk, rows as those of `phi`, ACC ``(CHUNK, CHUNK)``; 0 for pairs j > i."""
    w_phi = features_of(w_tile, readable, feature_map, tile.HEAD_DIM, ACC)
    products = dot(phi, tl.trans(w_phi), ACC, tile.PRECISION)
    offs = tl.arange(0, tile.CHUNK)
    if TRANSPOSED:
        return tl.where(offs[:, None] <= offs[None, :], products, 0.0)
    else:
        return tl.where(offs[:, None] >= offs[None, :], products, 0.0)


@triton.jit(do_not_specialize=["nheads", "nheads_w", "seqlen", "n_chunks", "n_all"])
def linear_outputs(
    x,
    w,
    y,
    valid_ptr,
    numbers,
    chunks,
    state,
    out,
    den_ptr,
    nheads,
    nheads_w,
    seqlen,
    n_chunks,
    n_all,
    tile,
    feature_map,
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    ACC: tl.constexpr = dtype_of(tile.ACC)
    chunk = tl.program_id(0) % n_all
    head = tl.program_id(0) // n_all % nheads
    block = tl.program_id(0) // n_all // nheads
    first_v = block * tile.BLOCK_DV
    span = span_of_chunk(chunks, chunk, seqlen, n_chunks)
    start = (chunk - span.first_chunk) * tile.CHUNK
    if start >= span.seqlen:
        return
    exist = rows_of_chunk(span, start, None, seqlen, tile.CHUNK)
    valid = rows_of_chunk(span, start, valid_ptr, seqlen, tile.CHUNK)
    of_x = valid if TRANSPOSED else exist
    of_w = exist if TRANSPOSED else valid
    x_tile = load_rows(x, span, head, start, of_x, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
    phi = features_of(x_tile, of_x, feature_map, tile.HEAD_DIM, ACC)
    nheads_kv = tl.minimum(nheads, nheads_w)
    head_kv = head // (nheads // nheads_kv)
    index = chunk if CAUSAL else span.sequence
    ptrs, there = state_pointers(state.kv, index, head_kv, nheads_kv, first_v, tile)
    # (CHUNK, BLOCK_DV)
    acc = dot(widen(phi, ACC), tl.load(ptrs, mask=there, other=0.0), ACC, tile.STATE_PRECISION)
    den = tl.zeros([tile.CHUNK], ACC)
    if den_ptr is not None:
        ptrs, there = sum_pointers(state.k_sum, index, head_kv, nheads_kv, tile)
        den += sum_along(widen(phi, ACC) * tl.load(ptrs, mask=there, other=0.0)[None, :], 1, ACC)
    if CAUSAL:
        if TRANSPOSED:
            group = nheads_w // nheads
            for h in range(head * group, head * group + group):
                w_tile = load_rows(w, span, h, start, of_w, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
                products = _within_chunk(phi, w_tile, of_w, feature_map, tile, ACC, TRANSPOSED)
                if numbers.scale is not None:
                    scale = load_numbers(numbers.scale, span, h, nheads_w, seqlen, start, of_w, tile.CHUNK)
                    products = products * scale[None, :]
                y_tile = load_rows(y, span, h, start, of_w, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
                # Scaled products may be below the range of float16.
                acc += dot(products, widen(y_tile, ACC), ACC, tile.STATE_PRECISION)
        else:
            w_tile = load_rows(w, span, head_kv, start, of_w, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
            products = _within_chunk(phi, w_tile, of_w, feature_map, tile, ACC, TRANSPOSED)
            den += sum_along(products, 1, ACC)
            y_tile = load_rows(y, span, head_kv, start, of_w, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
            acc += sum_seen(products, y_tile, tile, ACC)
    if den_ptr is not None:
        base = (tl.cast(span.batch, tl.int64) * nheads + head) * seqlen + span.first + start
        tl.store(den_ptr + base + tl.arange(0, tile.CHUNK), den, mask=exist & (block == 0))
        acc = tl.where(den[:, None] == 0.0, 0.0, quotient(acc, tl.where(den == 0.0, 1.0, den)[:, None]))
    if TRANSPOSED:
        acc = tl.where(valid[:, None], acc, 0.0)
    store_rows(out, span, head, start, acc, first_v, tile.HEAD_DIM_V)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    valid: torch.Tensor | None,
    numbers: RowNumbers,
    chunks: Chunks,
    state: State,
    out: torch.Tensor,
    den: torch.Tensor | None,
    counts: ChunkCounts,
    tile: LinearTile,
    feature_map: FeatureMap,
    *,
    is_causal: bool,
    transposed: bool,
) -> None:
    """Fill `out` and, if given, `den`; `counts` are those of its rows."""
    launcher.launch(
        constants_of(linear_outputs, tile, feature_map, CAUSAL=is_causal, TRANSPOSED=transposed),
        triton.cdiv(y.shape[3], tile.BLOCK_DV.value) * x.shape[1] * counts.all,
        (strided(x), strided(w), strided(y), valid, numbers, chunks, state, strided(out), den),
        (x.shape[1], w.shape[1], x.shape[2], *counts),
    )
