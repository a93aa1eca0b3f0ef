"""The error budget: how far an attention function may be from the truth, and the tools to measure it.

The truth is :mod:`fusedattn.reference` in float64. A function passes if, for the output, lse and every gradient,
its error is at most 1.5 times (maximum) and 1.1 times (mean) that of eager PyTorch in the same dtype, and its worst
row, relative to the size of the row, at most 1.5 times eager's worst. One unit in the last place is always allowed;
for gradients of few numbers, it is a unit of the summed absolute terms. :func:`compare` has the formulas.

    >>> import torch, fusedattn
    >>> from fusedattn import testing
    >>> inputs = testing.make_inputs(testing.Case(causal="bottom_right", dtype=torch.float32))
    >>> testing.check(fusedattn.attention, inputs)["dq"].ok
    True
"""

from fusedattn.testing.budget import (
    ALL_TENSORS,
    GRADIENTS,
    MAX_FACTOR,
    MEAN_FACTOR,
    TENSORS,
    AttentionFunction,
    Measurement,
    Ratios,
    Results,
    assert_within_budget,
    baseline,
    bias_terms,
    check,
    compare,
    compare_results,
    golden,
    keep_factor,
    measure,
    run,
    terms_of_added,
    through_bias,
    without_lse_gradient,
)
from fusedattn.testing.cached import check_cached, run_cached
from fusedattn.testing.cases import CACHED_CASES, CASES, Case, Inputs, make_inputs, results_of
from fusedattn.testing.fp8 import FP8_CASES, FP8Case, check_fp8
from fusedattn.testing.linear import check_linear
from fusedattn.testing.linear_cases import LINEAR_CASES, LinearCase

__all__ = [
    "ALL_TENSORS",
    "CACHED_CASES",
    "CASES",
    "FP8_CASES",
    "GRADIENTS",
    "LINEAR_CASES",
    "MAX_FACTOR",
    "MEAN_FACTOR",
    "TENSORS",
    "AttentionFunction",
    "Case",
    "FP8Case",
    "Inputs",
    "LinearCase",
    "Measurement",
    "Ratios",
    "Results",
    "assert_within_budget",
    "baseline",
    "bias_terms",
    "check",
    "check_cached",
    "check_fp8",
    "check_linear",
    "compare",
    "compare_results",
    "golden",
    "keep_factor",
    "make_inputs",
    "measure",
    "results_of",
    "run",
    "run_cached",
    "terms_of_added",
    "through_bias",
    "without_lse_gradient",
]
