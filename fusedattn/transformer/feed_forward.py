"""The position-wise half of a Transformer block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """``W_2 f(W_1 x + b_1) + b_2`` (Vaswani et al., 2017, equation 2, where ``f`` is relu).

    Args:
        d_model: width of the input and output.
        d_ff: width in between.
        dropout: dropout on ``f(...)``, in training.
        activation: ``"relu"``, ``"gelu"`` (exact; Hendrycks and Gimpel, 2016) or ``"silu"``.

    Raises:
        ValueError: ``activation`` is unknown.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, allowed are {tuple(_ACTIVATIONS)}")
        self.activation = activation
        self.up_proj: nn.Linear = nn.Linear(d_model, d_ff)
        self.down_proj: nn.Linear = nn.Linear(d_ff, d_model)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d_model)`` to ``(..., d_model)``."""
        return self.down_proj(self.dropout(_ACTIVATIONS[self.activation](self.up_proj(x))))


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)``, without biases (Shazeer, "GLU Variants", 2020, eq. 6).

    It has three matrices and :class:`FeedForward` two: with ``2/3`` of the ``d_ff`` both have the
    same number of parameters.

    Args:
        d_model: width of the input and output.
        d_ff: width in between.
        dropout: dropout on the product, in training.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj: nn.Linear = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj: nn.Linear = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj: nn.Linear = nn.Linear(d_ff, d_model, bias=False)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d_model)`` to ``(..., d_model)``."""
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))
