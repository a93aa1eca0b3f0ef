"""Parse instructions from a disassembly by cuobjdump or from AMD assembly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """An instruction and its branch target; addresses come from the disassembly, or just count.

    `encoding`, 128 bits, is known if the disassembly has it; an instruction without a `predicate` always runs. `table`
    has the targets of a branch to an address in a register.
    """

    address: int
    opcode: str
    target: int | None = None
    operands: str = ""
    encoding: int | None = None
    predicate: str = ""
    table: tuple[int, ...] = ()


def branch_tables(elf: str) -> dict[int, tuple[int, ...]]:
    """The targets of branches to addresses in registers, by the address of the branch; `elf` is from cuobjdump -elf."""
    pattern = re.compile(r"Offset of Indirect Branch:\s+(0x[0-9a-f]+).*\n\s*Targets:((?:\s+0x[0-9a-f]+)+)")
    return {int(at, 16): tuple(int(x, 16) for x in targets.split()) for at, targets in pattern.findall(elf)}


def sass_instructions(sass: str, tables: Mapping[int, tuple[int, ...]] | None = None) -> list[Instruction]:
    """The instructions of a disassembly by cuobjdump, with the tables of their branches."""
    encoding = r"(?:\s+/\* 0x([0-9a-f]{16}) \*/\s+/\* 0x([0-9a-f]{16}) \*/)?"
    pattern = re.compile(rf"/\*([0-9a-f]{{4,6}})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)([^;\n]*);{encoding}")
    found = []
    for address, predicate, opcode, operands, low, high in pattern.findall(sass):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        to = int(target[1], 16) if target else None
        bits = int(high + low, 16) if low else None
        table = (tables or {}).get(int(address, 16), ())
        found.append(Instruction(int(address, 16), opcode, to, operands, bits, predicate, table))
    return found


def amdgcn_instructions(assembly: str) -> list[Instruction]:
    """The instructions of AMD assembly, numbered from 0."""
    pattern = re.compile(r"^\s+([vs]_\w+|ds_\w+|global_\w+|buffer_\w+|scratch_\w+|flat_\w+)(?:\s+(\S+))?")
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(found)
        elif match := pattern.match(line):
            found.append((match[1], match[2] or ""))
    return [
        Instruction(i, opcode, labels.get(operand) if opcode.startswith(("s_cbranch", "s_branch")) else None)
        for i, (opcode, operand) in enumerate(found)
    ]
