"""Normalisation of each query and key before the rotation.

Henry et al., "Query-Key Normalization for Transformers" (2020), divide each query and key of a head by its length.
Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (2023), do so to keep scores from growing in
training; Qwen 3, Gemma 3 and OLMo 2 use the root mean square (Zhang and Sennrich, 2019)::

    rms     y = weight * x / sqrt(mean(x^2) + eps)
    l2      y = weight * x / sqrt(sum(x^2) + eps)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fusedattn.readable import is_readable
from fusedattn.zeroed import zeroed

Kind = Literal["rms", "l2"]


@dataclass(frozen=True, eq=False)
class QKNorm:
    """Each query and key of a head is divided by its root mean square, or its length, and multiplied by weights.

    Attributes:
        q_weight, k_weight: float16, bfloat16, float32 or float64, broadcastable to ``(nheads_q, head_dim)`` and
            ``(nheads_kv, head_dim)``; both get gradients. ``(head_dim,)`` if all heads share the weights, ``(nheads,
            1)`` or one element for a learned scale; None for 1. A model whose weights are stored less 1, such as
            Gemma 3, passes ``1 + weight``.
        eps: added to the mean or the sum of squares; positive.
        kind: "rms" for the mean of squares, "l2" for their sum.
        across_heads: the mean or sum is that of all heads of a token, as in OLMo 2, rather than of each head.

    Computed in float32 (float64 for float64 inputs), together with the rotation, and rounded once.

    Raises:
        TypeError: a weight is no floating-point tensor, or `eps` no number.
        ValueError: a weight has more than two dimensions, or `eps` is not positive, or `kind` is unknown.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    kind: Kind = "rms"
    across_heads: bool = False

    def __post_init__(self) -> None:
        for name, weight in self.weights().items():
            if not isinstance(weight, Tensor) or not weight.is_floating_point():
                got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
                raise TypeError(f"qk_norm.{name}: got {got}, allowed are floating-point tensors and None")
            if weight.dim() > 2:
                raise ValueError(
                    f"qk_norm.{name}: got shape {tuple(weight.shape)}, allowed are shapes that broadcast to "
                    "(nheads, head_dim)"
                )
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)):
            raise TypeError(f"qk_norm.eps: got {type(self.eps).__name__}, allowed are positive numbers")
        if not 0.0 < self.eps < math.inf:
            raise ValueError(f"qk_norm.eps: got {self.eps}, allowed are positive numbers")
        if self.kind not in get_args(Kind):
            raise ValueError(f"qk_norm.kind: got {self.kind!r}, allowed are 'rms' and 'l2'")

    def weights(self) -> dict[str, Tensor]:
        """The weights that are not 1, by name."""
        named = {"q_weight": self.q_weight, "k_weight": self.k_weight}
        return {name: weight for name, weight in named.items() if weight is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QKNorm:
        """The same norm with ``change(weight)`` in place of each weight."""
        q_weight, k_weight = (None if x is None else change(x) for x in (self.q_weight, self.k_weight))
        return replace(self, q_weight=q_weight, k_weight=k_weight)

    def to(self, device: torch.device | str) -> QKNorm:
        """The same norm with its weights on ``device``."""
        return self.mapped(lambda x: x.to(device))

    def of_heads(self, heads: slice | list[int], heads_kv: slice | list[int]) -> QKNorm:
        """The same norm of some heads."""

        def part(weight: Tensor | None, chosen: slice | list[int]) -> Tensor | None:
            return weight[chosen] if weight is not None and weight.dim() == 2 and weight.shape[0] > 1 else weight

        return replace(self, q_weight=part(self.q_weight, heads), k_weight=part(self.k_weight, heads_kv))

    def check(self, q: Tensor, nheads_kv: int) -> None:
        """Raise ValueError unless the weights fit q, ``(batch, nheads_q, seqlen_q, head_dim)``, and its device."""
        nheads = {"q_weight": q.shape[1], "k_weight": nheads_kv}
        for name, weight in self.weights().items():
            whole = (nheads[name], q.shape[3])
            if any(n not in (1, allowed) for n, allowed in zip(two_dimensional(weight).shape, whole, strict=True)):
                raise ValueError(
                    f"qk_norm.{name}: got shape {tuple(weight.shape)}, allowed are shapes that broadcast to "
                    f"(nheads, head_dim) = {whole}"
                )
            if weight.device != q.device:
                raise ValueError(f"qk_norm.{name}: got device {weight.device}, allowed is the device of q, {q.device}")

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, normalised, in eager PyTorch; shapes and dtypes as they were."""
        return self.of_queries(q), self.of_keys(k)

    def of_queries(self, q: Tensor) -> Tensor:
        """q, ``(batch, nheads_q, seqlen_q, head_dim)``, normalised, in eager PyTorch."""
        return self._normalized(q, self.q_weight)

    def of_keys(self, k: Tensor) -> Tensor:
        """k, ``(batch, nheads_kv, seqlen_k, head_dim)``, normalised, in eager PyTorch; for keys of a cache."""
        return self._normalized(k, self.k_weight)

    def _normalized(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = (1, 3) if self.across_heads else (3,)
        poisoned = None
        # A row with NaN or Inf becomes NaN, and what it adds to the gradient of the weights is 0 if nothing sees it.
        if not (is_readable(x) and x.isfinite().all()):
            poisoned = ~wide.isfinite().all(dim=3, keepdim=True)
            if self.across_heads:
                poisoned = poisoned.any(dim=1, keepdim=True)
            wide = zeroed(wide, poisoned)
        # Squares of large numbers would overflow.
        largest = wide.detach().abs().amax(dims, keepdim=True) if wide.numel() else wide.new_zeros(())
        factor = torch.where(largest > 2.0**60, 2.0**-100, 1.0).to(wide.dtype)
        wide = wide * factor
        squares = wide.square()
        size = squares.mean(dims, keepdim=True) if self.kind == "rms" else squares.sum(dims, keepdim=True)
        y = wide * torch.rsqrt(size + self.eps * factor.square())
        if weight is not None:
            y = y * two_dimensional(weight).to(wide.dtype)[:, None]
        if poisoned is not None:
            y = y + torch.zeros_like(poisoned, dtype=y.dtype).masked_fill(poisoned, math.nan)
        return y.to(x.dtype)


def two_dimensional(weight: Tensor) -> Tensor:
    """A weight as ``(nheads or 1, head_dim or 1)``."""
    return torch.atleast_2d(weight)
