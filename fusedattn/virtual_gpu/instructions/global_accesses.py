"""Loads, stores and atomic operations of global memory. PTX ISA, "data movement" and "atom"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.counters import lanes_in
from fusedattn.virtual_gpu.global_memory import load, save
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.floats import flush
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, access_of, name, vector
from fusedattn.virtual_gpu.registers import DTYPES, Array, Mask, lanes_of


@builds("ld.global", modifiers=True)
def _load(machine: Machine, x: Instruction) -> Step:
    kind, size, n = access_of(_plain(machine, x))
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
        machine.global_work.read(x, at, size * n)
        for i in range(n):
            put(i, load(at + i * size, size), mask)

    return step


def _plain(machine: Machine, x: Instruction) -> Instruction:
    """Without modifiers that only advise the caches, of which L2::cache_hint has a third operand."""
    words = x.opcode.split(".")
    if "L2::cache_hint" in words:
        machine.registers.row(name(x, 2), "u8")
    kept = [word for word in words if word not in _ADVICE]
    return Instruction(".".join(kept), x.operands, x.guard, x.negated, x.place)


_ADVICE = {
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "nc",
    "ca",
    "cg",
    "cs",
    "wb",
    "wt",
}


def loads_into(machine: Machine, x: Instruction, targets: tuple[str, ...], kind: str) -> Any:
    """A function (i, values, mask) that writes loaded numbers to register `i`, extended to its width.

    What is loaded for "_" is not kept.
    """
    size, signed = int(kind[1:]) // 8, kind[0] == "s"
    rows: list[Array | None] = []
    for target in targets:
        if target == "_":
            rows.append(None)
            continue
        width = machine.registers.bits(target) // 8
        if width < size:
            raise unknown(x)
        rows.append(machine.registers.row(target, f"{'i' if signed else 'u'}{width}"))

    def put(i: int, values: Array, mask: Mask) -> None:
        row = rows[i]
        if row is None:
            return
        if signed:
            values = values.view(f"i{size}")
        if mask is True:
            row[...] = values
        else:
            row[mask] = values

    return put


def address_of(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the mask: the global addresses of operand `i`, of the lanes of the mask, as int64."""
    operand = x.operand(i)
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


@builds("st.global", modifiers=True)
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(_plain(machine, x))
    addresses, values = address_of(machine, x, 0), sources_of(machine, x, 1, size)
    counters = machine.counters
    if len(vector(x, 1)) != n:
        raise unknown(x)
    stores = machine.stores
    number = stores.enter(x, size * n)

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        if counters.counting:
            counters.sectors(x, "write", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        examine_write(machine, x, at, size * n, lanes_of(mask))
        program = machine.program if mask is True else machine.program[mask]
        stores.store(at, [values(i, mask) for i in range(n)], program, lanes_of(mask), number)

    return step


def examine_write(machine: Machine, x: Instruction, at: Array, size: int, lanes: Any, *, atomic: bool = False) -> None:
    """Fail if lanes write global memory that asynchronous work uses."""
    work, shared = machine.global_work, machine.shared
    work.write(x, at, size, atomic=atomic)
    if work.boxes:
        work.write_boxes(x, at, size, shared.cta[lanes], shared.warp[lanes], shared.races)


_ATOMICS: dict[str, tuple[Callable[[Array, Array], Array], tuple[str, ...]]] = {
    # operation -> (function of the old and the new value, types)
    "add": (np.add, ("u32", "s32", "u64", "f32", "f64")),
    "min": (np.minimum, ("u32", "s32", "u64", "s64")),
    "max": (np.maximum, ("u32", "s32", "u64", "s64")),
    "exch": (lambda old, new: new, ("b32", "b64")),
    "and": (np.bitwise_and, ("b32", "b64")),
    "or": (np.bitwise_or, ("b32", "b64")),
    "xor": (np.bitwise_xor, ("b32", "b64")),
}


_ORDERING = {"acquire", "release", "acq_rel"}


def _add_flushed(old: Array, new: Array) -> Array:
    """The ISA: on global memory, float32 sums have no denormal operands or results."""
    return flush(flush(old) + flush(new))


@builds("atom.global", "red.global", modifiers=True)
def _atomic(machine: Machine, x: Instruction) -> Step:
    """Atomic operations of a vector of elements; those of one address follow in the order that the machine chooses."""
    words = [word for word in x.opcode.split(".")[2:] if word not in ("gpu", "sys", "cta", "relaxed", *_ORDERING)]
    ordering = _ORDERING & set(x.opcode.split("."))
    operation, *vectors, kind = words
    returns = x.opcode.startswith("atom")
    function, kinds = _ATOMICS[operation]
    n = {(): 1, ("v2",): 2, ("v4",): 4}[tuple(vectors)]
    if kind not in kinds or (n > 1 and (operation, kind) != ("add", "f32")):
        raise unknown(x)
    if kind == "f32":
        function = _add_flushed
    dtype, size = DTYPES[kind], int(kind[1:]) // 8
    addresses, values = address_of(machine, x, 1 if returns else 0), sources_of(machine, x, 2 if returns else 1, size)
    targets = vector(x, 0) if returns else ()
    put = loads_into(machine, x, targets, f"b{8 * size}") if returns else None
    if len(vector(x, 2 if returns else 1)) != n or (returns and len(targets) != n):
        raise unknown(x)
    counters, stores = machine.counters, machine.stores
    number = stores.enter(x, size)

    def step(mask: Mask) -> None:
        at, lanes = addresses(mask), lanes_of(mask)
        machine.memory.check(at, size * n, x)
        if counters.counting:
            counters.sectors(x, "atomic", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        examine_write(machine, x, at, size * n, lanes, atomic=True)
        program = machine.program[lanes]
        for i in range(n):
            new = np.broadcast_to(values(i, mask), at.shape).view(dtype)
            turn = machine.order.turn(at.size)
            if ordering:
                stores.synchronise(
                    at[turn] + i * size,
                    program[turn],
                    acquire="release" not in ordering,
                    release="acquire" not in ordering,
                )
            old = _in_turn(at + i * size, size, new, function, turn)
            if put is not None:
                put(i, old, mask)
        stores.add(at, size * n, program, lanes, number)

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
