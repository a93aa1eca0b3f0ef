"""float32 arithmetic to about half a unit in the last place, in a kernel."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import divide, fma, quotient
from fusedattn.kernels.scores import tanh
from fusedattn.kernels.softmax import exp_scaled
from tests.conftest import DEVICE, INTERPRETING
from tests.tools import hardware_noise as noise

ROWS, N = 16, 4096
INF, NAN = float("inf"), float("nan")


@triton.jit
def all_of_them(x_ptr, y, rows_ptr, out_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tile = tl.arange(0, ROWS)[:, None] * N + offs[None, :]
    x = tl.load(x_ptr + tile)
    per_row = tl.load(rows_ptr + tl.arange(0, ROWS))
    tl.store(out_ptr + tile, exp_scaled(x, tl.zeros_like(per_row)[:, None], y, 2))
    tl.store(out_ptr + ROWS * N + tile, quotient(x, per_row[:, None]))
    tl.store(out_ptr + 2 * ROWS * N + tile, fma(x, per_row[:, None], 1.0 - x))
    tl.store(out_ptr + 3 * ROWS * N + tl.arange(0, ROWS), divide(1.0, per_row))


@triton.jit
def ratios(x_ptr, y, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, quotient(x, y))
    tl.store(out_ptr + N + offs, tanh(x))


def run(x: np.ndarray, y: float, rows: np.ndarray) -> list[np.ndarray]:
    """exp2(x * y), x / rows, x * rows + (1 - x) and 1 / rows, in float64."""
    x, rows = (torch.from_numpy(part).to(DEVICE) for part in (x, rows))
    out = torch.empty(4, *x.shape, device=DEVICE)
    all_of_them[(1,)](x, y, rows, out, *x.shape)
    power, quotient, sum_, others = out.double().cpu().numpy()
    return [power, quotient, sum_, others.ravel()[: len(rows)]]


def units(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return np.abs(found - exact) / np.spacing(np.abs(exact.astype(np.float32))).astype(np.float64)


X = -np.random.default_rng(0).uniform(0.0, 100.0, (ROWS, N)).astype(np.float32)
BY_ROW = np.random.default_rng(1).uniform(0.5, 3000.0, ROWS).astype(np.float32)
Y = 1.1  # not representable in float32


@pytest.fixture(params=[False, True], ids=["no noise", "noise"])
def _arithmetic(request):
    """The arithmetic of the interpreter or the GPU, then a model of a GPU's in the interpreter."""
    if request.param and not INTERPRETING:
        pytest.skip("a GPU has an arithmetic of its own")
    with noise.gpu_kernels(torch.float32) if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("_arithmetic")
def test_errors():
    """The same bounds hold with approximate instructions: the code corrects their errors."""
    power, quotient, sum_, reciprocal = run(X, Y, BY_ROW)
    x, y, rows = X.astype(np.float64), np.float64(np.float32(Y)), BY_ROW.astype(np.float64)
    assert units(power, np.exp2(x * y)).max() < 1.1
    assert units(power, np.exp2(x * y)).mean() < 0.3
    assert units(quotient, x / rows[:, None]).max() < 0.51
    assert units(sum_, x * rows[:, None] + (np.float32(1.0) - X).astype(np.float64)).max() <= 0.5
    assert units(reciprocal, 1.0 / rows).max() <= 0.5


def test_ends_of_the_range():
    x = np.zeros((ROWS, 16), np.float32)
    x[0] = [0.0, -0.0, -INF, NAN, INF, -126.0, -127.0, -1000.0, -3e38, -1e-40, 1.0, -1.0, -200.0, 2.0, -125.5, -3.0]
    rows = np.ones(ROWS, np.float32)
    rows[0] = 1e-30
    power, quotient, _, _ = run(x, 1.0, rows)
    np.testing.assert_array_equal(
        power[0, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15]],
        [1.0, 1.0, 0.0, NAN, 2.0**-126, 0.0, 0.0, 0.0, 1.0, 2.0, 0.5, 0.0, 4.0, 0.125],
    )
    assert not np.isfinite(power[0, 4])
    np.testing.assert_array_equal(quotient[0, [0, 2, 3, 4, 8]], [0.0, -INF, NAN, INF, -INF])


def test_a_hidden_key_has_no_weight_however_small_the_scale():
    x = np.full((ROWS, 16), -INF, np.float32)
    power, *_ = run(x, float(np.finfo(np.float32).tiny), np.ones(ROWS, np.float32))
    assert (power == 0.0).all()


def run_ratios(x: np.ndarray, y: float) -> np.ndarray:
    """x / y and tanh(x), in float64."""
    out = torch.empty(2, len(x), device=DEVICE)
    ratios[(1,)](torch.from_numpy(x).to(DEVICE), y, out, len(x))
    return out.double().cpu().numpy()


@pytest.mark.usefixtures("_arithmetic")
def test_soft_cap():
    """The two steps of ``tanh(x / softcap)``; CUDA's tanhf is off by up to 2 units."""
    x = np.ascontiguousarray(X[0] / np.float32(20.0)) * np.where(np.arange(N) % 2, 1, -1).astype(np.float32)
    by_cap, hyperbolic = run_ratios(x, Y)
    exact = x.astype(np.float64)
    assert units(by_cap, exact / np.float64(np.float32(Y))).max() < 0.51
    assert units(hyperbolic, np.tanh(exact)).max() < 2.1
    assert units(hyperbolic, np.tanh(exact)).mean() < 0.5


@pytest.mark.parametrize("softcap", [1e-37, 2.0**126, 2.0**127, 3.4e38])
def test_quotients_by_any_number(softcap):
    x = np.array([0.0, -0.0, 1.0, -3.0, 1e30, -3e38, INF, -INF, NAN] + 7 * [2.0], np.float32)
    with np.errstate(over="ignore"):
        exact = (x.astype(np.float64) / np.float64(np.float32(softcap))).astype(np.float32)
    by_cap, hyperbolic = run_ratios(x, softcap)
    np.testing.assert_allclose(by_cap, exact, rtol=2e-7, atol=2.0**-148)
    np.testing.assert_array_equal(hyperbolic[[0, 5, 6, 7, 8]], [0.0, -1.0, 1.0, -1.0, NAN])
