"""cvt, against exact fractions that are rounded once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest

from fusedattn.virtual_gpu.errors import KernelError, UnknownPTXError
from tests.helpers.float_bits import BF16, E4M3, F16, F32, FORMATS, Format, check, drawn, hostile
from tests.helpers.integer_bits import HOSTILE, signed, valued
from tests.helpers.ptx_values import evaluate


def converted(source: Format, target: Format, x: int, ties: str = "even") -> int:
    """A number of one format in another."""
    sign = target.sign if x & source.sign else 0
    if source.is_nan(x):
        return (1 << target.bits - 1) - 1
    if source.magnitude(x) == source.infinity:
        return target.infinity | sign
    value = source.fraction(x)
    return target.nearest(value, ties) if value else sign


def operands_of(source: Format, target: Format) -> list[int]:
    """Hostile numbers, also those near ties and ends of the target."""
    found = hostile(source) + drawn(source, 500, 7)
    for x in hostile(target):
        if target.magnitude(x) < target.infinity and target.fraction(x):
            value = source.nearest(target.fraction(x))
            step = 1 << max(source.mantissa - target.mantissa - 1, 0)  # half a unit of the target
            found += [value + i * step + j for i in range(4) for j in (-1, 0, 1)]
    return [x % (1 << source.bits) for x in found]


@pytest.mark.parametrize(
    ("target", "source"),
    [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("f32", "f64"), ("bf16", "f16"), ("f16", "bf16")],
)
def test_narrower_floats(target: str, source: str) -> None:
    of, to = FORMATS[source], FORMATS[target]
    a = operands_of(of, to)
    got = evaluate(f"cvt.rn.{target}.{source} %d, %a;", to.bits, a=(of.bits, a))
    check(to, got, [converted(of, to, x) for x in a], a)
    if target in ("f16", "bf16"):
        assert {y for x, y in zip(a, got, strict=True) if of.is_nan(x)} == {0x7FFF}  # the ISA's NaN


def test_truncation_to_bf16() -> None:
    a = operands_of(F32, BF16)
    got = evaluate("cvt.rz.bf16.f32 %d, %a;", 16, a=(32, a))
    assert got == [converted(F32, BF16, x, "cut") for x in a]


def test_truncation_to_f16() -> None:
    a = operands_of(F32, F16)
    got = evaluate("cvt.rz.f16.f32 %d, %a;", 16, a=(32, a))
    assert got == [converted(F32, F16, x, "cut") for x in a]


@pytest.mark.parametrize(("target", "source"), [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16")])
def test_wider_floats(target: str, source: str) -> None:
    of, to = FORMATS[source], FORMATS[target]
    a = hostile(of) + drawn(of, 500, 7)
    got = evaluate(f"cvt.{target}.{source} %d, %a;", to.bits, a=(of.bits, a))
    check(to, got, [converted(of, to, x) for x in a], a)


def test_flushed_conversions() -> None:
    a = hostile(F32) + drawn(F32, 100, 1)
    got = evaluate("cvt.rn.ftz.bf16.f32 %d, %a;", 16, a=(32, a))
    assert got == [converted(F32, BF16, F32.flushed(x)) for x in a]
    long = operands_of(FORMATS["f64"], F32)
    got = evaluate("cvt.rn.ftz.f32.f64 %d, %a;", 32, a=(64, long))
    check(F32, got, [F32.flushed(converted(FORMATS["f64"], F32, x)) for x in long], long)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_pairs_of_halves(relu: str, kind: str) -> None:
    """The first operand becomes the high half."""
    to = FORMATS[kind]
    a = operands_of(F32, to)
    b = a[::-1]
    got = evaluate(f"cvt.rn{relu}.{kind}x2.f32 %d, %a, %b;", 32, a=(32, a), b=(32, b))
    for half, operands in ((16, a), (0, b)):
        wanted = [converted(F32, to, x) for x in operands]
        if relu:
            wanted = [0 if y & to.sign and not to.is_nan(y) else y for y in wanted]
        halves_of = [x >> half & 0xFFFF for x in got]
        check(to, halves_of, wanted, operands)
        assert {y for x, y in zip(operands, halves_of, strict=True) if F32.is_nan(x)} == {0x7FFF}
    assert evaluate(f"cvt.rn.{kind}x2.f32 %d, %a, 0f00000000;", 32, a=(32, [F32.nearest(Fraction(1))])) == [
        to.nearest(Fraction(1)) << 16
    ]


@pytest.mark.parametrize("mode", ["rn", "rna"])
def test_tf32(mode: str) -> None:
    form = Format(8, 10)
    a = operands_of(F32, form)
    got = evaluate(f"cvt.{mode}.tf32.f32 %d, %a;", 32, a=(32, a))
    wanted = [converted(F32, form, x, "away" if mode == "rna" else "even") << 13 for x in a]
    check(F32, got, wanted, a)


def saturated(source: Format, target: Format, x: int) -> int:
    """A number of one format in one of 8 bits: what is too large becomes the largest number, and NaN is 0x7F."""
    if source.is_nan(x):
        return 0x7F
    code = converted(source, target, x)
    return code & target.sign | min(target.magnitude(code), target.infinity - 1)


def all_ties(source: Format, target: Format) -> list[int]:
    """Every number of a format of 8 bits and every tie between two, in another format, and what is beside them."""
    found = []
    for x in range(1, target.infinity):
        tie = (target.fraction(x - 1) + target.fraction(x)) / 2
        found += [source.nearest(value) + i for value in (target.fraction(x), tie) for i in (-1, 0, 1)]
    beyond = 2 * target.fraction(target.infinity - 1) - target.fraction(target.infinity - 2)
    return [*found, source.nearest(beyond)]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["f32", "f16"])
@pytest.mark.parametrize("target", ["e4m3", "e5m2"])
def test_pairs_become_bytes(target: str, source: str, relu: str) -> None:
    """The first operand, or the high half, becomes the high byte."""
    of, to = FORMATS[source], FORMATS[target]
    a = hostile(of) + drawn(of, 500, 7) + all_ties(of, to)
    a += [x ^ of.sign for x in a]
    b = a[::-1]
    if source == "f32":
        got = evaluate(f"cvt.rn.satfinite{relu}.{target}x2.f32 %d, %a, %b;", 16, a=(32, a), b=(32, b))
    else:
        pairs = [x << 16 | y for x, y in zip(a, b, strict=True)]
        got = evaluate(f"cvt.rn.satfinite{relu}.{target}x2.f16x2 %d, %a;", 16, a=(32, pairs))
    wanted = [saturated(of, to, x) for x in a]
    if relu:
        wanted = [0 if y & to.sign else y for y in wanted]
    assert [x >> 8 for x in got] == wanted
    assert [x & 0xFF for x in got] == wanted[::-1]


def test_numbers_become_bytes() -> None:
    one = F32.nearest(Fraction(1))
    assert evaluate("cvt.rn.satfinite.e4m3x2.f32 %d, 0f00000000, %a;", 16, a=(32, [one, 0x7F800000])) == [0x38, 0x7E]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["e4m3", "e5m2"])
def test_bytes_become_pairs(source: str, relu: str) -> None:
    of = FORMATS[source]
    a = list(range(256))
    got = evaluate(f"cvt.rn{relu}.f16x2.{source}x2 %d, %a;", 32, a=(16, [x << 8 | 255 - x for x in a]))
    wanted = [0x7FFF if of.is_nan(x) else 0 if relu and x & of.sign else converted(of, F16, x) for x in a]
    assert [x >> 16 for x in got] == wanted
    assert [x & 0xFFFF for x in got] == wanted[::-1]


def test_f16_becomes_bf16_without_rounding() -> None:
    a = [F16.nearest(E4M3.fraction(x)) for x in range(1, 0x7F)] + [0, F16.sign, F16.infinity, 0xFE00]
    got = evaluate("cvt.bf16.f16 %d, %a;", 16, a=(16, a))
    assert got == [*(converted(F16, BF16, x) for x in a[:-1]), 0x7FFF]
    long = [0x3C01] * 64
    with pytest.raises(KernelError, match=r"cvt\.bf16\.f16, at .*: a number that bfloat16 does not have"):
        evaluate("cvt.bf16.f16 %d, %a;", 16, a=(16, long))
    none = "setp.ne.b16 %p, %a, %a; @%p cvt.bf16.f16 %d, %a;"
    evaluate(f"{{ .reg .pred %p; {none} }}", 16, a=(16, long))


def nearest_even(x: Fraction) -> int:
    return round(x)


WHOLE: dict[str, Callable[[Fraction], int]] = {
    "rni": nearest_even,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


def halves(form: Format) -> list[int]:
    numbers = [Fraction(n, 4) for n in range(-11, 12) if n] + [Fraction(2) ** k for k in range(7, 65, 8)]
    numbers += [sign * (Fraction(2) ** k + d) for k in (7, 15, 31, 63) for d in (-1, 0, 1) for sign in (1, -1)]
    return hostile(form) + [form.nearest(x) for x in numbers] + drawn(form, 200, 3)


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("kind", ["f32", "f16", "f64"])
def test_whole_numbers_of_the_same_type(kind: str, mode: str) -> None:
    form = FORMATS[kind]
    a = halves(form)

    def whole(x: int) -> int:
        if form.magnitude(x) >= form.infinity:
            return x
        value = WHOLE[mode](form.fraction(x))
        return form.nearest(Fraction(value)) if value else x & form.sign

    check(form, evaluate(f"cvt.{mode}.{kind}.{kind} %d, %a;", form.bits, a=(form.bits, a)), list(map(whole, a)), a)
    if kind == "f32":
        got = evaluate(f"cvt.{mode}.ftz.f32.f32 %d, %a;", 32, a=(32, a))
        check(form, got, [whole(form.flushed(x)) for x in a], a)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "f64"])
def test_floats_to_integers(source: str, kind: str) -> None:
    """Values out of range become the nearest integer of the range. NaN becomes 0, or 2^n for types of 64 bits."""
    form, bits = FORMATS[source], int(kind[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    a = halves(form)
    for mode, whole in WHOLE.items():
        wanted = []
        for x in a:
            if form.is_nan(x):
                value = 1 << bits - 1 if source == "f64" or bits == 64 else 0
            elif form.magnitude(x) == form.infinity:
                value = low if x & form.sign else high
            else:
                value = min(max(whole(form.fraction(x)), low), high)
            wanted.append(value % 2**bits)
        got = evaluate(f"cvt.{mode}.{kind}.{source} %d, %a;", bits, a=(form.bits, a))
        assert got == wanted, mode


def test_denormal_floats_are_no_integer_above_zero_with_ftz() -> None:
    a = [1, 0x80000001, 0x00400000]
    assert evaluate("cvt.rpi.s32.f32 %d, %a;", 32, a=(32, a)) == [1, 0, 1]
    assert evaluate("cvt.rpi.ftz.s32.f32 %d, %a;", 32, a=(32, a)) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["f32", "f16", "f64"])
def test_integers_to_floats(target: str, kind: str) -> None:
    form, bits = FORMATS[target], int(kind[1:])
    draw = random.Random(1)
    a = HOSTILE[bits] + [draw.getrandbits(draw.randrange(1, bits + 1)) for _ in range(200)]
    a += [
        x % 2**bits for k in (10, 11, 23, 24, 30, 53, 62) for x in (2**k + 1, 2**k + 2**k // 2**11, 3 * 2**k // 2 + 1)
    ]
    wanted = [form.nearest(Fraction(valued(x, kind))) if x else 0 for x in a]
    check(form, evaluate(f"cvt.rn.{target}.{kind} %d, %a;", form.bits, a=(bits, a)), wanted, a)


KINDS = [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "su"]


@pytest.mark.parametrize(("target", "source"), list(product(KINDS, KINDS)))
def test_integers_to_integers(target: str, source: str) -> None:
    """The value is cut to the target, and extended to its register by its sign or by zeros."""
    bits, width = int(source[1:]), int(target[1:])
    register, container = max(bits, 16), max(width, 16)
    a = HOSTILE[register] + [0x80, 0x7F, 0xFF, 0x17F, 0x180]
    values = [signed(x, bits) if source[0] == "s" else x % (1 << bits) for x in a]
    cut = [signed(x, width) if target[0] == "s" else x % (1 << width) for x in values]
    got = evaluate(f"cvt.{target}.{source} %d, %a;", container, a=(register, a))
    assert got == [x % (1 << container) for x in cut]


def test_signed_bytes_in_wider_registers() -> None:
    assert evaluate("cvt.s8.s32 %d, %a;", 16, a=(32, [0x80, 0x17F, 0xFFFFFFFF])) == [0xFF80, 0x7F, 0xFFFF]
    assert evaluate("cvt.s16.s8 %d, %a;", 32, a=(32, [0x80])) == [0xFFFFFF80]


@pytest.mark.parametrize(
    "opcode",
    ["cvt.sat.f32.f32", "cvt.f16.f32", "cvt.rzi.f32.f16", "cvt.rn.f32.f16", "cvt.rn.s32.f32", "cvt.rz.f16.f64",
     "cvt.rn.bf16.f64", "cvt.rn.bf16.s32", "cvt.f32.s32", "cvt.rn.f32.f32",
     "cvt.rni.s32.s16", "cvt.u32.pred", "cvt.b32.u16", "cvt.rn.relu.f16.f32", "cvt.rn.tf32.f32.x", "cvt.rn.e4m3x2.f32",
     "cvt.rn.satfinite.e2m3x2.f32", "cvt.rn.satfinite.e4m3x2.bf16x2", "cvt.rn.satfinite.f16x2.e4m3x2",
     "cvt.rn.bf16x2.e4m3x2", "cvt.rn.satfinite.e4m3.f32", "cvt.rz.ftz.f16.f32"],
)  # fmt: skip
def test_unknown_conversions(opcode: str) -> None:
    with pytest.raises(UnknownPTXError, match=opcode):
        evaluate(f"{opcode} %d, %a{', %a' if 'x2' in opcode else ''};", 32, a=(32, [0]))
