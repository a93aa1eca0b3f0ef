"""The barriers in shared memory on which threads and copies arrive: PTX ISA, "mbarrier"."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array


@dataclass
class MBarrier:
    """The state of one barrier: PTX ISA, "mbarrier". A phase ends when no arrival and no byte is pending."""

    expected: int
    pending: int
    time: int  # when a warp initialised it
    warp: int
    used: Array  # by each warp, the time of its last use, ``(n_warps,)``
    bytes: int = 0
    phase: int = 0
    gathered: list[tuple[Array, Array]] = field(default_factory=list)  # released in this phase
    released: tuple[Array, Array] | None = None  # by the phases that have ended

    def advance(self) -> bool:
        """End the phase if nothing is pending; returns whether it ended."""
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.expected
        parts = [*self.gathered, *([self.released] if self.released else [])]
        if parts:
            self.released = _latest([part[0] for part in parts]), _latest([part[1] for part in parts])
        self.gathered = []
        return True


def _latest(parts: list[Array]) -> Array:
    """The latest times of each agent; a part may be without the last agents."""
    n = max(len(part) for part in parts)
    return np.max([np.pad(part, (0, n - len(part))) for part in parts], axis=0)


class MBarriers:
    """The mbarriers of all programs, by program and address."""

    def __init__(self) -> None:
        self.table: dict[tuple[int, int], MBarrier] = {}

    def at(self, cta: int, address: int, x: Instruction) -> MBarrier:
        barrier = self.table.get((cta, address))
        if barrier is None:
            raise AsyncError(f"{x.opcode}, at {x.place}: no mbarrier is initialised at shared address {address}")
        return barrier

    def check_phases(self, name: str) -> None:
        """Fail if programs end in the middle of a phase: with bytes that do not match, or a part of its arrivals."""
        for (_, address), barrier in self.table.items():
            if barrier.bytes:
                raise AsyncError(
                    f"{name}: the mbarrier at shared address {address} ends with {abs(barrier.bytes)} bytes "
                    + ("expected that did not arrive" if barrier.bytes > 0 else "arrived that nobody expected")
                )
            if barrier.pending < barrier.expected:
                raise AsyncError(
                    f"{name}: the mbarrier at shared address {address} ends with "
                    f"{barrier.expected - barrier.pending} of {barrier.expected} arrivals of a phase"
                )
