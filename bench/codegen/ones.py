"""Calls with sizes of 1: Triton makes such an argument a constant, and compiles another kernel.

A kernel for one head, key or feature need not be fast, but it must compile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import masks
from fusedattn.masks import Mask
from fusedattn.score_mod import ArgGradient, ScoreMod

# The features of the calls; if a name begins with "one feature", queries and keys have one feature.
ONES: dict[str, frozenset[str]] = {
    "one feature": frozenset({"causal", "boolean", "dropout", "one value"}),
    "one feature, decode": frozenset({"causal", "one query", "long cache", "one value"}),
    "one value": frozenset({"causal", "padding", "rope", "positions", "one value"}),
    "one of each": frozenset(
        {"causal", "rope", "one pair", "one sequence", "one head", "one query", "one key", "one value"}
    ),
    "one head": frozenset({"causal", "rope", "one pair", "one head", "alibi", "sinks", "dropout", "one value"}),
    "one KV head": frozenset({"rope", "positions", "one KV head"}),
    "one key": frozenset({"padding", "prefix", "documents", "one key"}),
    "one query": frozenset(
        {"causal", "rope", "one pair", "one query", "long cache", "dropout", "one value", "largest"}
    ),
    "few queries": frozenset({"causal", "few queries", "sinks", "one head", "one value"}),
    "one packed": frozenset({"causal", "window", "rope", "one pair", "packed", "one head", "one value", "largest"}),
    "one block": frozenset(
        {"causal", "layout", "one block", "boolean", "tree", "of one number", "one sequence", "one value"}
    ),
    "args of 1": frozenset({"window", "prefix", "mask function", "score function", "args of 1", "one value"}),
    "one number": frozenset({"bias", "of one number", "relative", "reach 0", "softcap", "one value"}),
    "next to one": frozenset({"bias", "alibi", "relative", "reach 1", "one sequence", "one value"}),
    "one pass": frozenset({"one pass", "one head", "one sequence", "one value"}),
}


def head_dim_of(name: str) -> int:
    return 1 if name.startswith("one feature") else 16


@triton.jit
def _sees(batch, head, q_index, k_index, args):
    return (q_index * args[1] + k_index + tl.load(args[0])) % 5 >= args[2]


def mask_function() -> Mask:
    """A mask whose arguments are a tensor of one element, an int and a float, all 1."""
    return masks.function(_sees, args=(torch.ones(1, dtype=torch.int32), 1, 1.0))


@triton.jit
def _score(score, batch, head, q_index, k_index, args):
    return score * tl.load(args[1]) * args[0] + args[2]


@triton.jit
def _score_derivative(score, batch, head, q_index, k_index, args):
    return score * 0.0 + tl.load(args[1]) * args[0]


@triton.jit
def _gain_index(batch, head, q_index, k_index, args):
    return args[0] - 1


@triton.jit
def _gain_derivative(score, batch, head, q_index, k_index, args):
    return score * args[0]


def _score_eager(
    score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]
) -> Tensor:
    return score * args[1] * args[0] + args[2]


def score_function() -> ScoreMod:
    """A function of scores whose arguments are an int, a learned tensor of one element and a float, all 1."""
    of_gain = ArgGradient(1, _gain_index, _gain_derivative)
    return ScoreMod(_score, _score_derivative, _score_eager, (1, torch.ones(1), 1.0), (of_gain,))
