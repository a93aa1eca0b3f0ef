"""Whole numbers as bits, and values that instructions get wrong."""

from __future__ import annotations

import random
from itertools import product

HOSTILE = {
    bits: [
        0,
        1,
        2,
        3,
        7,
        100,
        (1 << bits) - 1,
        (1 << bits) - 2,
        1 << bits - 1,
        (1 << bits - 1) - 1,
        (1 << bits - 1) + 1,
    ]
    + [random.Random(bits).getrandbits(bits) for _ in range(6)]
    for bits in (16, 32, 64)
}


def signed(x: int, bits: int) -> int:
    """The value of bits as a two's complement."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


def valued(x: int, kind: str) -> int:
    return signed(x, int(kind[1:])) if kind[0] == "s" else x


def columns(*lists: list[int]) -> tuple[list[int], ...]:
    """All combinations, as one list for each operand."""
    return tuple(map(list, zip(*product(*lists), strict=True)))
