"""Which batches, heads, queries and keys of a larger attention a call computes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """A rectangle of the scores of a larger attention, the whole one.

    Alignments of masks, distances, dropout and users' functions count through the whole attention. Tensors of masks and
    biases have the sizes of the shard, as q, k and v have. For a shard, positions of ``rope`` are explicit.

    Attributes:
        first_batch, first_head, first_query, first_key: the numbers of its first batch, query head, query and key.
        nheads, seqlen_q, seqlen_k: the query heads, queries and keys of the whole; None if the shard has all.
    """

    first_batch: int = 0
    first_head: int = 0
    first_query: int = 0
    first_key: int = 0
    nheads: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    def lengths(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The queries and keys of the whole; the arguments are those of the shard."""
        return (
            seqlen_q if self.seqlen_q is None else self.seqlen_q,
            seqlen_k if self.seqlen_k is None else self.seqlen_k,
        )

    def heads(self, nheads: int) -> int:
        """The query heads of the whole; the argument is that of the shard."""
        return nheads if self.nheads is None else self.nheads

    def diagonal(self, seqlen_q: int, seqlen_k: int) -> int:
        """The key of the shard at which its query 0 stands if the last query of all stands at the last key of all."""
        whole_q, whole_k = self.lengths(seqlen_q, seqlen_k)
        return whole_k - whole_q + self.first_query - self.first_key

    def part(self, batch: int = 0, head: int = 0, query: int = 0, key: int = 0) -> Shard:
        """The part of this shard from these of its batches, heads, queries and keys on; the whole has known sizes."""
        return self._replace(
            first_batch=self.first_batch + batch,
            first_head=self.first_head + head,
            first_query=self.first_query + query,
            first_key=self.first_key + key,
        )

    def numbers(self, nheads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        """The numbers of a shard of these sizes as the kernels read them, int32 (kernels/shard.py)."""
        shift = self.diagonal(seqlen_q, seqlen_k) - (seqlen_k - seqlen_q)
        numbers = self.first_batch, self.first_head, self.heads(nheads), self.first_query, self.first_key, shift
        return numbers_on(device, numbers)


WHOLE = Shard()


def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """These numbers, int32 ``(n,)``, on a device; under a compiler they may be symbols."""
    return torch.tensor(numbers, dtype=torch.int32, device=device) if _is_traced() else _tensor(numbers, device)


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())


@lru_cache(maxsize=1024)
def _tensor(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The same memory for the same numbers: a copy to a GPU for each call would take longer than a short one."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
