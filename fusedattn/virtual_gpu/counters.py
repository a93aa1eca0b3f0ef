"""What ran, counted: instructions of each warp, products, accesses, and what the hardware needs for them.

An access is a request of one warp. Global memory answers it by sectors; shared memory by passes, one for each 32 words
whose banks differ. Copies of tensors and the operands of wgmma lie in layouts without conflicts of banks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fusedattn.virtual_gpu.kinds import kind_of
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array, Mask
from fusedattn.virtual_gpu.trace import Trace

WARP = 32
SECTOR = 32  # bytes
BANKS, WORD = 32, 4  # bytes of a word of a bank
PASS = BANKS * WORD
MATRIX = 8  # rows of 16 bytes, of ldmatrix and stmatrix
_OF_GROUP = 2**48  # more than there are addresses


@dataclass
class Traffic:
    """Requests of warps, the bytes that their lanes ask for, and the sectors or passes that these need.

    `ideal` are the sectors that the same distinct bytes would fill, or the passes without conflicts of banks.
    """

    requests: int = 0
    bytes: int = 0
    needed: int = 0
    ideal: int = 0

    def add(self, requests: int, n_bytes: int, needed: int, ideal: int) -> None:
        self.requests += requests
        self.bytes += n_bytes
        self.needed += needed
        self.ideal += ideal


@dataclass
class Executed:
    """What one instruction did, in all programs."""

    x: Instruction
    issued: Array  # by each warp of a program, ``(warps,)``; also if no lane's predicate is true
    multiply_adds: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)  # by space and direction: "global read", "shared write"
    readers: set[int] = field(default_factory=set)  # warps that read global memory, of programs that run together


@dataclass
class Counters:
    """Counts of a kernel's launches. Without `counting` there are only those of the first group, which cost nothing."""

    counting: bool = False
    programs: int = 0
    instructions: int = 0  # executed, each once for all threads of the programs that run together
    tolerated: Counter[str] = field(default_factory=Counter)  # breaches of rules that Settings.strict would raise
    barriers: Counter[int] = field(default_factory=Counter)  # waited for by a program, by the threads that they hold
    trace: Trace | None = None

    executed: dict[int, Executed] = field(default_factory=dict)  # by the identity of the instruction

    def of(self, x: Instruction) -> Executed:
        """The counts of one instruction."""
        found = self.executed.get(id(x))
        if found is None:
            found = self.executed[id(x)] = Executed(x, np.zeros(1, dtype="i8"))
        return found

    @property
    def by_opcode(self) -> Counter[str]:
        """Instructions issued, once for each warp."""
        return _summed((e.x.opcode, int(e.issued.sum())) for e in self.executed.values())

    @property
    def by_kind(self) -> Counter[str]:
        """Instructions issued, once for each warp, by :func:`~fusedattn.virtual_gpu.kinds.kind_of`."""
        return _summed((kind_of(opcode), n) for opcode, n in self.by_opcode.items())

    @property
    def by_warp(self) -> list[int]:
        """Instructions issued by each warp of a program, over all programs."""
        return [int(n) for n in sum((e.issued for e in self.executed.values()), np.zeros(1, dtype="i8"))]

    @property
    def multiply_adds(self) -> int:
        """Those of matrix instructions."""
        return sum(e.multiply_adds for e in self.executed.values())

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The accesses of all instructions, by space and direction."""
        return total(self.executed.values())

    @property
    def by_place(self) -> dict[tuple[str, str], Traffic]:
        """The same, by space and direction and place in the Python source."""
        found: dict[tuple[str, str], Traffic] = {}
        for e in self.executed.values():
            for where, t in e.traffic.items():
                found.setdefault((where, e.x.place), Traffic()).add(t.requests, t.bytes, t.needed, t.ideal)
        return found

    def issue(self, x: Instruction, by_warp: Array) -> None:
        """An instruction was issued so many times by each warp of a program."""
        executed = self.of(x)
        executed.issued = executed.issued + by_warp

    def multiply(self, x: Instruction, n: int) -> None:
        """A matrix instruction did `n` multiply-adds."""
        self.of(x).multiply_adds += n

    def sectors(self, x: Instruction, direction: str, addresses: Array, size: int, lanes: Array) -> None:
        """Lanes access `size` bytes of global memory each, aligned to `size`, which is at most a sector."""
        warp, index = np.unique(lanes // WARP, return_inverse=True)
        touched = np.unique(index * _OF_GROUP + addresses // SECTOR)
        distinct = np.unique(index * _OF_GROUP + addresses)
        ideal = -(-np.bincount(distinct // _OF_GROUP) * size // SECTOR)
        self._add(x, f"global {direction}", len(warp), size * addresses.size, len(touched), int(ideal.sum()))
        if direction == "read":
            self.of(x).readers.update(warp.tolist())

    def banks(self, x: Instruction, direction: str, addresses: Array, size: int, lanes: Array) -> None:
        """Lanes access `size` bytes of shared memory each, aligned to `size`.

        Accesses of 8 and 16 bytes take the halves and the quarters of a warp in turn. Lanes share the words that they
        have in common.
        """
        words_of_lane = max(size // WORD, 1)
        group = lanes // (WARP // words_of_lane)
        words = addresses.astype("i8")[:, None] // WORD + np.arange(words_of_lane)
        passes, ideal = _passes(np.repeat(group, words_of_lane), words.reshape(-1))
        self._add(x, f"shared {direction}", len(np.unique(lanes // WARP)), size * addresses.size, passes, ideal)

    def matrices(self, x: Instruction, direction: str, places: Array) -> None:
        """The rows of matrices ``(warps, n, 8)``, of 16 bytes each: a matrix is one pass if no banks conflict."""
        of_matrix = places.reshape(-1, MATRIX)
        group = np.repeat(np.arange(len(of_matrix)), MATRIX * 16 // WORD)
        words = of_matrix[:, :, None] // WORD + np.arange(16 // WORD)
        passes, ideal = _passes(group, words.reshape(-1))
        self._add(x, f"shared {direction}", len(places), 16 * places.size, passes, ideal)

    def operands(self, x: Instruction, n: int, n_bytes: int) -> None:
        """`n` groups of four warps read operands of wgmma, of `n_bytes` each, in shared memory."""
        self._add(x, "shared read", n, n * n_bytes, n * -(-n_bytes // PASS), n * -(-n_bytes // PASS))

    def box(
        self, x: Instruction, directions: tuple[str, str], addresses: Array, element: int, n_bytes: int, lane: int
    ) -> None:
        """A lane copies a box of `n_bytes` in shared memory; of its elements, those at these global addresses exist."""
        in_global, in_shared = directions
        existing = element * addresses.size
        sectors = len(np.unique(addresses // SECTOR))
        if in_global == "read":
            self.of(x).readers.add(lane // WARP)
        self._add(x, f"global {in_global}", 1, existing, sectors, -(-existing // SECTOR))
        self._add(x, f"shared {in_shared}", 1, n_bytes, -(-n_bytes // PASS), -(-n_bytes // PASS))

    def _add(self, x: Instruction, where: str, requests: int, n_bytes: int, needed: int, ideal: int) -> None:
        self.of(x).traffic.setdefault(where, Traffic()).add(requests, n_bytes, needed, ideal)


def lanes_in(mask: Mask, n_lanes: int) -> Array:
    """The numbers of the lanes of a mask."""
    return np.arange(n_lanes) if mask is True else np.flatnonzero(mask)


def total(executed: Iterable[Executed]) -> dict[str, Traffic]:
    """The accesses of several instructions, by space and direction."""
    found: dict[str, Traffic] = {}
    for e in executed:
        for where, t in e.traffic.items():
            found.setdefault(where, Traffic()).add(t.requests, t.bytes, t.needed, t.ideal)
    return found


def _passes(group: Array, words: Array) -> tuple[int, int]:
    """The passes for words of groups of lanes: as many as the distinct words in the fullest bank. And one a group."""
    _, index = np.unique(group, return_inverse=True)
    distinct = np.unique(index * _OF_GROUP + words)
    in_banks = np.bincount(distinct // _OF_GROUP * BANKS + distinct % BANKS, minlength=BANKS * (int(index.max()) + 1))
    fullest = in_banks.reshape(-1, BANKS).max(axis=1)
    return int(fullest.sum()), len(fullest)


def _summed(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, n in counts:
        found[name] += n
    return found
