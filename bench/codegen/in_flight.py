"""Find instructions that touch the registers of a wgmma that may still be running.

wgmma runs asynchronously until the warp has waited for its group. Until then its left operand, if in registers, must
not be written, and its sum neither written nor read; the next wgmma may add to the same sum (PTX ISA,
``wgmma.wait_group``). Triton before 3.9 breaks this rule in its PTX, and ptxas before 13.3 by itself: docs/codegen.md.

The set of products that may be running is followed along every path of the control flow, including loops, until it no
longer changes. Both ways of a branch count, and an instruction with a predicate both runs and does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.codegen.control_flow import states_before
from bench.codegen.disassembly import Instruction
from bench.codegen.loops import order_of
from bench.codegen.registers import product_of, read, written

What = Literal["operand written", "sum written", "sum read"]


@dataclass(frozen=True)
class Touch:
    """An instruction that touches registers of products that may be running.

    Attributes:
        address: the address of the instruction.
        opcode: its opcode.
        what: whether it writes an operand, writes a sum or reads a sum.
        registers: the numbers of the touched registers.
        products: addresses of the products.
        later: the number of products issued behind the last of these, on the path with the fewest.
        is_ordered: whether a scoreboard has shown before it that these products have read their operands.
    """

    address: int
    opcode: str
    what: What
    registers: tuple[int, ...]
    products: tuple[int, ...]
    later: int
    is_ordered: bool = False


class Running(NamedTuple):
    """A product that may be running.

    Attributes:
        age: the number of groups that ended after its own, on the path with the fewest; -1 if its own has not ended.
        later: the number of products issued since, likewise.
        is_read: whether a scoreboard has shown, on all paths, that its operands have been read.
    """

    age: int = -1
    later: int = 0
    is_read: bool = False


State = Mapping[int, Running]  # by the index of the product's instruction


def touches(instructions: list[Instruction]) -> list[Touch]:
    """The touches of a kernel for sm_90, in program order.

    Raises:
        NotImplementedError: the kernel has several functions, or branches to an address in a register without a table.
    """
    if not any(map(product_of, instructions)):
        return []
    return list(_touches(instructions, _running(instructions)))


def _touches(instructions: list[Instruction], states: list[State]) -> Iterator[Touch]:
    for instruction, before in zip(instructions, states, strict=True):
        if not before:
            continue
        state = _after_wait(before, instruction, instructions)
        products = {at: product for at in state if (product := product_of(instructions[at]))}
        own = product_of(instruction)
        # Successive products may add to one sum, in the same registers.
        sums = {at: product.sum for at, product in products.items() if own is None or product.sum != own.sum}
        operands = {at: product.operand for at, product in products.items()}
        results, sources = written(instruction), read(instruction)
        touched: dict[What, dict[int, frozenset[int]]] = {
            "operand written": {at: results & operand for at, operand in operands.items()},
            "sum written": {at: results & total for at, total in sums.items()},
            "sum read": {at: sources & total for at, total in sums.items()},
        }
        for what, registers in touched.items():
            of = sorted(at for at, common in registers.items() if common)
            if of:
                yield Touch(
                    instruction.address,
                    instruction.opcode,
                    what,
                    registers=tuple(sorted(frozenset().union(*registers.values()))),
                    products=tuple(instructions[at].address for at in of),
                    later=min(state[at].later for at in of),
                    is_ordered=what == "operand written" and all(state[at].is_read for at in of),
                )


def _running(instructions: list[Instruction]) -> list[State]:
    """The products that may be running before each instruction."""
    none: State = {}
    states = states_before(
        instructions, none, lambda place, before: _after(place, before, instructions), _merged, through_calls=True
    )
    return [state or {} for state in states]


def _after(place: int, before: State, instructions: list[Instruction]) -> State:
    """The products that may be running behind an instruction."""
    instruction = instructions[place]
    state = after = _after_wait(before, instruction, instructions)
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        pending = int(instruction.operands.split(",")[1], 16)
        after = {at: x for at, x in state.items() if x.age < pending}
    elif product_of(instruction):
        after = {at: x._replace(later=x.later + 1) for at, x in state.items()} | {place: Running()}
        if re.search(r"\bgsb0\b", instruction.operands):
            after = {at: x._replace(age=x.age + 1) for at, x in after.items()}
    return _merged(state, after) if instruction.predicate else after


def _after_wait(state: State, instruction: Instruction, instructions: list[Instruction]) -> State:
    """The state, updated by the scoreboards that an instruction waits for."""
    needs = order_of(instruction.encoding).needs if state else ()
    told = [at for at in state if order_of(instructions[at].encoding).operands in needs]
    return {**state, **{at: state[at]._replace(is_read=True) for at in told}} if told else state


def _merged(a: State, b: State) -> State:
    """The products that may be running where two paths meet."""
    if a is b:
        return a
    met = {**b, **a}
    for at in a.keys() & b.keys():
        x, y = a[at], b[at]
        met[at] = Running(min(x.age, y.age), min(x.later, y.later), x.is_read and y.is_read)
    return met
