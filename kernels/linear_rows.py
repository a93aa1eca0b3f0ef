"""Numbers of each query that the backward of linear attention reads: ``1 / den``, and ``delta = rowsum(dout * out)``.

out, dout       (batch, nheads, seqlen, head_dim_v)
den             ACC (batch, nheads, seqlen)
scale, delta    like den; both are 0 where den is 0: such a query has out 0
grid            (heads * chunks,)
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.accurate_math import divide
from fusedattn.kernels.linear_chunks import (
    ChunkCounts,
    Chunks,
    LinearTile,
    load_numbers,
    load_rows,
    rows_of_chunk,
    span_of_chunk,
)
from fusedattn.kernels.linear_states import RowNumbers
from fusedattn.kernels.primitives import dtype_of, row_dot, strided


class RowTile(NamedTuple):
    """Constants: CHUNK queries, BLOCK_DV of HEAD_DIM_V features at a time."""

    HEAD_DIM_V: Any
    CHUNK: Any
    BLOCK_DV: Any
    ACC: Any


@triton.jit(do_not_specialize=["nheads", "seqlen", "n_chunks", "n_all"])
def linear_rows(out, dout, den_ptr, numbers, chunks, nheads, seqlen, n_chunks, n_all, tile):
    ACC: tl.constexpr = dtype_of(tile.ACC)
    chunk = tl.program_id(0) % n_all
    head = tl.program_id(0) // n_all
    span = span_of_chunk(chunks, chunk, seqlen, n_chunks)
    start = (chunk - span.first_chunk) * tile.CHUNK
    if start >= span.seqlen:
        return
    exist = rows_of_chunk(span, start, None, seqlen, tile.CHUNK)
    delta = tl.zeros([tile.CHUNK], ACC)
    for first_v in range(0, tile.HEAD_DIM_V, tile.BLOCK_DV):
        out_tile = load_rows(out, span, head, start, exist, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
        dout_tile = load_rows(dout, span, head, start, exist, tile, first_v, tile.BLOCK_DV, tile.HEAD_DIM_V)
        delta += row_dot(out_tile, dout_tile, ACC)
    den = load_numbers(den_ptr, span, head, nheads, seqlen, start, exist, tile.CHUNK)
    empty = den == 0.0
    scale = divide(tl.full([tile.CHUNK], 1.0, ACC), tl.where(empty, 1.0, den))
    offs = (tl.cast(span.batch, tl.int64) * nheads + head) * seqlen + span.first + start + tl.arange(0, tile.CHUNK)
    tl.store(numbers.scale + offs, tl.where(empty, 0.0, scale), mask=exist)
    tl.store(numbers.delta + offs, tl.where(empty, 0.0, delta), mask=exist)


def launch(
    out: torch.Tensor,
    dout: torch.Tensor,
    den: torch.Tensor,
    numbers: RowNumbers,
    chunks: Chunks,
    counts: ChunkCounts,
    tile: LinearTile,
) -> None:
    """Fill the tensors of `numbers`; `counts` are those of its rows."""
    launcher.launch(
        _constants(tile),
        out.shape[1] * counts.all,
        (strided(out), strided(dout), den, numbers, chunks),
        (out.shape[1], out.shape[2], *counts),
    )


@lru_cache(maxsize=1024)
def _constants(tile: LinearTile) -> launcher.KernelConstants:
    own = RowTile(HEAD_DIM_V=tile.HEAD_DIM_V, CHUNK=tile.CHUNK, BLOCK_DV=tile.BLOCK_DV, ACC=tile.ACC)
    return launcher.KernelConstants(linear_rows, tile=own, num_warps=4)
