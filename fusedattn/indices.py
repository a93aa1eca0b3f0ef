"""Select the queries and keys of a part of the scores: by a slice or an int64 tensor ``(n,)``; None for all."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.shard import WHOLE, Shard


def select(seqlen: int, part: Tensor | slice | None, device: torch.device | str | None) -> Tensor:
    """The selected indices among ``0 .. seqlen - 1``, int64 ``(n,)``."""
    if isinstance(part, Tensor):
        return part.to(device)
    index = torch.arange(seqlen, device=device)
    return index if part is None else index[part]


def four_dimensional(x: Tensor) -> Tensor:
    """``x`` with leading dimensions of 1."""
    return x[(None,) * (4 - x.dim())]


def part_of(x: Tensor, rows: Tensor | slice | None, keys: Tensor | slice | None) -> Tensor:
    """The part of ``x``, broadcastable to the scores; four dimensions, and those of size 1 stay so."""
    x = four_dimensional(x)
    if rows is not None and x.shape[2] != 1:
        x = x[:, :, rows]
    if keys is not None and x.shape[3] != 1:
        x = x[:, :, :, keys]
    return x


def of_scores(
    batch: int, nheads: int, q_index: Tensor, k_index: Tensor, shard: Shard = WHOLE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices for users' functions: int64 ``(batch, 1, 1, 1)``, ``(nheads, 1, 1)``, ``(rows, 1)`` and ``(keys,)``.

    The arguments are those of the shard, the results count through the whole attention.
    """
    device = q_index.device
    batches = torch.arange(shard.first_batch, shard.first_batch + batch, device=device)[:, None, None, None]
    heads = torch.arange(shard.first_head, shard.first_head + nheads, device=device)[:, None, None]
    return batches, heads, q_index[:, None] + shard.first_query, k_index + shard.first_key
