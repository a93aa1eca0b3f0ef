"""Sums that do not depend on the order of their terms, so that atomics may build them.

A float32 is an integer of 24 bits times a power of two. A sum is kept as twelve int64 words, one for every 24 powers:
each term adds an integer to two of them, which is exact, and 2^39 terms fit. Kulisch, "Computer Arithmetic and
Validity" (2008), chapter 8, has the idea as one long accumulator.

    words    (n, 12) int64: word w counts in units of 2^(24 w - 149); for float64 terms, (n,) float64
    special  (n,) float32: the sum of the infinite and NaN terms, if any, is the result; for float64 terms, empty
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

WORDS = tl.constexpr(12)
BITS = tl.constexpr(24)
SMALLEST = -149  # the exponent of the smallest float32


class ExactSums(NamedTuple):
    """Sums as a kernel takes them."""

    words_ptr: Any
    special_ptr: Any


NO_SUMS = ExactSums(None, None)


@triton.jit
def add_exactly(sums, index, x, mask):
    """Add each element of ``x``, where `mask`, to the sum at its index: float32 exactly, float64 with rounding."""
    if x.dtype == tl.float64:
        tl.atomic_add(sums.words_ptr + index, x, mask=mask, sem="relaxed")
    else:
        bits = x.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        fraction = bits & 0x7FFFFF
        mantissa = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
        shift = tl.maximum(exponent, 1) - 1
        value = mantissa << (shift % BITS).to(tl.int64)
        sign = tl.where(bits < 0, -1, 1).to(tl.int64)
        words = sums.words_ptr + index.to(tl.int64) * WORDS + shift // BITS
        tl.atomic_add(words, sign * (value & 0xFFFFFF), mask=mask & (mantissa != 0), sem="relaxed")
        tl.atomic_add(words + 1, sign * (value >> BITS), mask=mask & (value >> BITS != 0), sem="relaxed")
        tl.atomic_add(sums.special_ptr + index, x, mask=mask & (exponent == 255), sem="relaxed")


def zeros(n: int, dtype: torch.dtype, device: torch.device) -> ExactSums:
    """``n`` sums of 0, for float32 or float64 terms."""
    if dtype == torch.float64:
        return ExactSums(torch.zeros(n, dtype=dtype, device=device), torch.empty(0, device=device))
    words = torch.zeros(n, WORDS.value, dtype=torch.int64, device=device)
    return ExactSums(words, torch.zeros(n, device=device))


def rounded(sums: ExactSums) -> torch.Tensor:
    """The sums ``(n,)``, rounded to float64 and then to the dtype of their terms."""
    words = sums.words_ptr
    if words.dtype == torch.float64:
        return words
    # After carrying upwards, all words but the last have 24 bits and no sign.
    columns = list(words.unbind(1))
    for i in range(len(columns) - 1):
        columns[i + 1] = columns[i + 1] + (columns[i] >> BITS.value)
        columns[i] = columns[i] & (2**BITS.value - 1)
    total = torch.zeros_like(columns[0], dtype=torch.float64)
    for i in reversed(range(len(columns))):
        total = total + columns[i].double() * 2.0 ** (BITS.value * i + SMALLEST)
    return torch.where(sums.special_ptr == 0, total.float(), sums.special_ptr)
