"""Barriers: of a program's threads, and mbarriers, on which asynchronous copies arrive too."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.shared_accesses import shared_addresses
from fusedattn.virtual_gpu.instructions.warps import members
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.mbarriers import MBarrier
from fusedattn.virtual_gpu.ptx import Instruction, name
from fusedattn.virtual_gpu.registers import Array, Mask, lanes_of, store


@builds("bar.warp.sync")
def _warp_barrier(machine: Machine, x: Instruction) -> Step:
    return members(machine, x, 0)  # a warp's accesses are in order


@builds("fence.proxy.async.global")
def _global_proxy_fence(machine: Machine, x: Instruction) -> Step:
    return lambda mask: None  # only races of shared memory are looked for


@builds("fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster")
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


def _granules(machine: Machine, lane: int, address: int) -> Array:
    """The granules of an mbarrier, ``(1, n)``."""
    return machine.shared.granules(np.array([machine.shared.start[lane] + address]), 8)


def used_mbarrier(machine: Machine, x: Instruction, cta: int, warp: int, address: int) -> MBarrier:
    """The mbarrier at an address, which a warp uses now."""
    barrier, races = machine.mbarriers.at(cta, address, x), machine.shared.races
    races.require(barrier.time, barrier.warp, cta, warp, x)
    barrier.used[warp] = races.tick(x)
    return barrier


@builds("mbarrier.init.shared::cta.b64", "mbarrier.init.shared.b64")
def _init(machine: Machine, x: Instruction) -> Step:
    each, count = _each(machine, x, 0), int(name(x, 1))
    if not 1 <= count < 2**20:
        raise AsyncError(f"{x.opcode}, at {x.place}: a count of {count}; allowed are 1 to 2^20 - 1")
    shared = machine.shared

    def step(mask: Mask) -> None:
        for lane, cta, warp, address in each(mask):
            time = shared.races.make_mbarrier(_granules(machine, lane, address), cta, warp, x)
            used = np.zeros(shared.n_warps, dtype="i8")
            machine.mbarriers.table[cta, address] = MBarrier(count, count, time, warp, used)
            machine.note("init", x, [lane // 32], address, count)

    return step


@builds("mbarrier.inval.shared::cta.b64", "mbarrier.inval.shared.b64")
def _invalidate(machine: Machine, x: Instruction) -> Step:
    each = _each(machine, x, 0)

    def step(mask: Mask) -> None:
        for lane, cta, warp, address in each(mask):
            barrier = used_mbarrier(machine, x, cta, warp, address)
            if barrier.bytes:
                raise AsyncError(f"{x.opcode}, at {x.place}: {barrier.bytes} bytes are still to arrive")
            machine.shared.races.end_mbarrier(_granules(machine, lane, address), cta, warp, barrier.used, x)
            del machine.mbarriers.table[cta, address]

    return step


@builds("mbarrier.arrive", modifiers=True)
def _arrive(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")[2:]
    expects = words[0] == "expect_tx"
    if words[expects:] not in (["shared::cta", "b64"], ["shared", "b64"]):
        raise unknown(x)
    if x.operand(0) != "_":
        raise unknown(x, f"got {x.operand(0)} for the state; allowed is _")
    each = _each(machine, x, 1)
    if not expects and len(x.operands) > 2 and name(x, 2) != "1":
        raise unknown(x, f"got {name(x, 2)} arrivals; allowed is 1")
    n_bytes = machine.registers.value(name(x, 2), "u4") if expects else np.zeros((), dtype="u4")

    def step(mask: Mask) -> None:
        of_lanes = np.broadcast_to(n_bytes, (machine.registers.n_lanes,))
        for lane, cta, warp, address in each(mask):
            barrier = used_mbarrier(machine, x, cta, warp, address)
            if not barrier.pending:
                raise AsyncError(f"{x.opcode}, at {x.place}: more arrivals than the {barrier.expected} of the barrier")
            machine.note("arrive", x, [lane // 32], address, int(of_lanes[lane]))
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
        shared.locate(at, lanes, 8, x)
        numbers = np.arange(n_lanes)[lanes]
        wanted = np.broadcast_to(parity, (n_lanes,))[lanes] & 1
        done = np.empty(len(numbers), dtype=bool)
        key = (shared.cta[lanes].astype("i8") << 33) + (at.astype("i8") << 1) + wanted
        for one in np.unique(key):
            same = key == one
            cta, address, bit = int(one >> 33), int(one >> 1 & 0xFFFFFFFF), int(one & 1)
            warps = np.unique(shared.warp[numbers[same]])
            for warp in warps:
                barrier = used_mbarrier(machine, x, cta, int(warp), address)
            done[same] = ended = barrier.phase & 1 != bit
            if ended:
                machine.note("wait", x, cta * shared.n_warps + warps, address, barrier.phase)
            if ended and barrier.released is not None:
                shared.races.acquire(cta, warps, barrier.released)
        found = np.zeros(n_lanes, dtype=bool)
        found[numbers] = done
        store(out, found, mask)
        if not done.all():
            machine.stall(numbers[~done], x)

    return step
