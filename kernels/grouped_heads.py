"""Tiles with queries of several heads.

Row ``r`` is query ``start + r // HEADS`` of head ``first + r % HEADS``. These heads share a KV head, whose keys and
values are read once for all of them. Rows of heads beyond the group do not exist. With HEADS == 1 a tile has queries of
one head, as in the kernels without groups.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.primitives import head_base, head_of, load_tile, program_tile, round_to, store_tile
from fusedattn.kernels.sequences import row_base, with_head


class TileRows(NamedTuple):
    """The rows of a tile.

    `start` is the first query, `head` the first head. `queries`, `exist` and `heads` are ``(BLOCK_M,)``; heads beyond
    the group are replaced by its last. With HEADS == 1 `heads` is `head`.
    """

    start: Any
    head: Any
    heads: Any
    queries: Any
    exist: Any


@triton.jit
def grouped_program(n_tiles, nheads_q, nheads_kv, heads_in_l2, HEADS: tl.constexpr, REVERSED: tl.constexpr):
    """(tile, first head, KV head, sequence) of this program; see program_tile."""
    group = nheads_q // nheads_kv
    if HEADS == 1:
        tile, head, sequence = program_tile(n_tiles, nheads_q, heads_in_l2, REVERSED)
        return tile, head, head // group, sequence
    else:
        parts = tl.cdiv(group, HEADS)
        tile, part, sequence = program_tile(n_tiles, nheads_kv * parts, heads_in_l2, REVERSED)
        head_kv = part // parts
        return tile, head_kv * group + part % parts * HEADS, head_kv, sequence


@triton.jit
def rows_of(place, start_m, head, stop_head, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """The :class:`TileRows` from query `start_m` and `head` on; heads from `stop_head` on do not exist."""
    offs = tl.arange(0, BLOCK_M)
    if HEADS == 1:
        queries = start_m + offs
        return TileRows(start_m, head, head, queries, queries < place.seqlen_q)
    else:
        queries = start_m + offs // HEADS
        heads = head + offs % HEADS
        exist = (queries < place.seqlen_q) & (heads < stop_head)
        return TileRows(start_m, head, tl.minimum(heads, stop_head - 1), queries, exist)


@triton.jit
def with_rows(place, rows, HEADS: tl.constexpr):
    """`place` with the head of each row, ``(BLOCK_M, 1)``, which broadcasts to pairs."""
    if HEADS == 1:
        return place
    else:
        return with_head(place, rows.heads[:, None])


@triton.jit
def row_offsets(place, rows):
    """The offsets of rows in a contiguous ``(batch, nheads, n_rows)`` tensor."""
    return row_base(with_head(place, rows.heads)) + rows.queries


@triton.jit
def _row_pointers(x, place, rows, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """Pointers to the rows of a :class:`Strided`, ``(BLOCK_M,)``; heads may lie further apart than int32 reaches."""
    offs = tl.arange(0, BLOCK_M)
    head_ptr = head_base(x, place.batch, rows.head, place.first_q) + tl.cast(rows.start, tl.int64) * x.stride_s
    return head_ptr + (offs // HEADS * x.stride_s + (offs % HEADS).to(tl.int64) * x.stride_h)


@triton.jit
def load_rows(
    x, place, rows, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, first=0
):
    """BLOCK_D features from `first` of the rows of a :class:`Strided`, ``(BLOCK_M, BLOCK_D)``.

    Rows that do not exist are 0. `first` is as in load_tile.
    """
    if HEADS == 1:
        x_head = head_of(x, place.batch, rows.head, place.first_q)
        return load_tile(x_head, rows.start, rows.exist, HEAD_DIM, BLOCK_M, BLOCK_D, first)
    else:
        offs_d = first + tl.arange(0, BLOCK_D)[None, :]
        ptrs = _row_pointers(x, place, rows, BLOCK_M, HEADS)[:, None] + offs_d
        return tl.load(ptrs, mask=rows.exist[:, None] & (offs_d < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(
    x,
    place,
    rows,
    tile,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write WIDTH features, from FIRST on, of existing rows to a :class:`Strided`, rounded to its dtype."""
    if HEADS == 1:
        x_head = head_of(x, place.batch, rows.head, place.first_q)
        store_tile(x_head, rows.start, place.seqlen_q, tile, HEAD_DIM, BLOCK_M, WIDTH, FIRST)
    else:
        offs_d = FIRST + tl.arange(0, WIDTH)[None, :]
        ptrs = _row_pointers(x, place, rows, BLOCK_M, HEADS)[:, None] + offs_d
        tl.store(ptrs, round_to(tile, x.ptr.dtype.element_ty), mask=rows.exist[:, None] & (offs_d < HEAD_DIM))
