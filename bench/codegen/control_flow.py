"""The order in which the instructions of a kernel for an NVIDIA GPU can run, from its disassembly."""

from __future__ import annotations

import re

from bench.codegen.disassembly import Instruction

# Branches whose targets are in registers. Code from Triton has none.
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")


def places_of(instructions: list[Instruction]) -> dict[int, int]:
    """The index of each instruction by its address.

    Raises:
        NotImplementedError: the kernel has several functions, each with addresses from 0 on.
    """
    places = {x.address: place for place, x in enumerate(instructions)}
    if len(places) < len(instructions):
        raise NotImplementedError("functions of a kernel: got several, allowed is one")
    return places


def successors_of(instructions: list[Instruction], places: dict[int, int], *, through_calls: bool) -> list[list[int]]:
    """The possible successors of each instruction.

    A call leads into its function, which returns to the place behind each call. Without `through_calls` it leads to the
    place behind itself, and functions are not reached.

    Raises:
        NotImplementedError: the kernel branches to an address in a register.
    """
    names = [x.opcode.split(".")[0] for x in instructions]
    returns = [place + 1 for place, name in enumerate(names) if name == "CALL"] if through_calls else []
    meetings: dict[str, list[int]] = {}
    for name, x in zip(names, instructions, strict=True):
        if name == "BSSY":
            barrier, target = x.operands.split(",")
            meetings.setdefault(barrier.strip(), []).append(places[int(target, 16)])
    found = []
    for place, (name, x) in enumerate(zip(names, instructions, strict=True)):
        if name in INDIRECT:
            raise NotImplementedError(f"branches: got {x.opcode} at {x.address:#x}, allowed are those to an address")
        jumps = name == "BRA" or (name == "CALL" and through_calls)
        address = re.search(r"0x[0-9a-f]+\s*$", x.operands) if jumps else None
        targets = [places[int(address[0], 16)]] if address else []
        if name == "BSYNC":  # continues behind itself, or perhaps at the target of its BSSY
            meeting = meetings.get(x.operands.strip(), [])
            targets = [] if place + 1 in meeting else meeting
        elif name == "RET":
            targets = returns
        # A branch may also have its condition among its operands.
        ends = name in ("EXIT", "RET") or (bool(targets) and name != "BSYNC" and x.operands.strip().startswith("0x"))
        falls = x.predicate or not ends
        found.append(targets + [place + 1] * (falls and place + 1 < len(instructions)))
    return found
