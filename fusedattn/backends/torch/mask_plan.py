"""Plan which parts of the scores to compute: blocks of queries, each with the range of keys that they may see.

The plan reads the values of a mask, so they must be available.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fusedattn.masks import Band, Documents, Mask, Prefix
from fusedattn.shard import WHOLE, Shard

# The overhead of a call of torch's function, forward and backward, in units of one score of one head.
CALL = 20_000

# Up to this number of scores, a plan does not pay.
FEW = 5 * CALL

# Below FULL_TILE queries torch uses smaller tiles, and each score takes SMALL_TILES times as long.
FULL_TILE, SMALL_TILES = 192, 1.1

BLOCKS = (128, 256)

Hidden = Literal["nothing", "later", "keys", "band", "pairs"]


def some(visible: Tensor, dim: int | tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """``visible.any(dim)`` of a bool tensor; torch's own takes up to forty times as long on a CPU."""
    if torch.jit.is_tracing():  # torch.jit.trace does not know a view of another dtype
        return visible.to(torch.uint8).amax(dim, keepdim).to(torch.bool)
    return visible.view(torch.uint8).amax(dim, keepdim).view(torch.bool)


class ScoresShape(NamedTuple):
    """The shape of the scores."""

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int


class Piece(NamedTuple):
    """Queries `rows`, the range of `keys` outside which they see nothing, and which of these pairs are hidden.

    Attributes:
        hidden: ``"nothing"``; ``"later"``: key ``j`` from query ``i < j``, both counted from the first of the piece;
            ``"keys"``: the same keys from every query; ``"band"``: the pairs that the bands of the mask hide;
            ``"pairs"``: any pairs that the mask hides.
    """

    rows: range
    keys: range
    hidden: Hidden

    def cost(self, nheads: int) -> float:
        """The cost in scores of one head; `nheads` counts the heads of all batches together."""
        n_rows, n_keys = len(self.rows), len(self.keys)
        n_scores = n_rows * n_keys
        if self.hidden == "later":
            n_scores -= min(n_rows, n_keys) ** 2 // 2
        return CALL + nheads * n_scores * (SMALL_TILES if n_rows < FULL_TILE else 1.0)


class Group(NamedTuple):
    """Batches that are computed together, in these pieces; queries outside every piece see nothing."""

    batches: range
    pieces: tuple[Piece, ...]


def within_shard(mask: Mask, shard: Shard, shape: ScoresShape, device: torch.device) -> Mask:
    """The same mask of a shard, counted from its first batch, query and key; what cannot be shifted is written out."""
    has_all_pairs = not (shard.first_query or shard.first_key) and shard.seqlen_q is None and shard.seqlen_k is None
    by_number = (mask.function is not None or mask.pattern is not None) and shard != WHOLE
    if by_number or not (has_all_pairs or (mask.prefix is None and mask.tree is None)):
        return Mask(
            allowed=mask.dense(
                shape.seqlen_q, shape.seqlen_k, batch=shape.batch, nheads=shape.nheads, shard=shard, device=device
            )
        )
    if has_all_pairs or not mask.bands:
        return mask
    lower, upper = mask.band(*shard.lengths(shape.seqlen_q, shape.seqlen_k))
    shift = shard.first_query - shard.first_key
    band = Band(None if lower is None else -lower - shift, None if upper is None else upper + shift, "top_left")
    return replace(mask, bands=frozenset({band}))


def with_allowed_pairs(mask: Mask, shape: ScoresShape, device: torch.device) -> Mask:
    """The mask in the form that :func:`plan` takes: a layout, function, tree or pattern goes into ``allowed``, a
    key mask into ``valid``.
    """
    if mask.layout is None and mask.function is None and mask.tree is None and mask.pattern is None:
        if mask.allowed is None:
            return mask
        allowed = mask.allowed[(None,) * (4 - mask.allowed.dim())]
        if allowed.shape[1:3] == (1, 1):
            valid = allowed[:, 0, 0].expand(shape.batch, shape.seqlen_k)
            return replace(mask, allowed=None, valid=valid if mask.valid is None else mask.valid & valid)
    return Mask(
        allowed=mask.dense(shape.seqlen_q, shape.seqlen_k, batch=shape.batch, nheads=shape.nheads, device=device)
    )


def is_short(mask: Mask, shape: ScoresShape) -> bool:
    """Whether one call of everything takes less time than a plan."""
    if mask.only_bands and shape.seqlen_q < shape.seqlen_k:  # a window may leave a query few of many keys
        return False
    return shape.batch * shape.nheads * shape.seqlen_q * shape.seqlen_k <= FEW


def plan(mask: Mask, shape: ScoresShape, *, diagonals: bool = True) -> list[Group]:
    """The cheapest known plan for a mask from :func:`with_allowed_pairs`; without `diagonals` no piece is ``"later"``.

    It has a piece even if nothing is visible.
    """
    batches, rows, keys = range(shape.batch), range(shape.seqlen_q), range(shape.seqlen_k)
    band = _Diagonals(*mask.band(len(rows), len(keys)), "band", shape.nheads, diagonals)
    of_keys = mask.valid is not None and replace(mask, valid=None).is_full
    at_once = [Group(batches, (Piece(rows, keys, "keys" if of_keys else "pairs"),))]
    if mask.only_bands:
        found = band._replace(nheads=shape.batch * shape.nheads).pieces(Piece(rows, keys, "nothing"))
        return [Group(batches, found)] if found else at_once
    plans = [at_once]
    if mask.allowed is not None:
        entries = [_blocks(visible) for visible in mask.allowed]
    else:
        ranges = _ranges(mask.valid, shape)
        if mask.documents is None and mask.prefix is None:
            there = [own for own, _ in ranges if own] or [range(0)]
            around = range(min(own.start for own in there), max(own.stop for own in there))
            plans.append([Group(batches, band.pieces(Piece(rows, around, "keys")))])
        entries = [_entry(mask, b, Piece(rows, *ranges[b]), band, shape) for b in batches]
    if len(entries) == 1:
        plans.append([Group(batches, entries[0])])
    else:
        alike = (list(of_plan) for _, of_plan in groupby(batches, key=entries.__getitem__))
        plans.append([Group(range(own[0], own[-1] + 1), entries[own[0]]) for own in alike])
    return min((x for x in plans if any(pieces for _, pieces in x)), key=lambda groups: _cost(groups, shape.nheads))


def of_batches(mask: Mask, batches: range) -> Mask:
    """The part of a mask from :func:`with_allowed_pairs` for some of the batches."""

    def own(x: Tensor) -> Tensor:
        return x[batches.start : batches.stop] if x.shape[0] > 1 else x

    return Mask(
        mask.bands,
        None if mask.valid is None else own(mask.valid),
        None if mask.allowed is None else own(mask.allowed),
        None if mask.prefix is None else Prefix(own(mask.prefix.lengths), mask.prefix.align),
        None if mask.documents is None else Documents(own(mask.documents.q), own(mask.documents.k)),
    )


class _Diagonals(NamedTuple):
    """Query ``i`` sees keys ``i + lower .. i + upper``; None for no limit.

    Attributes:
        hides: the kind of the hidden pairs, unless they are ``"later"``.
        nheads: the heads of all batches that are computed together.
        diagonals: whether ``"later"`` is allowed.
    """

    lower: int | None
    upper: int | None
    hides: Hidden
    nheads: int
    diagonals: bool

    def pieces(self, whole: Piece) -> tuple[Piece, ...]:
        """The pieces of `whole` that this band leaves visible."""
        part = self._narrowed(whole)
        if part is None:
            return ()
        rows = part.rows
        is_small = self.nheads * len(rows) * len(part.keys) <= FEW
        if is_small or part.hidden == "later" or not any(self._hidden_from(part)):
            return (part,)
        found: list[tuple[Piece, ...]] = [(part,)]
        for size in BLOCKS:
            starts = range(rows.start, rows.stop, size)
            blocks = (whole._replace(rows=range(i, min(i + size, rows.stop))) for i in starts)
            found.append(_merged(block for block in map(self._narrowed, blocks) if block is not None))
        return min(found, key=lambda pieces: sum(piece.cost(self.nheads) for piece in pieces))

    def _narrowed(self, whole: Piece) -> Piece | None:
        """`whole` without the queries and keys that the band hides entirely; None if nothing is left."""
        (rows, keys, hidden), lower, upper = whole, self.lower, self.upper
        start = rows.start if upper is None else max(rows.start, keys.start - upper)
        stop = rows.stop if lower is None else min(rows.stop, keys.stop - lower)
        if start >= stop or (lower is not None and upper is not None and lower > upper):
            return None
        first = keys.start if lower is None else max(keys.start, start + lower)
        end = keys.stop if upper is None else min(keys.stop, stop + upper)
        if first >= end:
            return None
        part = Piece(range(start, stop), range(first, end), hidden)
        earlier, later = self._hidden_from(part)
        if not earlier and not later:
            return part
        if not earlier and hidden == "nothing" and self.diagonals and upper is not None and start + upper == first:
            return part._replace(hidden="later")
        return part._replace(hidden=self.hides if hidden == "nothing" else "pairs")

    def _hidden_from(self, part: Piece) -> tuple[bool, bool]:
        """Whether the last query does not see the first key, and whether the first query does not see the last key."""
        return (
            self.lower is not None and part.rows.stop - 1 + self.lower > part.keys.start,
            self.upper is not None and part.rows.start + self.upper < part.keys.stop - 1,
        )


def _cost(groups: Iterable[Group], nheads: int) -> float:
    return sum(piece.cost(len(batches) * nheads) for batches, pieces in groups for piece in pieces)


def _ranges(valid: Tensor | None, shape: ScoresShape) -> list[tuple[range, Hidden]]:
    """For each batch, the range from its first to its last key that is not padding, and the hidden pairs inside."""
    found: list[tuple[range, Hidden]] = []
    if valid is None:
        return [(range(shape.seqlen_k), "nothing")] * shape.batch
    seen = valid.view(torch.int8)
    first, count = seen.argmax(1), seen.sum(1)
    stop = shape.seqlen_k - seen.flip(1).argmax(1)
    for i, j, n in torch.stack((first, stop, count)).T.tolist():
        found.append((range(i, j) if n else range(0), "nothing" if n == j - i else "keys"))
    return found


def _entry(mask: Mask, batch: int, whole: Piece, band: _Diagonals, shape: ScoresShape) -> tuple[Piece, ...]:
    """The pieces of one batch; `whole` has all its queries, and the range of its keys that are not padding."""
    if not whole.keys:
        return ()
    parts = [whole]
    if mask.documents is not None:
        parts = _documents(mask.documents.q[batch], mask.documents.k[batch], whole, band.nheads)
    if mask.prefix is None:
        return tuple(piece for part in parts for piece in band.pieces(part))
    # Queries before the one at the last key of the prefix see just the prefix; the others see a causal mask.
    length = int(mask.prefix.lengths[batch])
    shift = shape.seqlen_k - shape.seqlen_q if mask.prefix.align == "bottom_right" else 0
    upper = shift if band.upper is None else min(band.upper, shift)
    causal = band._replace(upper=upper, hides="pairs")
    found: list[Piece] = []
    for rows, keys, hidden in parts:
        turn = min(max(length - shift, rows.start), rows.stop)
        in_prefix = range(keys.start, max(min(keys.stop, length), keys.start))
        found += band.pieces(Piece(range(rows.start, turn), in_prefix, hidden))
        found += causal.pieces(Piece(range(turn, rows.stop), keys, hidden))
    return tuple(found)


def _documents(ids_q: Tensor, ids_k: Tensor, whole: Piece, nheads: int) -> list[Piece]:
    """One piece for each run of queries of a document, with the keys of that document; short runs are joined."""
    spans: dict[int, tuple[range, Hidden]] = {}
    for name, run in _runs(ids_k):
        run = range(max(run.start, whole.keys.start), min(run.stop, whole.keys.stop))
        if run and name in spans:
            spans[name] = range(spans[name][0].start, run.stop), "pairs"
        elif run:
            spans[name] = run, whole.hidden
    found: list[Piece] = []
    for name, rows in _runs(ids_q):
        if name not in spans:
            continue
        found.append(Piece(rows, *spans[name]))
        while len(found) > 1:
            (a, b), both = found[-2:], _covering(found[-2], found[-1])
            if both.cost(nheads) > a.cost(nheads) + b.cost(nheads):
                break
            found[-2:] = [both]
    return found


def _runs(ids: Tensor) -> list[tuple[int, range]]:
    """The runs of equal numbers: each number and its range."""
    starts = [0, *((ids[1:] != ids[:-1]).nonzero()[:, 0] + 1).tolist()]
    return list(zip(ids[starts].tolist(), (range(i, j) for i, j in pairwise([*starts, len(ids)])), strict=True))


def _covering(a: Piece, b: Piece) -> Piece:
    """The smallest piece that holds `a` and `b`, with `b` behind `a`."""
    keys = range(min(a.keys.start, b.keys.start), max(a.keys.stop, b.keys.stop))
    return Piece(range(a.rows.start, b.rows.stop), keys, "pairs")


def _blocks(visible: Tensor) -> tuple[Piece, ...]:
    """The pieces of a mask that is written out, bool ``(nheads or 1, seqlen_q, seqlen_k)``."""
    size = BLOCKS[-1]
    found: list[Piece] = []
    for start in range(0, visible.shape[1], size):
        block = visible[:, start : start + size]
        seen = some(block, (0, 1)).nonzero()[:, 0]
        if len(seen):
            keys = range(int(seen[0]), int(seen[-1]) + 1)
            everywhere = block[..., keys.start : keys.stop].view(torch.uint8).amin()
            hidden: Hidden = "nothing" if everywhere else "pairs"
            found.append(Piece(range(start, start + block.shape[1]), keys, hidden))
    return _merged(found)


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join consecutive blocks of queries that have the same keys and kind of hidden pairs."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last[1:] == piece[1:] and last.rows.stop == piece.rows.start:
            found[-1] = last._replace(rows=range(last.rows.start, piece.rows.stop))
        else:
            found.append(piece)
    return tuple(found)
