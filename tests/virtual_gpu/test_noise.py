"""Errors of approximate instructions: as large as the ISA allows, no larger, and decided by the operands."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest

from tests.helpers.float_bits import F32, check, hostile
from tests.helpers.ptx_values import evaluate


def ulp(y: float) -> float:
    return 2.0 ** (max(math.frexp(y)[1] - 1, F32.lowest) - 23)


# function -> (of floats, the largest error of result y for operand x, the range of operands)
FUNCTIONS: dict[str, tuple[Callable[[float], float], Callable[[float, float], float], tuple[float, float]]] = {
    "ex2": (lambda x: 2.0**x, lambda y, x: 2 * ulp(y), (-140, 127)),
    "rcp": (lambda x: 1 / x, lambda y, x: ulp(y), (-1000, 1000)),
    "sqrt": (math.sqrt, lambda y, x: 2**-23 * y, (1e-30, 1e30)),
    "rsqrt": (lambda x: 1 / math.sqrt(x), lambda y, x: 2**-22.9 * y, (1e-30, 1e30)),
    "tanh": (math.tanh, lambda y, x: 2**-11 * abs(y), (-5, 5)),
    "sin": (math.sin, lambda y, x: 2**-20.5 if abs(x) <= 2 * math.pi else 2**-14.7, (-300, 300)),
    "cos": (math.cos, lambda y, x: 2**-20.5 if abs(x) <= 2 * math.pi else 2**-14.7, (-6.2, 6.2)),
    "lg2": (math.log2, lambda y, x: 2**-22 * (1 if 0.5 < x < 2 else abs(y)), (0.1, 4)),
}


def noisy(code: str, seed: int, a: Sequence[int], b: Sequence[int]) -> list[int]:
    return evaluate(code, 32, {"noise": True, "seed": seed}, a=(32, a), b=(32, b))


def numbers(low: float, high: float, n: int = 1500) -> list[int]:
    draw = random.Random(0)
    return [F32.nearest(Fraction(draw.uniform(low, high))) for _ in range(n)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_reach_their_bounds(name: str) -> None:
    function, bound, ends = FUNCTIONS[name]
    a = numbers(*ends)
    parts = []
    for x, got in zip(a, noisy(f"{name}.approx.f32 %d, %a;", 3, a, a), strict=True):
        value = F32.number(x)
        exact = function(value)
        half = ulp(exact) / 2  # of rounding: a correctly rounded result is allowed in any case
        error = (F32.number(got) - exact) / max(bound(exact, value), half)
        parts.append(error)
    assert 0.7 < max(parts) <= 1 + 1e-6  # Python's own functions err by less
    assert -0.7 > min(parts) >= -1 - 1e-6


def test_quotients_err_by_two_units() -> None:
    a, b = numbers(-100, 100), numbers(-3, 3)[::-1]
    exact = [F32.number(x) / F32.number(y) for x, y in zip(a, b, strict=True)]
    got = noisy("div.full.f32 %d, %a, %b;", 1, a, b)
    units = [(F32.number(z) - y) / ulp(y) for y, z in zip(exact, got, strict=True)]
    assert 1.7 < max(units) <= 2
    assert -1.7 > min(units) >= -2
    assert noisy("div.rn.f32 %d, %a, %b;", 1, a, b) == evaluate("div.full.f32 %d, %a, %b;", 32, a=(32, a), b=(32, b))


def test_exact_instructions_do_not_err() -> None:
    a = numbers(0.1, 100)
    for code in ("sqrt.rn.f32 %d, %a;", "rcp.rn.f32 %d, %a;", "add.f32 %d, %a, %b;", "fma.rn.f32 %d, %a, %b, %a;"):
        assert noisy(code, 1, a, a) == evaluate(code, 32, a=(32, a), b=(32, a))


def test_operands_and_the_seed_decide() -> None:
    a = numbers(-5, 5, 400)
    code = "ex2.approx.ftz.f32 %d, %a;"
    first = noisy(code, 1, a, a)
    assert noisy(code, 1, a[::-1], a) == first[::-1]
    assert noisy(code, 2, a, a) != first
    exact = evaluate(code, 32, a=(32, a))
    assert sum(x != y for x, y in zip(first, exact, strict=True)) > 200


def test_results_that_the_isa_states_are_exact() -> None:
    """Those for operands that are zero, infinite or NaN."""
    a = [x for x in hostile(F32) if F32.magnitude(x) >= F32.infinity or F32.magnitude(x) == 0]
    for name in FUNCTIONS:
        code = f"{name}.approx.f32 %d, %a;"
        check(F32, noisy(code, 1, a, a), evaluate(code, 32, a=(32, a)), a)
    x, y = [x for x in a for _ in a], [y for _ in a for y in a]
    got = noisy("div.full.f32 %d, %a, %b;", 1, x, y)
    check(F32, got, evaluate("div.full.f32 %d, %a, %b;", 32, a=(32, x), b=(32, y)), x, y)


def test_small_powers_of_two_stay_above_zero() -> None:
    a = numbers(-160, -140)
    assert not any(x & F32.sign for x in noisy("ex2.approx.f32 %d, %a;", 1, a, a))
    assert set(noisy("ex2.approx.ftz.f32 %d, %a;", 1, a, a)) == {0}
