"""The actions of a warp on the timeline: its events, as the virtual GPU traced them, placed in the machine code.

The virtual GPU runs PTX, and ptxas moves, merges and adds instructions. But what orders time stands in both in the same
order: waits for mbarriers, arrivals, copies, products, waits for products and barriers. The path of a warp through the
machine code is the one with the same events; of several such paths, the one whose numbers of instructions between the
events are closest to those of PTX.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.codegen.disassembly import Instruction
from bench.codegen.loops import Step, loop_of
from bench.codegen.timeline import Action
from fusedattn.virtual_gpu.trace import Event

Sign = tuple[str, int]  # of an event: what it is, and a number that PTX and machine code share
MOST_PATHS = 64  # between two events
ROWS = 64  # of a product of four warps
KERNELS = Path(__file__).parents[2] / "kernels"


def sign_of_event(event: Event) -> Sign | None:
    """How an event is found in the machine code; None if it leaves no instruction there."""
    if event.what in ("init", "commit"):
        return None
    number = {"product": event.amount, "products": event.amount, "barrier": event.barrier}
    return event.what, number.get(event.what, 0)


def sign_of_instruction(x: Instruction) -> Sign | None:
    """The event of an instruction; None if it is none."""
    if x.opcode.startswith("SYNCS.PHASECHK"):
        return "wait", 0
    if x.opcode.startswith("SYNCS.ARRIVE"):
        return "arrive", 0
    if x.opcode.startswith("UTMALDG"):
        return "copy", 0
    if x.opcode.startswith("WARPGROUP.DEPBAR"):
        return "products", int(x.operands.split(",")[1], 16)
    if x.opcode.startswith("BAR.SYNC"):
        return "barrier", int(x.operands.split(",")[0], 16)
    if x.opcode.startswith(("HGMMA", "QGMMA")):
        [(n, k)] = re.findall(r"64x(\d+)x(\d+)", x.opcode)
        return "product", ROWS * int(n) * int(k)
    return None


class _Code:
    """Machine code, and the paths from one event to the next."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.code = code
        self.signs = [sign_of_instruction(x) for x in code]
        self.at = {x.address: i for i, x in enumerate(code)}
        self.steps = loop_of(list(code)).steps
        self._after: dict[int, dict[int, list[list[int]]]] = {}

    def after(self, i: int) -> dict[int, list[list[int]]]:
        """From instruction `i`: by the next event, the instructions on each way there."""
        if i not in self._after:
            self._after[i] = {}
            for path in self._paths(i):
                ways = self._after[i].setdefault(path[-1], [])
                ways.append(path[:-1])
        return self._after[i]

    def _paths(self, i: int) -> Iterator[list[int]]:
        found, open_paths = 0, [[j] for j in self._following(i)]
        while open_paths and found < MOST_PATHS:
            path = open_paths.pop()
            last = path[-1]
            if self.signs[last] is not None:
                found += 1
                yield path
                if not self.code[last].predicate:
                    continue
            # An event with a predicate may be none of this warp.
            open_paths += [[*path, j] for j in self._following(last) if j not in path]

    def _following(self, i: int) -> list[int]:
        x = self.code[i]
        following = [i + 1] if i + 1 < len(self.code) else []
        if x.opcode.startswith("EXIT") and not x.predicate:
            return []
        if x.table:
            return [self.at[target] for target in x.table]
        if x.target is None or x.target not in self.at:
            return following
        return [self.at[x.target], *(following if x.predicate else [])]


def path_of(events: Sequence[Event], code: Sequence[Instruction]) -> list[tuple[int, Event | None]]:
    """The instructions of a warp from its first event to its last, by their places in the code, with the events.

    Raises:
        ValueError: the machine code has no such path.
    """
    graph = _Code(code)
    signs = [sign_of_event(event) for event in events]
    chosen = [(event, sign) for event, sign in zip(events, signs, strict=True) if sign is not None]
    first = chosen[0][1]
    costs: dict[int, float] = {i: 0.0 for i, sign in enumerate(graph.signs) if sign == first}
    before: list[dict[int, tuple[int, list[int]]]] = [{}]
    for number, (event, sign) in enumerate(chosen[1:], 1):
        wanted, better, ways = sum(event.issued.values()), dict[int, float](), dict[int, tuple[int, list[int]]]()
        for i, cost in costs.items():
            for j, paths in graph.after(i).items():
                if graph.signs[j] != sign:
                    continue
                path = min(paths, key=lambda path: abs(len(path) - wanted))
                total = cost + abs(len(path) - wanted)
                if total < better.get(j, float("inf")):
                    better[j], ways[j] = total, (i, path)
        if not better:
            places = ", ".join(hex(code[i].address) for i in costs)
            raise ValueError(f"events: number {number}, {sign}, does not follow {chosen[number - 1][1]} at {places}")
        costs = better
        before.append(ways)
    at = min(costs, key=lambda i: costs[i])
    found: list[tuple[int, Event | None]] = [(at, chosen[-1][0])]
    for number in range(len(chosen) - 1, 0, -1):
        at, path = before[number][at]
        found += [(i, None) for i in reversed(path)]
        found.append((at, chosen[number - 1][0]))
    return found[::-1]


def actions_of(events: Sequence[Event], code: Sequence[Instruction], tiles: frozenset[int]) -> list[Action]:
    """The actions of a warp; `tiles` are the mbarriers on which copies arrive."""
    steps = loop_of(list(code)).steps
    return [_action(steps[i], event, tiles) for i, event in path_of(events, code)]


def _action(step: Step, event: Event | None, tiles: frozenset[int]) -> Action:
    if event is None:
        # An event that is none of this warp's takes an issue slot.
        return Action(replace(step, kind="issue") if step.kind in ("tma", "barrier") else step)
    if event.what == "product":
        return Action(step, label=label_of(event.x.place))
    if event.what == "products":
        return Action(step, label="products")
    if event.what == "wait":
        return Action(step, "wait", event.barrier, event.amount, "tile" if event.barrier in tiles else "others")
    if event.what == "copy":
        return Action(step, "copy", event.barrier, event.amount, tensor_of(event.x.place))
    if event.what == "arrive":
        return Action(step, "arrive", event.barrier, event.amount)
    return Action(replace(step, kind="issue"))  # a barrier of four warps that are alike


def label_of(place: str) -> str:
    """What a product computes: the variable to which the line of the kernel assigns it."""
    assigned = re.match(r"\s*(\w+) = ", _lines(place)[0])
    return assigned[1] if assigned else "product"


def tensor_of(place: str) -> str:
    """What a copy reads: the tensor whose boxes a line of the kernel names, which may call the one that copies."""
    found = re.search(r"\bboxes\.(\w+)", " ".join(_lines(place)))
    return found[1] if found else "tile"


def _lines(place: str) -> list[str]:
    """The lines of kernels at a place: the innermost, then those that call it."""
    found = re.findall(r"([\w.]+):(\d+)", place) or [("", "0")]
    return [linecache.getline(str(KERNELS / name), int(line)) for name, line in found]
