"""Rounding to formats of few bits: their numbers, ties, saturation, and agreement with torch's dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedattn.low_precision import BFLOAT16, E2M1, E4M3, E5M2, INT8, Format, rounded
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("_seed")

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2, E2M1, INT8, BFLOAT16], ids=lambda f: f.name)
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, BFLOAT16: torch.bfloat16}
E2M1_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


def numbers_of(format: Format) -> Tensor:
    """The numbers of a format from 0 on, in order."""
    if format == E2M1:
        return tensor(*E2M1_NUMBERS)
    if format == INT8:
        return torch.arange(128.0, device=DEVICE)
    bits = torch.int8 if DTYPES[format].itemsize == 1 else torch.int16
    codes = torch.arange(torch.iinfo(bits).max + 1).to(bits).view(DTYPES[format]).to(DEVICE)
    return codes.float()[codes.float().isfinite()]


@FORMATS
def test_its_numbers_stay(format: Format) -> None:
    numbers = numbers_of(format)
    assert numbers[-1] == format.largest
    for x in (numbers, -numbers, numbers.double()):
        assert torch.equal(rounded(x, format), x)


@FORMATS
def test_the_nearest_and_ties_to_even(format: Format) -> None:
    """Halfway between two numbers; and the next float32 on either side. Numbers alternate between even and odd."""
    numbers = numbers_of(format)
    lower, upper = numbers[:-1], numbers[1:]
    halfway = lower + (upper - lower) / 2
    even = torch.where(torch.arange(len(lower), device=DEVICE) % 2 == 0, lower, upper)
    for sign in (1.0, -1.0):
        assert torch.equal(rounded(sign * halfway, format), sign * even)
        assert torch.equal(rounded(sign * halfway.nextafter(lower), format), sign * lower)
        assert torch.equal(rounded(sign * halfway.nextafter(upper), format), sign * upper)


def test_ties_of_e2m1() -> None:
    x = tensor(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert rounded(x, E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@FORMATS
def test_beyond_the_largest(format: Format) -> None:
    x = tensor(format.largest * 1.01, math.inf, -math.inf, math.nan)
    assert rounded(x, format).tolist()[:3] == [format.largest, format.largest, -format.largest]
    assert rounded(x, format)[3].isnan()


def test_the_sign_of_zero() -> None:
    assert rounded(tensor(-0.01, -0.0), E2M1).signbit().all()


@pytest.mark.parametrize("format", [E4M3, E5M2, BFLOAT16], ids=lambda f: f.name)
def test_as_torch_rounds(format: Format) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).to(DEVICE)
    x = torch.cat((x[x.abs() <= format.largest], 3.0 * torch.randn(10_000, device=DEVICE)))
    assert torch.equal(rounded(x, format), x.to(DTYPES[format]).float())


@FORMATS
def test_the_exponent_of_the_largest(format: Format) -> None:
    assert 2.0**format.largest_exponent <= format.largest < 2.0 ** (format.largest_exponent + 1)
