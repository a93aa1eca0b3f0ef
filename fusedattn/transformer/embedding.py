"""Token ids to vectors, and the masks that go with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.masks import Mask


class TokenEmbedding(nn.Embedding):
    """``E[ids] * sqrt(d_model)`` (Vaswani et al., 2017, section 3.4), or plain ``E[ids]``.

    The factor brings rows of standard deviation ``1/sqrt(d_model)`` to the size of the sinusoidal
    positions that are added to them.

    Args:
        vocab_size: how many tokens there are.
        d_model: width of a vector.
        scaled: whether to multiply by ``sqrt(d_model)``.
    """

    def __init__(self, vocab_size: int, d_model: int, *, scaled: bool = True) -> None:
        super().__init__(vocab_size, d_model)
        self.factor = math.sqrt(d_model) if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Ids, int ``(batch, seqlen)``, to vectors ``(batch, seqlen, d_model)``.

        Raises:
            ValueError: ``ids`` is not two-dimensional.
            TypeError: ``ids`` is not an int32 or int64 tensor.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids: got {ids.dtype}, allowed are torch.int32 and torch.int64")
        if ids.dim() != 2:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed is (batch, seqlen)")
        return super().forward(ids) * self.factor


def token_mask(mask: Mask | Tensor | None, batch: int, seqlen_k: int) -> Mask:
    """What a model over tokens takes as its mask, as a :class:`Mask`.

    A bool tensor of shape ``(batch, seqlen_k)`` tells real tokens (True) from padding; any other
    bool tensor (True = attend) must broadcast to ``(batch, n_heads, seqlen_q, seqlen_k)``. Where
    ``(batch, seqlen_k)`` could be either, it is padding: write ``m[None]`` for the other meaning.
    """
    if isinstance(mask, Tensor) and tuple(mask.shape) == (batch, seqlen_k):
        return masks.padding(mask)
    return masks.as_mask(mask)
