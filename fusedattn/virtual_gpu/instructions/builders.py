"""From instructions to functions: the table of all instructions, and helpers to fill it.

A step carries out one instruction for the lanes of a mask: ``True`` for all of them, or a bool array ``(n_lanes,)``.
Building looks up registers and checks every modifier, so that running does neither.
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


def builds(*names: str) -> Callable[[Builder], Builder]:
    """Enter a builder into the table, for opcodes that begin with these names."""

    def enter(builder: Builder) -> Builder:
        for name in names:
            if name in _BUILDERS:
                raise ValueError(f"{name}: has a builder")
            _BUILDERS[name] = builder
        return builder

    return enter


def build(machine: Machine, instruction: Instruction) -> Step:
    """The step of an instruction, by the longest name that its opcode begins with; guarded by its predicate."""
    parts = instruction.opcode.split(".")
    for n in range(len(parts), 0, -1):
        builder = _BUILDERS.get(".".join(parts[:n]))
        if builder is not None:
            try:
                step = builder(machine, instruction)
                return _guarded(machine, instruction, step) if instruction.guard else step
            except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
                # a type, register, number or operand that there is not
                raise UnknownPTXError(f"{instruction.opcode}, at {instruction.place}: {error}") from error
    raise unknown(instruction)


def unknown(instruction: Instruction) -> UnknownPTXError:
    return UnknownPTXError(f"{instruction.opcode}, at {instruction.place}")


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
