"""Floating-point numbers of 8 bits: their values, and cvt to and from them. PTX ISA, "cvt" and "alternate formats".

e4m3 has no infinity: its largest exponent has numbers up to 448, and NaN where all bits but the sign are set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds
from fusedattn.virtual_gpu.instructions.floats import relu, to_f16
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name
from fusedattn.virtual_gpu.registers import Array, Mask, store

_NAN = 0x7F  # the canonical one of both formats


@dataclass(frozen=True)
class _Format:
    values: Array  # of each code, ``(256,)`` float32
    bounds: Array  # the largest float32 that becomes a code less than 1, 2, ... up to the largest number


def _format(exponent: int, mantissa: int, largest: int) -> _Format:
    """`largest` is the code of the largest number; those above it are NaN, but for infinity if there is one."""
    code = np.arange(128)
    field, rest = np.divmod(code, 1 << mantissa)
    bias = (1 << exponent - 1) - 1
    values = np.ldexp(rest + ((field > 0) << mantissa), np.maximum(field, 1) - bias - mantissa).astype("f4")
    middles = (values[:largest] + values[1 : largest + 1]) / 2
    # A tie becomes the even code, which for every other one is the upper.
    bounds = np.where(code[:largest] % 2, np.nextafter(middles, np.float32(0)), middles)
    values[largest + 1 :] = np.nan
    if largest % 4 == 3:  # the mantissa is full, so infinity follows
        values[largest + 1] = np.inf
    return _Format(np.concatenate([values, -values]), bounds)


_FORMATS = {"e4m3": _format(4, 3, 0x7E), "e5m2": _format(5, 2, 0x7B)}


def from_float8(codes: Array, kind: str) -> Array:
    """float32 values of codes."""
    return _FORMATS[kind].values[codes]


def to_float8(x: Array, kind: str) -> Array:
    """float32 rounded to nearest, ties to even; what is too large becomes the largest number."""
    code = np.searchsorted(_FORMATS[kind].bounds, np.abs(x)).astype("u1")
    return np.where(np.isnan(x), np.uint8(_NAN), code | np.signbit(x).astype("u1") << np.uint8(7))


@builds(*(f"cvt.rn.satfinite{clamp}.{kind}x2.{source}"
          for clamp in ("", ".relu") for kind in _FORMATS for source in ("f32", "f16x2")))  # fmt: skip
def _narrow(machine: Machine, x: Instruction) -> Step:
    """Two numbers in 16 bits: the first operand, or the high half of the only one, becomes the high byte."""
    *_, target, source = x.opcode.split(".")
    registers, clamped = machine.registers, ".relu." in x.opcode
    out = registers.row(name(x, 0), "u2").view("u1").reshape(-1, 2)
    if source == "f32":
        operands = [registers.value(name(x, i), "f4") for i in (2, 1)]
    else:
        halves = registers.row(name(x, 1), "u4").view("f2").reshape(-1, 2)
        operands = [halves[:, 0], halves[:, 1]]

    def step(mask: Mask) -> None:
        found = [to_float8((relu(y) if clamped else y).astype("f4"), target[:4]) for y in operands]
        for i, code in enumerate(found):
            store(out[:, i], code, mask)

    return step


@builds(*(f"cvt.rn{clamp}.f16x2.{kind}x2" for clamp in ("", ".relu") for kind in _FORMATS))
def _widen(machine: Machine, x: Instruction) -> Step:
    """The opposite, which is exact."""
    kind, clamped = x.opcode.split(".")[-1][:4], ".relu." in x.opcode
    out = machine.registers.row(name(x, 0), "u4").view("f2").reshape(-1, 2)
    codes = machine.registers.row(name(x, 1), "u2").view("u1").reshape(-1, 2)

    def step(mask: Mask) -> None:
        values = to_f16(from_float8(codes, kind))
        for i in (0, 1):
            store(out[:, i], relu(values[:, i]) if clamped else values[:, i], mask)

    return step
