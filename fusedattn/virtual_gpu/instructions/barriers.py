"""Barriers: of a program's threads, and mbarriers, on which asynchronous copies arrive too."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.shared_accesses import shared_addresses
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.mbarriers import MBarrier
from fusedattn.virtual_gpu.ptx import Instruction, name
from fusedattn.virtual_gpu.registers import Array, Mask, lanes_of, store


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
                raise AsyncError(f"{x.opcode}, at {x.place}: {barrier.bytes} bytes are still to arrive")
            _used(machine, x, lane, address, writes=True)
            del machine.mbarriers.table[cta, address]

    return step


@builds("mbarrier.arrive")
def _arrive(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")[2:]
    expects = words[0] == "expect_tx"
    if words[expects:] not in (["shared::cta", "b64"], ["shared", "b64"]):
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
                raise AsyncError(f"{x.opcode}, at {x.place}: more arrivals than the {barrier.expected} of the barrier")
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
