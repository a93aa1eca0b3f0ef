"""States of linear attention, from the first chunk on or from the last one.

    forward     S_c = S_0 + sum_j phi(k_j) v_j^T               s_c = s_0 + sum_j phi(k_j)
    REVERSED    R_c = dS  + sum_i phi(q_i) dout_i^T / den_i    r_c = ds  - sum_i phi(q_i) delta_i / den_i

with the tokens j before chunk c, and the queries i behind it. R is the gradient of a state if chunk c is the last that
it has; of all queries, that of S_0. Query heads of one KV head are summed.

    x         k or q, (batch, heads, seqlen, head_dim)
    y         v or dout, (batch, heads, seqlen, head_dim_v)
    states    (chunks, nheads_kv, head_dim, head_dim_v) and (chunks, nheads_kv, head_dim), if CAUSAL
    final     (sequences, nheads_kv, head_dim, head_dim_v) and (sequences, nheads_kv, head_dim)
    grid      (blocks of head_dim_v * nheads_kv * sequences,); a program goes through all chunks of a sequence
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
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
    span_of,
    state_pointers,
    sum_along,
    sum_pointers,
)
from fusedattn.kernels.primitives import dot_add, dtype_of, strided, widen


class State(NamedTuple):
    """States and sums of features, contiguous; None if there are none."""

    kv: Any
    k_sum: Any


class RowNumbers(NamedTuple):
    """Of each query, ACC ``(batch, nheads_q, seqlen_q)``: 1 / den (0 where den is 0) and delta; None: 1 and 0."""

    scale: Any
    delta: Any


@triton.jit(do_not_specialize=["nheads", "group", "seqlen", "n_chunks", "n_sequences"])
def linear_states(
    x,
    y,
    valid_ptr,
    numbers,
    chunks,
    initial,
    states,
    final,
    nheads,
    group,
    seqlen,
    n_chunks,
    n_sequences,
    tile,
    feature_map,
    REVERSED: tl.constexpr,
):
    ACC: tl.constexpr = dtype_of(tile.ACC)
    sequence = tl.program_id(0) % n_sequences
    head = tl.program_id(0) // n_sequences % nheads
    block = tl.program_id(0) // n_sequences // nheads
    first_v = block * tile.BLOCK_DV
    span = span_of(chunks, sequence, seqlen, n_chunks)
    state = tl.zeros([tile.BLOCK_D, tile.BLOCK_DV], ACC)
    k_sum = tl.zeros([tile.BLOCK_D], ACC)
    if initial.kv is not None:
        ptrs, exist = state_pointers(initial.kv, sequence, head, nheads, first_v, tile)
        state += tl.load(ptrs, mask=exist, other=0.0)
        ptrs, exist = sum_pointers(initial.k_sum, sequence, head, nheads, tile)
        k_sum += tl.load(ptrs, mask=exist, other=0.0)
    last = tl.cdiv(span.seqlen, tile.CHUNK) - 1
    for i in range(0, last + 1):
        chunk = i
        if REVERSED:
            chunk = last - i
        if states.kv is not None:
            ptrs, exist = state_pointers(states.kv, span.first_chunk + chunk, head, nheads, first_v, tile)
            tl.store(ptrs, state, mask=exist)
            ptrs, exist = sum_pointers(states.k_sum, span.first_chunk + chunk, head, nheads, tile)
            tl.store(ptrs, k_sum, mask=exist & (block == 0))
        start = chunk * tile.CHUNK
        readable = rows_of_chunk(span, start, valid_ptr, seqlen, tile.CHUNK)
        for h in range(head * group, head * group + group):
            x_tile = load_rows(x, span, h, start, readable, tile, 0, tile.BLOCK_D, tile.HEAD_DIM)
            # (CHUNK, BLOCK_D)
            phi = widen(features_of(x_tile, readable, feature_map, tile.HEAD_DIM, ACC), ACC)
            if numbers.scale is not None:
                scale = load_numbers(numbers.scale, span, h, nheads * group, seqlen, start, readable, tile.CHUNK)
                delta = load_numbers(numbers.delta, span, h, nheads * group, seqlen, start, readable, tile.CHUNK)
                phi = phi * scale[:, None]
                k_sum -= sum_along(phi * delta[:, None], 0, ACC)
            elif not REVERSED:
                k_sum += sum_along(phi, 0, ACC)
            y_tile = load_rows(y, span, h, start, readable, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
            state = dot_add(tl.trans(phi), widen(y_tile, ACC), state, ACC, tile.STATE_PRECISION)
    ptrs, exist = state_pointers(final.kv, sequence, head, nheads, first_v, tile)
    tl.store(ptrs, state, mask=exist)
    ptrs, exist = sum_pointers(final.k_sum, sequence, head, nheads, tile)
    tl.store(ptrs, k_sum, mask=exist & (block == 0))


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
    valid: torch.Tensor | None,
    numbers: RowNumbers,
    chunks: Chunks,
    initial: State,
    states: State,
    final: State,
    counts: ChunkCounts,
    tile: LinearTile,
    feature_map: FeatureMap,
    *,
    is_reversed: bool,
) -> None:
    """Fill `states` and `final`, or only `final`; layouts as in the module docstring."""
    n_sequences, nheads = final.kv.shape[:2]
    launcher.launch(
        constants_of(linear_states, tile, feature_map, REVERSED=is_reversed),
        triton.cdiv(y.shape[3], tile.BLOCK_DV.value) * nheads * n_sequences,
        (strided(x), strided(y), valid, numbers, chunks, initial, states, final),
        (nheads, x.shape[1] // nheads, x.shape[2], counts.each, n_sequences),
    )
