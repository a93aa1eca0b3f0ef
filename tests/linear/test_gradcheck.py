"""``gradcheck`` and ``gradgradcheck`` of linear attention in float64, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import LinearState
from tests.conftest import BACKENDS, INTERPRETING
from tests.helpers import linear, quick
from tests.helpers.linear import LinearProblem

pytestmark = [
    pytest.mark.usefixtures("poison", "_seed"),
    pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels"),
]

TINY = LinearProblem(
    seqlen_q=5, head_dim=3, head_dim_v=4, nheads_q=1, nheads_kv=1, dtype=torch.float64, initial_state=True
)

# The fields of TINY that each feature changes.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a state": {"initial_state": False},
    "not causal": {"causal": False, "seqlen_k": 3},
    "sums": {"normalize": False},
    "not causal, sums": {"causal": False, "normalize": False},
    "hidden keys": {"valid": "some", "batch": 2},
    "hidden keys, not causal": {"valid": "some", "causal": False},
    "grouped queries": {"nheads_q": 4, "nheads_kv": 2, "seqlen_q": 3},
    "packed": {"lengths": (2, 0, 3), "seqlen_q": 6, "nheads_q": 2},
    "packed, not causal": {"lengths": (2, 3), "causal": False, "valid": "some"},
    "two chunks": {"seqlen_q": 67},
    "two blocks of values": {"head_dim_v": 70, "seqlen_q": 2},
    "relu": {"feature_map": "relu"},
    "softmax": {"feature_map": "softmax"},
    "identity": {"feature_map": "identity", "normalize": False},
    "functions": {"feature_map": "jit"},
    "random features": {"feature_map": "favor"},
    "a function of torch": {"feature_map": "torch"},
}


ALSO_THOROUGH = (
    "without a state", "hidden keys, not causal", "packed, not causal", "random features", "a function of torch"
)  # fmt: skip


def function_of(problem: LinearProblem, backend: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call as a function of its leaves that returns one tensor, and these leaves."""
    inputs = linear.inputs_of(problem, "cpu")

    def function(*x: Tensor) -> Tensor:
        state = LinearState(*x[3:]) if len(x) > 3 else None
        out, after = linear.on_backend(backend)(*x[:3], initial_state=state, **inputs.options)
        return torch.cat([y.flatten() for y in (out, *after)])

    return function, [x.requires_grad_() for x in inputs.leaves.values()]


@quick.every(5, feature=lambda feature: feature not in ALSO_THOROUGH, backend="triton")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature, backend):
    """A difference quotient along a random direction of each leaf."""
    function, leaves = function_of(replace(TINY, **FEATURES[feature]), backend)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-6, rtol=1e-4)


@quick.only(feature=lambda feature: feature in ("hidden keys, not causal", "softmax"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_gradgradcheck(feature, backend):
    function, leaves = function_of(replace(TINY, **FEATURES[feature]), backend)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-6, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck_element_by_element(causal):
    function, leaves = function_of(replace(TINY, seqlen_q=3, causal=causal, valid="some"), "triton")
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_those_of_the_recurrence(backend):
    """Also of hidden keys and of the gradient that comes back."""
    problem = replace(TINY, valid="some")
    inputs = linear.inputs_of(problem, "cpu")

    def second(function: linear.LinearFunction) -> tuple[Tensor, ...]:
        x = {name: y.detach().requires_grad_() for name, y in inputs.leaves.items()}
        back = [y.detach().requires_grad_() for y in inputs.back]
        state = LinearState(x["kv"], x["k_sum"])
        out, after = function(x["q"], x["k"], x["v"], initial_state=state, **inputs.options)
        first = torch.autograd.grad([out, *after], list(x.values()), back, create_graph=True)
        return torch.autograd.grad(sum(y.square().sum() for y in first), [*x.values(), *back])

    for actual, expected in zip(second(linear.on_backend(backend)), second(linear.TRUTH), strict=True):
        torch.testing.assert_close(actual, expected)
