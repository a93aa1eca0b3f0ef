"""Sparse patterns in which a table says which blocks of keys each block of queries sees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.patterns import Pattern, Span, Whole, check_count, of_sizes


@dataclass(frozen=True, eq=False)
class BlockTable(Pattern):
    """A position sees a key iff ``table(whole)[..., position // block_q, key // block_k]``; no table: not at all.

    Attributes:
        block_q, block_k: any positive numbers of tokens.
    """

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_q)
        check_count("block_size", self.block_k)

    @property
    def rule(self) -> str:
        return "block_table"

    @abstractmethod
    def table(self, whole: Whole) -> Tensor:
        """Bool ``(batch or 1, nheads or 1, blocks of queries, blocks of keys)``; nheads divides that of q."""

    def written_out(self, whole: Whole) -> Pattern:
        return KnownTable(self.align, self.block_q, self.block_k, self.table(whole))

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        table = _of_heads(self.table(whole), whole.nheads)
        n_rows = table.shape[2]
        if 0 in table.shape[2:]:
            return table.new_zeros(q.shape[0], k.shape[0])
        row = q[:, 0].div(self.block_q, rounding_mode="floor")
        seen = table[:, :, row.clamp(0, n_rows - 1)][..., k // self.block_k]
        return seen & ((row >= 0) & (row < n_rows))[:, None]

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        table = _of_heads(self.table(whole), whole.nheads)
        # The number of True entries above and left of each corner.
        counts = F.pad(table.to(torch.int32).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        n_rows, n_columns = table.shape[2:]
        top = q.first[:, 0].div(self.block_q, rounding_mode="floor").clamp(0, n_rows)
        bottom = (q.last[:, 0].div(self.block_q, rounding_mode="floor") + 1).clamp(0, n_rows)
        left, right = (k.first // self.block_k).clamp(max=n_columns), (k.last // self.block_k + 1).clamp(max=n_columns)
        above, below = counts[:, :, top], counts[:, :, bottom]
        return below[..., right] - below[..., left] > above[..., right] - above[..., left]

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        table = self.table(whole).contiguous()
        n_batches, nheads, n_rows, n_columns = table.shape
        group = (whole.nheads or nheads) // nheads if nheads > 1 else 1
        of_batch, of_head = nheads * n_rows if n_batches > 1 else 0, n_rows if nheads > 1 else 0
        numbers = of_sizes(whole, self.shift(whole), of_batch, of_head, group, n_rows, n_columns)
        return numbers, table.view(torch.uint8), self.block_q, self.block_k


@dataclass(frozen=True, eq=False)
class KnownTable(BlockTable):
    """A table that is there already."""

    known: Tensor

    def table(self, whole: Whole) -> Tensor:
        return self.known

    def tensors(self) -> dict[str, Tensor]:
        return {"table": self.known}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        return replace(self, known=change(self.known))


@dataclass(frozen=True, eq=False)
class BigBird(BlockTable):
    """Blocks of a window, global blocks, and random ones."""

    window: int
    n_global: int
    n_random: int
    seed: int
    is_causal: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "n_global", "n_random"):
            check_count(name, getattr(self, name), least=0)
        check_count("seed", self.seed, least=0, most=2**62)

    def table(self, whole: Whole) -> Tensor:
        n = -(-whole.seqlen_k // self.block_k)
        number = torch.arange(n, device=whole.device)
        rows, columns = number[:, None], number
        near = (rows - columns).abs() <= self.window
        seen = near | (columns < self.n_global) | (rows < self.n_global)
        n_random = min(self.n_random, n)
        if n_random:
            taken = seen | (columns > rows) if self.is_causal else seen
            drawn = _noise(rows * n + columns, self.seed).masked_fill(taken, _LAST)
            chosen = drawn.topk(n_random, dim=-1, largest=False).indices
            seen = seen | torch.zeros_like(seen).scatter(-1, chosen, True) & ~taken
        return seen[None, None]


@dataclass(frozen=True, eq=False)
class SelectedBlocks(BlockTable):
    """Blocks of keys that are listed for each block of queries.

    Attributes:
        indices: int ``(batch or 1, nheads, blocks of queries, k)``; numbers that are no block of keys select none.
    """

    indices: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.indices, Tensor) or self.indices.dtype not in (torch.int32, torch.int64):
            got = self.indices.dtype if isinstance(self.indices, Tensor) else type(self.indices).__name__
            raise TypeError(f"indices: got {got}, allowed is an int32 or int64 tensor")
        if self.indices.dim() != 4:
            raise ValueError(
                f"indices: got shape {tuple(self.indices.shape)}, allowed is (batch, nheads_q or nheads_kv, blocks of "
                "queries, k)"
            )

    def check(self, batch: int, whole: Whole) -> None:
        n_batches, nheads, n_rows, _ = self.indices.shape
        n_blocks = -(-whole.seqlen_q // self.block_q)
        fits = n_batches in (1, batch) and n_rows == n_blocks
        if not fits or (nheads != 1 and (nheads == 0 or (whole.nheads or 0) % nheads)):
            raise ValueError(
                f"mask: selected_blocks(indices): got shape {tuple(self.indices.shape)}, allowed are (batch, nheads, "
                f"ceil(seqlen_q / {self.block_q}), k) = ({batch} or 1, a divisor of {whole.nheads}, {n_blocks}, k)"
            )

    def table(self, whole: Whole) -> Tensor:
        n = -(-whole.seqlen_k // self.block_k)
        listed = self.indices.long()
        listed = torch.where((listed >= 0) & (listed < n), listed, n)
        # One more column takes what selects no block.
        seen = torch.zeros(*listed.shape[:3], n + 1, dtype=torch.bool, device=listed.device)
        return seen.scatter(-1, listed, True)[..., :n]

    def tensors(self) -> dict[str, Tensor]:
        return {"selected_blocks(indices)": self.indices}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        return replace(self, indices=change(self.indices))


@dataclass(frozen=True, eq=False)
class SlidingTiles(BlockTable):
    """Tiles of a grid see the tiles of a `window` around them, which moves inwards at the edges.

    Attributes:
        tiles, window: in each of three dimensions, numbers of tiles.
    """

    tiles: tuple[int, int, int]
    window: tuple[int, int, int]

    def check(self, batch: int, whole: Whole) -> None:
        n = self.tiles[0] * self.tiles[1] * self.tiles[2] * self.block_k
        if (whole.seqlen_q, whole.seqlen_k) != (n, n):
            raise ValueError(
                f"mask: sliding_tiles(tiles, tile_size): got seqlen_q = {whole.seqlen_q} and seqlen_k = "
                f"{whole.seqlen_k}, allowed are {n} for both"
            )

    def table(self, whole: Whole) -> Tensor:
        seen = torch.ones(1, 1, dtype=torch.bool, device=whole.device)
        for size, window in zip(self.tiles, self.window, strict=True):
            number = torch.arange(size, device=whole.device)
            start = (number - window // 2).clamp(0, size - window)[:, None]
            seen = torch.kron(seen.byte(), ((number >= start) & (number < start + window)).byte()).bool()
        return seen[None, None]


_LAST = 2**62


def _noise(number: Tensor, seed: int) -> Tensor:
    """Pseudorandom numbers ``0 .. 2**62 - 1``, the same on every device (Steele et al., "SplitMix64", 2014)."""
    x = number + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x + _signed(0x9E3779B97F4A7C15)) if shift == 30 else x
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return (x ^ ((x >> 31) & (2**33 - 1))) & (_LAST - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    return x - 2**64 if x >= 2**63 else x


def _of_heads(table: Tensor, nheads: int | None) -> Tensor:
    """The table of each query head, or one for all."""
    if nheads is None or table.shape[1] in (1, nheads):
        return table
    return table.repeat_interleave(nheads // table.shape[1], dim=1)
