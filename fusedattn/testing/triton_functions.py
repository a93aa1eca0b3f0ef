"""The mask, score and feature functions of cases in :mod:`fusedattn.testing`, as a user would write them.

Each has a compiled and an eager version. This module needs Triton; it is imported only if a case has a function.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import masks
from fusedattn.feature_maps import FeatureMap
from fusedattn.masks import Mask
from fusedattn.score_mod import ArgGradient, ScoreMod

SLOPE = 0.03125  # of the scores by distance
STEEPEST = 2.0  # bound of the derivative of the scores, for gains up to 1


@triton.jit
def _sees(batch, head, q_index, k_index, args):
    """Hide every fifth diagonal; each head starts at another one."""
    first = tl.load(args[0] + batch * args[1] + head)
    return (q_index + 4 * k_index + first) % 5 != 0


def _sees_eager(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]) -> Tensor:
    return (q_index + 4 * k_index + args[0][batch * args[1] + head]) % 5 != 0


def mask_function(batch: int, nheads_q: int, generator: torch.Generator) -> Mask:
    """A mask that differs from head to head, with a tensor and a number as arguments."""
    first = torch.randint(0, 5, (batch * nheads_q,), generator=generator, dtype=torch.int32)
    return masks.function(_sees, _sees_eager, (first, nheads_q))


@triton.jit
def _score(score, batch, head, q_index, k_index, args):
    """Steeper near 0, and lower the further the key lies behind the query."""
    return score + tl.load(args[0] + head) * score / (1.0 + tl.abs(score)) - args[1] * (k_index - q_index)


@triton.jit
def _score_derivative(score, batch, head, q_index, k_index, args):
    size = 1.0 + tl.abs(score)
    return 1.0 + tl.load(args[0] + head) / (size * size)


@triton.jit
def _gain_index(batch, head, q_index, k_index, args):
    return head


@triton.jit
def _gain_derivative(score, batch, head, q_index, k_index, args):
    return score / (1.0 + tl.abs(score))


def _score_eager(
    score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]
) -> Tensor:
    return score + args[0][head] * score / (1.0 + score.abs()) - args[1] * (k_index - q_index)


def score_function(nheads_q: int, generator: torch.Generator) -> ScoreMod:
    """A function of scores with a learned gain for each head and a slope."""
    gains = torch.rand(nheads_q, generator=generator)
    of_gains = ArgGradient(0, _gain_index, _gain_derivative)
    return ScoreMod(_score, _score_derivative, _score_eager, (gains, SLOPE), (of_gains,))


@triton.jit
def _feature(x):
    return x * x + 0.5


@triton.jit
def _feature_derivative(x):
    return 2.0 * x


def _feature_eager(x: Tensor) -> Tensor:
    return x * x + 0.5


def feature_map() -> FeatureMap:
    """Squares, and a number for features of 0, which columns behind the last feature must not get."""
    return FeatureMap(_feature, _feature_derivative, _feature_eager)
