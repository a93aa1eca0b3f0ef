"""The KV heads of some of the query heads, which need not be whole groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_heads(queries: slice, group: int) -> list[int]:
    """The KV heads of some query heads, of which `group` share one in the whole attention.

    Each KV head once if the query heads can be grouped by them evenly, else one for each query head.
    """
    of_queries = [head // group for head in range(queries.start, queries.stop)]
    once = sorted(set(of_queries))
    shared = len(of_queries) // max(1, len(once))
    return once if of_queries == [head for head in once for _ in range(shared)] else of_queries


def heads_of(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of ``(batch, nheads, seqlen, head_dim)``: a view if they follow one another, without repetition."""
    start = heads[0] if heads else 0
    if list(heads) == list(range(start, start + len(heads))):
        return x[:, start : start + len(heads)]
    return x.index_select(1, torch.tensor(heads, device=x.device))
