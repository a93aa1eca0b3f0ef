"""Formats of numbers in few bits, and rounding to them.

The numbers of a format with one exponent are multiples of ``2 ** (exponent - mantissa_bits)``. Numbers below the
smallest exponent are multiples of the same step as those at it (subnormal numbers), down to 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """A format: the digits after the leading one, the least exponent of a normal number, the largest number."""

    name: str
    mantissa_bits: int
    smallest_exponent: int
    largest: float

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1


# OCP 8-bit Floating Point Specification, 2023; OCP Microscaling Formats Specification v1.0, 2023, table 1.
E4M3 = Format("e4m3", 3, -6, 448.0)
E5M2 = Format("e5m2", 2, -14, 57344.0)
E2M1 = Format("e2m1", 1, 0, 6.0)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
INT8 = Format("int8", 6, 6, 127.0)  # one step for all numbers
BFLOAT16 = Format("bfloat16", 7, -126, 2.0**128 - 2.0**120)


def rounded(x: Tensor, format: Format) -> Tensor:
    """The nearest number of `format` to each element; of two, the one with an even last digit.

    Args:
        x: float32 or float64, of any shape.
        format: numbers beyond its largest, infinities too, become the largest. A NaN stays one in every format.

    Returns:
        The shape and dtype of x.
    """
    x = x.clamp(-format.largest, format.largest)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=format.smallest_exponent)
    step = torch.ldexp(torch.ones_like(x), exponent - format.mantissa_bits)
    return (x / step).round() * step
