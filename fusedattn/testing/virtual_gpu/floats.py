"""Floating point: arithmetic, approximations, comparisons and conversions. PTX ISA, "floating point", "half precision"
and "cvt" instructions.

Operations are rounded once, as the ISA says. bfloat16 is computed in float32 and rounded. Approximate instructions are
exact up to float32's rounding, or err by as much as the ISA allows if the machine is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedattn.testing.virtual_gpu.builders import Mask, Step, builds, name, store, unknown, vector
from fusedattn.testing.virtual_gpu.integers import COMPARISONS, computed, ufunc
from fusedattn.testing.virtual_gpu.ptx import Instruction
from fusedattn.testing.virtual_gpu.registers import DTYPES, Array

if TYPE_CHECKING:
    from fusedattn.testing.virtual_gpu.machine import Machine

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


_TYPES: dict[str, tuple[str, Callable[[Array], Array], Callable[[Array], Array]]] = {
    # type -> (storage, to the type that computes, and back)
    "f32": ("f4", lambda x: x, lambda x: x),
    "f64": ("f8", lambda x: x, lambda x: x),
    "f16": ("f2", lambda x: x, lambda x: x),
    "bf16": ("u2", from_bf16, to_bf16),
}


def _halves(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of pairs of 16-bit floats in 32 bits, from one of single floats."""
    half = kind[:-2]
    storage, load, back = _TYPES[half]

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
    storage, load, back = _TYPES[kind]
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
    exact = machine.noise.two_ulp if words[1] in ("full", "approx") else lambda y, *seeds: y
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
    noise = machine.noise.of(which) if "approx" in modifiers else lambda y, *seeds: y

    def function(a: Array) -> Array:
        return noise(exact(a.astype("f8")).astype("f4"), a)

    return _arithmetic(machine, x, function, 1, "f32", "ftz" in modifiers)


_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_OF_NAN = {"num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}


def set_predicate(machine: Machine, x: Instruction) -> Step:
    """setp of floats: also of pairs of 16 bits, which set two predicates."""
    words = x.opcode.split(".")
    comparison, *modifiers, kind = words[1:]
    if comparison in _OF_NAN:
        compare = _OF_NAN[comparison]
    elif comparison in _UNORDERED:
        ordered = COMPARISONS[_UNORDERED[comparison]]
        compare = lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    elif comparison == "ne":  # of NaN it is false, as all ordered comparisons
        compare = lambda a, b: np.not_equal(a, b) & ~np.isnan(a) & ~np.isnan(b)  # noqa: E731
    else:
        compare = COMPARISONS[comparison]
    if set(modifiers) - {"ftz", "and", "or", "xor"}:
        raise unknown(x)
    combinations = [word for word in modifiers if word != "ftz"]
    registers, pair = machine.registers, kind.endswith("x2")
    storage, load, _ = _TYPES[kind[:-2] if pair else kind]
    if pair:
        if combinations:
            raise unknown(x)
        outs = [registers.row(y, "?") for y in vector(x, 0)]
        n = registers.n_lanes
        sources = [registers.value(name(x, i), "u4") for i in (1, 2)]

        def both(mask: Mask) -> None:
            a, b = (load(np.ascontiguousarray(np.broadcast_to(y, (n,))).view(storage)) for y in sources)
            found = compare(a, b).reshape(n, 2)
            for i, out in enumerate(outs):
                store(out, found[:, i], mask)

        return both
    prepare = (lambda y: flush(load(y))) if "ftz" in modifiers else load
    if not combinations:
        return computed(machine, x, lambda a, b: compare(prepare(a), prepare(b)), "?", storage, storage)
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combinations[0]]
    return computed(
        machine, x, lambda a, b, c: combine(compare(prepare(a), prepare(b)), c), "?", storage, storage, "?"
    )


builds(*(f"setp.{comparison}" for comparison in (*_UNORDERED, *_OF_NAN)))(set_predicate)

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
    storage, _, back = _TYPES[target]
    of, load, _ = _TYPES[source]
    prepare = (lambda y: flush(load(y))) if ftz and source == "f32" else load
    if target == source:  # rounding to whole numbers, in the same type
        if mode not in _ROUNDINGS:
            raise unknown(x)
        whole = _ROUNDINGS[mode]
        return computed(machine, x, lambda a: back(whole(prepare(a))), storage, of)
    narrows = np.dtype(storage).itemsize < np.dtype(of).itemsize
    if narrows and mode not in ("rn", "rz") or (mode == "rz" and target != "bf16"):
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
    of, load, _ = _TYPES[source]
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
    storage, _, back = _TYPES[target]
    computing = "f4" if target == "bf16" else storage
    return computed(machine, x, lambda a: back(a.astype(computing)), storage, DTYPES[source])


def _cvt_pair(machine: Machine, x: Instruction, target: str, source: str, mode: str, *, relu: bool) -> Step:
    """Two float32 in one register: the first operand becomes the high half."""
    if source != "f32" or mode != "rn":
        raise unknown(x)
    out = machine.registers.row(name(x, 0), "u4").view("u2").reshape(-1, 2)
    high, low = (machine.registers.value(name(x, i), "f4") for i in (1, 2))
    convert = to_bf16 if target == "bf16x2" else lambda y: y.astype("f2").view("u2")
    prepare = (lambda y: np.where(np.isnan(y), y, np.maximum(y, np.float32(0)))) if relu else lambda y: y

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
