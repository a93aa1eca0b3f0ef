"""Check attention in 8 bits on one problem: every number lies within the rounding that it may have.

Codes of q, k and v are known to the bit. What is left is the rounding of weights, relative to a score that is at most
the largest of the row: half a unit in the last of their 4 digits, or half of the smallest code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import FP8, reference, testing
from fusedattn.testing import Case, Inputs
from tests.conftest import DEVICE, triton_attention
from tests.helpers import fp8_eager
from tests.helpers.contract import memory_of, uninitialised_is_nan
from tests.helpers.hostile import call_of

DIGITS, SMALLEST = 2.0**-4, 2.0**-10 / 448.0  # half of a unit of a weight, relative to it, and to the largest weight
SCORES = 2.0**-20  # of the size of a score: rounding in float32


@dataclass(frozen=True, repr=False)
class FP8Problem:
    """A case in 8 bits.

    Attributes:
        hidden: written into keys and values that padding hides; it may have no effect.
        unseen: written into those that no query sees for another reason; a NaN reaches nothing.
        transposed: the memory order is (batch, seqlen, nheads, head_dim).
        size: factor of q and k; of v, its reciprocal.
    """

    case: Case = field(default_factory=Case)
    precision: FP8 = field(default_factory=FP8)
    hidden: float | None = None
    unseen: float | None = None
    transposed: bool = False
    size: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def __repr__(self) -> str:
        return call_of(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.tools.reproduce "{self!r}"'

    def inputs(self) -> Inputs:
        """The tensors, without what is written into hidden ones."""
        x = testing.make_inputs(self.case, DEVICE)
        q, k, v = (y * s for y, s in ((x.q, self.size), (x.k, self.size), (x.v, 1.0 / self.size)))
        return replace(x, q=q, k=k, v=v, dropout_seed=x.dropout_seed)


def check(problem: FP8Problem, function: Callable[..., Any] = triton_attention) -> bool:
    """Raise AssertionError, with the command that reproduces it, unless the numbers are right."""
    try:
        with torch.no_grad():
            _check(problem, function)
    except Exception as error:
        raise AssertionError(f"{problem.command}\n{type(error).__name__}: {error}") from error
    return True


def _check(problem: FP8Problem, function: Callable[..., Any]) -> None:
    clean = problem.inputs()
    given = _with_hidden(problem, clean)
    options = {**given.options, "precision": problem.precision, "return_lse": True}
    tensors = given.tensors()
    before = {name: memory_of(x).clone() for name, x in tensors.items()}
    with uninitialised_is_nan():
        out, lse = function(given.q, given.k, given.v, **options)
        again = function(given.q, given.k, given.v, **options)
    for name, x in tensors.items():
        assert torch.equal(memory_of(x), before[name]), f"{name} was modified"
    assert out.dtype == given.q.dtype, f"out is {out.dtype}"
    for name, x, y in (("out", out, again[0]), ("lse", lse, again[1])):
        assert torch.equal(x.isnan(), y.isnan()), f"{name} differs from run to run"
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), f"{name} differs from run to run"
    expected, allowed = _within(clean if problem.unseen is None else given, problem.precision)
    for name, x in (("out", out), ("lse", lse)):
        truth = expected[name]
        assert torch.equal(x == -math.inf, truth == -math.inf), f"{name}: other rows see nothing"
        error = torch.where(truth == -math.inf, 0.0, (x.double() - truth).abs())
        bad = ~(error <= allowed[name])
        assert not bad.any(), f"{name}: {int(bad.sum())} numbers beyond their rounding, {float(x[bad][0])} for " + str(
            float(truth[bad][0])
        )


def _with_hidden(problem: FP8Problem, x: Inputs) -> Inputs:
    """The inputs with other numbers in tokens that nobody sees, in the memory order of the problem."""
    seen = x.visible().unflatten(1, (x.k.shape[1], -1)).any(2).any(2)  # (batch, nheads_kv, seqlen_k)
    valid = torch.ones_like(seen) if x.mask.valid is None else x.mask.valid[:, None].expand_as(seen)
    k, v = x.k, x.v
    for number, where in ((problem.hidden, ~valid), (problem.unseen, valid & ~seen)):
        if number is not None:
            k, v = (y.masked_fill(where[..., None], number) for y in (k, v))
    q, k, v = (y.transpose(1, 2).contiguous().transpose(1, 2) if problem.transposed else y for y in (x.q, k, v))
    return replace(x, q=q, k=k, v=v)


def _within(x: Inputs, precision: FP8) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Out and lse of the codes without rounding of weights, and how far each may be from that."""
    made = (fp8_eager.codes_of(y, precision) for y in fp8_eager.prepared(x, precision))
    q, k, v = (codes.double() * scales.double()[..., None] for codes, scales in made)
    scale = x.q.shape[3] ** -0.5 if x.scale is None else x.scale
    wide = replace(x.to(torch.float64), q=q, k=k, v=v, rope=None, qk_norm=None, scale=scale)
    out, lse, weights = reference.attention(q, k, v, **wide.options)
    seen = x.visible()
    group = q.shape[1] // k.shape[1]
    sizes = torch.where(v.isfinite(), v.abs(), 0.0).repeat_interleave(group, 1)
    keep = testing.keep_factor(wide)
    largest = weights.amax(-1, keepdim=True) if weights.shape[-1] else weights.sum(-1, keepdim=True)
    # Scores of codes are sums in float32 of terms whose sizes add up to this.
    terms = torch.where(seen, q.abs().nan_to_num() @ k.abs().nan_to_num().repeat_interleave(group, 1).mT, 0.0)
    terms = terms.amax(-1, keepdim=True) if terms.shape[-1] else terms.sum(-1, keepdim=True)
    of_scores = SCORES * (terms * abs(scale) + _added(wide) + 1.0)
    of_weights = (keep * weights) @ sizes * (DIGITS + 2 * of_scores)
    of_weights += largest * SMALLEST * ((keep * seen.double()) @ sizes)
    unit = torch.finfo(x.q.dtype).eps
    return {"out": out, "lse": lse}, {
        "out": of_weights + (out.abs() + of_weights) * unit + 2.0**-24,
        "lse": of_scores[..., 0] * 4 + torch.where(lse == -math.inf, 0.0, lse.abs()) * 2.0**-22,
    }


def _added(x: Inputs) -> float:
    """The largest magnitude that is added to scores."""
    if x.bias is None:
        return 0.0
    dense = x.bias.dense(x.q.shape[2], x.k.shape[2])
    return float(torch.where(dense.isfinite(), dense, 0.0).abs().max()) if dense.numel() else 0.0
