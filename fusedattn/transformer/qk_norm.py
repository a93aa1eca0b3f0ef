"""Learned weights of a norm of queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from fusedattn.qk_norm import QKNorm


class QueryKeyNorm(nn.Module):
    """The root-mean-square norm of each query and key (Qwen 3, Gemma 3): one weight a feature, shared by all heads.

    Args:
        head_dim: the features of a head.
        eps: added to the mean of squares.
    """

    def __init__(self, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.q_weight: nn.Parameter = nn.Parameter(torch.ones(head_dim))
        self.k_weight: nn.Parameter = nn.Parameter(torch.ones(head_dim))

    def forward(self) -> QKNorm:
        """The norm, with the weights of this module."""
        return QKNorm(self.q_weight, self.k_weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.q_weight.shape[0]}, eps={self.eps}"
