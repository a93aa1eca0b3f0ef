"""The memory of a cache as tiles of adjacent tokens: views where possible, else copies of some pages at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedattn.kv_cache import KVCache

COPIED = 512  # the tokens in a copy, which still lies in the processor's cache when it is read


@dataclass(frozen=True)
class Sequences:
    """One sequence of a cache, or several that lie in the same slots of adjacent rows.

    Attributes:
        cache: the cache.
        batches: the sequences.
        length, kept: the tokens of each, and those that the cache still has.
        padding: the tokens at the start of each that no query sees.
    """

    cache: KVCache
    batches: slice
    length: int
    kept: int
    padding: int

    @property
    def first(self) -> int:
        """The first kept token that is not padding."""
        return max(0, self.padding - (self.length - self.kept))

    def tiles(self, x: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """The kept tokens ``start .. stop - 1`` of ``x``, a tensor of the cache: ``(batches, nheads_kv, n, ...)``.

        The next tile may overwrite this one.
        """
        cache, i = self.cache, self.batches.start
        if cache.block_table is not None:
            pages = cache.block_table[i].tolist()
            for slot, n in self._runs(start, stop):
                yield from _of_pages(x, pages, slot, n)
            return
        rows = self.batches
        if cache.rows is not None:
            row = int(cache.rows[i])
            rows = slice(row, row + 1)
        for slot, n in self._runs(start, stop):
            yield x[rows, :, slot : slot + n]

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(slot, number) of adjacent slots that hold these tokens, in order."""
        n_sinks, dropped = self.cache.n_sinks, self.length - self.kept
        ring = self.cache.capacity - n_sinks
        turn = dropped % ring if dropped else 0
        for first, last, shift in (
            (0, n_sinks, 0),
            (n_sinks, self.cache.capacity - turn, turn),
            (self.cache.capacity - turn, self.cache.capacity, turn - ring),
        ):
            first, last = max(first, start), min(last, stop)
            if first < last:
                yield first + shift, last - first


def sequences(cache: KVCache, together: bool) -> list[Sequences]:
    """Every sequence; all of them at once if `together`, and if they lie in the same slots of the first rows."""
    lengths, kept = cache.lengths.tolist(), cache.kept().tolist()
    padding = [0] * cache.batch if cache.left_padding is None else cache.left_padding.tolist()
    alike = len(set(zip(lengths, padding, strict=True))) == 1
    if together and alike and cache.block_table is None and cache.rows is None:
        return [Sequences(cache, slice(0, cache.batch), lengths[0], kept[0], padding[0])]
    return [Sequences(cache, slice(i, i + 1), lengths[i], kept[i], padding[i]) for i in range(cache.batch)]


def _of_pages(x: Tensor, pages: list[int], slot: int, n: int) -> Iterator[Tensor]:
    """The `n` tokens from `slot` on of a sequence with these pages."""
    size = x.shape[2]
    # If all tokens of a head have one stride, adjacent pages are one long page.
    is_flat = x.stride(0) == size * x.stride(2)
    if is_flat:
        x = x.as_strided((1, x.shape[1], x.shape[0] * size, x.shape[3]), x.stride())
    memory = x.new_empty(0)
    for parts in _tiles_of(pages, size, slot, n, is_flat):
        views = [x[row] if n == x.shape[2] else x[row, :, at : at + n] for row, at, n in parts]
        if len(views) == 1:
            yield views[0][None]
            continue
        shape = (x.shape[1], sum(n for _, _, n in parts), x.shape[3])
        if memory.shape != shape:  # new memory would take longer than the copy
            memory = x.new_empty(shape)
        yield torch.cat(views, dim=1, out=memory)[None]


Part = tuple[int, int, int]  # row, first slot, number of tokens


def _tiles_of(pages: list[int], size: int, slot: int, n: int, is_flat: bool) -> Iterator[list[Part]]:
    """The parts of each tile: one of any length, or several of at most ``COPIED`` tokens for each thread."""
    most = COPIED * torch.get_num_threads()
    parts: list[Part] = []
    held = 0
    while n:
        page, at = divmod(slot, size)
        count = min(size - at, n)
        row, at = (0, pages[page] * size + at) if is_flat else (pages[page], at)
        is_next = is_flat and bool(parts) and parts[-1][1] + parts[-1][2] == at
        if parts and held + count > most and not (is_next and len(parts) == 1):
            yield parts
            parts, held, is_next = [], 0, False
        if is_next:
            parts[-1] = (row, parts[-1][1], parts[-1][2] + count)
        else:
            parts.append((row, at, count))
        held += count
        slot, n = slot + count, n - count
    yield parts
