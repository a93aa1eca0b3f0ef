"""The model of a GPU's arithmetic, and the error budget under it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fusedattn import testing
from fusedattn.virtual_gpu import eager
from tests.conftest import INTERPRETING, assert_ratios, triton_attention
from tests.helpers import quick
from tests.tools import hardware_noise as noise

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="a GPU has an arithmetic of its own")

# Products over features come in pieces, and sums over rows of two heads are long.
WIDE = testing.Case(
    name="256 features, causal",
    batch=1,
    nheads_q=2,
    nheads_kv=1,
    seqlen_q=128,
    seqlen_k=128,
    head_dim=256,
    causal="bottom_right",
)
CASES = {case.name: case for case in (*testing.CASES, WIDE)}
JUDGED = [("causal", torch.bfloat16), ("soft-cap, causal, RoPE", torch.bfloat16), ("sinks", torch.float16)]
JUDGED += [
    (name, torch.float32)
    for name in (
        "causal",
        "causal, more queries than keys",
        "RoPE",
        "keys and values with a common part",
        "score function, soft-cap, bias",
        "sinks",
        WIDE.name,
    )
]


@quick.every(3, name="causal, more queries than keys")
@pytest.mark.parametrize(("name", "dtype"), JUDGED, ids=str)
def test_budget(name, dtype):
    inputs = testing.make_inputs(replace(CASES[name], dtype=dtype))
    with noise.gpu_kernels(dtype):
        actual = testing.run(triton_attention, inputs)
    with eager.gpu_eager():
        baseline = testing.baseline(inputs)
    terms = testing.bias_terms(inputs)
    assert_ratios(testing.compare_results(actual, testing.golden(inputs), baseline, dtype, terms), inputs)


def units(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors in units in the last place of the rounded exact result."""
    return (found.astype(np.float64) - exact) / np.spacing(np.abs(exact.astype(np.float32))).astype(np.float64)


X = -np.random.default_rng(0).uniform(0.0, 30.0, 2**16).astype(np.float32)


@pytest.mark.parametrize(
    ("found", "exact", "most"),
    [
        (eager.ex2(X), np.exp2(X.astype(np.float64)), eager.EX2),
        (eager.expf(X), np.exp(X.astype(np.float64)), eager.EXPF),
        (eager.logf(-X), np.log(-X.astype(np.float64)), eager.LOG),
        (eager.tanhf(X / 30), np.tanh((X / 30).astype(np.float64)), eager.TANHF),
        (eager.div_full(X[1:], X[:-1]), X[1:].astype(np.float64) / X[:-1], eager.DIV),
    ],
    ids=["exp2", "exp", "log", "tanh", "divide"],
)
def test_errors_reach_their_bound_and_no_further(found, exact, most):
    rounded = units(found, exact.astype(np.float32).astype(np.float64))
    assert most <= np.abs(rounded).max() <= most + 1e-3 or np.abs(rounded).max() == 2.0 * most  # below a power of two
    assert abs(rounded.mean()) < 0.02 * most
    assert {-most, 0, most} <= set(np.round(rounded))


def test_equal_operands_have_equal_results():
    np.testing.assert_array_equal(eager.ex2(X)[::-1], eager.ex2(X[::-1]))
    np.testing.assert_array_equal(eager.div_full(X[1:], X[:-1])[::2], eager.div_full(X[1::2], X[:-1:2]))
    assert (eager.div_full(X, X[::-1]) != eager.div_full(X[::-1], X)[::-1]).sum() == 0


def test_documented_instructions_are_exact():
    inf = np.float32("inf")
    x = np.array([0.0, -0.0, 1e-40, -inf, inf, np.nan, -126.5, -1000.0], np.float32)
    np.testing.assert_array_equal(eager.ex2(x), np.array([1, 1, 1, 0, inf, np.nan, 0, 0], np.float32))
    np.testing.assert_array_equal(eager.div_full(np.float32([0, 1, inf]), np.float32([2, 0, 3])), [0, inf, inf])
    assert eager.logf(np.ones(1, np.float32)) == 0


def test_products():
    """A chain loses terms that a sum of pairs keeps, and matrix units truncate where a chain rounds."""
    ones, none = np.ones((4, 1)), np.zeros((1, 1))
    large = np.array([[2.0**24, 1.0, 1.0, -(2.0**24)]])
    assert eager.chain(large, ones, none) == 0.0
    assert eager.tensor_core(large, ones, none) == 2.0
    assert eager.tensor_core(np.array([[1.0, 2.0**-24, 2.0**-25, 2.0**-25]]), ones, none) == 1.0
    assert eager.chain(np.array([[1.0, 1.5 * 2.0**-24]]), ones[:2], none) > 1.0
    assert eager.sum_by_halves(np.float32([2**24, 1, 0, 1]), 0) == 2**24 + 2
    assert eager.sum_by_halves(np.float32([[1, 2, 4]]), 1) == 7


@triton.jit
def all_of_them(x_ptr, out_ptr, sum_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.math.exp2(x))
    tl.store(out_ptr + N + offs, 1.0 / x)
    tl.store(out_ptr + 2 * N + offs, tl.log(-x))
    tl.store(sum_ptr, tl.sum(x, 0))


def run_all() -> tuple[np.ndarray, ...]:
    x = torch.from_numpy(X[:4096])
    results = torch.empty(3, 4096), torch.empty(1)
    all_of_them[(1,)](x, *results, 4096)
    return tuple(result.numpy() for result in results)


def test_kernels_err_inside_and_not_outside():
    x = X[:4096].astype(np.float64)
    exact = np.stack((np.exp2(x), 1.0 / x, np.log(-x)))
    before = run_all()
    with noise.gpu_kernels(torch.float32):
        inside = run_all()
    assert all(np.abs(units(*pair)).max() > 0.9 for pair in zip(inside[0], exact, strict=True))
    assert np.abs(units(before[0][:2], exact[:2])).max() < 1.5  # NumPy's error, on any CPU
    for one, other in zip(before, run_all(), strict=True):
        np.testing.assert_array_equal(one, other)
