"""The key blocks that a query tile visits, the query blocks that a key tile visits, and the mask inside a block.

Only this file computes them, for all kernels. A tile's blocks come in two kinds: *full* blocks, in which every pair is
visible and no mask arithmetic is done, and *boundary* blocks, in which :func:`visible` decides pair by pair. The full
blocks are one run, with boundary blocks to its left and right. Other blocks are not visited.

Without a lower bound, key blocks are counted from the first visible key, and query blocks end at the last visible
query, so that the ragged block always falls on the side of the diagonal, which is masked anyway.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.pairs import Block, Pairs, pair_pointers
from fusedattn.kernels.shard import diagonal_at_end, diagonal_at_start, head_number

# Larger than any length, and small enough to be added to one.
FAR = tl.constexpr(2**30)


class DocumentArguments(NamedTuple):
    """Numbers of documents, int32 ``(batch, seqlen)`` each; negative for a document that the other side lacks.

    The ranges, int32 ``(3, batch, seqlen)``, are for each query (key) the first key (query) of its document, the last
    + 1, and again the last + 1, or 0 if other documents lie between.
    """

    q_ptr: Any
    k_ptr: Any
    key_ranges_ptr: Any
    query_ranges_ptr: Any
    key_ranges_stride: Any
    query_ranges_stride: Any


class LayoutArguments(NamedTuple):
    """``(sequences or 1, nheads_q or 1)`` matrices of n_q by n_k blocks, each of block_q queries and block_k keys.

    For each row of blocks (column, for queries), the int32 counts and lists give the visible blocks.
    """

    key_counts_ptr: Any
    key_lists_ptr: Any
    query_counts_ptr: Any
    query_lists_ptr: Any
    blocks_ptr: Any
    stride_b: Any
    stride_h: Any
    n_q: Any
    n_k: Any
    block_q: Any
    block_k: Any


class MaskArguments(NamedTuple):
    """A mask as the kernels read it; a field that is None or False masks nothing.

    `valid_ptr` is ``(batch, seqlen_k)``; `key_range_ptr` is its :func:`fusedattn.kernels.mask_arguments.key_range`.
    `prefix_ptr`, ``(sequences,)``, goes with the diagonal that ends at the last key (PREFIX_AT_END) or starts at the
    first. `tree` is ``(sequences, nheads_q, seqlen_q, seqlen_q)``, for the newest seqlen_q keys; it hides no older one.
    BY_PAIR: only :func:`visible` knows which pairs of a block are visible, so no block counts as full.
    MAY_HIDE_ROWS: a query may see nothing even if it does not come before all keys. FUNCTION comes last:
    docs/decisions/0007.
    """

    HAS_LOWER: Any
    HAS_UPPER: Any
    BY_PAIR: Any
    MAY_HIDE_ROWS: Any
    valid_ptr: Any
    key_range_ptr: Any
    allowed: Pairs | None
    prefix_ptr: Any
    PREFIX_AT_END: Any
    documents: DocumentArguments | None
    layout: LayoutArguments | None
    tree: Pairs | None
    function_args: Any
    FUNCTION: Any


class Bounds(NamedTuple):
    """Query ``i`` sees keys ``i + lower <= j <= i + upper`` that lie in ``[key_start, key_stop)``.

    `contiguous`: that range has no gaps. With a prefix, keys below `prefix` are visible to all queries, and keys
    ``j <= i + prefix_upper`` to query ``i``.
    """

    lower: Any
    upper: Any
    key_start: Any
    key_stop: Any
    contiguous: Any
    prefix: Any
    prefix_upper: Any


class Blocks(NamedTuple):
    """Blocks from `start` on: `n_left` of `n_boundary` boundary blocks, `n_full` full ones, other boundary blocks."""

    start: Any
    n_left: Any
    n_full: Any
    n_boundary: Any


@triton.jit
def bounds_of(mask, place, numbers):
    """The :class:`Bounds` of a sequence, from the :class:`~fusedattn.kernels.parameters.Numbers` of the call."""
    at_start = diagonal_at_start(place)
    at_end = diagonal_at_end(place)
    lower = tl.maximum(numbers.lower_start + at_start, numbers.lower_end + at_end)
    upper = tl.minimum(numbers.upper_start + at_start, numbers.upper_end + at_end)
    prefix = 0
    prefix_upper = 0
    if mask.prefix_ptr is not None:
        prefix = tl.load(mask.prefix_ptr + place.sequence) - place.shard.first_key
        prefix_upper = at_end if mask.PREFIX_AT_END else at_start
    if mask.key_range_ptr is not None:
        ptr = mask.key_range_ptr + tl.cast(place.sequence, tl.int64) * 3
        return Bounds(lower, upper, tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), prefix, prefix_upper)
    else:
        return Bounds(lower, upper, 0, place.seqlen_k, 1, prefix, prefix_upper)


@triton.jit
def starting_at(bounds, first):
    """Bounds that also hide all keys before `first`."""
    return Bounds(
        bounds.lower,
        bounds.upper,
        tl.maximum(bounds.key_start, first),
        bounds.key_stop,
        bounds.contiguous,
        bounds.prefix,
        bounds.prefix_upper,
    )


@triton.jit
def _document_range(ranges_ptr, stride, base, offs, exists):
    """(start, stop) of the range that any of `offs`, ``(BLOCK,)``, sees; (full_start, full_stop) of the one all see."""
    ptrs = ranges_ptr + base + offs
    starts = tl.load(ptrs, mask=exists, other=FAR)
    stops = tl.load(ptrs + stride, mask=exists, other=0)
    full_stops = tl.load(ptrs + 2 * stride, mask=exists, other=FAR)
    return tl.min(starts, 0), tl.max(stops, 0), tl.max(tl.where(exists, starts, 0), 0), tl.min(full_stops, 0)


@triton.jit
def key_blocks(
    mask,
    place,
    bounds,
    start_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FULL_N: tl.constexpr,
    split=0,
    split_keys=0,
    IS_SPLIT: tl.constexpr = False,
    ALIGNED: tl.constexpr = False,
):
    """The :class:`Blocks` of BLOCK_N keys that queries ``start_m + arange(BLOCK_M)`` visit.

    Full blocks come in runs of FULL_N keys, a multiple of BLOCK_N, for loops that take FULL_N keys at a time. ALIGNED
    blocks begin at multiples of BLOCK_N, for keys that share something in fixed groups. If
    IS_SPLIT, only `split_keys`, a multiple of both, are visited, from ``split * split_keys`` after the first visited
    key on: keys that padding or a window hides before it move no block. A layout cannot be split.
    """
    if mask.layout is not None:
        row = _layout_row(mask.layout, place, start_m // mask.layout.block_q, mask.layout.n_q)
        n = tl.load(mask.layout.key_counts_ptr + row) * (mask.layout.block_k // BLOCK_N)
        return Blocks(0, n, 0, n)
    else:
        last = tl.minimum(start_m + BLOCK_M, place.seqlen_q) - 1
        start = bounds.key_start
        stop = bounds.key_stop
        full_start = start
        full_stop = stop
        if mask.HAS_UPPER:
            stop = tl.minimum(stop, last + bounds.upper + 1)
            full_stop = tl.minimum(full_stop, start_m + bounds.upper + 1)
        if mask.prefix_ptr is not None:
            stop = tl.minimum(stop, tl.maximum(last + bounds.prefix_upper + 1, bounds.prefix))
            full_stop = tl.minimum(full_stop, tl.maximum(start_m + bounds.prefix_upper + 1, bounds.prefix))
        if mask.HAS_LOWER:
            start = tl.maximum(start, start_m + bounds.lower)
            full_start = tl.maximum(full_start, last + bounds.lower)
        if mask.documents is not None:
            rows = start_m + tl.arange(0, BLOCK_M)
            documents = mask.documents
            first, end, full_first, full_end = _document_range(
                documents.key_ranges_ptr, documents.key_ranges_stride, place.query_base, rows, rows < place.seqlen_q
            )
            # If sequences are packed, the range counts from the start of the tensor.
            start = tl.maximum(start, first - place.first_k)
            stop = tl.minimum(stop, end - place.first_k)
            full_start = tl.maximum(full_start, full_first - place.first_k)
            full_stop = tl.minimum(full_stop, full_end - place.first_k)
        if mask.tree is not None:
            full_stop = tl.minimum(full_stop, _older_keys(place))
        if ALIGNED:
            start = start // BLOCK_N * BLOCK_N
        if IS_SPLIT:
            start += split * split_keys
            stop = tl.minimum(stop, start + split_keys)
            full_stop = tl.minimum(full_stop, stop)
        if mask.BY_PAIR:
            n = tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N)
            return Blocks(start, n, 0, n)
        else:
            n_left = 0
            if mask.HAS_LOWER or mask.documents is not None or ALIGNED:
                n_left = tl.cdiv(tl.maximum(tl.minimum(full_start, stop) - start, 0), BLOCK_N)
            first_full = start + n_left * BLOCK_N
            n_full = tl.maximum(full_stop - first_full, 0) // FULL_N * (FULL_N // BLOCK_N) * bounds.contiguous
            n_right = tl.cdiv(tl.maximum(stop - first_full - n_full * BLOCK_N, 0), BLOCK_N)
            return Blocks(start, n_left, n_full, n_left + n_right)


@triton.jit
def boundary_keys(i, blocks, mask, place, start_m, BLOCK_N: tl.constexpr):
    """The first key of boundary block `i` of the queries from `start_m` on."""
    if mask.layout is not None:
        row = _layout_row(mask.layout, place, start_m // mask.layout.block_q, mask.layout.n_q)
        parts = mask.layout.block_k // BLOCK_N
        block = tl.load(mask.layout.key_lists_ptr + row * mask.layout.n_k + i // parts)
        return block * mask.layout.block_k + i % parts * BLOCK_N
    else:
        return _boundary_start(i, blocks, BLOCK_N)


@triton.jit
def any_keys(i, blocks, mask, place, start_m, BLOCK_N: tl.constexpr):
    """The first key of block `i`, full blocks counted first, for loops that treat all blocks as boundary blocks."""
    if i < blocks.n_full:
        start_n = blocks.start + (blocks.n_left + i) * BLOCK_N
    else:
        start_n = boundary_keys(i - blocks.n_full, blocks, mask, place, start_m, BLOCK_N)
    return start_n


@triton.jit
def query_blocks(
    mask, place, bounds, group, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL_M: tl.constexpr
):  # fmt: skip
    """The :class:`Blocks` of BLOCK_M queries that keys ``start_n + arange(BLOCK_N)`` visit.

    Full blocks come in runs of FULL_M queries, as in :func:`key_blocks`. The result holds for each of the `group` heads
    from that of `place` on; if a layout has fewer blocks for one of them, :func:`boundary_queries` returns a query
    beyond the last. `start` may be negative: the first block then begins before row 0.
    """
    keys_hidden = (start_n + BLOCK_N <= bounds.key_start) | (start_n >= bounds.key_stop)
    if mask.layout is not None:
        column = _layout_row(mask.layout, place, start_n // mask.layout.block_k, mask.layout.n_k)
        n = tl.load(mask.layout.query_counts_ptr + column)
        for i in range(1, group):
            next_column = column + tl.cast(i, tl.int64) * mask.layout.stride_h * mask.layout.n_k
            n = tl.maximum(n, tl.load(mask.layout.query_counts_ptr + next_column))
        n = tl.where(keys_hidden, 0, n * (mask.layout.block_q // BLOCK_M))
        return Blocks(0, n, 0, n)
    else:
        last = start_n + BLOCK_N - 1
        start = 0
        stop = place.seqlen_q
        full_start = 0
        full_stop = stop
        if mask.HAS_UPPER:
            start = tl.maximum(start, start_n - bounds.upper)
            full_start = tl.maximum(full_start, last - bounds.upper)
        if mask.prefix_ptr is not None:
            start = tl.maximum(start, tl.where(start_n < bounds.prefix, 0, start_n - bounds.prefix_upper))
            full_start = tl.maximum(full_start, tl.where(last < bounds.prefix, 0, last - bounds.prefix_upper))
        if mask.HAS_LOWER:
            stop = tl.minimum(stop, tl.minimum(last, bounds.key_stop - 1) - bounds.lower + 1)
            full_stop = tl.minimum(full_stop, start_n - bounds.lower + 1)
        if mask.documents is not None:
            keys = start_n + tl.arange(0, BLOCK_N)
            documents = mask.documents
            first, end, full_first, full_end = _document_range(
                documents.query_ranges_ptr, documents.query_ranges_stride, place.key_base, keys, keys < place.seqlen_k
            )
            start = tl.maximum(start, first - place.first_q)
            stop = tl.minimum(stop, end - place.first_q)
            full_start = tl.maximum(full_start, full_first - place.first_q)
            full_stop = tl.minimum(full_stop, full_end - place.first_q)
        stop = tl.where(keys_hidden, start, stop)
        if mask.BY_PAIR:
            n = tl.cdiv(tl.maximum(stop - start, 0), BLOCK_M)
            return Blocks(stop - n * BLOCK_M, n, 0, n)
        else:
            n_right = 0
            if mask.HAS_LOWER or mask.documents is not None:
                n_right = tl.cdiv(tl.maximum(stop - tl.maximum(full_stop, start), 0), BLOCK_M)
            end_full = stop - n_right * BLOCK_M
            keys_full = (start_n >= bounds.key_start) & (last < bounds.key_stop) & (bounds.contiguous != 0)
            if mask.tree is not None:
                keys_full = keys_full & (last < _older_keys(place))
            n_full = tl.where(keys_full, tl.maximum(end_full - full_start, 0) // FULL_M, 0) * (FULL_M // BLOCK_M)
            n_left = tl.cdiv(tl.maximum(end_full - n_full * BLOCK_M - start, 0), BLOCK_M)
            return Blocks(end_full - (n_left + n_full) * BLOCK_M, n_left, n_full, n_left + n_right)


@triton.jit
def boundary_queries(i, blocks, mask, place, start_n, BLOCK_M: tl.constexpr):
    """The first query of boundary block `i` of the keys from `start_n` on."""
    if mask.layout is not None:
        column = _layout_row(mask.layout, place, start_n // mask.layout.block_k, mask.layout.n_k)
        parts = mask.layout.block_q // BLOCK_M
        block = tl.load(mask.layout.query_lists_ptr + column * mask.layout.n_q + i // parts)
        in_list = i < tl.load(mask.layout.query_counts_ptr + column) * parts
        return tl.where(in_list, block * mask.layout.block_q + i % parts * BLOCK_M, place.seqlen_q)
    else:
        return _boundary_start(i, blocks, BLOCK_M)


@triton.jit
def any_queries(i, blocks, mask, place, start_n, BLOCK_M: tl.constexpr):
    """The first query of block `i`, full blocks counted first, for loops that treat all blocks as boundary blocks."""
    if i < blocks.n_full:
        start_m = blocks.start + (blocks.n_left + i) * BLOCK_M
    else:
        start_m = boundary_queries(i - blocks.n_full, blocks, mask, place, start_n, BLOCK_M)
    return start_m


@triton.jit
def _boundary_start(i, blocks, BLOCK: tl.constexpr):
    return blocks.start + (i + tl.where(i >= blocks.n_left, blocks.n_full, 0)) * BLOCK


@triton.jit
def _layout_row(layout, place, block, n):
    """The index of `block` among the rows (n = n_q) or columns (n = n_k) of blocks of all matrices."""
    matrix = tl.cast(place.sequence, tl.int64) * layout.stride_b + place.head * layout.stride_h
    return matrix * n + block


@triton.jit
def tile_visited(mask, place, bounds, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether queries ``start_m + arange(BLOCK_M)`` visit keys ``start_n + arange(BLOCK_N)``, for tiles on any grid."""
    if mask.layout is not None:
        row = _layout_row(mask.layout, place, start_m // mask.layout.block_q, mask.layout.n_q)
        shown = tl.load(mask.layout.blocks_ptr + row * mask.layout.n_k + start_n // mask.layout.block_k) != 0
        return shown & (start_m < place.seqlen_q) & (start_n < bounds.key_stop) & (start_n + BLOCK_N > bounds.key_start)
    else:
        blocks = key_blocks(mask, place, bounds, start_m, BLOCK_M, BLOCK_N, BLOCK_N)
        n = blocks.n_full + blocks.n_boundary
        inside = (start_n + BLOCK_N > blocks.start) & (start_n < blocks.start + n * BLOCK_N)
        return (start_m < place.seqlen_q) & (n > 0) & inside


@triton.jit
def load_key_visible(mask, place, bounds, keys):
    """Which `keys`, ``(BLOCK_N,)``, any query may see: inside the range, and valid."""
    inside = (keys >= bounds.key_start) & (keys < bounds.key_stop)
    if mask.valid_ptr is not None:
        inside = inside & (tl.load(mask.valid_ptr + place.key_base + keys, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _older_keys(place):
    """The number of keys before those of the queries."""
    return diagonal_at_end(place) - place.shard.first_query


@triton.jit
def numbers_of_pairs(place, rows, keys):
    """(sequence, head, query, key) for users' functions, which may load by them.

    Rows and keys outside the sequence become its first or last.
    """
    sequence, head, _ = head_number(place)
    query = tl.minimum(tl.maximum(rows, 0), place.seqlen_q - 1) + place.shard.first_query
    key = tl.minimum(tl.maximum(keys, 0), place.seqlen_k - 1) + place.shard.first_key
    return sequence, head, query, key


@triton.jit
def visible(mask, place, bounds, block, query_exists, key_visible):
    """Which pairs of a block are visible.

    `query_exists` and `key_visible` have the shapes of the block's rows and keys. A layout decides about whole blocks.
    """
    rows = block.rows
    keys = block.keys
    pairs = query_exists & key_visible
    if mask.HAS_UPPER:
        pairs = pairs & (keys <= rows + bounds.upper)
    if mask.HAS_LOWER:
        pairs = pairs & (keys >= rows + bounds.lower)
    if mask.prefix_ptr is not None:
        pairs = pairs & ((keys <= rows + bounds.prefix_upper) | (keys < bounds.prefix))
    if mask.documents is not None:
        of_query = tl.load(mask.documents.q_ptr + place.query_base + rows, mask=query_exists, other=-1)
        of_key = tl.load(mask.documents.k_ptr + place.key_base + keys, mask=key_visible, other=-2)
        pairs = pairs & (of_query == of_key)
    if mask.allowed is not None:
        ptrs = pair_pointers(mask.allowed, place, block)
        pairs = pairs & (tl.load(ptrs, mask=pairs, other=0) != 0)
    if mask.tree is not None:
        older = _older_keys(place)
        newest = Block(block.start_m, block.start_n - older, rows, keys - older)
        ptrs = pair_pointers(mask.tree, place, newest)
        pairs = pairs & (tl.load(ptrs, mask=pairs & (newest.keys >= 0), other=1) != 0)
    if mask.FUNCTION is not None:
        sequence, head, query, key = numbers_of_pairs(place, rows, keys)
        pairs = pairs & mask.FUNCTION(sequence, head, query, key, mask.function_args)
    return pairs
