"""Heads for tokens: each process of a group gets all tokens of its share of the heads, and gives its tokens' others.

Jacobs et al., "DeepSpeed Ulysses" (2023). Processes that share a KV head each get a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedattn.distributed.collectives import exchange
from fusedattn.distributed.kv_heads import heads_of, kv_heads


@dataclass(frozen=True)
class Heads:
    """The shares of the heads.

    Attributes:
        group: the processes.
        nheads_q, nheads_kv: of the attention; nheads_q is a multiple of the number of processes.
        lengths_q, lengths_k: the tokens of each process.
    """

    group: dist.ProcessGroup
    nheads_q: int
    nheads_kv: int
    lengths_q: Sequence[int]
    lengths_k: Sequence[int]

    def queries(self, rank: int) -> slice:
        """The query heads of a process."""
        n = self.nheads_q // dist.get_world_size(self.group)
        return slice(rank * n, (rank + 1) * n)

    def kv(self, rank: int) -> list[int]:
        """The KV heads of a process."""
        return kv_heads(self.queries(rank), self.nheads_q // self.nheads_kv)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this process's heads, from its tokens of all heads; ``(batch, nheads, seqlen, head_dim)``."""
        n = dist.get_world_size(self.group)
        of_kv = [self.kv(rank) for rank in range(n)]
        queries = self._exchanged([q[:, self.queries(rank)] for rank in range(n)], self.lengths_q)
        keys, values = (self._exchanged([heads_of(x, heads) for heads in of_kv], self.lengths_k) for x in (k, v))
        return queries, keys, values

    def _exchanged(self, parts: list[Tensor], lengths: Sequence[int]) -> Tensor:
        batch, nheads, _, head_dim = parts[dist.get_rank(self.group)].shape
        specs = [(torch.Size((batch, nheads, length, head_dim)), parts[0].dtype) for length in lengths]
        return torch.cat(exchange(parts, specs, self.group), dim=2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """All heads of this process's tokens, from all tokens of its heads: ``(batch, nheads, seqlen, ...)``."""
        n, own = dist.get_world_size(self.group), self.lengths_q[dist.get_rank(self.group)]
        specs = [(torch.Size((*x.shape[:2], own, *x.shape[3:])), x.dtype)] * n
        return torch.cat(exchange(x.split(list(self.lengths_q), dim=2), specs, self.group), dim=1)
