"""The memory of a cache as tiles of adjacent tokens: views where possible, else copies of some pages at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def tiles(self, tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        """The kept tokens ``start .. stop - 1`` of tensors of the cache: ``(batches, nheads_kv, n, ...)`` of each.

        All are cut at the same tokens, however they lie in memory. The next tiles may overwrite these.
        """
        cache, i = self.cache, self.batches.start
        if cache.block_table is not None:
            pages = cache.block_table[i].tolist()
            for slot, n in self._runs(start, stop):
                yield from _of_pages(tensors, pages, slot, n)
            return
        rows = self.batches
        if cache.rows is not None:
            row = int(cache.rows[i])
            rows = slice(row, row + 1)
        for slot, n in self._runs(start, stop):
            yield tuple(x[rows, :, slot : slot + n] for x in tensors)

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


Run = tuple[int, int]  # the first of adjacent slots, counted through all pages of the memory, and their number


def _of_pages(tensors: Sequence[Tensor], pages: list[int], slot: int, n: int) -> Iterator[tuple[Tensor, ...]]:
    """The `n` tokens from `slot` on of a sequence with these pages."""
    size = tensors[0].shape[2]
    flat = [_as_one_page(x) for x in tensors]
    memory = [x.new_empty(0) for x in tensors]
    for runs in _tiles_of(pages, size, slot, n, all(x is not None for x in flat)):
        held = sum(n for _, n in runs)
        tile = []
        for i, (x, whole) in enumerate(zip(tensors, flat, strict=True)):
            views = _views(x, whole, runs)
            if len(views) > 1:
                if memory[i].shape[:2] != (x.shape[1], held):  # new memory would take longer than the copy
                    memory[i] = x.new_empty(x.shape[1], held, x.shape[3])
                views = [torch.cat(views, dim=1, out=memory[i])]
            tile.append(views[0][None])
        yield tuple(tile)


def _as_one_page(x: Tensor) -> Tensor | None:
    """``(nheads_kv, all slots, features)``, if all tokens of a head have one stride."""
    n_rows, nheads_kv, size, width = x.shape
    if n_rows > 1 and x.stride(0) != size * x.stride(2):
        return None
    return x.as_strided((nheads_kv, n_rows * size, width), x.stride()[1:])


def _views(x: Tensor, whole: Tensor | None, runs: list[Run]) -> list[Tensor]:
    """The slots of a tensor, which is `whole` as one page: ``(nheads_kv, n, features)`` each."""
    if whole is not None:
        return [whole[:, start : start + n] for start, n in runs]
    size, found = x.shape[2], []
    for start, n in runs:
        stop = start + n
        for first in range(start - start % size, stop, size):
            own = slice(max(start, first) - first, min(stop - first, size))
            found.append(x[first // size, :, own])
    return found


def _tiles_of(pages: list[int], size: int, slot: int, n: int, are_views: bool) -> Iterator[list[Run]]:
    """The runs of each tile: several of at most ``COPIED`` tokens for each thread, or one, of any length if a view."""
    most = COPIED * torch.get_num_threads()
    runs: list[Run] = []
    held = 0
    while n:
        page, at = divmod(slot, size)
        count = min(size - at, n)
        at += pages[page] * size
        is_next = bool(runs) and sum(runs[-1]) == at
        if runs and held + count > most and not (are_views and is_next and len(runs) == 1):
            yield runs
            runs, held, is_next = [], 0, False
        if is_next:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((at, count))
        held += count
        slot, n = slot + count, n - count
    yield runs
