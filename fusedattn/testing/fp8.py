"""The error budget of attention in 8 bits: the unit is the error of its definition, :mod:`fusedattn.low_precision`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusedattn import low_precision, reference
from fusedattn.attention import attention
from fusedattn.fp8 import FP8
from fusedattn.low_precision import RECIPES, Recipe
from fusedattn.support import Backend, not_supported_reasons
from fusedattn.testing.budget import Ratios, Results, compare_results
from fusedattn.testing.cases import Case, Inputs, make_inputs


@dataclass(frozen=True)
class FP8Case(Case):
    """An attention problem without gradients, and how its operands are rounded."""

    precision: FP8 = field(default_factory=FP8)


# Longer than the 128 tokens that share a scale.
FP8_CASES = (
    FP8Case("fp8, causal, RoPE", seqlen_q=150, seqlen_k=150, causal="bottom_right", rope="half"),
    FP8Case("fp8, one scale, uneven padding", seqlen_k=150, padding="uneven", precision=FP8("tensor")),
    FP8Case(
        "fp8, rotated, QK-norm, GQA 6:2", seqlen_q=37, seqlen_k=150, nheads_q=6, qk_norm="per_head", rope="interleaved",
        precision=FP8(rotate=True),
    ),
    FP8Case("fp8, window, head_dim 80", nheads_q=2, seqlen_q=150, seqlen_k=300, head_dim=80, window=(70, 9)),
    FP8Case(
        "fp8, documents, boolean mask, one batch empty", batch=3, seqlen_q=140, seqlen_k=140, documents="packed",
        boolean="broadcast", padding="right", empty_batch=True, precision=FP8("tensor", rotate=True),
    ),
)  # fmt: skip


def recipe_of(precision: FP8) -> Recipe:
    """The recipe of the definition."""
    return replace(RECIPES[_NAMES[precision.scales]], rotate=precision.rotate)


_NAMES = {"block": "fp8, blocks", "tensor": "fp8, tensor"}


def fp8_baseline(inputs: Inputs, precision: FP8) -> Results:
    """Out and lse of the definition, for masks, rotations and norms; out in the dtype of the inputs."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (inputs.q, inputs.k, inputs.v))
    if inputs.qk_norm is not None:
        q, k = inputs.qk_norm.apply(q, k)
    if inputs.rope is not None:
        q, k = inputs.rope.rotate(q, k)
    out, lse = low_precision.attention(q, k, v, recipe_of(precision), mask=inputs.mask, scale=inputs.scale)
    return {"out": out.to(inputs.q.dtype), "lse": lse}


def fp8_golden(inputs: Inputs) -> Results:
    """Out and lse without any rounding, in float64."""
    wide = inputs.to(torch.float64)
    with torch.no_grad():
        out, lse, _ = reference.attention(wide.q, wide.k, wide.v, **wide.options)
    return {"out": out, "lse": lse}


def fp8_reasons(case: FP8Case, backend: Backend, device: torch.device | str = "cpu") -> list[str]:
    """Every reason why a case cannot run on a backend."""
    x = make_inputs(case, device)
    with torch.no_grad():
        return not_supported_reasons(x.q, x.k, x.v, mask=x.mask, precision=case.precision, backend=backend)


@torch.no_grad()
def run_fp8(case: FP8Case, inputs: Inputs, backend: Backend) -> Results:
    """Out and lse of a case."""
    options = inputs.options | {"precision": case.precision, "backend": backend}
    found: Any = attention(inputs.q, inputs.k, inputs.v, return_lse=True, **options)
    return dict(zip(("out", "lse"), found, strict=True))


def compare_fp8(case: FP8Case, inputs: Inputs, actual: Results) -> dict[str, Ratios]:
    """The errors of :func:`run_fp8`, which may be 1.5 times (on average 1.1 times) those of the definition."""
    return compare_results(actual, fp8_golden(inputs), fp8_baseline(inputs, case.precision), inputs.q.dtype)


def check_fp8(case: FP8Case, backend: Backend, device: torch.device | str = "cpu") -> dict[str, Ratios]:
    """Measure out and lse of a case against the error budget."""
    inputs = make_inputs(case, device)
    return compare_fp8(case, inputs, run_fp8(case, inputs, backend))
