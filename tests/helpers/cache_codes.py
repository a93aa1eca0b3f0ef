"""Codes of 8 and 4 bits in plain Python: rounding by a search among all values, and the values of codes."""

from __future__ import annotations

import bisect
import functools
import math
import struct
from fractions import Fraction

import torch

from tests.helpers.float_bits import Format

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, torch.uint8: 7.0}
FLOATS = {torch.float8_e4m3fn: Format(4, 3), torch.float8_e5m2: Format(5, 2)}
SMALLEST_SCALE = 2.0**-126


def single(x: float) -> float:
    """The nearest float32 number; ties to even."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


@functools.cache
def values(dtype: torch.dtype) -> tuple[Fraction, ...]:
    """The values of the positive finite codes of a floating-point format, by code."""
    form = FLOATS[dtype]
    return tuple(x for code in range(128) if (x := form.fraction(code)) <= Fraction(LARGEST[dtype]))


def code_of(x: float, scale: float, dtype: torch.dtype) -> int | None:
    """The code of a float32 number: the byte, the integer, or for 4 bits the nibble; None for a NaN."""
    largest = LARGEST[dtype]
    product = single(x * single(1.0 / scale)) if scale >= SMALLEST_SCALE else 0.0
    if dtype in FLOATS:
        if math.isnan(product):
            return None
        sign = 0x80 if math.copysign(1.0, product) < 0 else 0
        return sign | _nearest(Fraction(min(abs(product), largest)), values(dtype))
    if math.isnan(product):
        product = 0.0
    integer = round(Fraction(max(-largest, min(largest, product))))  # ties to even
    return integer + 8 if dtype == torch.uint8 else integer


def _nearest(x: Fraction, choices: tuple[Fraction, ...]) -> int:
    above = bisect.bisect_left(choices, x)
    if above == len(choices) or above == 0 or choices[above] == x:
        return min(above, len(choices) - 1)
    down, up = x - choices[above - 1], choices[above] - x
    if down == up:
        return above if above % 2 == 0 else above - 1
    return above if up < down else above - 1


def number_of(code: int, dtype: torch.dtype) -> float:
    """The value of a code, without its scale."""
    if dtype == torch.uint8:
        return float(code - 8)
    if dtype == torch.int8:
        return float(code)
    form = FLOATS[dtype]
    magnitude = float(form.fraction(code & 0x7F))
    return math.copysign(magnitude, -1.0 if code & 0x80 else 1.0)


def scale_of(group: list[float], dtype: torch.dtype) -> float:
    """The scale of the features of a group."""
    if not all(map(math.isfinite, group)):
        return math.nan
    scale = single(max(map(abs, group)) / LARGEST[dtype])
    return scale if scale >= SMALLEST_SCALE else 0.0
