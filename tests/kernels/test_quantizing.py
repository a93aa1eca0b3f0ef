"""Codes and scales of the kernels: equal to nearest codes in exact arithmetic, and bit for bit to quantization.py."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn.kernels.cached import decoded
from fusedattn.kernels.quantizing import encoded, scales_of
from fusedattn.quantization import FORMATS, quantised
from fusedattn.quantization import scales_of as eager_scales
from tests.conftest import DEVICE
from tests.helpers.float_bits import Format

pytestmark = pytest.mark.usefixtures("_seed")

DTYPES = {form.name: dtype for dtype, form in FORMATS.items()}
WIDTH = 16
SMALLEST = 2.0**-126  # normal float32


@triton.jit
def _encode(x_ptr, scale_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """One row of WIDTH numbers for each scale."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    codes = encoded(tl.load(x_ptr + at), tl.load(scale_ptr + rows)[:, None], FORMAT)
    tl.store(out_ptr + at, codes.to(tl.int32))


@triton.jit
def _scale(x_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    tl.store(out_ptr + rows, scales_of(x, FORMAT))


@triton.jit
def _decode(codes_ptr, out_ptr, FORMAT: tl.constexpr, dtype: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, decoded(tl.load(codes_ptr + offs), FORMAT, True, dtype).to(tl.float32))


BLOCK = 256


def padded(x: Tensor) -> Tensor:
    """Rows of WIDTH numbers, a multiple of BLOCK of them; 0 behind the last."""
    size = BLOCK * WIDTH
    return torch.cat((x, x.new_zeros(-len(x) % size))).view(-1, WIDTH).to(DEVICE)


def encode(x: Tensor, scale: Tensor, form: str) -> Tensor:
    """Codes ``(rows, WIDTH)``: bits of a float, or whole numbers, from 0 to 15 for int4."""
    out = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _encode[(len(x) // BLOCK,)](x, scale.to(DEVICE).contiguous(), out, form, BLOCK, WIDTH)
    return out


def bits(*patterns: Tensor) -> Tensor:
    """Float32 numbers of these bits."""
    return torch.cat([x.to(torch.int64).to(torch.int32) for x in patterns]).view(torch.float32)


def random_bits(n: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (n,))


def values_of(form: str) -> list[tuple[Fraction, int]]:
    """Every finite code of a format that is not negative, by its definition, in order of value."""
    if form.startswith("int"):
        return [(Fraction(i), i) for i in range(128 if form == "int8" else 8)]
    if form == "e5m2":
        own = Format(5, 2)
        return [(own.fraction(i), i) for i in range(own.infinity)]
    found = []
    for i in range(0x7F):  # 0x7F is NaN, and there is no infinity: OCP 8-bit floating point, e4m3
        exponent, mantissa = divmod(i, 8)
        found.append(((mantissa + (8 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 10), i))
    return found


def nearest(x: float, table: list[tuple[Fraction, int]]) -> tuple[bool, int]:
    """(whether it is negative, the code of its magnitude): the nearest one, of two as near the even one."""
    magnitude = Fraction(min(abs(x), float(table[-1][0])))
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[middle][0] <= magnitude else (low, middle)
    below, above = magnitude - table[low][0], table[high][0] - magnitude
    first = below < above or (below == above and table[low][1] % 2 == 0)
    return math.copysign(1.0, x) < 0, table[low if first else high][1]


def numbers_around(table: list[tuple[Fraction, int]]) -> Tensor:
    """Every code, every tie between two, and the float32 numbers beside them; of both signs."""
    exact = [value for value, _ in table]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(exact)]
    at = torch.tensor([float(x) for x in (*exact, *ties, 2 * exact[-1] - exact[-2])]).view(torch.int32).long()
    around = torch.cat([(at + step).clamp(min=0) for step in (-1, 0, 1)])
    return torch.cat((around, around + 2**31))


def special() -> Tensor:
    return torch.tensor([0, 1, 2**23 - 1, 2**23, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])


@pytest.mark.parametrize("form", DTYPES)
def test_codes_are_the_nearest(form):
    """For a scale of 1, in exact arithmetic: ties to even, subnormal codes, numbers beyond the largest, and NaN."""
    table = values_of(form)
    specials = torch.cat((special(), special() + 2**31))
    inside = torch.randn(3000).mul(float(table[-1][0]) / 3).view(torch.int32).long()
    x = padded(bits(numbers_around(table), specials, inside, random_bits(3000)))
    codes = encode(x, torch.ones(len(x)), form).flatten().tolist()
    is_float = form.startswith("e")
    for value, code in zip(x.flatten().tolist(), codes, strict=True):
        if math.isnan(value):
            expected = {0x7F, 0xFF} if is_float else {8 if form == "int4" else 0}
            assert code in expected, value
            continue
        negative, magnitude = nearest(value, table)
        if is_float:
            expected = magnitude | (0x80 if negative else 0)
        else:
            expected = (-magnitude if negative else magnitude) + (8 if form == "int4" else 0)
        assert code == expected, (value, code)


def tiny_and_other_scales(n: int) -> Tensor:
    """Of any size; the last ones have no finite reciprocal, or are no scale."""
    scales = torch.randint(0, 254 * 2**23, (n,)).to(torch.int32).view(torch.float32)
    odd = [SMALLEST, SMALLEST / 2, SMALLEST / 8, 2.0**-149, 2.0**-128, 2.0**-127, 0.0, -1.0, math.nan, math.inf, 3e38]
    scales[-len(odd) :] = torch.tensor(odd)
    return scales


@pytest.mark.parametrize("form", DTYPES)
def test_codes_equal_those_of_the_definition(form):
    """For scales of any size, of numbers that reach beyond the largest code; a NaN is any NaN."""
    scale = tiny_and_other_scales(2 * BLOCK)
    x = padded(bits(random_bits(BLOCK * WIDTH), torch.zeros(BLOCK * WIDTH)))
    near = scale[:, None] * torch.randn(len(scale), WIDTH) * FORMATS[DTYPES[form]].largest
    x[BLOCK:] = near[BLOCK:].to(DEVICE)
    x[-20:, 0] = 0.0
    found = encode(x, scale, form).cpu()
    expected = quantised(x.cpu(), scale[:, None], DTYPES[form])
    if form == "int4":
        expected = torch.stack((expected & 15, expected >> 4), dim=-1).flatten(-2)
    elif form.startswith("e"):
        expected, is_nan = expected.view(torch.uint8), expected.float().isnan()
        assert (found[is_nan] & 0x7F == 0x7F).all()
        found, expected = found.masked_fill(is_nan, 0), expected.int().masked_fill(is_nan, 0)
    assert torch.equal(found, expected.int())


@pytest.mark.parametrize("form", DTYPES)
def test_scales_equal_those_of_the_definition(form):
    """Of rows of any size, one of them not finite; below the smallest normal number they are 0."""
    x = torch.randn(2 * BLOCK, WIDTH) * 2.0 ** torch.linspace(-149, 126, 2 * BLOCK)[:, None]
    x[::7] = bits(random_bits(x[::7].numel())).view(-1, WIDTH)
    x[3, 5], x[10, 2], x[17, 1], x[24] = math.nan, math.inf, -math.inf, 0.0
    found = torch.empty(len(x), device=DEVICE)
    _scale[(2,)](x.to(DEVICE), found, form, BLOCK, WIDTH)
    largest = FORMATS[DTYPES[form]].largest
    for row, scale, eager in zip(x.tolist(), found.tolist(), eager_scales(x, DTYPES[form])[:, 0].tolist(), strict=True):
        if not all(map(math.isfinite, row)):
            assert math.isnan(scale), row
            assert math.isnan(eager), row
            continue
        exact = Fraction(max(map(abs, row))) / Fraction(largest)
        expected = torch.tensor(float(exact), dtype=torch.float64).float().item()
        expected = expected if expected >= SMALLEST else 0.0
        assert scale == expected, row
        assert eager == expected, row


@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["e4m3", "e5m2", "int8"])
def test_every_code_is_decoded_exactly(form, dtype):
    """Those of floating point over 256."""
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    found = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes.view(torch.int8), found, form, dtype, 256)
    table = {i: float(value) for value, i in values_of(form)}
    for code, value in enumerate(found.tolist()):
        if form == "int8":
            assert value == (code + 128) % 256 - 128
        elif code & 0x7F in table:
            assert value == table[code & 0x7F] / 256 * (-1 if code & 0x80 else 1)
        elif form == "e5m2" and code & 0x7F == 0x7C:
            assert value == math.copysign(math.inf, -1 if code & 0x80 else 1)
        else:
            assert math.isnan(value)
