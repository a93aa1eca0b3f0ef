"""Token ids to vectors, and the masks that go with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.masks import Mask


class TokenEmbedding(nn.Embedding):
    """``E[ids] * sqrt(d_model)`` (Vaswani et al., 2017, section 3.4), or plain ``E[ids]``.

    The factor scales rows of standard deviation ``1/sqrt(d_model)`` to the size of the sinusoidal
    positions that are added to them.

    Args:
        vocab_size: the number of tokens.
        d_model: width of a vector.
        scaled: whether to multiply by ``sqrt(d_model)``.
    """

    def __init__(self, vocab_size: int, d_model: int, *, scaled: bool = True) -> None:
        super().__init__(vocab_size, d_model)
        self.factor: float = math.sqrt(d_model) if scaled else 1.0

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
    """Convert the mask argument of a model over tokens to a :class:`Mask`.

    A bool tensor of shape ``(batch, seqlen_k)`` marks real tokens (True) and padding; any other
    bool tensor (True = attend) must broadcast to ``(batch, n_heads, seqlen_q, seqlen_k)``. A tensor
    ``(batch, seqlen_k)`` that could be either is padding: pass ``m[None]`` for the other meaning.
    """
    if isinstance(mask, Tensor) and tuple(mask.shape) == (batch, seqlen_k):
        return masks.padding(mask)
    return masks.as_mask(mask)
