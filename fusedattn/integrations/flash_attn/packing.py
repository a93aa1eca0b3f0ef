"""The sequence that each packed token belongs to."""

from __future__ import annotations

import torch
from torch import Tensor


def places(cu_seqlens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each of the tokens ``0 .. n - 1``, its position there, and whether it belongs to a sequence.

    Nothing waits for `cu_seqlens`. Tokens of no sequence get the last sequence and position 0.

    Args:
        cu_seqlens: int32 or int64 ``(n_sequences + 1,)``.

    Returns:
        int64 ``(n,)``, int64 ``(n,)``, bool ``(n,)``.
    """
    token = torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    inside = token < cu_seqlens[-1]
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    position = (token - cu_seqlens[sequence]).long()
    return sequence, position.masked_fill(~inside, 0), inside
