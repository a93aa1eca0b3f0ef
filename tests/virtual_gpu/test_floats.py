"""Arithmetic of floats, against exact fractions that are rounded once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from fusedattn.virtual_gpu.errors import UnknownPTXError
from tests.helpers.float_bits import BF16, F16, F32, FORMATS, Format, check, drawn, hostile
from tests.helpers.integer_bits import columns
from tests.helpers.ptx_values import evaluate

Number = Any  # a float or a Fraction

ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def divided(a: Number, b: Number) -> Number:
    if b == 0 and isinstance(b, float):
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def multiplied_and_added(a: Number, b: Number, c: Number) -> Number:
    return a * b + c


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_one_rounding(name: str, kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    a, b = a + drawn(form, 1500, 1), b + drawn(form, 1500, 2)
    got = evaluate(f"{name}.{kind} %d, %a, %b;", form.bits, a=(form.bits, a), b=(form.bits, b))
    check(form, got, [form.rounded(ARITHMETIC[name], *x) for x in zip(a, b, strict=True)], a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs(kind: str) -> None:
    form = FORMATS[kind]
    a, b, c, d = (drawn(form, 300, seed) + hostile(form) for seed in range(4))
    pairs = [[y << 16 | x for x, y in zip(low, high, strict=True)] for low, high in ((a, b), (b, c), (c, d))]
    for name, function in ARITHMETIC.items():
        got = evaluate(f"{name}.{kind}x2 %d, %a, %b;", 32, a=(32, pairs[0]), b=(32, pairs[1]))
        check(form, [x & 0xFFFF for x in got], [form.rounded(function, *x) for x in zip(a, b, strict=True)], a, b)
        check(form, [x >> 16 for x in got], [form.rounded(function, *x) for x in zip(b, c, strict=True)], b, c)
    operands = dict(zip("abc", ((32, pair) for pair in pairs), strict=True))
    got = evaluate(f"fma.rn.{kind}x2 %d, %a, %b, %c;", 32, **operands)
    check(form, [x & 0xFFFF for x in got], [form.rounded(multiplied_and_added, *x) for x in zip(a, b, c, strict=True)])
    check(form, [x >> 16 for x in got], [form.rounded(multiplied_and_added, *x) for x in zip(b, c, d, strict=True)])


def close_calls() -> list[tuple[int, int, int]]:
    """Sums a b + c of float32 near a tie, closer than float64 can tell; also where float32 is denormal."""
    near = [
        (0x3F800001, 0x3F7FFFFE),  # (1 + 2^-23) (1 - 2^-23) = 1 - 2^-46
        (0x3F800800, 0x3F7FF001),  # (1 + 2^-12) (1 - 2^-12 + 2^-24) = 1 + 2^-36
        (0x3F800000, 0x3F800000),
    ]
    cases = []
    for (a, b), steps in product(near, range(-6, 7)):
        for c, half in ((0x3F800000 + abs(steps), -24), (0x00400000 + abs(steps), -150)):
            scaled = a + (half // 2 << 23), b + (half - half // 2 << 23)
            for signs in product((0, F32.sign), repeat=3):
                cases.append((scaled[0] | signs[0], scaled[1] | signs[1], c | signs[2]))
    return cases


def test_products_and_sums_are_rounded_once() -> None:
    a, b = columns(hostile(F32), hostile(F32))
    c = [hostile(F32)[i * 5 % 42] for i in range(len(a))]
    more = list(zip(a, b, c, strict=True)) + close_calls()
    draw = random.Random(5)
    for x, y in zip(drawn(F32, 800, 3), drawn(F32, 800, 4), strict=True):
        negated = F32.rounded(ARITHMETIC["mul"], x, y) ^ F32.sign  # sums that cancel
        more += [(x, y, negated), (x, y, (negated + draw.randrange(-3, 4)) % 2**32), (x, y, draw.getrandbits(32))]
    a, b, c = map(list, zip(*more, strict=True))
    wanted = [F32.rounded(multiplied_and_added, *x) for x in more]
    operands = {"a": (32, a), "b": (32, b), "c": (32, c)}
    check(F32, evaluate("fma.rn.f32 %d, %a, %b, %c;", 32, **operands), wanted, a, b, c)
    flushed = [F32.rounded(multiplied_and_added, *map(F32.flushed, x)) for x in more]
    got = evaluate("fma.rn.ftz.f32 %d, %a, %b, %c;", 32, **operands)
    check(F32, got, [F32.flushed(x) for x in flushed], a, b, c)


@pytest.mark.parametrize("denormal", [False, True])
def test_close_calls_alone(denormal: bool) -> None:
    """No other thread has a tie, so those that look like one must be found in either range."""
    cases = [x for x in close_calls() if F32.is_denormal(x[2]) == denormal]
    a, b, c = map(list, zip(*cases, strict=True))
    got = evaluate("fma.rn.f32 %d, %a, %b, %c;", 32, a=(32, a), b=(32, b), c=(32, c))
    check(F32, got, [F32.rounded(multiplied_and_added, *x) for x in cases], a, b, c)


def test_close_calls_are_close() -> None:
    """Some of them come out differently if the sum is rounded to float64 first."""
    differing = 0
    for x in close_calls():
        twice = Fraction(float(multiplied_and_added(*map(F32.fraction, x))))
        differing += bool(twice) and F32.nearest(twice) != F32.rounded(multiplied_and_added, *x)
    assert differing > 100


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_products_and_sums_of_half_precision(relu: str, kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    c = [hostile(form)[i * 5 % 42] for i in range(len(a))]
    a, b, c = (x + drawn(form, 2000, seed) for seed, x in enumerate((a, b, c)))
    if kind == "bf16":  # 1.5 * 1.984375 is a tie, which the smallest number decides
        ties = list(product((0x3FC0, 0xBFC0), (0x3FFE,), (0x0001, 0x8001, 0x0000)))
        a, b, c = (x + list(y) for x, y in zip((a, b, c), zip(*ties, strict=True), strict=True))
    got = evaluate(f"fma.rn{relu}.{kind} %d, %a, %b, %c;", 16, a=(16, a), b=(16, b), c=(16, c))
    wanted = [form.rounded(multiplied_and_added, *x) for x in zip(a, b, c, strict=True)]
    if relu:
        wanted = [0 if x & form.sign and not form.is_nan(x) else x for x in wanted]
    check(form, got, wanted, a, b, c)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_denormal_operands_and_results_are_zero_with_ftz(name: str) -> None:
    a, b = columns(hostile(F32), hostile(F32))
    got = evaluate(f"{name}.ftz.f32 %d, %a, %b;", 32, a=(32, a), b=(32, b))
    pairs = [(F32.flushed(x), F32.flushed(y)) for x, y in zip(a, b, strict=True)]
    check(F32, got, [F32.flushed(F32.rounded(ARITHMETIC[name], *x)) for x in pairs], a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64", "f16x2", "bf16x2"])
def test_signs(kind: str) -> None:
    form = FORMATS[kind.removesuffix("x2")]
    a = hostile(form)
    if kind.endswith("x2"):
        a = [x << 16 | y for x, y in zip(a, a[::-1], strict=True)]
        bits, signs = 32, 0x80008000
    else:
        bits, signs = form.bits, form.sign
    assert evaluate(f"neg.{kind} %d, %a;", bits, a=(bits, a)) == [x ^ signs for x in a]
    assert evaluate(f"abs.{kind} %d, %a;", bits, a=(bits, a)) == [x & ~signs for x in a]


@pytest.mark.parametrize("kind", ["f16", "f16x2", "f32"])
def test_signs_of_denormal_numbers_with_ftz(kind: str) -> None:
    form = FORMATS[kind.removesuffix("x2")]
    a = hostile(form)
    assert any(0 < form.magnitude(x) < 1 << form.mantissa for x in a)
    numbers = [x for x in a if not form.is_nan(x)]  # PTX leaves open which NaN
    bits = form.bits
    flushed = [form.flushed(x) for x in numbers]
    wanted = {"neg": [x ^ form.sign for x in flushed], "abs": [x & ~form.sign for x in flushed]}
    if kind == "f16x2":
        bits, numbers = 32, [x << 16 | y for x, y in zip(numbers, numbers[::-1], strict=True)]
        wanted = {name: [x << 16 | y for x, y in zip(z, z[::-1], strict=True)] for name, z in wanted.items()}
    for name, results in wanted.items():
        assert evaluate(f"{name}.ftz.{kind} %d, %a;", bits, a=(bits, numbers)) == results, name


def test_denormal_halves_are_zero_with_ftz() -> None:
    a, b = columns(hostile(F16), hostile(F16))
    pairs = [(F16.flushed(x), F16.flushed(y)) for x, y in zip(a, b, strict=True)]
    for name, function in ARITHMETIC.items():
        got = evaluate(f"{name}.ftz.f16 %d, %a, %b;", 16, a=(16, a), b=(16, b))
        check(F16, got, [F16.flushed(F16.rounded(function, *x)) for x in pairs], a, b)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_of_nan_are_the_canonical_nan(name: str, kind: str) -> None:
    form = FORMATS[kind]
    nans = [x for x in hostile(form) if form.is_nan(x)]
    nans += [form.infinity | 1, form.infinity | 1 | form.sign, (1 << form.bits) - 1]
    one = form.nearest(Fraction(1))
    canonical = (1 << form.bits - 1) - 1
    a, b = columns(nans, nans)
    got = evaluate(f"{name}.{kind} %d, %a, %b;", form.bits, a=(form.bits, a), b=(form.bits, b))
    assert set(got) == {canonical}
    if kind != "f64":
        a, b = [*nans, *[one] * len(nans)], [*[one] * len(nans), *nans]
        got = evaluate(f"{name}.NaN.{kind} %d, %a, %b;", form.bits, a=(form.bits, a), b=(form.bits, b))
        assert set(got) == {canonical}


def extreme(form: Format, name: str, a: int, b: int, *, of_nan: bool) -> int:
    """min or max: -0 is less than 0, and NaN counts only if both are NaN, or if `of_nan`."""
    nans = form.is_nan(a), form.is_nan(b)
    if any(nans):
        return form.infinity | 1 if of_nan or all(nans) else (b if nans[0] else a)
    key = {x: (form.number(x), 0 if x & form.sign else 1) for x in (a, b)}
    return (min if name == "min" else max)((a, b), key=lambda x: key[x])


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str, kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    operands = {"a": (form.bits, a), "b": (form.bits, b)}
    for of_nan in ("", ".NaN") if kind != "f64" else ("",):
        got = evaluate(f"{name}{of_nan}.{kind} %d, %a, %b;", form.bits, **operands)
        check(form, got, [extreme(form, name, *x, of_nan=bool(of_nan)) for x in zip(a, b, strict=True)], a, b)
    if kind == "f32":
        got = evaluate(f"{name}.ftz.f32 %d, %a, %b;", 32, **operands)
        pairs = [(F32.flushed(x), F32.flushed(y)) for x, y in zip(a, b, strict=True)]
        check(form, got, [extreme(form, name, *x, of_nan=False) for x in pairs], a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_extremes_of_pairs(kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    packed = [[y << 16 | x for x, y in zip(u, v, strict=True)] for u, v in ((a, b), (b, a))]
    got = evaluate(f"max.{kind}x2 %d, %a, %b;", 32, a=(32, packed[0]), b=(32, packed[1]))
    wanted = [extreme(form, "max", *x, of_nan=False) for x in zip(a, b, strict=True)]
    check(form, [x & 0xFFFF for x in got], wanted, a, b)
    check(form, [x >> 16 for x in got], wanted, a, b)


def test_quotients() -> None:
    a, b = columns(hostile(F32), hostile(F32))
    a, b = a + drawn(F32, 1500, 1), b + drawn(F32, 1500, 2)
    wanted = [F32.rounded(divided, *x) for x in zip(a, b, strict=True)]
    for mode in ("rn", "full"):  # without noise, both are exact
        check(F32, evaluate(f"div.{mode}.f32 %d, %a, %b;", 32, a=(32, a), b=(32, b)), wanted, a, b)
    flushed = [F32.flushed(F32.rounded(divided, F32.flushed(x), F32.flushed(y))) for x, y in zip(a, b, strict=True)]
    check(F32, evaluate("div.full.ftz.f32 %d, %a, %b;", 32, a=(32, a), b=(32, b)), flushed, a, b)


def rooted(x: Number) -> Number:
    """The root, with a sticky bit below 200 binary places that keeps it off ties."""
    if isinstance(x, float):
        return x if x == 0 or math.isnan(x) or x > 0 else math.nan
    if x < 0:
        raise ZeroDivisionError
    scaled = (x.numerator << 600) // x.denominator
    root = math.isqrt(scaled)
    inexact = root * root * x.denominator != x.numerator << 600
    return Fraction(2 * root + inexact, 2**301)


def test_roots_and_reciprocals() -> None:
    a = hostile(F32) + drawn(F32, 2000, 1)
    for mode in ("rn", "approx"):
        check(F32, evaluate(f"sqrt.{mode}.f32 %d, %a;", 32, a=(32, a)), [F32.rounded(rooted, x) for x in a], a)
        inverse = [F32.rounded(lambda x: divided(1.0 if isinstance(x, float) else 1, x), x) for x in a]
        check(F32, evaluate(f"rcp.{mode}.f32 %d, %a;", 32, a=(32, a)), inverse, a)


def _ulps(got: int, wanted: float) -> float:
    """The difference, in units of the last place of the wanted number."""
    exponent = max(math.frexp(wanted)[1] - 1, F32.lowest)
    return abs(F32.number(got) - wanted) / 2.0 ** (exponent - 23)


@pytest.mark.parametrize(
    ("name", "function", "low", "high"),
    [
        ("ex2", lambda x: 2.0**x, -149.0, 127.9),
        ("lg2", math.log2, 1e-40, 1e38),
        ("rsqrt", lambda x: 1 / math.sqrt(x), 1e-38, 1e38),
        ("sin", math.sin, -6.0, 6.0),
        ("cos", math.cos, -6.0, 6.0),
        ("tanh", math.tanh, -8.0, 8.0),
    ],
)
def test_functions_are_nearly_exact(name: str, function: Callable[[float], float], low: float, high: float) -> None:
    draw = random.Random(0)
    numbers = [draw.uniform(low, high) for _ in range(500)] + [draw.uniform(0.5, 1.5) for _ in range(500)]
    a = [F32.nearest(Fraction(x)) for x in numbers]
    got = evaluate(f"{name}.approx.f32 %d, %a;", 32, a=(32, a))
    assert max(_ulps(y, function(F32.number(x))) for x, y in zip(a, got, strict=True)) <= 0.5001


def test_special_values_of_functions() -> None:
    infinity, nan, zero = 0x7F800000, 0x7FC00000, 0
    minus = F32.sign
    tables = {
        "ex2.approx.f32": {infinity: infinity, infinity | minus: 0, zero: 0x3F800000, minus: 0x3F800000, nan: nan,
                           0x43000000: infinity, 0xC3170000: 0, 0xC3150000: 1},
        "ex2.approx.ftz.f32": {0x00000001: 0x3F800000, 0xC2FE0000: 0, 0xC2FC0000: 0x00800000},
        "lg2.approx.f32": {zero: infinity | minus, infinity: infinity, 0xBF800000: nan, 0x3F800000: 0},
        "rsqrt.approx.f32": {zero: infinity, infinity: 0, 0xBF800000: nan},
        "rcp.approx.ftz.f32": {zero: infinity, minus: infinity | minus, 1: infinity, 0x7F7FFFFF: 0},
        "tanh.approx.f32": {infinity: 0x3F800000, infinity | minus: 0xBF800000, zero: zero},
    }  # fmt: skip
    for opcode, table in tables.items():
        got = evaluate(f"{opcode} %d, %a;", 32, a=(32, list(table)))
        check(F32, got, list(table.values()), list(table))


@pytest.mark.parametrize(
    "opcode",
    ["add.sat.f32", "add.rz.f32", "fma.rn.relu.f32", "fma.rz.f32",
     "mul.ftz.bf16", "add.ftz.bf16x2", "min.ftz.f64", "neg.ftz.bf16", "abs.ftz.bf16x2", "neg.ftz.f64",
     "mul.f8", "neg.foo",
     "max.xorsign.f32", "ex2.f16", "div.approx.f32", "div.full.f64",
     "div.rn.f32.f32", "sin.f32.f32", "add.rn.rn.f32", "abs.b32"],
)  # fmt: skip
def test_unknown_modifiers(opcode: str) -> None:
    n = {"fma": 3, "neg": 1, "abs": 1, "ex2": 1, "sin": 1}.get(opcode.partition(".")[0], 2)
    with pytest.raises(UnknownPTXError, match=f"{opcode}, (?!.* operands)"):
        evaluate(f"{opcode} %d{', %a' * n};", 32, a=(32, [0]))


def test_formats_of_the_model() -> None:
    """The model's own arithmetic, on values that are known."""
    assert (F16.nearest(Fraction(65519)), F16.nearest(Fraction(65520))) == (0x7BFF, F16.infinity)
    assert (BF16.nearest(Fraction(257, 256)), BF16.nearest(Fraction(259, 256))) == (0x3F80, 0x3F82)
    assert (F32.nearest(Fraction(1, 2**150)), F32.nearest(Fraction(3, 2**150))) == (0, 2)
    assert F32.nearest(Fraction(1, 10)) == 0x3DCCCCCD
    assert F32.number(0x3DCCCCCD) == 0.10000000149011612
