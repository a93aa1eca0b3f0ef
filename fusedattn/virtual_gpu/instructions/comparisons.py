"""Comparisons, which set predicates. PTX ISA, "comparison and selection"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.floats import FLUSHED, TYPES, flush
from fusedattn.virtual_gpu.instructions.integers import INTEGERS, LOGIC, computed, ufunc
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name, vector
from fusedattn.virtual_gpu.registers import DTYPES, Array, Mask, store

COMPARISONS: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_OF_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}  # older names
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_OF_NAN: dict[str, Callable[[Array, Array], Array]] = {
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@builds(*(f"setp.{comparison}" for comparison in (*COMPARISONS, *_OF_UNSIGNED, *_UNORDERED, *_OF_NAN)), modifiers=True)
def _setp(machine: Machine, x: Instruction) -> Step:
    """Comparisons of any type; ``setp.lt.and.s32 p, a, b, c`` combines the result with c."""

    words = x.opcode.split(".")
    kind = words[-1]
    if kind not in INTEGERS:
        return _setp_of_floats(machine, x)
    comparison = _OF_UNSIGNED.get(words[1], words[1]) if kind[0] == "u" else words[1]
    function, dtype = COMPARISONS[comparison], DTYPES[kind]
    if kind[0] == "b" and comparison not in ("eq", "ne"):
        raise unknown(x)
    if len(words) == 3:
        return ufunc(machine, x, function, "?", dtype, dtype)
    if len(words) != 4 or words[2] not in LOGIC:
        raise unknown(x)
    combine = LOGIC[words[2]]
    return computed(machine, x, lambda a, b, c: combine(function(a, b), c), "?", dtype, dtype, "?")


def _comparison_of_floats(comparison: str) -> Callable[[Array, Array], Array]:
    """Ordered comparisons are false if one operand is NaN, unordered ones (neu, ...) are true."""
    if comparison in _OF_NAN:
        return _OF_NAN[comparison]
    if comparison in _UNORDERED:
        ordered = COMPARISONS[_UNORDERED[comparison]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    if comparison == "ne":
        return lambda a, b: (a < b) | (a > b)
    return COMPARISONS[comparison]


def _setp_of_floats(machine: Machine, x: Instruction) -> Step:
    """Also of pairs of 16 bits, which set two predicates."""
    comparison, *modifiers, kind = x.opcode.split(".")[1:]
    compare = _comparison_of_floats(comparison)
    combinations, ftz = [word for word in modifiers if word != "ftz"], "ftz" in modifiers
    if len(combinations) > 1 or set(combinations) - set(LOGIC) or len(modifiers) != len(combinations) + ftz:
        raise unknown(x)
    if ftz and kind not in FLUSHED:
        raise unknown(x, f"got .ftz for {kind}; allowed are {', '.join(FLUSHED)}")
    registers, pair = machine.registers, kind.endswith("x2")
    storage, load, _ = TYPES[kind[:-2] if pair else kind]
    prepare: Callable[..., Any] = (lambda y: flush(load(y))) if ftz else load
    if pair:
        if combinations:
            raise unknown(x)
        outs = [registers.row(y, "?") for y in vector(x, 0)]
        n = registers.n_lanes
        sources = [registers.value(name(x, i), "u4") for i in (1, 2)]

        def both(mask: Mask) -> None:
            a, b = (prepare(np.ascontiguousarray(np.broadcast_to(y, (n,))).view(storage)) for y in sources)
            found = compare(a, b).reshape(n, 2)
            for i, out in enumerate(outs):
                store(out, found[:, i], mask)

        return both
    if not combinations:
        return computed(machine, x, lambda a, b: compare(prepare(a), prepare(b)), "?", storage, storage)
    combine = LOGIC[combinations[0]]
    return computed(machine, x, lambda a, b, c: combine(compare(prepare(a), prepare(b)), c), "?", storage, storage, "?")
