"""Linear attention within the error budget: out, the state and every gradient, on both backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import BACKENDS, DEVICE, DTYPES, INTERPRETING
from tests.helpers import linear, quick
from tests.helpers.linear import LinearProblem

pytestmark = pytest.mark.usefixtures("poison", "_seed")

BASE = LinearProblem(seqlen_q=65, head_dim=16, nheads_q=2, nheads_kv=2)

# The fields of BASE that each feature changes.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "not causal, other keys": {"causal": False, "seqlen_k": 130, "nheads_kv": 1, "valid": "some"},
    "sums": {"normalize": False},
    "not causal, sums": {"causal": False, "normalize": False, "initial_state": True, "valid": "last"},
    "grouped queries, hidden keys": {"nheads_q": 4, "batch": 2, "valid": "some"},
    "one key head, after a state": {"nheads_kv": 1, "initial_state": True},
    "left padding, after a state": {"valid": "first", "initial_state": True, "seqlen_q": 130},
    "a batch of hidden keys": {"valid": "none", "batch": 2},
    "without the state": {"return_state": False, "nheads_kv": 1, "seqlen_q": 130},
    "packed": {"lengths": (3, 0, 65, 0, 60), "seqlen_q": 130},
    "packed, hidden keys, after states": {"lengths": (64, 1, 0), "seqlen_q": 70, "valid": "some", "initial_state": True,
                                          "nheads_kv": 1},
    "packed, not causal": {"lengths": (70, 25), "seqlen_q": 95, "causal": False, "valid": "some", "nheads_kv": 1,
                           "initial_state": True},
    "relu": {"feature_map": "relu", "seqlen_q": 130},
    "softmax": {"feature_map": "softmax", "head_dim": 20},
    "identity": {"feature_map": "identity", "normalize": False, "initial_state": True},
    "functions": {"feature_map": "jit", "head_dim": 20, "valid": "some", "initial_state": True},
    "random features": {"feature_map": "favor", "initial_state": True, "size": 0.5},
    "a function of torch": {"feature_map": "torch", "nheads_kv": 1},
    "head_dim 20, fewer values": {"head_dim": 20, "head_dim_v": 7},
    "more values": {"head_dim_v": 80},
    "head_dim 80": {"head_dim": 80, "head_dim_v": 130, "nheads_q": 1, "nheads_kv": 1},
    "one short of a chunk": {"seqlen_q": 63},
    "a chunk": {"seqlen_q": 64},
    "three chunks": {"seqlen_q": 130, "head_dim": 64},
}  # fmt: skip

QUICK = (
    "plain", "not causal, other keys", "not causal, sums", "grouped queries, hidden keys",
    "left padding, after a state", "a batch of hidden keys", "packed, hidden keys, after states", "packed, not causal",
    "relu", "softmax", "functions", "head_dim 20, fewer values", "more values",
)  # fmt: skip


@quick.only(feature=lambda feature: feature in QUICK, dtype=lambda dtype: dtype != torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_budget(feature, backend, dtype):
    # The order of torch's float32 sums depends on the shapes, so that it is luck which of two products is nearer.
    problem, by_luck = replace(BASE, **FEATURES[feature], dtype=dtype), backend == "torch" and dtype == torch.float32
    linear.assert_budget(problem, backend, DEVICE, few=by_luck)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_budget_of_many_features(head_dim, dtype):
    """256 features have chunks of 32 tokens."""
    problem = replace(BASE, head_dim=head_dim, head_dim_v=80, nheads_q=1, nheads_kv=1, dtype=dtype, initial_state=True)
    linear.assert_budget(problem, "triton", DEVICE)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen", [0, 1, 2])
def test_budget_of_few_tokens(seqlen, backend, causal, normalize):
    for initial_state in (False, True):
        problem = replace(BASE, seqlen_q=seqlen, causal=causal, normalize=normalize, initial_state=initial_state)
        linear.assert_budget(problem, backend, DEVICE, few=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_no_queries_and_no_keys(seqlen_q, seqlen_k, backend):
    """Without keys, out is that of the initial state, and 0 without one."""
    for initial_state in (False, True):
        problem = replace(BASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=False, initial_state=initial_state)
        linear.assert_budget(problem, backend, DEVICE, few=True)


@pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")
@quick.every(9)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_float64_is_nearly_exact(feature, backend):
    """As near as the recurrence itself, which adds 130 tokens one by one."""
    problem = replace(BASE, **FEATURES[feature], dtype=torch.float64)
    inputs = linear.inputs_of(problem, DEVICE)
    actual = linear.run(linear.on_backend(backend), problem, inputs)
    assert not linear.beyond_terms(actual, problem, inputs, list(actual), units=16.0)
