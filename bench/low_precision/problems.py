"""Queries, keys and values of one attention each: drawn, and those of the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedattn import low_precision, reference
from fusedattn.low_precision import Recipe
from fusedattn.masks import Mask, full

Attend = Callable[[Tensor, Tensor, Tensor, Mask, float | None], Tensor]  # (q, k, v, mask, scale) -> out

SIZES = 1, 8, 1024, 128  # (batch, nheads, seqlen, head_dim) of drawn numbers


@dataclass(frozen=True)
class Problem:
    """Operands ``(batch, nheads, seqlen, head_dim)``, float32, as they are multiplied."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None

    def exact(self) -> Tensor:
        """The output in float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        return reference.attention(q, k, v, mask=self.mask, scale=self.scale)[0]


def normal() -> Problem:
    """Standard normal numbers."""
    q, k, v = torch.randn(3, *SIZES, generator=torch.Generator().manual_seed(0))
    return Problem(q, k, v, full(), None)


def with_outliers() -> Problem:
    """``N(0, 1) + N(0, 100) * Bernoulli(0.001)`` (FlashAttention-3, section 4.3)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, *SIZES, generator=generator)
    rare = torch.rand(x.shape, generator=generator) < 0.001
    q, k, v = x + 10.0 * torch.randn(x.shape, generator=generator) * rare
    return Problem(q, k, v, full(), None)


@dataclass
class Recorder:
    """Exact attention that keeps its operands."""

    problems: list[Problem] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
        self.problems.append(Problem(q, k, v, mask, scale))
        return reference.attention(q, k, v, mask=mask, scale=scale)[0]


def attend_by(recipe: Recipe) -> Attend:
    """Attention in few bits."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
        return low_precision.attention(q, k, v, recipe, mask=mask, scale=scale)[0]

    return attend


def errors_of(problem: Problem, recipes: dict[str, Recipe]) -> Iterator[dict[str, Any]]:
    """For each recipe, the error of out relative to its size, the largest one relative to the largest number, and the
    cosine."""
    exact = problem.exact()
    for name, recipe in recipes.items():
        out = attend_by(recipe)(problem.q, problem.k, problem.v, problem.mask, problem.scale).double()
        error = out - exact
        yield {
            "recipe": name,
            "error": float(error.norm() / exact.norm()),
            "largest": float(error.abs().max() / exact.abs().max()),
            "cosine": float((out * exact).sum() / (out.norm() * exact.norm())),
        }


def statistics_of(problem: Problem) -> dict[str, float]:
    """What rotation and smoothing could change: the largest number of q and k over the root mean square, and the share
    of the squares that is that of the mean over tokens."""
    found = {}
    for name, x in (("q", problem.q), ("k", problem.k)):
        power = x.pow(2).mean()
        found[f"{name}, largest"] = float(x.abs().max() / power.sqrt())
        found[f"{name}, mean"] = float(x.mean(dim=2).pow(2).mean() / power)
    return found
