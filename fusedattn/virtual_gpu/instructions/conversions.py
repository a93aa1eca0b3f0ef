"""cvt: from one type to another. PTX ISA, "cvt"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.floats import TYPES, flush, to_bf16
from fusedattn.virtual_gpu.instructions.integers import computed
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name
from fusedattn.virtual_gpu.registers import DTYPES, Array, Mask, store

_ROUNDINGS = {"rn": np.rint, "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@builds("cvt")
def _cvt(machine: Machine, x: Instruction) -> Step:
    *modifiers, target, source = x.opcode.split(".")[1:]
    rounding = [word for word in modifiers if word not in ("ftz", "sat", "relu", "satfinite")]
    if len(rounding) > 1 or set(modifiers) & {"satfinite"}:
        raise unknown(x)
    mode = rounding[0] if rounding else ""
    if target in ("bf16x2", "f16x2"):
        return _cvt_pair(machine, x, target, source, mode, relu="relu" in modifiers)
    if "sat" in modifiers or "relu" in modifiers:
        raise unknown(x)
    if target in ("f32", "f64", "f16", "bf16") and source in ("f32", "f64", "f16", "bf16"):
        return _cvt_floats(machine, x, target, source, mode, ftz="ftz" in modifiers)
    if source in ("f32", "f64", "f16", "bf16"):
        return _cvt_to_integer(machine, x, target, source, mode, ftz="ftz" in modifiers)
    if target in ("f32", "f64", "f16", "bf16"):
        if mode != "rn":
            raise unknown(x)
        return _cvt_from_integer(machine, x, target, source)
    if target == "tf32":
        raise unknown(x)
    if modifiers:
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
        if mode not in _ROUNDINGS:
            raise unknown(x)
        whole = _ROUNDINGS[mode]
        return computed(machine, x, lambda a: back(whole(prepare(a))), storage, of)
    narrows = np.dtype(storage).itemsize < np.dtype(of).itemsize
    if (narrows and mode not in ("rn", "rz")) or (mode == "rz" and target != "bf16"):
        raise unknown(x)
    if mode == "rz":
        return computed(machine, x, lambda a: (a.view("u4") >> np.uint32(16)).astype("u2"), storage, of)
    computing = "f4" if target == "bf16" else storage
    return computed(machine, x, lambda a: back(prepare(a).astype(computing)), storage, of)


def _cvt_to_integer(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, ftz: bool) -> Step:
    """Values beyond the target become its largest or smallest number; NaN becomes 0."""
    if mode not in _ROUNDINGS or mode == "rn":
        raise unknown(x)
    kind = DTYPES[target]
    of, load, _ = TYPES[source]
    limits, whole = np.iinfo(kind), _ROUNDINGS[mode]
    wide = _container(machine, x, kind)

    def convert(a: Array) -> Array:
        value = whole((flush(load(a)) if ftz and source == "f32" else load(a)).astype("f8"))
        inside = (value >= float(limits.min)) & (value < float(limits.max) + (kind[1] != "8"))
        exact = np.where(inside, value, 0.0).astype(kind)
        beyond = np.where(value > 0, limits.max, limits.min)
        return np.where(inside | np.isnan(value), exact, beyond.astype(kind)).astype(kind).astype(wide)

    return computed(machine, x, convert, wide, of)


def _cvt_from_integer(machine: Machine, x: Instruction, target: str, source: str) -> Step:
    storage, _, back = TYPES[target]
    computing = "f4" if target == "bf16" else storage
    return computed(machine, x, lambda a: back(a.astype(computing)), storage, DTYPES[source])


def _cvt_pair(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, relu: bool) -> Step:
    """Two float32 in one register: the first operand becomes the high half."""
    if source != "f32" or mode != "rn":
        raise unknown(x)
    out = machine.registers.row(name(x, 0), "u4").view("u2").reshape(-1, 2)
    high, low = (machine.registers.value(name(x, i), "f4") for i in (1, 2))
    convert = to_bf16 if target == "bf16x2" else lambda y: y.astype("f2").view("u2")
    prepare: Callable[..., Any] = (
        (lambda y: np.where(np.isnan(y), y, np.maximum(y, np.float32(0)))) if relu else lambda y: y
    )

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
