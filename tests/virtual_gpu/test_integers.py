"""Arithmetic of integers, bits and predicates, against Python's integers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.helpers.integer_bits import HOSTILE, columns, signed, valued
from tests.helpers.ptx_values import evaluate


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}
KINDS = ("s16", "u16", "s32", "u32", "s64", "u64")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_results_are_cut_to_the_width(name: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    got = evaluate(f"{name}.{kind} %d, %a, %b;", bits, a=(bits, a), b=(bits, b))
    assert got == [BINARY[name](valued(x, kind), valued(y, kind)) % (1 << bits) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", ["s16x2", "u16x2"])
def test_sums_of_halves(kind: str) -> None:
    """Nothing is carried from one to the other."""
    a, b = columns(HOSTILE[32], HOSTILE[32])
    got = evaluate(f"add.{kind} %d, %a, %b;", 32, a=(32, a), b=(32, b))
    halves = [((x + y) % 2**16, ((x >> 16) + (y >> 16)) % 2**16) for x, y in zip(a, b, strict=True)]
    assert got == [low | high << 16 for low, high in halves]


@pytest.mark.parametrize("kind", KINDS)
def test_high_half_of_a_product(kind: str) -> None:
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    got = evaluate(f"mul.hi.{kind} %d, %a, %b;", bits, a=(bits, a), b=(bits, b))
    assert got == [(valued(x, kind) * valued(y, kind) >> bits) % (1 << bits) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_division_is_towards_zero(kind: str) -> None:
    """A quotient by zero is unspecified; here it is all ones, and the remainder is the dividend."""
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    pairs = [(valued(x, kind), valued(y, kind)) for x, y in zip(a, b, strict=True)]
    quotients = [towards_zero(x, y) if y else -1 for x, y in pairs]
    operands = {"a": (bits, a), "b": (bits, b)}
    assert evaluate(f"div.{kind} %d, %a, %b;", bits, **operands) == [q % (1 << bits) for q in quotients]
    remainders = [(x - q * y) % (1 << bits) for (x, y), q in zip(pairs, quotients, strict=True)]
    assert evaluate(f"rem.{kind} %d, %a, %b;", bits, **operands) == remainders


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    products = [valued(x, kind) * valued(y, kind) for x, y in zip(a, b, strict=True)]
    assert evaluate(f"mul.wide.{kind} %d, %a, %b;", 2 * bits, a=(bits, a), b=(bits, b)) == [
        p % (1 << 2 * bits) for p in products
    ]
    c = [HOSTILE[2 * bits][i % 17] for i in range(len(a))]
    got = evaluate(f"mad.wide.{kind} %d, %a, %b, %c;", 2 * bits, a=(bits, a), b=(bits, b), c=(2 * bits, c))
    assert got == [(p + z) % (1 << 2 * bits) for p, z in zip(products, c, strict=True)]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_products_and_a_sum(half: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = columns(HOSTILE[bits], HOSTILE[bits])
    c = [HOSTILE[bits][i % 17] for i in range(len(a))]
    got = evaluate(f"mad.{half}.{kind} %d, %a, %b, %c;", bits, a=(bits, a), b=(bits, b), c=(bits, c))
    shift = bits if half == "hi" else 0
    assert got == [
        ((valued(x, kind) * valued(y, kind) >> shift) + z) % (1 << bits) for x, y, z in zip(a, b, c, strict=True)
    ]


@pytest.mark.parametrize("name", ["min", "max"])
def test_negative_extremes_become_zero_with_relu(name: str) -> None:
    a, b = columns(HOSTILE[32], HOSTILE[32])
    got = evaluate(f"{name}.relu.s32 %d, %a, %b;", 32, a=(32, a), b=(32, b))
    assert got == [max(BINARY[name](signed(x, 32), signed(y, 32)), 0) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_negation_and_absolute_value(bits: int) -> None:
    a = HOSTILE[bits]
    assert evaluate(f"neg.s{bits} %d, %a;", bits, a=(bits, a)) == [-x % (1 << bits) for x in a]
    assert evaluate(f"abs.s{bits} %d, %a;", bits, a=(bits, a)) == [abs(signed(x, bits)) for x in a]


LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("bits", [1, 16, 32, 64])
def test_logic(bits: int) -> None:
    kind, values = ("pred", [0, 1]) if bits == 1 else (f"b{bits}", HOSTILE[bits])
    a, b = columns(values, values)
    for name, function in LOGIC.items():
        got = evaluate(f"{name}.{kind} %d, %a, %b;", bits, a=(bits, a), b=(bits, b))
        assert got == [function(x, y) for x, y in zip(a, b, strict=True)], name
    assert evaluate(f"not.{kind} %d, %a;", bits, a=(bits, a)) == [x ^ (1 << bits) - 1 for x in a]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u16", "u32", "u64"])
def test_shifts_by_more_than_the_width(kind: str) -> None:
    bits = int(kind[1:])
    amounts = [0, 1, 5, bits - 1, bits, bits + 1, 2 * bits, 255, 2**31, 2**32 - 1]
    a, b = columns(HOSTILE[bits], amounts)
    if kind[0] == "b":
        wanted = [(x << y) % (1 << bits) if y < bits else 0 for x, y in zip(a, b, strict=True)]
        assert evaluate(f"shl.{kind} %d, %a, %b;", bits, a=(bits, a), b=(32, b)) == wanted
    wanted = [(valued(x, kind) >> min(y, bits)) % (1 << bits) for x, y in zip(a, b, strict=True)]
    assert evaluate(f"shr.{kind} %d, %a, %b;", bits, a=(bits, a), b=(32, b)) == wanted
    for amount in amounts:
        wanted = [(valued(x, kind) >> min(amount, bits)) % (1 << bits) for x in HOSTILE[bits]]
        assert evaluate(f"shr.{kind} %d, %a, {amount};", bits, a=(bits, HOSTILE[bits])) == wanted


def test_constants_shifted_by_registers() -> None:
    amounts = [0, 1, 31, 32, 33, 2**32 - 1]
    assert evaluate("shl.b32 %d, 5, %a;", 32, a=(32, amounts)) == [5, 10, 2**31, 0, 0, 0]
    assert evaluate("shr.s32 %d, -8, %a;", 32, a=(32, amounts)) == [2**32 - 8, 2**32 - 4] + [2**32 - 1] * 4


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode: str) -> None:
    a, b, c = columns(HOSTILE[32][:9], HOSTILE[32][:9], [0, 1, 31, 32, 33, 63, 64, 2**32 - 1])
    n = [amount % 32 if mode == "wrap" else min(amount, 32) for amount in c]
    operands = {"a": (32, a), "b": (32, b), "c": (32, c)}
    both = [high << 32 | low for low, high in zip(a, b, strict=True)]
    left = [(x << k >> 32) % 2**32 for x, k in zip(both, n, strict=True)]
    assert evaluate(f"shf.l.{mode}.b32 %d, %a, %b, %c;", 32, **operands) == left
    assert evaluate(f"shf.r.{mode}.b32 %d, %a, %b, %c;", 32, **operands) == [
        (x >> k) % 2**32 for x, k in zip(both, n, strict=True)
    ]


def extracted(a: int, first: int, length: int, kind: str) -> int:
    """bfe, bit by bit as the ISA has it."""
    top = int(kind[1:]) - 1
    first, length = first & 0xFF, length & 0xFF
    sign = 0 if kind[0] == "u" or not length else a >> min(first + length - 1, top) & 1
    bits = [a >> first + i & 1 if i < length and first + i <= top else sign for i in range(top + 1)]
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_bit_fields(kind: str) -> None:
    bits = int(kind[1:])
    places = [0, 1, 4, bits - 1, bits, bits + 1, 200, 255, 256, 2**32 - 1]
    a, first, length = columns(HOSTILE[bits][4:14], places, places)
    got = evaluate(f"bfe.{kind} %d, %a, %b, %c;", bits, a=(bits, a), b=(32, first), c=(32, length))
    assert got == [extracted(*x, kind) for x in zip(a, first, length, strict=True)]
    for at, n in [(5, 3), (1, 31), (bits - 1, 1), (bits, 1), (3, 0), (bits - 2, 9)]:
        wanted = [extracted(x, at, n, kind) for x in HOSTILE[bits]]
        assert evaluate(f"bfe.{kind} %d, %a, {at}, {n};", bits, a=(bits, HOSTILE[bits])) == wanted


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_inserted(bits: int) -> None:
    places = [0, 1, 4, bits - 1, bits, 200, 255, 256, 2**32 - 1]
    a, into, first, length = columns(HOSTILE[bits][5:9], HOSTILE[bits][6:13:2], places, places)
    operands = {"a": (bits, a), "b": (bits, into), "c": (32, first), "f": (32, length)}
    got = evaluate(f"bfi.b{bits} %d, %a, %b, %c, %f;", bits, **operands)
    wanted = []
    for x, y, at, n in zip(a, into, first, length, strict=True):
        for i in range(n & 0xFF):
            if (at & 0xFF) + i < bits:
                place = (at & 0xFF) + i
                y = y & ~(1 << place) | (x >> i & 1) << place
        wanted.append(y)
    assert got == wanted


def permuted(a: int, b: int, selector: int) -> int:
    both = (b << 32 | a).to_bytes(8, "little")
    out = bytearray()
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both[nibble & 7]
        out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(out, "little")


def test_permuted_bytes() -> None:
    draw = random.Random(0)
    a, b, c = ([draw.getrandbits(32) for _ in range(400)] for _ in range(3))
    operands = {"a": (32, a), "b": (32, b)}
    got = evaluate("prmt.b32 %d, %a, %b, %c;", 32, **operands, c=(32, c))
    assert got == [permuted(*x) for x in zip(a, b, c, strict=True)]
    for selector in (0x5410, 0x7632, 0x1054, 0xBA98, 0xFFFF, 0x0008, 0x3340):
        wanted = [permuted(x, y, selector) for x, y in zip(a, b, strict=True)]
        assert evaluate(f"prmt.b32 %d, %a, %b, {selector:#x};", 32, **operands) == wanted
    assert evaluate("prmt.b32 %d, %a, 0, %c;", 32, a=(32, a), c=(32, c)) == [
        permuted(x, 0, z) for x, z in zip(a, c, strict=True)
    ]


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0x01, 0xFF])
def test_tables_of_three_bits(table: int) -> None:
    draw = random.Random(table)
    a, b, c = ([draw.getrandbits(32) for _ in range(64)] for _ in range(3))
    got = evaluate(f"lop3.b32 %d, %a, %b, %c, {table:#x};", 32, a=(32, a), b=(32, b), c=(32, c))
    assert got == [
        sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))
        for x, y, z in zip(a, b, c, strict=True)
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_of_bits(bits: int) -> None:
    a = HOSTILE[bits] + [1 << i for i in range(bits)]
    assert evaluate(f"popc.b{bits} %d, %a;", 32, a=(bits, a)) == [x.bit_count() for x in a]
    assert evaluate(f"clz.b{bits} %d, %a;", 32, a=(bits, a)) == [bits - x.bit_length() for x in a]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "f32", "s32", "u64"])
def test_selection(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = columns(HOSTILE[bits], HOSTILE[bits][:5], [0, 1])
    got = evaluate(f"selp.{kind} %d, %a, %b, %c;", bits, a=(bits, a), b=(bits, b), c=(1, c))
    assert got == [x if z else y for x, y, z in zip(a, b, c, strict=True)]
    assert evaluate(f"selp.b{bits} %d, -1, 7, %c;", bits, c=(1, [0, 1])) == [7, (1 << bits) - 1]


@pytest.mark.parametrize(("kind", "bits"), [("u16", 16), ("b32", 32), ("u32", 32), ("f32", 32), ("u64", 64)])
def test_copies(kind: str, bits: int) -> None:
    assert evaluate(f"mov.{kind} %d, %a;", bits, a=(bits, HOSTILE[bits])) == HOSTILE[bits]


def test_constants() -> None:
    one = (32, [0])
    assert evaluate("mov.b32 %d, -1;", 32, a=one) == [2**32 - 1]
    assert evaluate("mov.u32 %d, 0x7FU;", 32, a=one) == [127]
    assert evaluate("mov.b32 %d, 2139095040;", 32, a=one) == [0x7F800000]
    assert evaluate("mov.f32 %d, 0fFF800000;", 32, a=one) == [0xFF800000]
    assert evaluate("mov.b32 %d, 0f3f800000;", 32, a=one) == [0x3F800000]
    assert evaluate("mov.f64 %d, 0d3FF0000000000001;", 64, a=one) == [0x3FF0000000000001]
    assert evaluate("mov.b16 %d, -2;", 16, a=one) == [0xFFFE]
    assert evaluate("mov.pred %d, -1;", 1, a=one) == [1]
    assert evaluate("mov.pred %d, 0;", 1, a=one) == [0]


def test_packing_of_registers() -> None:
    low, high = [0x1234, 0xFFFF, 0x8000], [0xABCD, 0, 0x7FFF]
    assert evaluate("mov.b32 %d, {%a, %b};", 32, a=(16, low), b=(16, high)) == [
        y << 16 | x for x, y in zip(low, high, strict=True)
    ]
    whole = [0x89ABCDEF01234567, 2**63, 2**32 - 1]
    halves = [(x % 2**32, x >> 32) for x in whole]
    assert evaluate("mov.b64 {%d, %e}, %a;", (32, 32), a=(64, whole)) == halves
    assert evaluate("mov.b64 {_, %d}, %a;", 32, a=(64, whole)) == [y for _, y in halves]
    assert evaluate("mov.b64 {%d, _}, %a;", 32, a=(64, whole)) == [x for x, _ in halves]
    code = ".reg .b16 %x<4>; mov.b64 {%x0, %x1, %x2, %x3}, %a; mov.b64 %d, {%x3, %x2, %x1, %x0};"
    words = [[x >> 16 * i & 0xFFFF for i in range(4)] for x in whole]
    assert evaluate(code, 64, a=(64, whole)) == [w[0] << 48 | w[1] << 32 | w[2] << 16 | w[3] for w in words]
