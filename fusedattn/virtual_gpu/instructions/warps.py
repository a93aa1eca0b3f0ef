"""Instructions by which the threads of a warp exchange values."""

from __future__ import annotations

import numpy as np

from fusedattn.virtual_gpu.errors import KernelError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name, vector
from fusedattn.virtual_gpu.registers import Array, Mask, store

WARP = 32


def whole_warps(mask: Mask, x: Instruction) -> None:
    """Fail unless each warp takes part as a whole or not at all."""
    if mask is not True:
        of_warps = mask.reshape(-1, WARP)
        if (of_warps.any(axis=1) != of_warps.all(axis=1)).any():
            raise KernelError(f"{x.opcode}, at {x.place}: only a part of a warp executes it")


_ALL = 0xFFFFFFFF


def members(machine: Machine, x: Instruction, i: int) -> Step:
    """A check that warps execute an instruction as a whole, and name all threads in operand `i`, the member mask."""
    given = name(x, i)
    named = machine.registers.value(given, "u4")
    if not machine.registers.has(given):
        _require_all(named, x)
        return lambda mask: whole_warps(mask, x)

    def check(mask: Mask) -> None:
        whole_warps(mask, x)
        _require_all(named if mask is True else named[mask], x)

    return check


def _require_all(named: Array, x: Instruction) -> None:
    some = named[named != _ALL]
    if some.size:
        raise unknown(x, f"got member mask {int(some[0]):#x}; allowed is {_ALL:#x}")


@builds("shfl.sync", modifiers=True)
def _shuffle(machine: Machine, x: Instruction) -> Step:
    """Read the register of another thread of the warp; segments of the warp are not supported."""
    words = x.opcode.split(".")
    if len(words) != 4 or words[3] != "b32" or words[2] not in ("idx", "bfly", "up", "down"):
        raise unknown(x)
    check = members(machine, x, 4)
    clamp = int(name(x, 3), 0)
    if clamp != (0 if words[2] == "up" else 31):
        raise unknown(x)
    registers = machine.registers
    target, *predicate = vector(x, 0)
    out, value, by = registers.row(target, "u4"), registers.row(name(x, 1), "u4"), registers.value(name(x, 2), "u4")
    own = np.arange(WARP, dtype="i8")
    found = [registers.row(y, "?").reshape(-1, WARP) for y in predicate]

    def source(amount: Array) -> Array:
        if words[2] == "idx":
            return amount + 0 * own
        if words[2] == "bfly":
            return own ^ amount
        return own - amount if words[2] == "up" else own + amount

    def step(mask: Mask) -> None:
        check(mask)
        amount = by.astype("i8") & 31
        lanes = source(amount.reshape(-1, WARP) if amount.ndim else amount)
        inside = (lanes >= 0) & (lanes < WARP)
        lanes = np.where(inside, lanes, own)
        of_warps = value.reshape(-1, WARP)
        taken = of_warps[:, lanes] if lanes.ndim == 1 else np.take_along_axis(of_warps, lanes, axis=1)
        store(out, taken.reshape(-1), mask)
        for row in found:
            store(row, inside, True if mask is True else mask.reshape(-1, WARP))

    return step


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@builds("redux.sync", modifiers=True)
def _reduce(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    if len(words) != 4 or words[2] not in _REDUCTIONS or words[3] not in ("s32", "u32", "b32"):
        raise unknown(x)
    check = members(machine, x, 2)
    dtype = "i4" if words[3] == "s32" else "u4"
    out, value = machine.registers.row(name(x, 0), dtype), machine.registers.value(name(x, 1), dtype)
    function = _REDUCTIONS[words[2]]

    def step(mask: Mask) -> None:
        check(mask)
        lanes = np.broadcast_to(value, out.shape).reshape(-1, WARP)
        store(out, np.repeat(function.reduce(lanes, axis=1, dtype=dtype), WARP), mask)

    return step


@builds("elect.sync")
def _elect(machine: Machine, x: Instruction) -> Step:
    """One thread of each warp, here the first."""
    check = members(machine, x, 1)
    target, predicate = vector(x, 0)
    outs = [(machine.registers.row(target, "u4"), 0)] if target != "_" else []
    first = np.tile(np.arange(WARP) == 0, machine.registers.n_lanes // WARP)
    elected = machine.registers.row(predicate, "?")

    def step(mask: Mask) -> None:
        check(mask)
        for out, leader in outs:
            store(out, leader, mask)
        store(elected, first, mask)

    return step


@builds("vote.sync", modifiers=True)
def _vote(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    check = members(machine, x, 2)
    value = machine.registers.value(name(x, 1), "?")
    if words[2:] == ["ballot", "b32"]:
        bits = np.uint32(1) << np.arange(WARP, dtype="u4")
        out = machine.registers.row(name(x, 0), "u4")

        def ballot(mask: Mask) -> None:
            check(mask)
            votes = np.broadcast_to(value, out.shape).reshape(-1, WARP)
            store(out, np.repeat((votes * bits).sum(axis=1, dtype="u4"), WARP), mask)

        return ballot
    if words[3:] != ["pred"] or words[2] not in ("all", "any"):
        raise unknown(x)
    function = np.logical_and if words[2] == "all" else np.logical_or
    out = machine.registers.row(name(x, 0), "?")

    def step(mask: Mask) -> None:
        check(mask)
        votes = np.broadcast_to(value, out.shape).reshape(-1, WARP)
        store(out, np.repeat(function.reduce(votes, axis=1), WARP), mask)

    return step


@builds("activemask.b32")
def _active(machine: Machine, x: Instruction) -> Step:
    out = machine.registers.row(name(x, 0), "u4")

    def step(mask: Mask) -> None:
        whole_warps(mask, x)
        store(out, np.uint32(0xFFFFFFFF), mask)

    return step


@builds("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32")
def _set_registers(machine: Machine, x: Instruction) -> Step:
    """How many registers a thread has from now on, which changes no value; four warps execute it together."""
    count = int(name(x, 0))
    if count % 8 or not 24 <= count <= 256:
        raise unknown(x, f"got {count} registers; allowed are multiples of 8 from 24 to 256")
    return lambda mask: whole_warps(mask, x)
