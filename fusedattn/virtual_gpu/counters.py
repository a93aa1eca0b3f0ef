"""What ran, counted: instructions, accesses, and what the hardware would need for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array, Mask

SECTOR = 32  # bytes
BANKS = 32  # of four bytes each


@dataclass
class Counters:
    """Counts of a kernel's launches. Accesses are only looked at if `accesses` is true, which takes time."""

    accesses: bool = False
    programs: int = 0
    instructions: int = 0  # executed, each once for all threads of a program
    by_opcode: Counter[str] = field(default_factory=Counter)  # executed, each once for a warp
    bytes_of: Counter[str] = field(default_factory=Counter)  # by space and direction
    barriers: int = 0
    liberties: Counter[str] = field(default_factory=Counter)  # breaches of rules that Settings.strict would raise
    sectors_of: Counter[str] = field(default_factory=Counter)  # by place in the source: of global memory
    passes_of: Counter[str] = field(default_factory=Counter)  # by place: of shared memory, one if no banks conflict
    accesses_of: Counter[str] = field(default_factory=Counter)  # by place: of a warp

    def sectors(self, x: Instruction, addresses: Array, size: int, mask: Mask) -> None:
        """A global access of `size` bytes for each lane of the mask."""
        if not self.accesses:
            return
        self.bytes_of[x.opcode.split(".")[0] + ".global"] += size * addresses.size
        warp = _warps(addresses.size, mask)
        touched = (addresses[:, None] + np.arange(0, size, min(size, SECTOR))) // SECTOR
        pairs = np.unique(warp[:, None] * 2**45 + touched)
        self.sectors_of[x.place] += pairs.size
        self.accesses_of[x.place] += np.unique(warp).size

    def banks(self, x: Instruction, addresses: Array, size: int, mask: Mask) -> None:
        """A shared access of `size` bytes for each lane of the mask.

        Accesses of 8 and 16 bytes are done by halves and quarters of a warp. Lanes that read one word share it.
        """
        if not self.accesses:
            return
        self.bytes_of[x.opcode.split(".")[0] + ".shared"] += size * addresses.size
        warp = _warps(addresses.size, mask)
        lane = np.arange(addresses.size) if mask is True else np.flatnonzero(mask)
        parts = max(size // 4, 1)
        group = lane // (32 // parts)
        words = addresses.astype("i8")[:, None] // 4 + np.arange(parts)
        distinct = np.unique(group[:, None] * 2**40 + words)
        in_bank = np.unique(distinct // 2**40 * BANKS + distinct % BANKS, return_counts=True)
        passes: Counter[int] = Counter()
        for key, n in zip(in_bank[0] // BANKS, in_bank[1], strict=True):
            passes[int(key)] = max(passes[int(key)], int(n))
        self.passes_of[x.place] += sum(passes.values())
        self.accesses_of[x.place] += np.unique(warp).size * parts

    def matrices(self, x: Instruction, places: Array) -> None:
        """Rows of matrices ``(warps, n, 8)``, of 16 bytes each: a matrix is one pass if no banks conflict."""
        if not self.accesses:
            return
        self.bytes_of[x.opcode.split(".")[0] + ".shared"] += 16 * places.size
        columns = np.sort(places // 16 % 8, axis=-1)
        conflicts = [np.unique(row, return_counts=True)[1].max() for row in columns.reshape(-1, 8)]
        self.passes_of[x.place] += int(np.sum(conflicts))
        self.accesses_of[x.place] += len(conflicts)


def _warps(n: int, mask: Mask) -> Array:
    lanes = np.arange(n) if mask is True else np.flatnonzero(mask)
    return lanes // 32
