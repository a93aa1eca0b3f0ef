"""A few steps of the training that ``make soak`` runs for long: fused and eager from one seed, in every dtype."""

from __future__ import annotations

import statistics

import pytest
import torch

from tests.tools import soak

STEPS = 12


@pytest.fixture(scope="module")
def exact() -> list[float]:
    """The losses of eager attention in float32."""
    return soak.train("eager", STEPS).losses


@pytest.mark.thorough
def test_the_fused_model_trains_as_eager_does(exact):
    fused = soak.train("fused", STEPS)
    noise = max(max(soak.departure(soak.train(order, STEPS).losses, exact)) for order in soak.ORDERS)
    assert fused.nan_gradients == 0
    assert max(soak.departure(fused.losses, exact)) <= soak.DEPARTURE_LIMIT * max(noise, torch.finfo(torch.float32).eps)
    assert exact[-1] < exact[0]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_training(dtype, exact):
    """No NaN, and no further from float32 than eager attention in the same dtype."""
    fused, eager = soak.train("fused", STEPS, dtype), soak.train("eager", STEPS, dtype)
    assert fused.nan_gradients == fused.overflows == 0

    def error(run: soak.Training) -> float:
        return statistics.fmean(abs(a - b) for a, b in zip(run.losses, exact, strict=True))

    assert error(fused) <= 1.5 * error(eager)


def test_a_nan_in_a_gradient_is_counted(monkeypatch):
    forward = soak.KeysReversed.forward
    monkeypatch.setattr(
        soak.KeysReversed, "forward", lambda self, q, *rest, **o: forward(self, q * torch.nan, *rest, **o)
    )
    assert soak.train("keys reversed", 2).nan_gradients == 2


def test_a_wrong_scale_departs_further_than_the_noise(monkeypatch, exact):
    """By 1%: the comparison is fine enough to see it, although the weights are still nearly uniform."""
    forward = soak.KeysReversed.forward

    def slightly_wrong(self, q, *rest, **options):
        return forward(self, q * 1.01, *rest, **options)

    noise = max(soak.departure(soak.train("keys reversed", STEPS).losses, exact))
    monkeypatch.setattr(soak.KeysReversed, "forward", slightly_wrong)
    wrong = max(soak.departure(soak.train("keys reversed", STEPS).losses, exact))
    assert wrong > 3 * soak.DEPARTURE_LIMIT * max(noise, torch.finfo(torch.float32).eps)


def test_the_orders_are_the_same_attention():
    """In float64, where another order of sums changes a few units in the last place."""
    ids, valid = next(soak.batches(1))
    expected = soak.make_model("eager").double()(ids, valid)
    for order in soak.ORDERS:
        got = soak.make_model(order).double()(ids, valid)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # rotated in float64, from float32 tables
