"""Find uniform registers that an instruction for an NVIDIA GPU reads although a path to it has not written them.

ptxas 12.8 makes such code for sm_90. It keeps the address of a wgmma operand in a uniform register from one iteration
of a loop to the next, and may leave out the copy into it before the loop: the first iteration then multiplies other
memory. On a GPU this gave wrong outputs (docs/decisions/0032).

The set of registers that every path has written is followed through the control flow until it no longer changes. An
instruction with a predicate counts as one that writes. A copy of a register that is not in the set takes its result
out of the set too: ptxas may copy a pair of which only one register is needed. Functions that a kernel calls are not
looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.codegen.control_flow import states_before
from bench.codegen.disassembly import Instruction

NONE: frozenset[int] = frozenset()
REGISTER = re.compile(r"(?<!\w)UR(\d+)")
RESULT = re.compile(r"UR(?:\d+|Z)")
PREDICATE = re.compile(r"!?U?P[\dTR]")

# Opcodes that write a uniform register, besides those that begin with U; and those of the latter that write none.
RESULTS_OF_OTHERS = ("R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU", "LDCU")
WITHOUT_RESULT = ("UISETP", "UPLOP3", "UBLKCP", "UBLKRED", "UBLKPF", "UCGABAR_ARV", "UCGABAR_WAIT", "USETMAXREG")


@dataclass(frozen=True)
class Undefined:
    """An instruction that reads uniform registers which may not have been written."""

    address: int
    opcode: str
    registers: tuple[int, ...]


def undefined(instructions: list[Instruction]) -> list[Undefined]:
    """The reads of registers that some path has not written, in program order.

    Raises:
        NotImplementedError: the kernel has several functions, or branches to an address in a register without a table.
    """
    accesses = [(uniform_read(x), uniform_written(x)) for x in instructions]

    def after(place: int, before: frozenset[int]) -> frozenset[int]:
        read, written = accesses[place]
        return before - written if _copies(instructions[place]) and read - before else before | written

    states = states_before(instructions, NONE, after, frozenset.intersection, through_calls=False)
    return [
        Undefined(x.address, x.opcode, tuple(sorted(read - state)))
        for x, (read, _), state in zip(instructions, accesses, states, strict=True)
        if state is not None and read - state and not _copies(x)
    ]


def _copies(instruction: Instruction) -> bool:
    """Whether an instruction copies one uniform register into another."""
    return instruction.opcode == "UMOV"


def uniform_written(instruction: Instruction) -> frozenset[int]:
    """Uniform registers that an instruction writes, if its predicate lets it."""
    _, *modifiers = instruction.opcode.split(".")
    operands = _operands(instruction)
    place = _place_of_result(instruction)
    if place is None or operands[place] == "URZ":
        return NONE
    width = 4 if "128" in modifiers else 2 if {"64", "WIDE"} & set(modifiers) else 1
    return _named(operands[place], width)


def uniform_read(instruction: Instruction) -> frozenset[int]:
    """Uniform registers that an instruction reads."""
    operands, place = _operands(instruction), _place_of_result(instruction)
    found: set[int] = set()
    for i, operand in enumerate(operands):
        if i != place and (register := REGISTER.search(operand)):
            first, width = _accessed(instruction, operands, i)
            start = int(register[1]) + first
            found.update(range(start, start + width))
    return frozenset(found)


def _accessed(instruction: Instruction, operands: list[str], i: int) -> tuple[int, int]:
    """(first, number) of the registers of a source operand, counted from the one that it names."""
    name, *modifiers = instruction.opcode.split(".")
    operand = operands[i]
    if operand.startswith("gdesc") and name.endswith("GMMA"):  # names both operands, or the right one behind registers
        return (0, 4) if operands[1].startswith("gdesc") else (2, 2)
    if operand.startswith(("gdesc", "desc")):
        return 0, 2
    if name.startswith("UTMA"):  # [address, barrier, coordinates], [tensor map]
        dimensions = next((int(x[0]) for x in modifiers if re.fullmatch(r"[1-5]D", x)), 0)
        return (0, 2) if i == 1 else (0, 1 if name != "UTMALDG" else 2 + dimensions)
    is_wide = "64" in modifiers and (
        (name.startswith("U") and name != "ULDC") or (name == "SYNCS" and "[" not in operand)
    )
    return 0, 2 if is_wide or ("WIDE" in modifiers and name.startswith("U") and i == 3) else 1


def _place_of_result(instruction: Instruction) -> int | None:
    name = instruction.opcode.split(".")[0]
    writes = name.startswith("U") and not name.startswith("UTMA") and name not in WITHOUT_RESULT
    if not writes and name not in RESULTS_OF_OTHERS:
        return None
    operands = _operands(instruction)
    place = next((i for i, operand in enumerate(operands) if not PREDICATE.fullmatch(operand)), None)
    return place if place is not None and RESULT.fullmatch(operands[place]) else None


def _operands(instruction: Instruction) -> list[str]:
    return [operand.strip() for operand in instruction.operands.split(",")]


def _named(operand: str, width: int) -> frozenset[int]:
    first = int(operand.removeprefix("UR"))
    return frozenset(range(first, first + width))
