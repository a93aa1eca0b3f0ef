"""Gradients of queries and keys of linear attention, through their features.

    dq    dphi(q_i) = (S dout_i - delta_i s + sum_j ds_ij phi(k_j)) / den_i    ds_ij = dout_i . v_j - delta_i
    dk    dphi(k_j) =  R v_j + r + sum_i ds_ij phi(q_i) / den_i                delta_i = dout_i . out_i

with the sums of kernels/linear_outputs.py. Without the numbers of rows, den is 1 and delta is 0.

The program of dq computes these numbers: delta from the same products as ds, because the rounding of out is larger than
what is left of ds in a row that sees few keys. The sum is ``phi(q_i) . (S dout_i) + sum_j a_ij (dout_i . v_j)``, over
den_i.

    x         q or k, (batch, heads, seqlen, head_dim): the rows that a gradient is for
    w         k or q, likewise: the other rows
    y         dout or v, (batch, heads, seqlen, head_dim_v): of the rows of x
    z         v or dout: of the rows of w
    state     S and s, or R and r if TRANSPOSED, of each chunk or, if not CAUSAL, of each sequence
    dx        like x
    den       ACC (batch, nheads_q, seqlen), for dq
    grid      (heads of x * chunks of x,)
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.accurate_math import divide
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
    sum_pointers,
    sum_seen,
    through_features,
)
from fusedattn.kernels.linear_states import RowNumbers, State
from fusedattn.kernels.primitives import dot, dtype_of, row_dot, strided, widen


@triton.jit
def _products_of_values(y, z, span, head, head_w, start, of_x, of_w, tile, ACC: tl.constexpr):
    """``y z^T`` of a chunk, ACC ``(CHUNK, CHUNK)``."""
    products = tl.zeros([tile.CHUNK, tile.CHUNK], ACC)
    for first_v in range(0, tile.HEAD_DIM_V, tile.BLOCK_DV):
        y_tile = load_rows(y, span, head, start, of_x, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
        z_tile = load_rows(z, span, head_w, start, of_w, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
        products = dot(y_tile, tl.trans(z_tile), ACC, tile.PRECISION, products)
    return products


@triton.jit
def _features(x, span, head, start, readable, feature_map, tile, ACC: tl.constexpr):
    """The features of a chunk; they are loaded again for each product, because no program has room to keep them."""
    tl.debug_barrier()  # or the loads of all products begin at once
    x_tile = load_rows(x, span, head, start, readable, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
    return features_of(x_tile, readable, feature_map, tile.HEAD_DIM, ACC)


@triton.jit
def _through_state(dphi, y, span, head, start, readable, state, index, head_kv, nheads_kv, tile, ACC: tl.constexpr):
    """``dphi + y S^T`` of a chunk, ACC ``(CHUNK, BLOCK_D)``."""
    for first_v in range(0, tile.HEAD_DIM_V, tile.BLOCK_DV):
        y_tile = load_rows(y, span, head, start, readable, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
        ptrs, there = state_pointers(state.kv, index, head_kv, nheads_kv, first_v, tile)
        s_tile = tl.load(ptrs, mask=there, other=0.0)
        dphi = dot(widen(y_tile, ACC), tl.trans(s_tile), ACC, tile.STATE_PRECISION, dphi)
    return dphi


@triton.jit(do_not_specialize=["nheads", "nheads_w", "seqlen", "n_chunks", "n_all"])
def linear_features(
    x,
    w,
    y,
    z,
    valid_ptr,
    numbers,
    chunks,
    state,
    dx,
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
    head = tl.program_id(0) // n_all
    span = span_of_chunk(chunks, chunk, seqlen, n_chunks)
    start = (chunk - span.first_chunk) * tile.CHUNK
    if start >= span.seqlen:
        return
    exist = rows_of_chunk(span, start, None, seqlen, tile.CHUNK)
    valid = rows_of_chunk(span, start, valid_ptr, seqlen, tile.CHUNK)
    of_x = valid if TRANSPOSED else exist
    of_w = exist if TRANSPOSED else valid
    nheads_kv = tl.minimum(nheads, nheads_w)
    head_kv = head // (nheads // nheads_kv)
    index = chunk if CAUSAL else span.sequence
    offs = tl.arange(0, tile.CHUNK)
    # (CHUNK, BLOCK_D)
    dphi = tl.zeros([tile.CHUNK, tile.BLOCK_D], ACC)
    if TRANSPOSED:
        dphi = _through_state(dphi, y, span, head, start, of_x, state, index, head_kv, nheads_kv, tile, ACC)
        ptrs, there = sum_pointers(state.k_sum, index, head_kv, nheads_kv, tile)
        dphi += tl.load(ptrs, mask=there, other=0.0)[None, :]
        if CAUSAL:
            group = nheads_w // nheads
            for h in range(head * group, head * group + group):
                ds = _products_of_values(y, z, span, head, h, start, of_x, of_w, tile, ACC)
                if numbers.scale is not None:
                    scale = load_numbers(numbers.scale, span, h, nheads_w, seqlen, start, of_w, tile.CHUNK)
                    delta = load_numbers(numbers.delta, span, h, nheads_w, seqlen, start, of_w, tile.CHUNK)
                    ds = (ds - delta[None, :]) * scale[None, :]
                ds = tl.where(offs[:, None] <= offs[None, :], ds, 0.0)
                w_phi = widen(_features(w, span, h, start, of_w, feature_map, tile, ACC), ACC)
                # Scaled gradients may be below the range of float16.
                dphi += dot(ds, w_phi, ACC, tile.STATE_PRECISION)
    else:
        delta = tl.zeros([tile.CHUNK], ACC)
        if CAUSAL:
            seen = (offs[:, None] >= offs[None, :]) & of_w[None, :]
            ds = tl.where(seen, _products_of_values(y, z, span, head, head_kv, start, of_x, of_w, tile, ACC), 0.0)
            if den_ptr is not None:
                phi = _features(x, span, head, start, of_x, feature_map, tile, ACC)
                w_phi = _features(w, span, head_kv, start, of_w, feature_map, tile, ACC)
                weights = tl.where(seen, dot(phi, tl.trans(w_phi), ACC, tile.PRECISION), 0.0)
                delta += row_dot(weights, ds, ACC)
        dphi = _through_state(dphi, y, span, head, start, of_x, state, index, head_kv, nheads_kv, tile, ACC)
        if den_ptr is not None:
            den = load_numbers(den_ptr, span, head, nheads, seqlen, start, of_x, tile.CHUNK)
            empty = den == 0.0
            den = tl.where(empty, 1.0, den)
            delta += row_dot(_features(x, span, head, start, of_x, feature_map, tile, ACC), dphi, ACC)
            delta = tl.where(empty, 0.0, divide(delta, den))
            scale = tl.where(empty, 0.0, divide(tl.full([tile.CHUNK], 1.0, ACC), den))
            rows = (tl.cast(span.batch, tl.int64) * nheads + head) * seqlen + span.first + start + offs
            tl.store(numbers.scale + rows, scale, mask=exist)
            tl.store(numbers.delta + rows, delta, mask=exist)
            ptrs, there = sum_pointers(state.k_sum, index, head_kv, nheads_kv, tile)
            dphi -= delta[:, None] * tl.load(ptrs, mask=there, other=0.0)[None, :]
        if CAUSAL:
            ds = tl.where(seen, ds - delta[:, None], 0.0)
            w_phi = _features(w, span, head_kv, start, of_w, feature_map, tile, ACC)
            dphi += sum_seen(ds, w_phi, tile, ACC)
        if den_ptr is not None:
            dphi = tl.where(empty[:, None], 0.0, dphi * scale[:, None])
    x_tile = load_rows(x, span, head, start, of_x, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
    found = through_features(x_tile, dphi, of_x, feature_map, tile.HEAD_DIM, ACC)
    store_rows(dx, span, head, start, found, 0, tile.HEAD_DIM)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    valid: torch.Tensor | None,
    numbers: RowNumbers,
    chunks: Chunks,
    state: State,
    dx: torch.Tensor,
    den: torch.Tensor | None,
    counts: ChunkCounts,
    tile: LinearTile,
    feature_map: FeatureMap,
    *,
    is_causal: bool,
    transposed: bool,
) -> None:
    """Fill `dx` and, if `den` is given, the tensors of `numbers`; `counts` are those of the rows of `dx`."""
    launcher.launch(
        constants_of(linear_features, tile, feature_map, CAUSAL=is_causal, TRANSPOSED=transposed),
        x.shape[1] * counts.all,
        (strided(x), strided(w), strided(y), strided(z), valid, numbers, chunks, state, strided(dx), den),
        (x.shape[1], w.shape[1], x.shape[2], *counts),
    )
