"""Floating point: arithmetic and approximations. PTX ISA, "floating point" and "half precision" instructions.

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
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import DTYPES, Array

_TINY = np.float32(2.0**-126)
_NORMAL = {4: _TINY, 2: np.float16(2.0**-14)}  # the smallest normal numbers, by bytes
FLUSHED = ("f32", "f16", "f16x2")  # types that .ftz is for


def flush(x: Array) -> Array:
    """Replace denormal numbers of float32 or float16 by zero, of the same sign."""
    return np.where(np.abs(x) < _NORMAL[x.itemsize], np.copysign(x.dtype.type(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c, rounded once."""
    product = a.astype("f8") * b  # exact: 48 bits
    total = product + c
    if not (total.view("u8") & 0x0FFFFFFF).all():  # perhaps a tie of float32, which a rounding of the sum may make
        tie = (total.view("u8") & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < _TINY) & (total != 0)
        if tie.any():
            total = _to_odd(total, _error(product, c, total))
    return total.astype("f4")


def _fma_of_bf16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c as float32 that rounds to the right bfloat16."""
    product = a.astype("f8") * b
    total = product + c
    total = _to_odd(total, _error(product, c, total))
    rounded = total.astype("f4")
    return _to_odd(rounded, total - rounded)


def _error(a: Array, b: Array, total: Array) -> Array:
    """What a + b exceeds the rounded total by, exactly."""
    part = total - a
    return (a - (total - part)) + (b - part)


def _to_odd(rounded: Array, error: Array) -> Array:
    """Numbers too small by `error` become the odd one of their neighbours: then another rounding sees no false tie."""
    bits = rounded.view(f"u{rounded.dtype.itemsize}")
    too_far = (error < 0) != np.signbit(rounded)  # from zero
    return np.where(np.abs(error) > 0, bits - too_far | 1, bits).view(rounded.dtype)


def from_bf16(x: Array) -> Array:
    return (x.astype("u4") << np.uint32(16)).view("f4")


def to_bf16(x: Array) -> Array:
    """float32 rounded to nearest, ties to even; a NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x, dtype="f4").view("u4")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), NAN[2], rounded).astype("u2")


NAN = {n: 2 ** (8 * n - 1) - 1 for n in (2, 4, 8)}  # the canonical one, by bytes: all bits but the sign
_NAN = {n: np.array(bits, dtype=f"u{n}").view(f"f{n}") for n, bits in NAN.items()}


def canonical(x: Array) -> Array:
    """All NaN become the canonical one."""
    return np.where(np.isnan(x), _NAN[x.itemsize], x)


def to_f16(x: Array) -> Array:
    """Rounded to nearest, ties to even; a NaN is 0x7FFF."""
    half = x.astype("f2")
    return canonical(half) if np.isnan(x).any() else half


def relu(x: Array) -> Array:
    """Positive numbers and the canonical NaN; zero for others."""
    return canonical(np.where(x <= 0, x.dtype.type(0), x))


def _fma_of_f16(a: Array, b: Array, c: Array) -> Array:
    return (a.astype("f8") * b + c).astype("f2")  # no sum that float64 rounds is near a tie of float16


_FMA = {
    "f32": fma,
    "f16": _fma_of_f16,
    "f16x2": _fma_of_f16,
    "bf16": _fma_of_bf16,
    "bf16x2": _fma_of_bf16,
}

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
    if ftz:
        if kind not in FLUSHED:
            raise unknown(x, f"got .ftz for {kind}; allowed are {', '.join(FLUSHED)}")
        plain = function
        function = lambda *y: flush(plain(*map(flush, y)))  # noqa: E731
    if kind in ("f16x2", "bf16x2"):
        return computed(machine, x, _halves(kind, function), "u4", *["u4"] * n)
    storage, load, back = TYPES[kind]
    if kind == "bf16":
        return computed(machine, x, lambda *y: back(function(*map(load, y))), storage, *[storage] * n)
    return computed(machine, x, function, storage, *[storage] * n)


_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@builds("add", "sub", "mul", modifiers=True)
def _binary(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("rn", "ftz"))
    if kind not in DTYPES or kind[0] not in "fb" or kind in ("b16", "b32", "b64"):
        raise unknown(x)
    function = _BINARY[x.opcode[:3]]
    if kind in ("f32", "f64") and "ftz" not in modifiers:
        return ufunc(machine, x, function, DTYPES[kind], DTYPES[kind], DTYPES[kind])
    return _arithmetic(machine, x, function, 2, kind, "ftz" in modifiers)


@builds("fma.rn", modifiers=True)
def _fma(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("rn", "ftz", "relu"))
    function = _FMA[kind]
    if "relu" not in modifiers:
        return _arithmetic(machine, x, function, 3, kind, "ftz" in modifiers)
    if kind == "f32" or "ftz" in modifiers:
        raise unknown(x)
    return _arithmetic(machine, x, lambda *y: relu(function(*y)), 3, kind, ftz=False)


@builds("neg", "abs", modifiers=True)
def _sign(machine: Machine, x: Instruction) -> Step:
    kind, modifiers = _split(x, ("ftz",))
    if kind in ("f32", "f64") or "ftz" in modifiers:
        function = np.negative if x.opcode.startswith("neg") else np.abs
        return _arithmetic(machine, x, function, 1, kind, "ftz" in modifiers)
    bits = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}[kind]
    dtype = "u4" if kind.endswith("x2") else "u2"
    sign = np.array(bits, dtype=dtype)
    if x.opcode.startswith("neg"):
        return computed(machine, x, lambda a: a ^ sign, dtype, dtype)
    return computed(machine, x, lambda a: a & ~sign, dtype, dtype)


def _settled(found: Array) -> bool:
    """Whether there is neither a zero nor a NaN."""
    return bool(np.abs(found).min() > 0)


def _smaller(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A minimum; NumPy's leaves open whether that of 0 and -0 is -0, and which NaN it gives."""

    def smaller(a: Array, b: Array) -> Array:
        found = function(a, b)
        return found if _settled(found) else canonical(np.where((found == 0) & (a == b), -(-a - b), found))

    return smaller


def _larger(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A maximum; NumPy's leaves open whether that of 0 and -0 is 0, and which NaN it gives."""

    def larger(a: Array, b: Array) -> Array:
        found = function(a, b)
        return found if _settled(found) else canonical(np.where((found == 0) & (a == b), a + b, found))

    return larger


@builds("min", "max", modifiers=True)
def _extreme(machine: Machine, x: Instruction) -> Step:
    """Without .NaN, the other operand if one is NaN."""
    kind, modifiers = _split(x, ("ftz", "NaN"))
    if x.opcode.startswith("min"):
        function = _smaller(np.minimum if "NaN" in modifiers else np.fmin)
    else:
        function = _larger(np.maximum if "NaN" in modifiers else np.fmax)
    return _arithmetic(machine, x, function, 2, kind, "ftz" in modifiers)


@builds("div.full", "div.rn", modifiers=True)
def _div(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    if words[2:] not in (["f32"], ["ftz", "f32"]):
        raise unknown(x)
    function: Callable[..., Any] = np.divide
    if words[1] == "full" and machine.noise.on:
        noise = machine.noise.of("div")
        function = lambda a, b: noise(np.divide(a.astype("f8"), b), a, b)  # noqa: E731
    return _arithmetic(machine, x, function, 2, "f32", "ftz" in words)


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


@builds(*_FUNCTIONS, modifiers=True)
def _function(machine: Machine, x: Instruction) -> Step:
    which, *modifiers, kind = x.opcode.split(".")
    if kind != "f32" or set(modifiers) - {"approx", "rn", "ftz"}:
        raise unknown(x)
    exact = _FUNCTIONS[which]
    noise = (machine.noise if "approx" in modifiers else Noise()).of(which)

    def function(a: Array) -> Array:
        return noise(exact(a.astype("f8")), a)

    return _arithmetic(machine, x, function, 1, "f32", "ftz" in modifiers)
