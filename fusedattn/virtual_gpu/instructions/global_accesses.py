"""Loads, stores and atomic operations of global memory. PTX ISA, "data movement" and "atom"."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedattn.virtual_gpu.counters import lanes_in
from fusedattn.virtual_gpu.global_memory import load, save
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, access_of, vector
from fusedattn.virtual_gpu.registers import Array, Mask


@builds("ld.global")
def _load(machine: Machine, x: Instruction) -> Step:
    kind, size, n = access_of(_plain(x))
    targets = vector(x, 0)
    put = loads_into(machine, x, targets, kind)
    addresses, counters = address_of(machine, x, 1), machine.counters
    if len(targets) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        if counters.counting:
            counters.sectors(x, "read", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        for i in range(n):
            put(i, load(at + i * size, size), mask)

    return step


def _plain(x: Instruction) -> Instruction:
    """Without modifiers that only advise the caches."""
    words = x.opcode.split(".")
    kept = [word for word in words if word not in _ADVICE and not word.startswith("L2::")]
    return Instruction(".".join(kept), x.operands, x.guard, x.negated, x.place)


_ADVICE = {
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::no_allocate",
    "nc",
    "ca",
    "cg",
    "cs",
    "wb",
    "wt",
}


def loads_into(machine: Machine, x: Instruction, targets: tuple[str, ...], kind: str) -> Any:
    """A function (i, values, mask) that writes loaded numbers to register `i`, extended to its width."""
    size, signed = int(kind[1:]) // 8, kind[0] == "s"
    rows = []
    for target in targets:
        width = machine.registers.bits(target) // 8
        if width < size:
            raise unknown(x)
        rows.append(machine.registers.row(target, f"{'i' if signed else 'u'}{width}"))

    def put(i: int, values: Array, mask: Mask) -> None:
        if signed:
            values = values.view(f"i{size}")
        if mask is True:
            rows[i][...] = values
        else:
            rows[i][mask] = values

    return put


def address_of(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the mask: the global addresses of operand `i`, of the lanes of the mask, as int64."""
    operand = x.operands[i]
    if not isinstance(operand, Address) or operand.coordinates:
        raise unknown(x)
    base, offset = machine.registers.row(operand.base, "i8"), operand.offset

    def addresses(mask: Mask) -> Array:
        return (base if mask is True else base[mask]) + offset

    return addresses


def sources_of(machine: Machine, x: Instruction, i: int, size: int) -> Any:
    """A function (j, mask): element `j` of the vector at operand `i`, of the lanes of the mask."""
    rows = [machine.registers.value(source, f"u{size}") for source in vector(x, i)]

    def values(j: int, mask: Mask) -> Array:
        row = rows[j]
        return row if mask is True or row.ndim == 0 else row[mask]

    return values


@builds("st.global")
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(_plain(x))
    addresses, values = address_of(machine, x, 0), sources_of(machine, x, 1, size)
    counters = machine.counters
    if len(vector(x, 1)) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        if counters.counting:
            counters.sectors(x, "write", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        for i in range(n):
            save(at + i * size, size, values(i, mask))

    return step


_ATOMICS = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@builds("atom.global", "red.global")
def _atomic(machine: Machine, x: Instruction) -> Step:
    """Atomic operations of a vector of elements; those of one address follow in the order that the machine chooses."""
    words = [
        word
        for word in x.opcode.split(".")[2:]
        if word not in ("gpu", "sys", "cta", "relaxed", "acq_rel", "acquire", "release", "noftz")
    ]
    operation, kind = words[0], words[-1]
    returns = x.opcode.startswith("atom")
    if (
        operation not in _ATOMICS
        or len(words) not in (2, 3)
        or kind not in ("f32", "u32", "s32", "b32", "u64", "s64", "b64", "f64")
    ):
        raise unknown(x)
    size = int(kind[1:]) // 8
    dtype = f"{ {'f': 'f', 's': 'i', 'u': 'u', 'b': 'u'}[kind[0]] }{size}"
    n = int(words[1][1:]) if len(words) == 3 else 1
    addresses, values = address_of(machine, x, 1 if returns else 0), sources_of(machine, x, 2 if returns else 1, size)
    targets = vector(x, 0) if returns else ()
    put = loads_into(machine, x, tuple(y for y in targets if y != "_"), f"b{8 * size}") if returns else None
    function, counters = _ATOMICS[operation], machine.counters

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        if counters.counting:
            counters.sectors(x, "atomic", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        for i in range(n):
            new = np.broadcast_to(values(i, mask), at.shape).view(dtype)
            old = _in_turn(at + i * size, size, new, function, machine.order.turn(at.size))
            if put is not None and targets[i] != "_":
                put(i, old, mask)

    return step


def _in_turn(at: Array, size: int, new: Array, function: Any, turn: Array) -> Array:
    """Apply atomic operations one after the other; returns the old values, as bits."""
    old = np.empty(at.shape, dtype=f"u{size}")
    left = turn
    while left.size:  # each round takes the first that is left at each address
        _, first = np.unique(at[left], return_index=True)
        chosen = left[first]
        bits = load(at[chosen], size)
        old[chosen] = bits
        save(at[chosen], size, function(bits.view(new.dtype), new[chosen]).astype(new.dtype).view(f"u{size}"))
        left = np.delete(left, first)
    return old
