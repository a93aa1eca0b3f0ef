"""Which tokens of a sequence each process holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

Balance = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class Split:
    """A sequence of `seqlen` tokens, cut into chunks for `n_owners`; chunks differ by at most one token.

    With ``"contiguous"``, owner ``i`` of ``n`` holds chunk ``i`` of ``n``. With ``"zigzag"``, it holds chunks ``i`` and
    ``2 n - 1 - i`` of ``2 n``: under a causal mask all owners then have the same number of visible pairs.
    """

    seqlen: int
    n_owners: int
    balance: Balance

    @cached_property
    def chunks(self) -> tuple[slice, ...]:
        """Every chunk, in the order of tokens."""
        n = self.n_owners * (2 if self.balance == "zigzag" else 1)
        ends = (self.seqlen * i // n for i in range(n + 1))
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    def of(self, owner: int) -> tuple[slice, ...]:
        """The chunks of one owner, in the order in which its tensors hold them."""
        if self.balance == "contiguous":
            return (self.chunks[owner],)
        return self.chunks[owner], self.chunks[len(self.chunks) - 1 - owner]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each owner."""
        return tuple(sum(map(length_of, self.of(owner))) for owner in range(self.n_owners))

    def shard(self, x: Tensor, owner: int, dim: int) -> Tensor:
        """The tokens of one owner."""
        return torch.cat([x[(slice(None),) * (dim % x.dim()) + (chunk,)] for chunk in self.of(owner)], dim=dim)

    def joined(self, shards: list[Tensor], dim: int) -> Tensor:
        """The tokens of all owners in their order, from the tensors of each."""
        held: list[tuple[slice, Tensor]] = []
        for owner, shard in enumerate(shards):
            chunks = self.of(owner)
            held += zip(chunks, shard.split([length_of(chunk) for chunk in chunks], dim), strict=True)
        return torch.cat([x for _, x in sorted(held, key=lambda item: item[0].start)], dim=dim)

    def places(self, owner: int) -> list[tuple[slice, slice]]:
        """For each chunk of an owner: where it lies in the tensors of the owner, and in the sequence."""
        chunks = self.of(owner)
        ends = accumulate(map(length_of, chunks), initial=0)
        return [(slice(start, stop), chunk) for (start, stop), chunk in zip(pairwise(ends), chunks, strict=True)]


def length_of(tokens: slice) -> int:
    """The number of tokens from its start to its stop."""
    length: int = tokens.stop - tokens.start
    return length
