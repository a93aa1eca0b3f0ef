"""Shared memory of all programs.

A program's memory begins at address :data:`BASE`, as on the hardware, where the first kilobyte is the system's; a
null pointer is out of bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import MemoryAccessError
from fusedattn.virtual_gpu.ptx import Instruction, Kernel, access_of
from fusedattn.virtual_gpu.races import Races
from fusedattn.virtual_gpu.registers import Array

BASE = 1024
_POISON = 0xFF  # NaN in every float type


class SharedMemory:
    """The bytes of `n_ctas` programs, `n_bytes` of each, with the order of accesses."""

    def __init__(
        self, kernel: Kernel, n_ctas: int, n_threads: int, n_bytes: int, *, fenced_copies: bool = True
    ) -> None:
        self.n_ctas, self.n_bytes = n_ctas, n_bytes
        self.fenced_copies = fenced_copies
        self.window = -(-(BASE + n_bytes) // 1024) * 1024  # of one program
        self.granule = _smallest_access(kernel)
        self.bytes = np.empty(n_ctas * self.window, dtype="u1")
        self.typed = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.last = np.zeros(n_ctas * self.window // 4, dtype="i4")  # by word, for `overtaken`
        lanes = np.arange(n_ctas * n_threads)
        self.cta, self.warp = lanes // n_threads, lanes % n_threads // 32  # of each lane
        self.start = self.cta * self.window  # of each lane's memory
        self.n_warps = n_threads // 32
        self.clear()

    def clear(self) -> None:
        """Poison all bytes, and forget all accesses."""
        self.bytes.fill(_POISON)
        n_granules = self.window // self.granule
        self.races = Races(self.n_ctas, self.n_warps, n_granules, fenced_copies=self.fenced_copies)

    def locate(self, addresses: Array, lanes: Any, size: int, x: Instruction) -> Array:
        """The places in :attr:`bytes` of `size` bytes at addresses of lanes, checked; int64."""
        addresses = addresses.astype("i8")
        if (addresses & (size - 1)).any():
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise MemoryAccessError(f"{x.opcode}, at {x.place}: shared address {bad} is not a multiple of {size}")
        self.check(addresses, size, x)
        return self.start[lanes] + addresses

    def check(self, addresses: Array, size: int, x: Instruction) -> None:
        """Fail unless these bytes are the kernel's."""
        if addresses.min() < BASE or addresses.max() + size > BASE + self.n_bytes:
            outside = (addresses < BASE) | (addresses + size > BASE + self.n_bytes)
            bad = int(addresses[outside].flat[0]) - BASE
            raise MemoryAccessError(
                f"{x.opcode}, at {x.place}: {size} bytes at {bad} of shared memory, which has {self.n_bytes}"
            )

    def granules(self, places: Array, size: int) -> Array:
        """The granules of `size` bytes at each place, ``(n, granules of size)``."""
        first = places // self.granule
        n = size // self.granule
        return first[:, None] if n == 1 else first[:, None] + np.arange(n)

    def reads(self, places: Array, lanes: Any, size: int, x: Instruction) -> None:
        """Lanes read `size` bytes at places, by the generic proxy."""
        self.races.read(self.granules(places, size), self.cta[lanes, None], self.warp[lanes, None], x)

    def writes(self, places: Array, lanes: Any, parts: list[Array], x: Instruction) -> None:
        """Lanes will write the elements of a vector, each ``(n,)`` or ``()``, at places, by the generic proxy."""
        size = parts[0].itemsize * len(parts)

        def equal() -> Array:
            """The granules that have these values already."""
            vectors = np.stack([np.broadcast_to(part, places.shape) for part in parts], axis=1)
            same = vectors.view("u1") == self.bytes[places[:, None] + np.arange(size)]
            return same.reshape(len(places), -1, self.granule).all(axis=2)

        self.races.write(self.granules(places, size), self.cta[lanes, None], self.warp[lanes, None], x, equal)

    def overtaken(self, places: Array) -> tuple[Array, Array]:
        """Which places, of several words each, are also those of a later one; and for each the last that has it."""
        order = np.arange(len(places))
        self.last[places // 4] = order
        last = self.last[places // 4]
        return last != order, last


def _smallest_access(kernel: Kernel) -> int:
    """The size of the smallest access of shared memory, in bytes."""
    sizes = [8]  # a barrier's
    for x in kernel.instructions:
        if x.opcode.startswith(("ld.shared", "st.shared")):
            _, size, n = access_of(x)
            sizes.append(size * n)
        elif x.opcode.startswith(("cp.async.ca", "cp.async.cg")):
            sizes.append(int(str(x.operands[2]), 0))
    return min(sizes)
