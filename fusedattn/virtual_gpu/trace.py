"""What orders the work of warps in time: copies, arrivals, waits, products and barriers, in the order of each warp.

Between two events a warp issues instructions, which are counted by kind. The virtual GPU has no clock: a model that has
one can replay the events (bench/codegen/timeline.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fusedattn.virtual_gpu.kinds import KINDS, Kind, kind_of
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array

What = Literal["init", "arrive", "wait", "copy", "product", "commit", "products", "barrier"]


@dataclass(frozen=True)
class Event:
    """One event of a warp.

    Attributes:
        what: "init", "arrive" and "wait" concern an mbarrier, on which a "copy" arrives too; "product" is a wgmma,
            "commit" ends a group of them, "products" waits for groups; "barrier" is one of threads.
        issued: the warp's instructions since its event before, by kind, without those that are events.
        barrier: the shared address of the mbarrier, or the number of the barrier.
        amount: "init": arrivals of a phase. "arrive": bytes that it expects. "wait": phases that have ended.
            "copy": bytes. "product": multiply-adds of four warps. "products": groups that may remain. "barrier":
            threads.
    """

    what: What
    x: Instruction
    issued: dict[Kind, int]
    barrier: int = 0
    amount: int = 0


class Prefixes:
    """How many instructions of each kind stand before each instruction of a block, and in all of it."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        of_kind = np.zeros((len(instructions) + 1, len(KINDS)), dtype="i8")
        for i, x in enumerate(instructions):
            of_kind[i + 1, KINDS.index(kind_of(x.opcode))] = 1
        self.before = of_kind.cumsum(axis=0)  # (instructions + 1, kinds)
        self.at = {id(x): i for i, x in enumerate(instructions)}


class Trace:
    """The events of the latest launch of a kernel, by program and warp."""

    def __init__(self) -> None:
        self.events: dict[tuple[int, int], list[Event]] = {}

    def begin(self, programs: Sequence[int], n_warps: int) -> None:
        """Programs begin that run together, of so many warps each."""
        self._warps = [(program, warp) for program in programs for warp in range(n_warps)]
        self.events |= {warp: [] for warp in self._warps}
        self._issued = np.zeros((len(self._warps), len(KINDS)), dtype="i8")  # before the block that runs
        self._noted = self._issued.copy()  # up to the latest event

    def enter(self, block: Prefixes) -> None:
        """Instructions of a block follow."""
        self._block = block

    def leave(self, warps: Array) -> None:
        """Warps, numbered over all programs, have run the block."""
        self._issued[warps] += self._block.before[-1]

    def note(self, what: What, x: Instruction, warps: Iterable[int], barrier: int = 0, amount: int = 0) -> None:
        """An instruction of the block is an event of some warps, numbered over all programs."""
        i = self._block.at[id(x)]
        for warp in warps:
            issued = self._issued[warp] + self._block.before[i] - self._noted[warp]
            self._noted[warp] = self._issued[warp] + self._block.before[i + 1]
            counts = {kind: int(n) for kind, n in zip(KINDS, issued, strict=True) if n}
            self.events[self._warps[warp]].append(Event(what, x, counts, barrier, amount))
