"""The order in which the instructions of a kernel for an NVIDIA GPU can run, from its disassembly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from bench.codegen.disassembly import Instruction

T = TypeVar("T")

# Branches whose targets are in registers. In code from Triton they choose the task of a warp, from a table.
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")


def states_before(
    instructions: list[Instruction],
    start: T,
    after: Callable[[int, T], T],
    met: Callable[[T, T], T],
    *,
    through_calls: bool,
) -> list[T | None]:
    """The state before each instruction, None if it is not reached; followed along every path until nothing changes.

    `after` gives the state behind the instruction of an index, `met` that where two paths meet. A call leads into its
    function, which returns to the place behind each call; without `through_calls` it leads to the place behind itself,
    and functions are not reached.

    Raises:
        NotImplementedError: the kernel has several functions, each with addresses from 0 on, or branches to an address
            in a register for which there is no table.
    """
    successors = _successors(instructions, through_calls=through_calls)
    states: list[T | None] = [None] * len(instructions)
    states[0], changed = start, [0]
    while changed:
        place = changed.pop()
        before = states[place]
        assert before is not None  # it was reached
        state = after(place, before)
        for successor in successors[place]:
            known = states[successor]
            joined = state if known is None else met(known, state)
            if joined != known:
                states[successor] = joined
                changed.append(successor)
    return states


def _successors(instructions: list[Instruction], *, through_calls: bool) -> list[list[int]]:
    """The possible successors of each instruction."""
    places = {x.address: place for place, x in enumerate(instructions)}
    if len(places) < len(instructions):
        raise NotImplementedError("functions of a kernel: got several, allowed is one")
    names = [x.opcode.split(".")[0] for x in instructions]
    returns = [place + 1 for place, name in enumerate(names) if name == "CALL"] if through_calls else []
    meetings: dict[str, list[int]] = {}
    for name, x in zip(names, instructions, strict=True):
        if name == "BSSY":
            barrier, target = x.operands.split(",")
            meetings.setdefault(barrier.strip(), []).append(places[int(target, 16)])
    found = []
    for place, (name, x) in enumerate(zip(names, instructions, strict=True)):
        if name in INDIRECT and not x.table:
            raise NotImplementedError(f"branches: got {x.opcode} at {x.address:#x}, allowed are those to an address")
        jumps = name == "BRA" or (name == "CALL" and through_calls)
        address = re.search(r"0x[0-9a-f]+\s*$", x.operands) if jumps else None
        targets = [places[int(address[0], 16)]] if address else [places[to] for to in x.table]
        if name == "BSYNC":  # continues behind itself, or perhaps at the target of its BSSY
            meeting = meetings.get(x.operands.strip(), [])
            targets = [] if place + 1 in meeting else meeting
        elif name == "RET":
            targets = returns
        # A branch may also have its condition among its operands.
        always_jumps = bool(targets) and name != "BSYNC" and x.operands.strip().startswith("0x")
        falls = x.predicate or not (name in ("EXIT", "RET", *INDIRECT) or always_jumps)
        found.append(targets + [place + 1] * (falls and place + 1 < len(instructions)))
    return found
