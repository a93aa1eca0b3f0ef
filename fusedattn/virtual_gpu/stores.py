"""Who stored where in global memory: two programs, or two warps, store no different values to one byte in a launch.

Barriers order the warps of a program, and atomic operations that release and acquire at one address order programs;
nothing else does. What a program stores before it releases is ordered before what another stores after it has acquired
that: the threads of a program are taken as one here. Atomic operations of several programs on one byte are no error,
but those of one and a store by another are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import RaceError
from fusedattn.virtual_gpu.global_memory import GlobalMemory, Range, load, save
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array
from fusedattn.virtual_gpu.shared_memory import SharedMemory

_BITS = 12  # of the number of an instruction
_WARP = 6  # bits of the number of a warp, above them; then follows 1 + the number of a program
_TIME = 32  # bits of a time; above them is how often the program had released


class Stores:
    """The instructions of a kernel that change global memory, and what they did in a launch."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.memory = GlobalMemory([])
        self.known: dict[int, dict[int, int]] = {}  # to a program: so many releases of others
        self.released: dict[int, dict[int, int]] = {}  # the same, at an address
        self.instructions: list[Instruction] = []
        self.granule = 16  # the smallest access, in bytes
        self.checked = True
        self.cta_of: dict[int, int] = {}  # of the programs that run now
        self.releases = np.zeros(shared.n_ctas, dtype="i8")  # by each of them

    def enter(self, x: Instruction, size: int) -> int:
        """The number of an instruction that changes `size` bytes for each thread."""
        self.instructions.append(x)
        self.granule = min(self.granule, size)
        self.checked &= len(self.instructions) < 2**_BITS
        return len(self.instructions) - 1

    def begin(self, memory: GlobalMemory, programs: Sequence[int]) -> None:
        """Programs begin; those before them, on the same memory, were of the same launch."""
        if self.memory is not memory:
            self.memory = memory
            self.known, self.released = {}, {}
        self.cta_of = {program: cta for cta, program in enumerate(programs)}
        self.releases.fill(0)

    def synchronise(self, at: Array, program: Array, *, acquire: bool, release: bool) -> None:
        """Atomic operations at addresses, in their order."""
        for address, number in zip(at.tolist(), program.tolist(), strict=True):
            known, there = self.known.setdefault(number, {}), self.released.setdefault(address, {})
            if acquire:
                _join(known, there)
            if release:
                cta = self.cta_of[number]
                self.releases[cta] += 1
                _join(there, known)
                there[number] = int(self.releases[cta])

    def store(self, at: Array, parts: list[Array], program: Array, lanes: Any, number: int) -> None:
        """Store the elements of a vector, each ``(n,)`` or ``()``, at checked addresses ``(n,)``, by lanes."""
        if not self.checked:
            _save(at, parts)
            return
        by, times = self._now(program, lanes, number)
        size = parts[0].itemsize * len(parts)
        for tensor, chosen in self.memory.by_range(at):
            done, granules = tensor.stored(self.granule), self._granules(tensor, at[chosen], size)
            values, mine = _chosen(parts, chosen), by[chosen, None]
            before = done.writers[granules]
            others = (before != 0) & (before >> _BITS != mine >> _BITS)
            if others.any():
                self._compare(at[chosen], values, others, before, done.times[granules], mine)
            if done.atomics is not None:
                self._examine_atomics(done.atomics[granules], mine)
            done.writers[granules] = mine
            done.times[granules] = times[chosen, None]
            others = done.writers[granules] != mine
            _save(at[chosen], values)
            if others.any():
                self._compare(at[chosen], values, others, done.writers[granules], None, mine)

    def add(self, at: Array, size: int, program: Array, lanes: Any, number: int) -> None:
        """Atomic operations on `size` bytes at checked addresses ``(n,)``, by lanes."""
        if not self.checked:
            return
        by, _ = self._now(program, lanes, number)
        for tensor, chosen in self.memory.by_range(at):
            done, granules = tensor.stored(self.granule), self._granules(tensor, at[chosen], size)
            mine = by[chosen, None]
            before = done.writers[granules]
            others = (before != 0) & (_program(before) != _program(mine))
            if others.any():
                self._examine_order(others, before, done.times[granules], mine, "not ordered after what")
            if done.atomics is None:
                done.atomics = np.zeros_like(done.writers)
            before = done.atomics[granules]
            done.atomics[granules] = mine
            several = (before < 0) | ((before > 0) & (_program(before) != _program(mine)))
            several |= _program(done.atomics[granules]) != _program(mine)
            done.atomics[granules[several]] *= -1  # of several programs, of which it is the last

    def _now(self, program: Array, lanes: Any, number: int) -> tuple[Array, Array]:
        """Of each lane: a number of its program, warp and instruction, and the time."""
        races, warp = self.shared.races, self.shared.warp[lanes]
        by = ((program.astype("i8") + 1 << _WARP) + warp << _BITS) + number
        now = races.tick(self.instructions[number])
        return by, now + (self.releases[self.shared.cta[lanes]] << _TIME)

    def _granules(self, tensor: Range, at: Array, size: int) -> Array:
        first = at // self.granule - tensor.start // self.granule
        return first[:, None] + np.arange(max(size // self.granule, 1))

    def _compare(
        self, at: Array, parts: list[Array], others: Array, writers: Array, times: Array | None, mine: Array
    ) -> None:
        """Fail if bytes that others have written are not what is stored, with nothing that orders the two."""
        values = np.stack([np.broadcast_to(part, at.shape) for part in parts], axis=1).view("u1")
        differ = load(at[:, None] + np.arange(values.shape[1]), 1) != values
        bad = others & differ.reshape(*others.shape, -1).any(axis=2)
        self._examine_order(bad, writers, times, mine, "another value than")

    def _examine_order(self, bad: Array, writers: Array, times: Array | None, mine: Array, says: str) -> None:
        """Fail if something orders one of these writes before what happens now; nothing does so without `times`."""
        for i, j in np.argwhere(bad):
            writer, me = int(writers[i, j]), int(mine[i, 0])
            if times is None or not self._ordered(writer, int(times[i, j]), me):
                self._fail(writer, me, says)

    def _ordered(self, writer: int, time: int, me: int) -> bool:
        program, own = int(_program(writer)), int(_program(me))
        if program != own:
            return self.known.get(own, {}).get(program, 0) > time >> _TIME
        cta = self.cta_of[own]
        known = self.shared.races.known[cta, _warp(me), _warp(writer)]
        return bool(known >= time & (1 << _TIME) - 1)

    def _examine_atomics(self, before: Array, mine: Array) -> None:
        """Fail if another program had an atomic operation there, unless this one has acquired something since."""
        others = (before < 0) | ((before > 0) & (_program(before) != _program(mine)))
        for i, j in np.argwhere(others):
            me, other = int(mine[i, 0]), int(before[i, j])
            known = self.known.get(int(_program(me)), {}).keys() - {int(_program(me))}
            if not known or (other > 0 and int(_program(other)) not in known):
                self._fail(abs(other), me, "not ordered after what", several=other < 0)

    def _fail(self, writer: int, me: int, says: str, *, several: bool = False) -> None:
        x, first = (self.instructions[by & 2**_BITS - 1] for by in (me, writer))
        program, own = int(_program(writer)), int(_program(me))
        who = f"warp {_warp(writer)}" if program == own else f"program {program}"
        who = "one of several programs" if several else who
        raise RaceError(
            f"{x.opcode}, at {x.place}: {says} {who} stores to the same bytes, by {first.opcode} at {first.place}"
        )


def _join(known: dict[int, int], others: dict[int, int]) -> None:
    for program, n in others.items():
        known[program] = max(known.get(program, 0), n)


def _program(by: Any) -> Any:
    """The number of a program, of numbers that may be negative."""
    return (abs(by) >> _BITS + _WARP) - 1


def _warp(by: int) -> int:
    return by >> _BITS & 2**_WARP - 1


def _chosen(parts: list[Array], chosen: Any) -> list[Array]:
    return [part[chosen] if part.ndim else part for part in parts]


def _save(at: Array, parts: list[Array]) -> None:
    for i, part in enumerate(parts):
        save(at + i * part.itemsize, part.itemsize, part)
