"""The registers of a thread that an instruction for sm_90 writes and reads, from its disassembly."""

from __future__ import annotations

import re
from typing import NamedTuple

from bench.codegen.disassembly import Instruction

NONE: frozenset[int] = frozenset()

# "R12", "-R12.reuse", "[R12.64+0x10]", but neither "UR12" nor "RZ".
REGISTER = re.compile(r"(?<![\w.])R(\d+)((?:\.\w+)*)")
RESULT = re.compile(r"R(\d+)(?:\.64)?")
PREDICATE = re.compile(r"!?U?P[\dTR]")

# wgmma of 16, 8 and 1 bits: 64 rows; the first group is the number of columns.
PRODUCT = re.compile(r"[HQIB]GMMA\.(?:SP\.)?64x(\d+)x\d+\.(\w+)")
LEFT_OPERAND = 4  # registers: 64 rows of 32 bytes, for 128 threads

# Opcodes that write predicates, memory or nothing; their first register is a source. All others write their first
# operand behind predicates, if it is a register.
WITHOUT_RESULT = frozenset(
    ("BAR", "CALL", "DSETP", "FCHK", "FSETP", "HSETP2", "ISETP", "NANOSLEEP", "R2P", "RET", "WARPSYNC")
)
STORES = frozenset(("ST", "STG", "STS", "STL", "STSM", "RED", "REDG"))
DOUBLES = frozenset(("DADD", "DFMA", "DMUL", "DSETP"))
MATRICES = frozenset(("HMMA", "IMMA", "QMMA"))
FRAGMENTS = (4, 4, 2, 4)  # registers of the sum, both operands, and the sum before, at most


class Product(NamedTuple):
    """Registers of a wgmma: its sum, and its left operand, if that does not come from shared memory."""

    sum: frozenset[int]
    operand: frozenset[int]


def product_of(instruction: Instruction) -> Product | None:
    """The registers of a wgmma; None for other instructions."""
    shape = PRODUCT.match(instruction.opcode)
    if shape is None:
        return None
    # 64 rows for 128 threads; two sums of 16 bits share a register.
    width = int(shape[1]) // (4 if shape[2] == "F16" else 2)
    total, left = instruction.operands.split(",")[:2]
    return Product(_named(total, width), _named(left, LEFT_OPERAND))


def written(instruction: Instruction) -> frozenset[int]:
    """Registers that an instruction writes, if its predicate lets it."""
    product = product_of(instruction)
    if product is not None:
        return product.sum
    name, *modifiers = instruction.opcode.split(".")
    place = _place_of_result(name, _operands(instruction))
    return NONE if place is None else _named(_operands(instruction)[place], _width_of_result(name, modifiers))


def read(instruction: Instruction) -> frozenset[int]:
    """Registers that an instruction reads, including addresses, but not the sum that a wgmma adds to."""
    product = product_of(instruction)
    if product is not None:
        return product.operand
    name, *modifiers = instruction.opcode.split(".")
    operands = _operands(instruction)
    place = _place_of_result(name, operands)
    found: set[int] = set()
    for i, operand in enumerate(operands):
        if i == place:
            continue
        for number, suffixes in REGISTER.findall(operand):
            width = 2 if ".64" in suffixes else _width_of_source(name, modifiers, i, is_last=i == len(operands) - 1)
            found.update(range(int(number), int(number) + width))
    return frozenset(found)


def _operands(instruction: Instruction) -> list[str]:
    return [operand.strip() for operand in instruction.operands.split(",")]


def _named(operand: str, width: int) -> frozenset[int]:
    """`width` registers, from the one that an operand names on."""
    register = RESULT.match(operand.strip())
    return frozenset(range(int(register[1]), int(register[1]) + width)) if register else NONE


def _place_of_result(name: str, operands: list[str]) -> int | None:
    """The index of the result operand: the first one, or the one behind predicates that are results too."""
    if name in WITHOUT_RESULT:
        return None
    place = next((i for i, operand in enumerate(operands) if not PREDICATE.fullmatch(operand)), None)
    return place if place is not None and RESULT.fullmatch(operands[place]) else None


def _width_of_result(name: str, modifiers: list[str]) -> int:
    if name in MATRICES:
        return 2 if "F16" in modifiers[1:2] else FRAGMENTS[0]
    if name == "LDSM":
        return _matrices(modifiers)
    if name in DOUBLES or name == "LEPC" or (name == "CS2R" and "32" not in modifiers) or "WIDE" in modifiers:
        return 2
    types = [modifier for modifier in modifiers if re.fullmatch(r"B?[FSU]\d+", modifier)]
    if (name in ("F2F", "FRND") and types[:1] == ["F64"]) or (name == "I2F" and "F64" in types):
        return 2
    if name == "F2I" and {"S64", "U64"} & set(types):
        return 2
    return _moved(modifiers)


def _width_of_source(name: str, modifiers: list[str], place: int, *, is_last: bool) -> int:
    if name in MATRICES:
        return FRAGMENTS[min(place, 3)]
    if name in DOUBLES or (name in ("F2F", "F2I") and modifiers[-1:] == ["F64"]):
        return 2
    if name in STORES and is_last:
        return _matrices(modifiers) if name == "STSM" else _moved(modifiers)
    return 2 if "WIDE" in modifiers and place == 3 else 1


def _moved(modifiers: list[str]) -> int:
    """The number of registers that are loaded, stored or moved."""
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1


def _matrices(modifiers: list[str]) -> int:
    """The number of registers of the 8 x 8 matrices that are loaded or stored together."""
    return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
