"""Which program stored where in global memory: two may not store different values to one byte in a launch.

Nothing orders the programs of a launch but atomic operations that acquire and release. In a kernel with any of these,
nothing is checked; atomic operations themselves are never an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import RaceError
from fusedattn.virtual_gpu.global_memory import GlobalMemory, load, save
from fusedattn.virtual_gpu.ptx import Instruction, Kernel
from fusedattn.virtual_gpu.registers import Array

_BITS = 12  # of the number of an instruction; above them is 1 + the number of a program
_ORDERING = {"acquire", "release", "acq_rel"}


class Stores:
    """The instructions of a kernel that store to global memory, and what they did in a launch."""

    def __init__(self, kernel: Kernel) -> None:
        self.instructions: list[Instruction] = []
        self.granule = 16  # the smallest access, in bytes
        self.checked = not any(_ORDERING & set(x.opcode.split(".")) for x in kernel.instructions)

    def enter(self, x: Instruction, size: int) -> int:
        """The number of an instruction that stores `size` bytes for each thread."""
        self.instructions.append(x)
        self.granule = min(self.granule, size)
        self.checked &= len(self.instructions) < 2**_BITS
        return len(self.instructions) - 1

    def store(self, memory: GlobalMemory, at: Array, parts: list[Array], program: Array, number: int) -> None:
        """Store the elements of a vector, each ``(n,)`` or ``()``, at checked addresses ``(n,)``, by programs."""
        if not self.checked:
            _save(at, parts)
            return
        by = (program.astype("i8")[:, None] + 1 << _BITS) + number
        size = parts[0].itemsize * len(parts)
        for tensor, chosen in memory.by_range(at):
            writers = tensor.writers(self.granule)
            first = at[chosen] // self.granule - tensor.start // self.granule
            granules = first[:, None] + np.arange(max(size // self.granule, 1))
            before, mine = writers[granules], by[chosen]
            others = (before != 0) & (before >> _BITS != mine >> _BITS)
            if others.any():
                self._compare(at[chosen], _chosen(parts, chosen), others, before, number)
            writers[granules] = mine
            others = writers[granules] != mine
            _save(at[chosen], _chosen(parts, chosen))
            if others.any():
                self._compare(at[chosen], _chosen(parts, chosen), others, writers[granules], number)

    def _compare(self, at: Array, parts: list[Array], others: Array, writers: Array, number: int) -> None:
        """Fail if bytes that other programs have written are not what is stored."""
        differ = np.zeros(len(at), dtype=bool)
        for i, part in enumerate(parts):
            differ |= load(at + i * part.itemsize, part.itemsize) != part
        bad = others & differ[:, None]
        if bad.any():
            x, writer = self.instructions[number], int(writers[bad][0])
            first = self.instructions[writer & 2**_BITS - 1]
            raise RaceError(
                f"{x.opcode}, at {x.place}: another value than program {(writer >> _BITS) - 1} stores to the same "
                f"bytes, by {first.opcode} at {first.place}"
            )


def _chosen(parts: list[Array], chosen: Any) -> list[Array]:
    return [part[chosen] if part.ndim else part for part in parts]


def _save(at: Array, parts: list[Array]) -> None:
    for i, part in enumerate(parts):
        save(at + i * part.itemsize, part.itemsize, part)
