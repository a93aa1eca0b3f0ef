"""Means of tokens, which are subtracted before rounding: what all tokens have in common takes digits from the rest.

Without its mean, k gives the same softmax: the scores of a query all change by one number (SageAttention, Zhang et al.,
2024). The mean of a block of q gives a term for each key, which is added to the scores (SageAttention2, 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_of_tokens(x: Tensor, seen: Tensor) -> Tensor:
    """The mean over tokens of each head.

    Args:
        x: ``(batch, nheads, seqlen, head_dim)``.
        seen: bool ``(batch, nheads, seqlen)``, True = the token counts.

    Returns:
        ``(batch, nheads, 1, head_dim)``; 0 where no token counts.
    """
    total = x.masked_fill(~seen[..., None], 0.0).sum(dim=-2, keepdim=True)
    return total / seen.sum(dim=-1)[..., None, None].clamp(min=1)


def mean_of_blocks(x: Tensor, seen: Tensor, tokens: int) -> Tensor:
    """For each token, the mean of its block of so many tokens; the last block may have fewer.

    Args:
        x: ``(batch, nheads, seqlen, head_dim)``.
        seen: bool ``(batch, nheads, seqlen)``, True = the token counts.
        tokens: in a block.

    Returns:
        The shape of x.
    """
    seqlen = x.shape[-2]
    if seqlen == 0:
        return x
    rest = -seqlen % tokens
    blocks = F.pad(x, (0, 0, 0, rest)).unflatten(-2, (-1, tokens)).flatten(1, 2)
    counted = F.pad(seen, (0, rest)).unflatten(-1, (-1, tokens)).flatten(1, 2)
    means = mean_of_tokens(blocks, counted).unflatten(1, (x.shape[1], -1))[..., 0, :]
    return torch.repeat_interleave(means, tokens, dim=-2)[..., :seqlen, :]
