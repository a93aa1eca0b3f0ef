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
            known, fenced = (np.max([part[i] for part in parts], axis=0) for i in (0, 1))
            self.released = known, fenced
        self.gathered = []
        return True


class MBarriers:
    """The mbarriers of all programs, by program and address."""

    def __init__(self) -> None:
        self.table: dict[tuple[int, int], MBarrier] = {}

    def at(self, cta: int, address: int, x: Instruction) -> MBarrier:
        barrier = self.table.get((cta, address))
        if barrier is None:
            raise AsyncError(f"{x.opcode}, at {x.place}: no mbarrier is initialised at shared address {address}")
        return barrier
