"""Numbers that are taken out of a computation, though their gradient is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Zeroed(torch.autograd.Function):
    """``x`` with 0 where `poisoned`; the gradient passes to ``x`` as if nothing had been replaced."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, poisoned: Tensor) -> Tensor:
        return x.masked_fill(poisoned, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def zeroed(x: Tensor, poisoned: Tensor) -> Tensor:
    """``x`` with 0 where `poisoned`, bool, broadcastable to ``x``."""
    return Zeroed.apply(x, poisoned)  # type: ignore[no-untyped-call]
