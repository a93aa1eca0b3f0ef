"""From instructions to functions: the table of all instructions, and helpers to fill it.

A step carries out one instruction for the lanes of a mask: ``True`` for all of them, or a bool array ``(n_lanes,)``.
Building looks up registers, and checks every modifier and operand, so that running does neither.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusedattn.virtual_gpu.errors import UnknownPTXError
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Mask

Step = Callable[[Mask], None]
Builder = Callable[[Machine, Instruction], Step]

_BUILDERS: dict[str, Builder] = {}
_WITH_MODIFIERS: set[str] = set()  # names after which an opcode may go on


def builds(*names: str, modifiers: bool = False) -> Callable[[Builder], Builder]:
    """Enter a builder into the table, for these opcodes; with `modifiers`, also for longer ones, which it checks."""

    def enter(builder: Builder) -> Builder:
        for name in names:
            if name in _BUILDERS:
                raise ValueError(f"{name}: has a builder")
            _BUILDERS[name] = builder
        if modifiers:
            _WITH_MODIFIERS.update(names)
        return builder

    return enter


def build(machine: Machine, instruction: Instruction) -> Step:
    """The step of an instruction, by the longest name that its opcode begins with; guarded by its predicate."""
    builder = _builder(instruction)
    try:
        step = _watched(machine, instruction, builder(machine, instruction))
        all_used(instruction)
        return _guarded(machine, instruction, step) if instruction.guard else step
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        # a type, register, number or operand that there is not
        raise unknown(instruction, str(error)) from error


def _builder(instruction: Instruction) -> Builder:
    parts = instruction.opcode.split(".")
    for n in range(len(parts), 0, -1):
        name = ".".join(parts[:n])
        if name in _BUILDERS:
            if n < len(parts) and name not in _WITH_MODIFIERS:
                raise unknown(instruction, f"modifier .{parts[n]}")
            return _BUILDERS[name]
    raise unknown(instruction)


def all_used(instruction: Instruction) -> None:
    """Fail if an instruction has operands that nothing asked for."""
    for i, operand in enumerate(instruction.operands):
        if i not in instruction.used:
            raise unknown(instruction, f"got {len(instruction.operands)} operands; no use is known of {operand}")


def unknown(instruction: Instruction, reason: str = "") -> UnknownPTXError:
    """The error of an instruction that is not known, or not in this form."""
    return UnknownPTXError(f"{instruction.opcode}, at {instruction.place}" + (f": {reason}" if reason else ""))


def _watched(machine: Machine, instruction: Instruction, step: Step) -> Step:
    """A step that tells if it uses registers of wgmma, which must be fenced then."""
    rows = machine.fences.rows_used(instruction)
    if not rows:
        return step

    def watched(mask: Mask) -> None:
        step(mask)
        machine.fences.use(rows, mask)

    return watched


def _guarded(machine: Machine, instruction: Instruction, step: Step) -> Step:
    guard, negated = machine.registers.row(instruction.guard, "?"), instruction.negated
    changes = instruction.guard in instruction.names[1:]  # perhaps by the step

    def guarded(mask: Mask) -> None:
        mine = ~guard if negated else guard
        if mask is not True:
            mine = mine & mask
        elif changes:
            mine = mine.copy()
        n = np.count_nonzero(mine)
        if n == mine.size:
            step(True)
        elif n:
            step(mine)

    return guarded
