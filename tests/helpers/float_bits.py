"""Numbers of floating point as their bits, with exact fractions for their values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary format of IEEE 754, with a sign bit, `exponent` bits and `mantissa` bits.

    If it is not `infinite`, its largest exponent has numbers too, and only the largest magnitude is NaN.
    """

    exponent: int
    mantissa: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def infinity(self) -> int:
        """What follows the largest number: NaN if there is no infinity."""
        return (1 << self.exponent) - 1 << self.mantissa if self.infinite else self.sign - 1

    @property
    def sign(self) -> int:
        return 1 << self.bits - 1

    @property
    def lowest(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - (1 << self.exponent - 1)

    def magnitude(self, x: int) -> int:
        return x & self.sign - 1

    def is_nan(self, x: int) -> bool:
        return self.magnitude(x) >= self.infinity + self.infinite

    def is_denormal(self, x: int) -> bool:
        return 0 < self.magnitude(x) < 1 << self.mantissa

    def fraction(self, x: int) -> Fraction:
        """The value of a finite number."""
        field, rest = divmod(self.magnitude(x), 1 << self.mantissa)
        exponent = self.lowest - self.mantissa + max(field - 1, 0)
        value = (rest + (1 << self.mantissa if field else 0)) * Fraction(2) ** exponent
        return -value if x & self.sign else value

    def number(self, x: int) -> float:
        """The value as Python's float, which holds it exactly."""
        magnitude = self.magnitude(x)
        value = math.nan if self.is_nan(x) else math.inf
        if magnitude < self.infinity:
            value = float(abs(self.fraction(x)))
        return math.copysign(value, -1 if x & self.sign else 1)

    def nearest(self, value: Fraction, ties: str = "even") -> int:
        """The number nearest to a value that is not zero; `ties` to "even" or "away", or no rounding up: "cut"."""
        sign, value = (self.sign if value < 0 else 0), abs(value)
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        exponent -= value < Fraction(2) ** exponent
        exponent = max(exponent, self.lowest)
        n, rest = divmod(value, Fraction(2) ** (exponent - self.mantissa))
        rest /= Fraction(2) ** (exponent - self.mantissa)
        half = Fraction(1, 2)
        up = {"even": rest > half or (rest == half and n % 2), "away": rest >= half, "cut": False}[ties]
        magnitude = (exponent - self.lowest << self.mantissa) + int(n) + bool(up)
        return sign | min(magnitude, self.infinity - (ties == "cut"))

    def flushed(self, x: int) -> int:
        """A denormal number becomes zero, of its sign."""
        return x & self.sign if self.is_denormal(x) else x

    def rounded(self, function: Callable[..., float | Fraction], *operands: int) -> int:
        """The bits of a function of operands, rounded once; `function` may use + - * / of numbers and fractions."""
        numbers = [self.number(x) for x in operands]
        if all(map(math.isfinite, numbers)):
            with suppress(ZeroDivisionError):
                exact = Fraction(function(*map(self.fraction, operands)))
                if exact:
                    return self.nearest(exact)
        special = function(*numbers)  # infinite, NaN, or zero of a sign, as Python's floats have it
        if math.isnan(special):
            return self.infinity | 1
        return (self.infinity if special else 0) | (self.sign if math.copysign(1, special) < 0 else 0)

    def same(self, got: int, wanted: int) -> bool:
        """Equal, or both NaN."""
        return got == wanted or (self.is_nan(got) and self.is_nan(wanted))


F16, BF16, F32, F64 = Format(5, 10), Format(8, 7), Format(8, 23), Format(11, 52)
E4M3, E5M2 = Format(4, 3, infinite=False), Format(5, 2)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "e4m3": E4M3, "e5m2": E5M2}


def hostile(form: Format) -> list[int]:
    """Zeros, the ends of denormal and normal numbers, small numbers, infinities and NaNs, of both signs."""
    one = form.infinity // 2 >> form.mantissa << form.mantissa
    normal = 1 << form.mantissa
    magnitudes = [0, 1, 2, 3, normal - 1, normal, normal + 1, 3 * normal, one - 1, one, one + 1]
    magnitudes += [one - normal, one + normal // 2, one + normal, one + normal + normal // 4]  # 0.5, 1.5, 2, 2.5
    magnitudes += [form.infinity - 1, form.infinity - normal, form.infinity]
    magnitudes += [form.infinity + 1, form.infinity + normal // 2, form.infinity + normal - 1]
    return [magnitude | sign for magnitude in magnitudes for sign in (0, form.sign)]


def drawn(form: Format, n: int, seed: int) -> list[int]:
    """Random bits, many of them near 1."""
    draw = random.Random(seed)
    near = form.infinity // 2
    return [
        draw.getrandbits(form.bits) if i % 2 else near + draw.randrange(-8 << form.mantissa, 8 << form.mantissa)
        for i in range(n)
    ]


def check(form: Format, got: list[int], wanted: list[int], *operands: list[int]) -> None:
    for y, z, *x in zip(got, wanted, *operands, strict=True):
        assert form.same(y, z), f"{[hex(v) for v in x]}: {y:#x}, not {z:#x}"
