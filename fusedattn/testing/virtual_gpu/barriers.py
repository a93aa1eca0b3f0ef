"""Barriers: of a program's threads, and mbarriers, on which asynchronous copies arrive too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedattn.testing.virtual_gpu.builders import Mask, Step, builds, name, store, unknown
from fusedattn.testing.virtual_gpu.faults import AsyncFault
from fusedattn.testing.virtual_gpu.ptx import Instruction
from fusedattn.testing.virtual_gpu.registers import Array
from fusedattn.testing.virtual_gpu.shared_memory import lanes_of, shared_addresses

if TYPE_CHECKING:
    from fusedattn.testing.virtual_gpu.machine import Machine


@builds("bar.warp.sync")
def _warp_barrier(machine: Machine, x: Instruction) -> Step:
    return lambda mask: None  # a warp's accesses are in order


@builds("fence.proxy.async", "fence.proxy.async.shared::cta")
def _proxy_fence(machine: Machine, x: Instruction) -> Step:
    shared = machine.shared

    def step(mask: Mask) -> None:
        warps = np.unique(lane_warps(machine, mask))
        shared.races.fence(warps // shared.n_warps, warps % shared.n_warps)

    return step


def lane_warps(machine: Machine, mask: Mask) -> Array:
    """The warp of each lane of the mask, counted over all programs."""
    return np.arange(machine.registers.n_lanes)[lanes_of(mask)] // 32


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
            raise AsyncFault(f"{x.opcode}, at {x.place}: no mbarrier is initialised at shared address {address}")
        return barrier


def _each(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the mask: (lane, program, warp, address) of each lane of an mbarrier instruction, checked."""
    addresses, shared = shared_addresses(machine, x, i), machine.shared

    def found(mask: Mask) -> list[tuple[int, int, int, int]]:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        shared.locate(at, lanes, 8, x)
        numbers = np.arange(machine.registers.n_lanes)[lanes]
        return [
            (int(lane), int(shared.cta[lane]), int(shared.warp[lane]), int(address))
            for lane, address in zip(numbers, at, strict=True)
        ]

    return found


def _used(machine: Machine, x: Instruction, lane: int, address: int, *, writes: bool) -> None:
    shared = machine.shared
    places = np.array([shared.start[lane] + address])
    (shared.writes if writes else shared.reads)(places, np.array([lane]), 8, x)


@builds("mbarrier.init.shared::cta.b64", "mbarrier.init.shared.b64")
def _init(machine: Machine, x: Instruction) -> Step:
    each, count = _each(machine, x, 0), int(name(x, 1))

    def step(mask: Mask) -> None:
        for lane, cta, _, address in each(mask):
            _used(machine, x, lane, address, writes=True)
            machine.mbarriers.table[cta, address] = MBarrier(count, count)

    return step


@builds("mbarrier.inval.shared::cta.b64", "mbarrier.inval.shared.b64")
def _invalidate(machine: Machine, x: Instruction) -> Step:
    each = _each(machine, x, 0)

    def step(mask: Mask) -> None:
        for lane, cta, _, address in each(mask):
            barrier = machine.mbarriers.at(cta, address, x)
            if barrier.bytes:
                raise AsyncFault(f"{x.opcode}, at {x.place}: {barrier.bytes} bytes are still to arrive")
            _used(machine, x, lane, address, writes=True)
            del machine.mbarriers.table[cta, address]

    return step


@builds("mbarrier.arrive")
def _arrive(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")[2:]
    expects = words[0] == "expect_tx"
    if words not in (["expect_tx", "shared::cta", "b64"], ["shared::cta", "b64"], ["shared", "b64"]):
        raise unknown(x)
    if x.operands[0] != "_":
        raise unknown(x)
    each = _each(machine, x, 1)
    if not expects and len(x.operands) > 2 and name(x, 2) != "1":
        raise unknown(x)
    n_bytes = machine.registers.value(name(x, 2), "u4") if expects else np.zeros((), dtype="u4")

    def step(mask: Mask) -> None:
        of_lanes = np.broadcast_to(n_bytes, (machine.registers.n_lanes,))
        for lane, cta, warp, address in each(mask):
            _used(machine, x, lane, address, writes=False)
            barrier = machine.mbarriers.at(cta, address, x)
            if not barrier.pending:
                raise AsyncFault(f"{x.opcode}, at {x.place}: more arrivals than the {barrier.expected} of the barrier")
            barrier.bytes += int(of_lanes[lane])
            barrier.pending -= 1
            barrier.gathered.append(machine.shared.races.release(cta, warp))
            if barrier.advance():
                machine.wake(cta)

    return step


@builds("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier.try_wait.parity.shared.b64")
def _try_wait(machine: Machine, x: Instruction) -> Step:
    """True if the phase of that parity has ended. Threads for which it has not wait until some phase ends."""
    addresses, shared = shared_addresses(machine, x, 1), machine.shared
    out, parity = machine.registers.row(name(x, 0), "?"), machine.registers.value(name(x, 2), "u4")
    n_lanes = machine.registers.n_lanes

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, 8, x)
        shared.reads(places, lanes, 8, x)
        numbers = np.arange(n_lanes)[lanes]
        wanted = np.broadcast_to(parity, (n_lanes,))[lanes] & 1
        done = np.empty(len(numbers), dtype=bool)
        key = (shared.cta[lanes].astype("i8") << 33) + (at.astype("i8") << 1) + wanted
        for one in np.unique(key):
            same = key == one
            cta, address, bit = int(one >> 33), int(one >> 1 & 0xFFFFFFFF), int(one & 1)
            barrier = machine.mbarriers.at(cta, address, x)
            done[same] = ended = barrier.phase & 1 != bit
            if ended and barrier.released is not None:
                shared.races.acquire(cta, np.unique(shared.warp[numbers[same]]), barrier.released)
        found = np.zeros(n_lanes, dtype=bool)
        found[numbers] = done
        store(out, found, mask)
        if not done.all():
            machine.stall(numbers[~done], x)

    return step
