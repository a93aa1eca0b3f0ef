"""Integers, bits and predicates: arithmetic, shifts, selection and moves. PTX ISA, "integer arithmetic", "logic and
shift", "comparison and selection" instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.machine import PARAMETER_WINDOW, Machine
from fusedattn.virtual_gpu.ptx import Instruction, name, vector
from fusedattn.virtual_gpu.registers import DTYPES, Array, Mask, store

_WIDER = {"i2": "i4", "u2": "u4", "i4": "i8", "u4": "u8"}
INTEGERS = ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64")
_BITS = ("b16", "b32", "b64", "pred")


def ufunc(machine: Machine, x: Instruction, function: Any, target: str, *sources: str) -> Step:
    """A step that applies a NumPy ufunc to operands of these dtypes, one element to one."""
    out = machine.registers.row(name(x, 0), target)
    inputs = [machine.registers.value(name(x, 1 + i), dtype) for i, dtype in enumerate(sources)]
    if all(y.ndim == 0 for y in inputs):
        inputs[0] = np.broadcast_to(inputs[0], out.shape)
    if len(inputs) == 1:
        (only,) = inputs
        return lambda mask: function(only, out=out, where=mask)
    a, b = inputs
    return lambda mask: function(a, b, out=out, where=mask)


def computed(
    machine: Machine, x: Instruction, function: Callable[..., Any], target: str, *sources: str, first: int = 1
) -> Step:
    """A step that stores a function of operands of these dtypes."""
    out = machine.registers.row(name(x, 0), target)
    inputs = [machine.registers.value(name(x, first + i), dtype) for i, dtype in enumerate(sources)]

    def step(mask: Mask) -> None:
        store(out, function(*inputs), mask)

    return step


def integer_type(x: Instruction, *before: str) -> str:
    """The type at the end of an opcode of an integer, with nothing between it and the words `before`."""
    *words, kind = x.opcode.split(".")
    if tuple(words[1:]) != before or kind not in INTEGERS:
        raise unknown(x)
    return kind


@builds("add.s16", "add.u16", "add.s32", "add.u32", "add.s64", "add.u64")
def _add(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return ufunc(machine, x, np.add, kind, kind, kind)


@builds("add.s16x2", "add.u16x2")
def _add_x2(machine: Machine, x: Instruction) -> Step:
    def both(a: Array, b: Array) -> Array:
        return (a + b & 0xFFFF) | ((a & 0xFFFF0000) + (b & 0xFFFF0000))

    return computed(machine, x, both, "u4", "u4", "u4")


@builds("sub.s16", "sub.u16", "sub.s32", "sub.u32", "sub.s64", "sub.u64")
def _sub(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return ufunc(machine, x, np.subtract, kind, kind, kind)


@builds("mul.lo", modifiers=True)
def _mul_lo(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "lo")]
    return ufunc(machine, x, np.multiply, kind, kind, kind)


@builds("mul.wide", modifiers=True)
def _mul_wide(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "wide")]
    wide = _WIDER[kind]
    return computed(machine, x, lambda a, b: a.astype(wide) * b.astype(wide), wide, kind, kind)


@builds("mad.lo", modifiers=True)
def _mad_lo(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "lo")]
    return computed(machine, x, lambda a, b, c: a * b + c, kind, kind, kind, kind)


@builds("mad.wide", modifiers=True)
def _mad_wide(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "wide")]
    wide = _WIDER[kind]
    return computed(machine, x, lambda a, b, c: a.astype(wide) * b.astype(wide) + c, wide, kind, kind, wide)


def _high(a: Array, b: Array) -> Array:
    """The high half of the products of equal types."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = _WIDER[a.dtype.str[1:]]
        return (a.astype(wide) * b.astype(wide) >> bits).astype(a.dtype)
    if a.dtype.kind == "i":  # the unsigned product counts each negative factor 2^64 times too often
        high = _high(a.view("u8"), b.view("u8")).view("i8")
        return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    a_low, a_high, b_low, b_high = a & 0xFFFFFFFF, a >> 32, b & 0xFFFFFFFF, b >> 32
    middle = a_high * b_low + (a_low * b_low >> 32)
    other = a_low * b_high + (middle & 0xFFFFFFFF)
    return a_high * b_high + (middle >> 32) + (other >> 32)


@builds("mul.hi", modifiers=True)
def _mul_hi(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "hi")]
    return computed(machine, x, _high, kind, kind, kind)


@builds("mad.hi", modifiers=True)
def _mad_hi(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x, "hi")]
    return computed(machine, x, lambda a, b, c: _high(a, b) + c, kind, kind, kind, kind)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero. Division by zero gives all ones, as on NVIDIA's GPUs."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, 1, b)
    quotient = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient.astype(a.dtype))


@builds("div.s16", "div.u16", "div.s32", "div.u32", "div.s64", "div.u64")
def _div(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return computed(machine, x, _quotient, kind, kind, kind)


@builds("rem.s16", "rem.u16", "rem.s32", "rem.u32", "rem.s64", "rem.u64")
def _rem(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return computed(machine, x, lambda a, b: np.where(b == 0, a, a - _quotient(a, b) * b), kind, kind, kind)


_EXTREMES = {"min": np.minimum, "max": np.maximum}


@builds(*(f"{f}.{kind}" for f in _EXTREMES for kind in INTEGERS if kind[0] != "b"))
def _extreme(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return ufunc(machine, x, _EXTREMES[x.opcode[:3]], kind, kind, kind)


@builds("min.relu.s32", "max.relu.s32")
def _extreme_relu(machine: Machine, x: Instruction) -> Step:
    function = _EXTREMES[x.opcode[:3]]
    return computed(machine, x, lambda a, b: np.maximum(function(a, b), 0), "i4", "i4", "i4")


@builds("neg.s16", "neg.s32", "neg.s64")
def _neg(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return ufunc(machine, x, np.negative, kind, kind)


@builds("abs.s16", "abs.s32", "abs.s64")
def _abs(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return ufunc(machine, x, np.abs, kind, kind)


LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@builds(*(f"{f}.{kind}" for f in LOGIC for kind in _BITS))
def _logic(machine: Machine, x: Instruction) -> Step:
    function, _, kind = x.opcode.partition(".")
    return ufunc(machine, x, LOGIC[function], DTYPES[kind], DTYPES[kind], DTYPES[kind])


@builds(*(f"not.{kind}" for kind in _BITS))
def _not(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[x.opcode.partition(".")[2]]
    return ufunc(machine, x, np.invert, kind, kind)


@builds("shl", "shr", modifiers=True)
def _shift(machine: Machine, x: Instruction) -> Step:
    """The amount is a u32; amounts above the width count as the width."""
    kind = DTYPES[integer_type(x)]
    bits, left = 8 * np.dtype(kind).itemsize, x.opcode.startswith("shl")
    function = np.left_shift if left else np.right_shift
    out = machine.registers.row(name(x, 0), kind)
    value, amount = machine.registers.value(name(x, 1), kind), machine.registers.value(name(x, 2), "u4")
    if amount.ndim == 0 and amount < bits and value.ndim:
        fixed = amount.astype(kind)
        return lambda mask: function(value, fixed, out=out, where=mask)
    fills = kind[0] == "i" and not left  # with the sign

    def step(mask: Mask) -> None:
        shifted = function(value, np.minimum(amount, bits - 1).astype(kind))
        store(out, shifted if fills else np.where(amount < bits, shifted, 0), mask)

    return step


@builds("shf.l.wrap.b32", "shf.r.wrap.b32", "shf.l.clamp.b32", "shf.r.clamp.b32")
def _funnel(machine: Machine, x: Instruction) -> Step:
    """Shift the 64 bits of (second, first) and keep the high half (left) or the low half (right)."""
    _, side, mode, _ = x.opcode.split(".")

    def shifted(low: Array, high: Array, amount: Array) -> Array:
        n = (amount & 31 if mode == "wrap" else np.minimum(amount, 32)).astype("u8")
        both = high.astype("u8") << np.uint64(32) | low
        return ((both << n) >> np.uint64(32) if side == "l" else both >> n).astype("u4")

    return computed(machine, x, shifted, "u4", "u4", "u4", "u4")


@builds("bfe", modifiers=True)
def _bit_field(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    bits = 8 * np.dtype(kind).itemsize
    if kind[0] not in "iu" or bits < 32:
        raise unknown(x)

    def extract(value: Array, first: Array, length: Array) -> Array:
        first, length = first & 0xFF, length & 0xFF
        empty = (length == 0) | (first >= bits) & (kind[0] == "u")  # beyond its end a signed number has its sign
        first, end = np.minimum(first, bits - 1), np.minimum(first + length, bits)
        # Move the field to the top, then down: the second shift fills with the sign if there is one.
        up, down = np.where(empty, 0, (bits - end, bits - end + first)).astype(kind)
        return np.where(empty, 0, value << up >> down).astype(kind)

    return computed(machine, x, extract, kind, kind, "u4", "u4")


@builds("bfi.b32", "bfi.b64")
def _bit_field_insert(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    bits = 8 * np.dtype(kind).itemsize

    def insert(value: Array, into: Array, first: Array, length: Array) -> Array:
        first, length = (np.minimum(y & 0xFF, bits).astype("u8") for y in (first, length))
        ones = np.where(length >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(length, 63)) - np.uint64(1))
        field = np.where(first >= bits, 0, ones << np.minimum(first, 63)).astype(kind)
        moved = (value.astype("u8") << np.minimum(first, 63)).astype(kind)
        return into & ~field | moved & field

    return computed(machine, x, insert, kind, kind, kind, "u4", "u4")


@builds("lop3.b32")
def _lop3(machine: Machine, x: Instruction) -> Step:
    """Any function of three bits, by its table of truth: bit ``4 a + 2 b + c``."""
    table = int(name(x, 4).rstrip("U"), 0)

    def function(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), dtype="u4")
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    return computed(machine, x, function, "u4", "u4", "u4", "u4")


@builds("prmt.b32")
def _permute_bytes(machine: Machine, x: Instruction) -> Step:
    """Four bytes of the eight of (b, a); a selector of 8 and more spreads the sign of its byte."""
    source_a, source_b = (machine.registers.value(name(x, i), "u4") for i in (1, 2))
    selector = machine.registers.value(name(x, 3), "u4")
    out = machine.registers.row(name(x, 0), "u4")

    def chosen(byte: Array | int, a: Array, b: Array) -> Array:
        both = b.astype("u8") << np.uint64(32) | a
        return both >> (np.uint64(8) * (byte & 7)).astype("u8") & np.uint64(0xFF)

    def step(mask: Mask) -> None:
        result = np.zeros(out.shape, dtype="u8")
        for i in range(4):
            nibble = (selector >> (4 * i) & 0xF).astype("u8")
            byte = chosen(nibble, source_a, source_b)
            byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype("u8")
            result |= byte << np.uint64(8 * i)
        store(out, result.astype("u4"), mask)

    return step


@builds("popc.b32", "popc.b64")
def _popc(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    return computed(machine, x, np.bitwise_count, "u4", kind)


@builds("clz.b32", "clz.b64")
def _clz(machine: Machine, x: Instruction) -> Step:
    kind = DTYPES[integer_type(x)]
    bits = 8 * np.dtype(kind).itemsize

    def leading_zeros(a: Array) -> Array:
        spread = a.copy()
        for n in (1, 2, 4, 8, 16, 32):
            if n < bits:
                spread |= spread >> np.array(n, dtype=kind)
        return bits - np.bitwise_count(spread)

    return computed(machine, x, leading_zeros, "u4", kind)


@builds("selp", modifiers=True)
def _selp(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    if len(words) != 2 or words[1] not in (*INTEGERS, "f32", "f64"):
        raise unknown(x)
    kind = f"u{np.dtype(DTYPES[words[1]]).itemsize}"
    return computed(machine, x, lambda a, b, chosen: np.where(chosen, a, b), kind, kind, kind, "?")


@builds("mov", modifiers=True)
def _mov(machine: Machine, x: Instruction) -> Step:
    """Copies, and the packing of several registers into one and back."""
    words = x.opcode.split(".")
    if len(words) != 2:
        raise unknown(x)
    registers, kind = machine.registers, DTYPES[words[1]]
    target, source = x.operand(0), x.operand(1)
    if isinstance(target, str) and isinstance(source, str):
        kind = kind if kind == "?" else f"u{np.dtype(kind).itemsize}"
        out, value = registers.row(target, kind), registers.value(source, kind)
        return lambda mask: store(out, value, mask)
    parts = vector(x, 1 if isinstance(target, str) else 0)
    part = f"u{np.dtype(kind).itemsize // len(parts)}"
    if isinstance(target, str):
        packed = registers.row(target, kind).view(part).reshape(-1, len(parts))
        values = [registers.value(y, part) for y in parts]

        def pack(mask: Mask) -> None:
            for i, value in enumerate(values):
                store(packed[:, i], value, mask)

        return pack
    whole = registers.row(name(x, 1), kind).view(part).reshape(-1, len(parts))
    outs = [(i, registers.row(y, part)) for i, y in enumerate(parts) if y != "_"]

    def unpack(mask: Mask) -> None:
        for i, out in outs:
            store(out, whole[:, i], mask)

    return unpack


@builds("cvta.param.u64", "cvta.to.global.u64", "cvta.global.u64")
def _cvta(machine: Machine, x: Instruction) -> Step:
    """Global addresses are generic already; those of parameters have a window of their own."""
    window = np.uint64(PARAMETER_WINDOW if x.opcode == "cvta.param.u64" else 0)
    return computed(machine, x, lambda a: a + window, "u8", "u8")
