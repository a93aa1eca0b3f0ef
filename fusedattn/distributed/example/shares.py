"""Which tokens each process has, and which pairs of a query and a key it computes in causal attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fusedattn.distributed.split import Balance, Split, length_of


@dataclass(frozen=True)
class Shares:
    """A sequence of `seqlen` tokens in `n_parts`; `n_sharing` processes share each part, in attention by heads."""

    seqlen: int
    n_parts: int
    n_sharing: int
    balance: Balance

    @cached_property
    def parts(self) -> Split:
        """The tokens of each part."""
        return Split(self.seqlen, self.n_parts, self.balance)

    def held(self) -> str:
        """The number of tokens of a process; of different numbers, the least and the most."""
        lengths = [n for part in self.parts.lengths for n in Split(part, self.n_sharing, "contiguous").lengths]
        least, most = min(lengths), max(lengths)
        return f"{most:,}" if least == most else f"{least:,} to {most:,}"

    def part_of_query(self) -> Tensor:
        """The part that each token belongs to, int64 ``(seqlen,)``."""
        found = torch.empty(self.seqlen, dtype=torch.int64)
        for part in range(self.n_parts):
            for chunk in self.parts.of(part):
                found[chunk] = part
        return found

    def of_pairs(self) -> list[float]:
        """For each part, its share of the pairs that a causal mask leaves."""
        total = _visible(slice(0, self.seqlen))
        return [sum(map(_visible, self.parts.of(part))) / total for part in range(self.n_parts)]

    def names(self) -> list[str]:
        """The processes of each part."""
        firsts = range(0, self.n_parts * self.n_sharing, self.n_sharing)
        if self.n_sharing == 1:
            return [f"process {rank}" for rank in firsts]
        return [f"processes {rank} to {rank + self.n_sharing - 1}" for rank in firsts]


def _visible(queries: slice) -> int:
    """The number of pairs of these queries: query ``i`` sees ``i + 1`` keys."""
    return length_of(queries) * (queries.start + queries.stop + 1) // 2
