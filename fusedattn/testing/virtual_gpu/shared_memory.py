"""Shared memory of all programs: loads and stores, and the matrices of ldmatrix and stmatrix.

A program's memory begins at address :data:`BASE`, as on the hardware, where the first kilobyte is the system's; a
null pointer is out of bounds.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedattn.testing.virtual_gpu.builders import Mask, Step, builds, unknown, vector
from fusedattn.testing.virtual_gpu.faults import MemoryFault
from fusedattn.testing.virtual_gpu.global_memory import access_of, loads_into, sources_of
from fusedattn.testing.virtual_gpu.ptx import Address, Instruction, Kernel
from fusedattn.testing.virtual_gpu.races import Races
from fusedattn.testing.virtual_gpu.registers import Array
from fusedattn.testing.virtual_gpu.warps import whole_warps

if TYPE_CHECKING:
    from fusedattn.testing.virtual_gpu.machine import Machine

BASE = 1024
_POISON = 0xFF  # NaN in every float type


class SharedMemory:
    """The bytes of `n_ctas` programs, `n_bytes` of each, with the order of accesses."""

    def __init__(
        self, kernel: Kernel, n_ctas: int, n_threads: int, n_bytes: int, liberties: Counter[str], *, strict: bool
    ) -> None:
        self.n_ctas, self.n_bytes = n_ctas, n_bytes
        self.liberties, self.strict = liberties, strict
        self.window = -(-(BASE + n_bytes) // 1024) * 1024  # of one program
        self.granule = _smallest_access(kernel)
        self.bytes = np.empty(n_ctas * self.window, dtype="u1")
        self.typed = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        lanes = np.arange(n_ctas * n_threads)
        self.cta, self.warp = lanes // n_threads, lanes % n_threads // 32  # of each lane
        self.start = self.cta * self.window  # of each lane's memory
        self.n_warps = n_threads // 32
        self.clear()

    def clear(self) -> None:
        """Poison all bytes, and forget all accesses."""
        self.bytes.fill(_POISON)
        n_granules = self.window // self.granule
        self.races = Races(self.n_ctas, self.n_warps, n_granules, self.liberties, strict=self.strict)

    def locate(self, addresses: Array, lanes: Any, size: int, x: Instruction) -> Array:
        """The places in :attr:`bytes` of `size` bytes at addresses of lanes, checked; int64."""
        addresses = addresses.astype("i8")
        if (addresses & (size - 1)).any():
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise MemoryFault(f"{x.opcode}, at {x.place}: shared address {bad} is not a multiple of {size}")
        self.check(addresses, size, x)
        return self.start[lanes] + addresses

    def check(self, addresses: Array, size: int, x: Instruction) -> None:
        """Fail unless these bytes are the kernel's."""
        if addresses.min() < BASE or addresses.max() + size > BASE + self.n_bytes:
            outside = (addresses < BASE) | (addresses + size > BASE + self.n_bytes)
            bad = int(addresses[outside].flat[0]) - BASE
            raise MemoryFault(
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

    def writes(self, places: Array, lanes: Any, size: int, x: Instruction) -> None:
        """Lanes write `size` bytes at places, by the generic proxy."""
        self.races.write(self.granules(places, size), self.cta[lanes, None], self.warp[lanes, None], x)


def lanes_of(mask: Mask) -> Any:
    """An index that selects the lanes of a mask."""
    return slice(None) if mask is True else np.flatnonzero(mask)


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


def shared_addresses(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the lanes: the shared addresses of operand `i`."""
    operand = x.operands[i]
    if not isinstance(operand, Address) or operand.coordinates:
        raise unknown(x)
    registers, offset = machine.registers, operand.offset
    if not registers.has(operand.base):
        fixed = int(registers.value(operand.base, "u4")) + offset
        return lambda lanes: np.full(registers.n_lanes, fixed, dtype="u4")[lanes]
    base = registers.row(operand.base, "u4")
    return lambda lanes: base[lanes] + np.uint32(offset) if offset else base[lanes]


@builds("ld.shared")
def _load(machine: Machine, x: Instruction) -> Step:
    kind, size, n = access_of(x)
    targets = vector(x, 0)
    if len(targets) != n:
        raise unknown(x)
    addresses, put, shared = shared_addresses(machine, x, 1), loads_into(machine, x, targets, kind), machine.shared

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, size * n, x)
        shared.reads(places, lanes, size * n, x)
        machine.counters.banks(x, at, size * n, mask)
        elements = shared.typed[size]
        first = places // size
        for i in range(n):
            put(i, elements[first + i], mask)

    return step


@builds("st.shared")
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(x)
    addresses, values, shared = shared_addresses(machine, x, 0), sources_of(machine, x, 1, size), machine.shared
    if len(vector(x, 1)) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, size * n, x)
        shared.writes(places, lanes, size * n, x)
        machine.counters.banks(x, at, size * n, mask)
        elements = shared.typed[size]
        first = places // size
        for i in range(n):
            elements[first + i] = values(i, mask)

    return step


def _matrices(x: Instruction, words: list[str]) -> tuple[int, bool]:
    """The number of 8 by 8 matrices of 16-bit elements, and whether they are transposed."""
    transposed = "trans" in words
    rest = [word for word in words if word != "trans"]
    if rest[:2] != ["sync", "aligned"] or rest[2] != "m8n8" or rest[4:] != ["shared", "b16"]:
        raise unknown(x)
    return int(rest[3][1:]), transposed


def _row_places(machine: Machine, x: Instruction, mask: Mask, addresses: Any, n: int) -> tuple[Array, Any, Array]:
    """Places of the rows of `n` matrices, ``(warps, n, 8)``: lanes 8 i to 8 i + 7 have those of matrix i; the lanes that
    gave them, and the warps."""
    whole_warps(mask, x)
    n_lanes = machine.registers.n_lanes
    warps = np.arange(n_lanes // 32) if mask is True else np.flatnonzero(mask.reshape(-1, 32)[:, 0])
    lanes = (warps[:, None] * 32 + np.arange(8 * n)).reshape(-1)
    places = machine.shared.locate(addresses(lanes), lanes, 16, x)
    return places.reshape(-1, n, 8), lanes, warps


# Lane 4 r + c holds elements 2 c and 2 c + 1 of row r.
_ROW, _PAIR = np.divmod(np.arange(32), 4)


@builds("ldmatrix")
def _load_matrices(machine: Machine, x: Instruction) -> Step:
    n, transposed = _matrices(x, x.opcode.split(".")[1:])
    targets = vector(x, 0)
    if len(targets) != n:
        raise unknown(x)
    addresses, shared = shared_addresses(machine, x, 1), machine.shared
    bank, rows = machine.registers.rows(targets)

    def step(mask: Mask) -> None:
        places, lanes, warps = _row_places(machine, x, mask, addresses, n)
        shared.reads(places.reshape(-1), lanes, 16, x)
        machine.counters.matrices(x, places)
        if transposed:  # element (r, c) of the transposed matrix is element (c, r)
            halves = shared.typed[2]
            low, high = (halves[places[..., 2 * _PAIR + i] // 2 + _ROW].astype("u4") for i in (0, 1))
            values = low | high << np.uint32(16)
        else:
            values = shared.typed[4][places[..., _ROW] // 4 + _PAIR]
        _put(bank, rows, values, mask, warps)

    return step


def _put(bank: Array, rows: Any, values: Array, mask: Mask, warps: Array) -> None:
    """Write ``(warps, registers, 32)`` values to registers."""
    by_register = values.transpose(1, 0, 2)
    if mask is True:
        bank[rows] = by_register.reshape(by_register.shape[0], -1)
    else:
        lanes = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        indices = np.arange(bank.shape[0])[rows]
        bank[indices[:, None], lanes] = by_register.reshape(by_register.shape[0], -1)


@builds("stmatrix")
def _store_matrices(machine: Machine, x: Instruction) -> Step:
    n, transposed = _matrices(x, x.opcode.split(".")[1:])
    sources = vector(x, 1)
    if len(sources) != n:
        raise unknown(x)
    addresses, shared = shared_addresses(machine, x, 0), machine.shared
    bank, rows = machine.registers.rows(sources)

    def step(mask: Mask) -> None:
        places, lanes, warps = _row_places(machine, x, mask, addresses, n)
        shared.writes(places.reshape(-1), lanes, 16, x)
        machine.counters.matrices(x, places)
        values = bank[rows].reshape(n, -1, 32)[:, warps].transpose(1, 0, 2)
        if transposed:
            halves = shared.typed[2]
            for i in (0, 1):
                halves[places[..., 2 * _PAIR + i] // 2 + _ROW] = (values >> np.uint32(16 * i)).astype("u2")
        else:
            shared.typed[4][places[..., _ROW] // 4 + _PAIR] = values

    return step
