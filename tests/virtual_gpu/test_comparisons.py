"""setp for integers, floats and pairs of them, against Python's comparisons."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest

from fusedattn.virtual_gpu.errors import UnknownPTXError
from tests.helpers.float_bits import F16, F32, FORMATS, hostile
from tests.helpers.integer_bits import HOSTILE, columns, valued
from tests.helpers.ptx_values import evaluate

ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
SIGNLESS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def compared(name: str, x: float, y: float) -> bool:
    """A comparison of floats, as the ISA defines it for NaN."""
    nan = math.isnan(x) or math.isnan(y)
    if name in ("num", "nan"):
        return nan == (name == "nan")
    if name in UNORDERED:
        return nan or ORDERED[UNORDERED[name]](x, y)
    return not nan and ORDERED[name](x, y)


@pytest.mark.parametrize("kind", ["s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"])
def test_integers(kind: str) -> None:
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    names = ("eq", "ne") if kind[0] == "b" else tuple(ORDERED)
    for name in names + (tuple(SIGNLESS) if kind[0] == "u" else ()):
        function = ORDERED[SIGNLESS.get(name, name)]
        wanted = [function(valued(x, kind), valued(y, kind)) for x, y in zip(a, b, strict=True)]
        assert evaluate(f"setp.{name}.{kind} %d, %a, %b;", 1, a=(bits, a), b=(bits, b)) == wanted, name


def test_negative_constants() -> None:
    a = [0, 1, 0xFFFF, 0x8000, 0xFEFF, 0xFF00, 0xFF01]
    assert evaluate("setp.gt.u16 %d, %a, -257;", 1, a=(16, a)) == [x > 0xFEFF for x in a]
    assert evaluate("setp.lt.s16 %d, %a, -1;", 1, a=(16, a)) == [0, 0, 0, 1, 1, 1, 1]
    assert evaluate("setp.gt.s64 %d, %a, -1;", 1, a=(64, [0, 2**63, 2**64 - 1, 5])) == [1, 0, 0, 1]


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_floats_and_nan(kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    pairs = [(form.number(x), form.number(y)) for x, y in zip(a, b, strict=True)]
    for name in (*ORDERED, *UNORDERED, "num", "nan"):
        got = evaluate(f"setp.{name}.{kind} %d, %a, %b;", 1, a=(form.bits, a), b=(form.bits, b))
        assert got == [compared(name, x, y) for x, y in pairs], name


def test_denormal_operands_are_zero_with_ftz() -> None:
    a, b = columns(hostile(F32), hostile(F32))
    for name in ("eq", "lt", "neu"):
        got = evaluate(f"setp.{name}.ftz.f32 %d, %a, %b;", 1, a=(32, a), b=(32, b))
        flushed = [(F32.number(F32.flushed(x)), F32.number(F32.flushed(y))) for x, y in zip(a, b, strict=True)]
        assert got == [compared(name, x, y) for x, y in flushed], name


def test_denormal_halves_are_zero_with_ftz() -> None:
    """2^-24 and -2^-24 equal 0, and are not below the smallest normal number's half."""
    a, b = columns(hostile(F16), hostile(F16))
    assert any(0 < F16.magnitude(x) < 1 << F16.mantissa for x in a)
    for name in ("eq", "lt", "gt", "neu"):
        flushed = [(F16.number(F16.flushed(x)), F16.number(F16.flushed(y))) for x, y in zip(a, b, strict=True)]
        wanted = [compared(name, x, y) for x, y in flushed]
        assert evaluate(f"setp.{name}.ftz.f16 %d, %a, %b;", 1, a=(16, a), b=(16, b)) == wanted, name
        packed = [[x << 16 | y for x, y in zip(z, z[::-1], strict=True)] for z in (a, b)]
        got = evaluate(f"setp.{name}.ftz.f16x2 %d|%e, %a, %b;", (1, 1), a=(32, packed[0]), b=(32, packed[1]))
        assert got == list(zip(wanted[::-1], wanted, strict=True)), name


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ne", "neu", "lt", "geu", "nan"])
def test_pairs_set_two_predicates(name: str, kind: str) -> None:
    form = FORMATS[kind]
    a, b = columns(hostile(form), hostile(form))
    others = b[::-1], a[::-1]
    packed = [[high << 16 | low for low, high in zip(x, y, strict=True)] for x, y in zip((a, b), others, strict=True)]
    got = evaluate(f"setp.{name}.{kind}x2 %d|%e, %a, %b;", (1, 1), a=(32, packed[0]), b=(32, packed[1]))
    low = [compared(name, form.number(x), form.number(y)) for x, y in zip(a, b, strict=True)]
    high = [compared(name, form.number(x), form.number(y)) for x, y in zip(*others, strict=True)]
    assert got == list(zip(low, high, strict=True))


def test_the_guard_may_be_a_target() -> None:
    """Both predicates are written for the threads that the guard selects before the instruction."""
    one, two = 0x3C00, 0x4000
    got = evaluate(
        "@%d setp.ne.f16x2 %d|%e, %a, %b;",
        (1, 1),
        d=(1, [1, 1, 0, 0]),
        e=(1, [0, 1, 0, 1]),
        a=(32, [one << 16 | one] * 4),
        b=(32, [two << 16 | one, one << 16 | two] * 2),
    )
    assert got == [(0, 1), (1, 0), (0, 0), (0, 1)]


@pytest.mark.parametrize("combination", ["and", "or", "xor"])
def test_combined_with_a_predicate(combination: str) -> None:
    a, b, c = columns([0, 1, 2**31], [0, 1, 2**32 - 1], [0, 1])
    combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[combination]
    operands = {"a": (32, a), "b": (32, b), "c": (1, c)}
    got = evaluate(f"setp.lt.{combination}.s32 %d, %a, %b, %c;", 1, **operands)
    pairs = [(valued(x, "s32") < valued(y, "s32"), z) for x, y, z in zip(a, b, c, strict=True)]
    assert got == [combine(x, z) for x, z in pairs]
    got = evaluate(f"setp.eq.{combination}.f32 %d, %a, %b, %c;", 1, **operands)
    numbers = [(F32.number(x), F32.number(y), z) for x, y, z in zip(a, b, c, strict=True)]
    assert got == [combine(compared("eq", x, y), z) for x, y, z in numbers]


@pytest.mark.parametrize(
    "opcode",
    [
        "setp.equ.s32",
        "setp.lo.f32",
        "setp.hs.s32",
        "setp.lt.b32",
        "setp.lt.sat.f32",
        "setp.lt.u8",
        "setp.lt.ftz.bf16",
        "setp.lt.ftz.bf16x2",
        "setp.lt.ftz.f64",
        "setp.lt.ftz.ftz.f32",
        "setp.lt.and.or.f32",
    ],
)
def test_unknown_comparisons(opcode: str) -> None:
    with pytest.raises(UnknownPTXError, match=opcode):
        evaluate(f"{opcode} %d, %a, %a;", 1, a=(32, [0]))
