"""Floating point: arithmetic, approximations, comparisons and conversions. PTX ISA, "floating point", "half precision"
and "cvt" instructions.

Operations are rounded once, as the ISA says. bfloat16 is computed in float32 and rounded. Approximate instructions are
exact up to float32's rounding, or err by as much as the ISA allows if the machine is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.integers import computed, ufunc
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import DTYPES, Array

_TINY = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Replace denormal numbers by zero, of the same sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c, rounded once."""
    product = a.astype("f8") * b  # exact: 48 bits
    total = product + c
    # A second rounding differs from one only if the sum looks like a tie, and was itself rounded.
    bits = np.atleast_1d(total).view("u8")
    tie = bits & np.uint64(0x1FFFFFFF) == np.uint64(0x10000000)
    if tie.any():
        product, c64 = np.broadcast_arrays(product, c.astype("f8"))
        part = total - product
        error = np.atleast_1d((product - (total - part)) + (c64 - part))
        away = np.sign(error) * np.sign(np.atleast_1d(total))
        bits = bits + np.where(tie & (away > 0), 1, 0).astype("u8") - np.where(tie & (away < 0), 1, 0).astype("u8")
        total = bits.view("f8").reshape(total.shape)
    return total.astype("f4")


def from_bf16(x: Array) -> Array:
    return (x.astype("u4") << np.uint32(16)).view("f4")


def to_bf16(x: Array) -> Array:
    """float32 rounded to nearest, ties to even; a NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x, dtype="f4").view("u4")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype("u2")


TYPES: dict[str, tuple[str, Callable[[Array], Array], Callable[[Array], Array]]] = {
    # type -> (storage, to the type that computes, and back)
    "f32": ("f4", lambda x: x, lambda x: x),
    "f64": ("f8", lambda x: x, lambda x: x),
    "f16": ("f2", lambda x: x, lambda x: x),
    "bf16": ("u2", from_bf16, to_bf16),
}


def _halves(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of pairs of 16-bit floats in 32 bits, from one of single floats."""
    half = kind[:-2]
    storage, load, back = TYPES[half]

    def paired(*operands: Array) -> Array:
        n = max(x.size for x in operands)
        parts = [load(np.ascontiguousarray(np.broadcast_to(x, (n,))).view(storage)) for x in operands]
        return np.ascontiguousarray(back(function(*parts))).view("u4")

    return paired


def _split(x: Instruction, allowed: tuple[str, ...]) -> tuple[str, set[str]]:
    """The type of an opcode, and its modifiers, each of which must be allowed."""
    _, *modifiers, kind = x.opcode.split(".")
    if set(modifiers) - set(allowed) or len(set(modifiers)) != len(modifiers):
        raise unknown(x)
    return kind, set(modifiers)


def _arithmetic(machine: Machine, x: Instruction, function: Callable[..., Array], n: int, kind: str, ftz: bool) -> Step:
    """A step for `n` operands of one floating-point type; `function` rounds once."""
    if kind in ("f16x2", "bf16x2"):
        return computed(machine, x, _halves(kind, function), "u4", *["u4"] * n)
    storage, load, back = TYPES[kind]
    if kind == "bf16":
        return computed(machine, x, lambda *y: back(function(*map(load, y))), storage, *[storage] * n)
    if ftz:
        return computed(machine, x, lambda *y: flush(function(*map(flush, y))), storage, *[storage] * n)
    return computed(machine, x, function, storage, *[storage] * n)


_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@builds("add", "sub", "mul")
def _binary(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("rn", "ftz"))
    if kind not in DTYPES or kind[0] not in "fb" or kind in ("b16", "b32", "b64"):
        raise unknown(x)
    function = _BINARY[x.opcode[:3]]
    if kind in ("f32", "f64") and "ftz" not in modifiers:
        return ufunc(machine, x, function, DTYPES[kind], DTYPES[kind], DTYPES[kind])
    return _arithmetic(machine, x, function, 2, kind, "ftz" in modifiers)


@builds("fma.rn", "mad.f32", "mad.rn")
def _fma(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("rn", "ftz", "relu"))
    if kind == "f64":
        raise unknown(x)
    if kind.startswith("f16"):

        def function(a: Array, b: Array, c: Array) -> Array:
            return (a.astype("f8") * b + c).astype("f2")
    else:
        function = fma
    if "relu" in modifiers:
        return _arithmetic(machine, x, lambda *y: np.fmax(function(*y), 0), 3, kind, "ftz" in modifiers)
    return _arithmetic(machine, x, function, 3, kind, "ftz" in modifiers)


@builds("neg", "abs")
def _sign(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("ftz",))
    if kind in ("f32", "f64"):
        function = np.negative if x.opcode.startswith("neg") else np.abs
        return _arithmetic(machine, x, function, 1, kind, "ftz" in modifiers)
    bits = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}[kind]
    dtype = "u4" if kind.endswith("x2") else "u2"
    sign = np.array(bits, dtype=dtype)
    if x.opcode.startswith("neg"):
        return computed(machine, x, lambda a: a ^ sign, dtype, dtype)
    return computed(machine, x, lambda a: a & ~sign, dtype, dtype)


@builds("min", "max")
def _extreme(machine: Machine, x: Instruction) -> Step:
    """Without .NaN, the other operand if one is NaN."""
    kind, modifiers = _split(x, ("ftz", "NaN"))
    functions = (np.minimum, np.maximum) if "NaN" in modifiers else (np.fmin, np.fmax)
    return _arithmetic(machine, x, functions[x.opcode.startswith("max")], 2, kind, "ftz" in modifiers)


@builds("div.full.f32", "div.full.ftz.f32", "div.rn.f32", "div.rn.ftz.f32", "div.approx.f32", "div.approx.ftz.f32")
def _div(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    exact: Callable[..., Any] = machine.noise.two_ulp if words[1] in ("full", "approx") else lambda y, *seeds: y
    return _arithmetic(machine, x, lambda a, b: exact(np.divide(a, b), a, b), 2, "f32", "ftz" in words)


# Function -> NumPy's, of float64; the error that the ISA states is applied by Noise.
_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.divide(1.0, x),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.divide(1.0, np.sqrt(x)),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@builds(*_FUNCTIONS)
def _function(machine: Machine, x: Instruction) -> Step:
    which, *modifiers, kind = x.opcode.split(".")
    if kind != "f32" or set(modifiers) - {"approx", "rn", "ftz"}:
        raise unknown(x)
    exact = _FUNCTIONS[which]
    noise: Callable[..., Any] = machine.noise.of(which) if "approx" in modifiers else lambda y, *seeds: y

    def function(a: Array) -> Array:
        return noise(exact(a.astype("f8")).astype("f4"), a)

    return _arithmetic(machine, x, function, 1, "f32", "ftz" in modifiers)
