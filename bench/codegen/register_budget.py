"""How many registers the warps of a kernel may use, where groups of warps share them out by setmaxnreg.

A program begins with the same number of registers for every thread. A group of four warps then gives some up, or takes
what others gave up (PTX ISA, ``setmaxnreg``). What ptxas reports is the number at the beginning; the disassembly shows
all others. Every path of the control flow is followed, and each instruction belongs to the change that was the last
before it. So the tasks of the warps are found without names or addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.codegen.control_flow import states_before
from bench.codegen.disassembly import Instruction
from bench.codegen.loops import LANES, WARP_GROUP
from bench.codegen.occupancy import MULTIPROCESSORS, SCHEDULERS
from bench.codegen.registers import product_of, read, written

CHANGE, REQUEST = "USETMAXREG", "UTMALDG"
START = -1  # the place of no instruction: a program begins


@dataclass(frozen=True)
class Stretch:
    """The instructions from a change of the number of registers to the next.

    Attributes:
        allowed: registers that a thread has.
        used: registers that it needs, from R0 to the last that is named.
        products: the number of wgmma instructions.
        requests: the number of instructions that ask the tensor memory accelerator for a tile.
    """

    allowed: int
    used: int
    products: int = 0
    requests: int = 0


class Plan(NamedTuple):
    """What a launch intends: warps, and the registers of a thread that multiplies and of one that requests tiles."""

    warps: int
    multiplying: int
    requesting: int


def stretches(instructions: list[Instruction], at_start: int) -> tuple[Stretch, ...]:
    """The stretches of a kernel for sm_90 whose threads begin with `at_start` registers; none if nothing changes that.

    Raises:
        NotImplementedError: the kernel has several functions, or branches to an address in a register without a table.
    """
    if not any(x.opcode.startswith(CHANGE) for x in instructions):
        return ()

    def after(place: int, before: frozenset[int]) -> frozenset[int]:
        x = instructions[place]
        if not x.opcode.startswith(CHANGE):
            return before
        return frozenset({place}) | (before if x.predicate else frozenset())

    states = states_before(instructions, frozenset({START}), after, frozenset.union, through_calls=True)
    members: dict[int, list[Instruction]] = {}
    for x, changes in zip(instructions, states, strict=True):
        for change in changes or ():
            members.setdefault(change, []).append(x)
    return tuple(
        _stretch(at_start if change == START else _number(instructions[change]), members[change])
        for change in sorted(members)
    )


def _number(change: Instruction) -> int:
    return int(change.operands.split(",")[-1], 16)


def _stretch(allowed: int, instructions: list[Instruction]) -> Stretch:
    named = frozenset().union(*(read(x) | written(x) for x in instructions))
    return Stretch(
        allowed,
        used=max(named, default=-1) + 1,
        products=sum(product_of(x) is not None for x in instructions),
        requests=sum(x.opcode.startswith(REQUEST) for x in instructions),
    )


def faults_of(found: Sequence[Stretch], at_start: int, plan: Plan) -> Iterator[str]:
    """Where a kernel that begins with `at_start` registers for a thread does not keep to the plan."""
    if not found:
        yield f"never changes its {at_start} registers, planned are {plan.multiplying} and {plan.requesting}"
        return
    multiplying = [x for x in found if x.products]
    requesting = [x for x in found if x.requests]
    for what, selected, planned in (
        ("multiplies", multiplying, plan.multiplying),
        ("requests tiles", requesting, plan.requesting),
    ):
        others = sorted({x.allowed for x in selected} - {planned})
        if others:
            yield f"{what} with {' or '.join(map(str, others))} registers, planned are {planned}"
    for x in found:
        if x.used > x.allowed:
            yield f"uses {x.used} registers where a thread has {x.allowed}"
    machine = MULTIPROCESSORS["sm_90"]
    step = machine.register_step
    available = SCHEDULERS * LANES * machine.lane_registers
    begins_with = LANES * plan.warps * -(-at_start // step) * step
    if begins_with > available:
        yield f"begins with {begins_with} registers, a multiprocessor has {available}"
    other_warps = plan.warps - WARP_GROUP * len(multiplying)
    of_others = max((x.allowed for x in requesting), default=plan.requesting)
    together = LANES * (WARP_GROUP * sum(x.allowed for x in multiplying) + other_warps * of_others)
    if together > begins_with:
        yield f"waits forever: its warps ask for {together} registers, it begins with {begins_with}"
