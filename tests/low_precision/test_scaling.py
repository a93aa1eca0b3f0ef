"""Scales: which numbers share one, its value by each rule, and the numbers that come out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedattn import quantization
from fusedattn.low_precision import (
    E2M1,
    E4M3,
    E5M2,
    INT8,
    Format,
    Quantisation,
    by_block,
    by_channel,
    by_tensor,
    by_token,
    e4m3_scales,
    mx,
    nvfp4,
    of_weights,
    powers_above,
    powers_below,
    quantised,
    rounded,
    two_level_scales,
    two_level_unit_scales,
)
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("_seed")

# As rules see the sides of groups: one number for all, then tokens and features; 5 and 48 divide neither 13 nor 80.
SHAPE = 2, 3, 13, 80
WAYS = {
    "tensor": by_tensor(E4M3),
    "blocks": by_block(E4M3, 5),
    "longer than the sequence": by_block(INT8, 128),
    "tokens": by_token(INT8),
    "channels": by_channel(E5M2),
    "MXFP8": mx(E4M3),
    "MXFP4": mx(E2M1),
    "MXFP4, scales up": mx(E2M1, powers_above),
    "MXFP4 of v": mx(E2M1).transposed,
    "NVFP4": nvfp4(),
    "NVFP4, one level": nvfp4(e4m3_scales),
    "weights": of_weights(E4M3),
    "NVFP4 of weights": nvfp4(two_level_unit_scales),
}
ways = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE) * torch.randn(*shape[:-1], 1, device=DEVICE).exp()


def one_by_one(x: Tensor, how: Quantisation) -> Tensor:
    """:func:`quantised`, group by group in plain Python."""
    out = torch.empty_like(x)
    whole = x.abs().max()
    for b, h in itertools.product(*map(range, x.shape[:2])):
        tokens, features = how.tokens or x.shape[2], how.features or x.shape[3]
        for i, j in itertools.product(range(0, x.shape[2], tokens), range(0, x.shape[3], features)):
            place = b, h, slice(i, i + tokens), slice(j, j + features)
            largest = torch.stack((x[place].abs().max(), whole))  # the last group makes the tensor what it is
            scale = how.rule(largest, how.format)[0]
            out[place] = rounded(x[place] / scale, how.format) * scale
    return out


@ways
def test_group_by_group(how: Quantisation) -> None:
    x = drawn(*SHAPE)
    assert torch.equal(quantised(x, how), one_by_one(x, how))


@ways
def test_zeros_and_tiny_numbers(how: Quantisation) -> None:
    assert torch.equal(quantised(torch.zeros(SHAPE, device=DEVICE), how), torch.zeros(SHAPE, device=DEVICE))
    tiny = torch.full(SHAPE, 1e-42, device=DEVICE)
    assert quantised(tiny, how).abs().max() <= 1e-39
    assert quantised(tiny[:, :, :0], how).shape == (2, 3, 0, 80)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WAYS)
def test_nan_changes_no_other_number(name: str, bad: float) -> None:
    x = drawn(*SHAPE)
    x[1, 2, 6, 40] = 0.0
    expected = quantised(x, WAYS[name])
    expected[1, 2, 6, 40] = math.nan
    x[1, 2, 6, 40] = bad
    torch.testing.assert_close(quantised(x, WAYS[name]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("format", "error"), [(E4M3, 2**-4), (E5M2, 2**-3), (E2M1, 2**-2)], ids=lambda x: getattr(x, "name", "")
)
def test_error_of_each_number(format: Format, error: float) -> None:
    """Half a unit of the last digit, or half of the smallest number."""
    x = drawn(*SHAPE)
    half = 0.5 * 2.0 ** (format.smallest_exponent - format.mantissa_bits)
    scale = x.abs().amax(dim=-1, keepdim=True) / format.largest
    limit = torch.maximum(error * x.abs(), half * scale)
    assert ((quantised(x, by_token(format)) - x).abs() <= limit * (1 + 1e-6)).all()


def test_codes_of_the_cache() -> None:
    """The same numbers, but for roundings of the scale's reciprocal, as those of a quantised cache."""
    x = drawn(*SHAPE)
    for format, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2), (INT8, torch.int8)):
        scale = quantization.scales_of(x, dtype)
        cached = quantization.dequantised(quantization.quantised(x, scale, dtype), scale)
        assert (quantised(x, by_token(format)) != cached).float().mean() < 1e-3


def scales(rule, format, *largest: float) -> list[float]:  # type: ignore[no-untyped-def]
    return rule(torch.tensor(largest, device=DEVICE), format).tolist()


def test_powers_of_two() -> None:
    assert scales(powers_below, E2M1, 4.0, 6.0, 7.9, 8.0) == [1.0, 1.0, 1.0, 2.0]
    assert scales(powers_above, E2M1, 3.0, 6.0, 6.1, 12.0) == [0.5, 1.0, 2.0, 2.0]
    assert scales(powers_below, E4M3, 256.0, 448.0, 511.0, 512.0) == [1.0, 1.0, 1.0, 2.0]
    assert scales(powers_above, E4M3, 224.0, 448.0, 448.0001) == [0.5, 1.0, 2.0]
    assert scales(powers_below, E5M2, 1e-38) == scales(powers_above, E5M2, 1e-38) == [2.0**-127]


def test_numbers_cut_off() -> None:
    """A power of two below cuts off up to a quarter of the largest number of a group; one above does not."""
    x = torch.tensor([7.75, 1.0], device=DEVICE)[None, None, None]
    assert quantised(x, mx(E2M1)).flatten().tolist() == [6.0, 1.0]
    assert quantised(x, mx(E2M1, powers_above)).flatten().tolist() == [8.0, 1.0]


def test_two_levels() -> None:
    """The largest scale is 448 times that of the tensor, whatever the size of the numbers."""
    whole = 2688.0
    assert scales(two_level_scales, E2M1, whole, 6.0, 6.2) == [448.0, 1.0, 1.0]
    assert scales(two_level_scales, E2M1, whole * 2**-20, 6.0 * 2**-20) == [448.0 * 2**-20, 2**-20]
    assert scales(e4m3_scales, E2M1, 6.0 * 2**-11, 6.0, 1e9) == [0.0, 1.0, 448.0]


def test_weights_in_two_levels() -> None:
    """SageAttention3 multiplies weights whose largest is 1 by 448 * 6, and rounds them by groups of 16."""
    weights = torch.rand(1, 2, 7, 50, device=DEVICE).pow(8)
    weights[0, 0, 0, 0] = 1.0
    expected = quantised(weights * 2688.0, nvfp4(e4m3_scales)) / 2688.0
    for rule in (two_level_unit_scales, two_level_scales):
        torch.testing.assert_close(quantised(weights, nvfp4(rule)), expected, rtol=1e-6, atol=0)


def test_small_weights_are_lost_without_a_second_level() -> None:
    """A group whose scale is less than half the smallest number of e4m3 becomes 0."""
    weights = torch.full((1, 1, 1, 32), 1e-3, device=DEVICE)
    weights[..., :16] = 1.0
    assert quantised(weights, nvfp4(e4m3_scales))[..., 16:].abs().max() == 0
    torch.testing.assert_close(quantised(weights, nvfp4(two_level_unit_scales)), weights, rtol=2**-4, atol=0)


def test_weights_with_a_fixed_scale() -> None:
    weights = torch.tensor([1.0, 0.5, 1.0 / 448, 2.0**-9 / 448, 0.0], device=DEVICE)[None, None, None]
    torch.testing.assert_close(quantised(weights, of_weights(E4M3)), weights, rtol=1e-6, atol=0)
