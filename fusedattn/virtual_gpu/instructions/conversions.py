"""cvt: from one type to another. PTX ISA, "cvt"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import KernelError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.floats import TYPES, flush, from_bf16, relu, to_bf16, to_f16
from fusedattn.virtual_gpu.instructions.integers import computed
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name
from fusedattn.virtual_gpu.registers import DTYPES, Array, Mask, store

_WHOLE: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@builds("cvt", modifiers=True)
def _cvt(machine: Machine, x: Instruction) -> Step:
    *modifiers, target, source = x.opcode.split(".")[1:]
    rounding = [word for word in modifiers if word not in ("ftz", "relu")]
    if len(rounding) > 1 or len(set(modifiers)) != len(modifiers):
        raise unknown(x)
    mode, ftz, clamped = "".join(rounding), "ftz" in modifiers, "relu" in modifiers
    if target in ("bf16x2", "f16x2"):
        return _cvt_pair(machine, x, target, source, mode, clamped=clamped)
    if clamped or (ftz and "f32" not in (target, source)):
        raise unknown(x)
    if target in TYPES and source in TYPES:
        return _cvt_floats(machine, x, target, source, mode, ftz=ftz)
    if source in TYPES:
        return _cvt_to_integer(machine, x, target, source, mode, ftz=ftz)
    if target in TYPES:
        return _cvt_from_integer(machine, x, target, source, mode)
    if modifiers or "b" in target + source or "pred" in (target, source):
        raise unknown(x)
    kind, of = DTYPES[target], DTYPES[source]
    wide = _container(machine, x, kind)
    return computed(machine, x, lambda a: a.astype(kind).astype(wide), wide, of)


def _container(machine: Machine, x: Instruction, kind: str) -> str:
    """The dtype of a target register that is wider than the value, which is extended by its sign or by zeros."""
    bits = machine.registers.bits(name(x, 0))
    return f"{kind[0]}{max(bits // 8, np.dtype(kind).itemsize)}"


def _cvt_floats(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, ftz: bool) -> Step:
    storage, _, back = TYPES[target]
    of, load, _ = TYPES[source]
    prepare: Callable[..., Any] = (lambda y: flush(load(y))) if ftz and source == "f32" else load
    if target == source:  # rounding to whole numbers, in the same type
        whole = _WHOLE[mode]
        return computed(machine, x, lambda a: back(whole(prepare(a))), storage, of)
    if (target, source, mode) == ("bf16", "f32", "rz"):
        return computed(machine, x, lambda a: _cut_off(prepare(a)), storage, of)
    if (target, source, mode, ftz) == ("f16", "f32", "rz", False):
        return computed(machine, x, _cut_to_f16, storage, of)
    widens = np.dtype(storage).itemsize > np.dtype(of).itemsize
    if mode != ("" if widens else "rn") or (target, source) == ("bf16", "f64"):
        raise unknown(x)
    computing = "f4" if target == "bf16" else storage
    if ftz and target == "f32":
        return computed(machine, x, lambda a: flush(load(a).astype("f4")), storage, of)
    if target == "f16":
        return computed(machine, x, lambda a: to_f16(prepare(a)), storage, of)
    return computed(machine, x, lambda a: back(prepare(a).astype(computing)), storage, of)


def _cut_off(x: Array) -> Array:
    """float32 as bfloat16, rounded towards zero."""
    return np.where(np.isnan(x), 0x7FFF, x.view("u4") >> np.uint32(16)).astype("u2")


def _cut_to_f16(x: Array) -> Array:
    """float32 as float16, rounded towards zero."""
    half = to_f16(x)
    return np.where(np.abs(half.astype("f4")) > np.abs(x), np.nextafter(half, np.float16(0)), half)


def _cvt_to_integer(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, ftz: bool) -> Step:
    """Values beyond the target become its largest or smallest number.

    NaN becomes 0, or the number with the highest bit alone if one of the types is a long one.
    """
    kind, whole = np.dtype(DTYPES[target]), _WHOLE[mode]
    of, load, _ = TYPES[source]
    largest, smallest = (np.array(n, dtype=kind) for n in (np.iinfo(kind).max, np.iinfo(kind).min))
    highest = 1 << 8 * kind.itemsize - 1 if source == "f64" or kind.itemsize == 8 else 0
    of_nan = np.array(highest, dtype=f"u{kind.itemsize}").view(kind)
    wide = _container(machine, x, DTYPES[target])

    def convert(a: Array) -> Array:
        value = whole((flush(load(a)) if ftz and source == "f32" else load(a)).astype("f8"))
        inside = (value >= float(smallest)) & (value < float(int(largest) + 1))
        beyond = np.where(value > 0, largest, np.where(value < 0, smallest, of_nan))
        return np.where(inside, np.where(inside, value, 0.0).astype(kind), beyond).astype(wide)

    return computed(machine, x, convert, wide, of)


def _cvt_from_integer(machine: Machine, x: Instruction, target: str, source: str, mode: str) -> Step:
    storage, _, back = TYPES[target]
    if mode != "rn" or target == "bf16" or source[0] not in "su":
        raise unknown(x)
    return computed(machine, x, lambda a: back(a.astype(storage)), storage, DTYPES[source])


def _cvt_pair(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, clamped: bool) -> Step:
    """Two float32 in one register: the first operand becomes the high half."""
    if source != "f32" or mode != "rn":
        raise unknown(x)
    out = machine.registers.row(name(x, 0), "u4").view("u2").reshape(-1, 2)
    high, low = (machine.registers.value(name(x, i), "f4") for i in (1, 2))
    convert = to_bf16 if target == "bf16x2" else lambda y: to_f16(y).view("u2")
    prepare: Callable[[Array], Array] = relu if clamped else lambda y: y

    def step(mask: Mask) -> None:
        halves = convert(prepare(low)), convert(prepare(high))
        for i, half in enumerate(halves):
            store(out[:, i], half, mask)

    return step


@builds("cvt.rna.tf32.f32", "cvt.rn.tf32.f32")
def _cvt_tf32(machine: Machine, x: Instruction) -> Step:
    """Ten bits of mantissa: ties away from zero (rna), or to even (rn)."""
    away = x.opcode.startswith("cvt.rna")

    def convert(bits: Array) -> Array:
        half = np.uint32(0x1000) if away else np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
        special = bits & np.uint32(0x7F800000) == np.uint32(0x7F800000)
        return np.where(special, bits, bits + half & np.uint32(0xFFFFE000))

    return computed(machine, x, convert, "u4", "u4")


@builds("cvt.bf16.f16")
def _cvt_exactly(machine: Machine, x: Instruction) -> Step:
    """Without a mode, it is not told how numbers are rounded: none must need it. e4m3 in float16 does not."""
    out, a = machine.registers.row(name(x, 0), "u2"), machine.registers.value(name(x, 1), "f2")

    def step(mask: Mask) -> None:
        value = a.astype("f4")
        bits = to_bf16(value)
        rounded = (from_bf16(bits) != value) & ~np.isnan(value) & mask
        if rounded.any():
            raise KernelError(
                f"{x.opcode}, at {x.place}: a number that bfloat16 does not have, and no mode of rounding"
            )
        store(out, bits, mask)

    return step
