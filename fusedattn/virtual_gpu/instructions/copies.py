"""Asynchronous copies between global and shared memory: cp.async, by threads, and tensors by the tensor memory
accelerator (TMA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fusedattn.virtual_gpu import global_memory
from fusedattn.virtual_gpu.errors import MemoryAccessError, RaceError
from fusedattn.virtual_gpu.global_work import Box
from fusedattn.virtual_gpu.groups import Work
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.global_accesses import address_of, examine_write
from fusedattn.virtual_gpu.instructions.shared_accesses import different_values, shared_addresses
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, name
from fusedattn.virtual_gpu.registers import Array, Mask, lanes_of
from fusedattn.virtual_gpu.tensor_map import TensorMap

UNFENCED_MBARRIER = "boxes that arrive on an mbarrier with no fence.proxy.async after its initialisation"


@builds("cp.async.ca.shared.global", "cp.async.cg.shared.global")
def _copy(machine: Machine, x: Instruction) -> Step:
    """Copy `size` bytes for each thread from global memory, or write zeros."""
    to, source = shared_addresses(machine, x, 0), address_of(machine, x, 1)
    size, allowed = int(name(x, 2), 0), (16,) if x.opcode.startswith("cp.async.cg") else (4, 8, 16)
    if size not in allowed:
        raise unknown(x, f"got {size} bytes; allowed are {', '.join(map(str, allowed))}")
    given = _source_size(machine, x, size)
    shared, n_lanes, counters = machine.shared, machine.registers.n_lanes, machine.counters

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        numbers = np.arange(n_lanes)[lanes]
        at = to(lanes)
        places = shared.locate(at, lanes, size, x)
        sizes = np.broadcast_to(given(), (n_lanes,))[lanes]
        whole = sizes == size
        if (sizes[~whole] != 0).any():
            raise unknown(x, f"got {sizes[~whole].max()} bytes of the source; allowed are 0 and {size}")
        addresses = source(mask).copy()
        if whole.any():
            machine.memory.check(addresses[whole], size, x)
            machine.global_work.read(x, addresses[whole], size)
        if counters.counting:
            counters.banks(x, "write", at, size, numbers)
            if whole.any():
                counters.sectors(x, "read", addresses[whole], size, numbers[whole])
        granules = shared.granules(places, size)
        cta, warp = shared.cta[numbers][:, None], shared.warp[numbers][:, None]
        shared.races.begin_write(granules, cta, warp, x)
        overtaken, last = shared.overtaken(places)
        if overtaken.any():
            words = np.zeros((size // 4, len(places)), dtype="u4")
            words[:, whole] = [global_memory.load(addresses[whole] + i, 4) for i in range(0, size, 4)]
            lost = (words != words[:, last]).any(axis=0)
            if lost.any():
                different_values(machine, x, places, lost, warp[:, 0])

        def effect(chosen: Array) -> None:
            words = shared.typed[4]
            filled, empty = chosen & whole, chosen & ~whole
            for i in range(0, size, 4):
                words[(places[filled] + i) // 4] = global_memory.load(addresses[filled] + i, 4)
                words[(places[empty] + i) // 4] = 0

        def end(chosen: Array) -> None:
            shared.races.end_write(granules[chosen], x)

        sources = np.where(whole, addresses, -1)[:, None]
        machine.copies.add(Work(numbers, effect, end, x, sources, size), machine.order)

    return step


def _source_size(machine: Machine, x: Instruction, size: int) -> Callable[[], Array]:
    """How many bytes come from global memory: the fourth operand, or none if this is a predicate that is true."""
    given, registers = name(x, 3) if len(x.operands) > 3 else str(size), machine.registers
    if not registers.has(given):
        fixed = registers.value(given, "u4")
        return lambda: fixed
    bits = registers.bits(given)
    if bits == 1:
        ignored = registers.row(given, "?")
        return lambda: np.where(ignored, 0, size)
    if bits != 32:
        raise unknown(x, f"got {given} of {bits} bits; allowed are a size of 32 bits and a predicate")
    sizes = registers.row(given, "u4")
    return lambda: sizes


@builds("cp.async.commit_group")
def _commit(machine: Machine, x: Instruction) -> Step:
    return lambda mask: machine.copies.commit(mask)


@builds("cp.async.wait_group")
def _wait(machine: Machine, x: Instruction) -> Step:
    pending = int(name(x, 0))
    return lambda mask: machine.copies.wait(pending, mask)


@builds("cp.async.wait_all")
def _wait_all(machine: Machine, x: Instruction) -> Step:
    def step(mask: Mask) -> None:
        machine.copies.commit(mask)
        machine.copies.wait(0, mask)

    return step


@dataclass(eq=False)
class _BoxCopy(Box):
    """A copy of a box to the shared memory of a program; it arrives on a barrier."""

    machine: Machine
    granules: Array

    def complete(self) -> None:
        machine, shared, tensor, x = self.machine, self.machine.shared, self.tensor, self.x
        addresses, exists = tensor.elements(self.first)
        places = tensor.targets(self.start) + self.cta * shared.window
        values = np.full(tensor.box, tensor.fill, dtype=f"u{tensor.element}")
        values[exists] = global_memory.load(addresses[exists], tensor.element)
        shared.typed[tensor.element][places // tensor.element] = values
        barrier = machine.mbarriers.at(self.cta, self.barrier, x)
        barrier.bytes -= tensor.n_bytes
        barrier.gathered.append(shared.races.end_write_by_tma(self.granules, self.barrier, x))
        self.arrived = shared.races.now
        if barrier.advance():
            machine.wake(self.cta)


def _box(machine: Machine, x: Instruction, operand: object) -> tuple[Array, list[Array]]:
    if not isinstance(operand, Address) or operand.offset:
        raise unknown(x)
    registers = machine.registers
    coordinates = [
        np.broadcast_to(registers.value(coordinate, "i4"), (registers.n_lanes,)) for coordinate in operand.coordinates
    ]
    return registers.row(operand.base, "u8"), coordinates[::-1]


def _checked(
    machine: Machine,
    x: Instruction,
    tensor: TensorMap,
    first: tuple[int, ...],
    lane: int,
    start: int,
    directions: tuple[str, str],
) -> Array:
    """The granules of a box in shared memory, ``(1, n)``, after all checks of its addresses.

    `directions` are those of its accesses of global and shared memory, to be counted.
    """
    if len(first) != len(tensor.box):
        raise unknown(x, f"got {len(first)} coordinates; allowed are {len(tensor.box)}")
    if len(first) == 1 and first[0] * tensor.element % 16:
        raise MemoryAccessError(
            f"{x.opcode}, at {x.place}: byte {first[0] * tensor.element} of a tensor of one dimension is not a "
            "multiple of 16, which was an illegal instruction on an H200"
        )
    alignment = 128 * (tensor.swizzle + 1) if tensor.swizzle else 128
    if start % alignment:
        raise MemoryAccessError(f"{x.opcode}, at {x.place}: shared address {start} is not a multiple of {alignment}")
    shared = machine.shared
    cta = int(shared.cta[lane])
    shared.check(np.array([start]), tensor.n_bytes, x)
    addresses, exists = tensor.elements(first)
    if exists.any():
        machine.memory.check(addresses[exists], tensor.element, x)
    if machine.counters.counting:
        machine.counters.box(x, directions, addresses[exists], tensor.element, tensor.n_bytes, lane)
    places = np.arange(start, start + tensor.n_bytes, 16) + cta * shared.window
    return shared.granules(places, 16).reshape(1, -1)


def _unfenced_mbarrier(machine: Machine, x: Instruction) -> None:
    """A box will arrive on an mbarrier whose initialisation the accelerator may not see."""
    if machine.strict:
        raise RaceError(f"{x.opcode}, at {x.place}: no fence.proxy.async after the mbarrier.init of its mbarrier")
    machine.counters.tolerated[f"{UNFENCED_MBARRIER}: {x.place}"] += 1


@builds(
    *(
        f"cp.async.bulk.tensor.{n}d.shared::{space}.global.mbarrier::complete_tx::bytes"
        for n in (1, 2, 3, 4, 5)
        for space in ("cta", "cluster")
    )
)
def _load_box(machine: Machine, x: Instruction) -> Step:
    to, barriers = shared_addresses(machine, x, 0), shared_addresses(machine, x, 2)
    maps, coordinates = _box(machine, x, x.operand(1))
    shared = machine.shared

    def step(mask: Mask) -> None:
        for lane in np.arange(machine.registers.n_lanes)[lanes_of(mask)]:
            tensor = machine.tensor_map(int(maps[lane]), x)
            first = tuple(int(coordinate[lane]) for coordinate in coordinates)
            start, barrier = int(to(lane)), int(barriers(lane))
            cta, warp = int(shared.cta[lane]), int(shared.warp[lane])
            granules = _checked(machine, x, tensor, first, int(lane), start, ("read", "write"))
            made = machine.mbarriers.at(cta, barrier, x)
            shared.races.require(made.time, made.warp, cta, warp, x)
            if not shared.races.sees(made.time, made.warp, cta, warp):
                _unfenced_mbarrier(machine, x)
            shared.races.begin_write(granules, np.array([[cta]]), np.array([[warp]]), x, of_async=True)
            machine.note("copy", x, [lane // 32], barrier, tensor.n_bytes)
            copy = _BoxCopy(x, tensor, first, cta, start, barrier, machine, granules)
            machine.global_work.load(copy)
            if machine.box_writes.work:
                machine.global_work.read(x, copy.addresses(), tensor.element)
            if machine.order.at_once(1)[0]:
                copy.complete()
            else:
                machine.boxes.append(copy)

    return step


@builds(
    *(f"cp.async.bulk.tensor.{n}d.global.shared::cta.bulk_group" for n in (1, 2, 3, 4, 5)),
    *(f"cp.reduce.async.bulk.tensor.{n}d.global.shared::cta.add.bulk_group" for n in (1, 2, 3, 4, 5)),
)
def _write_box(machine: Machine, x: Instruction) -> Step:
    """Copy a box of shared memory to a tensor, as far as it lies there, or add it, one element after the other."""
    maps, coordinates = _box(machine, x, x.operand(0))
    source, shared, adds = shared_addresses(machine, x, 1), machine.shared, x.opcode.startswith("cp.reduce")
    number = machine.stores.enter(x, 4 if adds else 2)

    def step(mask: Mask) -> None:
        for lane in np.arange(machine.registers.n_lanes)[lanes_of(mask)]:
            _write_one(int(lane))

    def _write_one(lane: int) -> None:
        tensor = machine.tensor_map(int(maps[lane]), x)
        first = tuple(int(coordinate[lane]) for coordinate in coordinates)
        cta, start = int(shared.cta[lane]), int(source(lane))
        granules = _checked(machine, x, tensor, first, lane, start, ("atomic" if adds else "write", "read"))
        of_cta, warp = np.array([[cta]]), np.array([[int(shared.warp[lane])]])
        shared.races.begin_reads(granules, of_cta, warp, x)
        addresses, exists = tensor.elements(first)
        if adds:
            _examine_sum(x, tensor, first, exists)
        at, size = addresses[exists], tensor.element
        lanes = np.full(at.size, lane)
        examine_write(machine, x, at, size, lanes, atomic=adds)
        if adds:
            machine.stores.add(at, size, machine.program[lanes], lanes, number)

        def effect(chosen: Array) -> None:
            values = shared.typed[size][(tensor.targets(start) + cta * shared.window) // size][exists]
            if adds:
                total = global_memory.load(at, size).view("f4") + values.view("f4")
                global_memory.save(at, size, total.view("u4"))
            elif at.size:
                machine.stores.store(at, [values], machine.program[lanes], lanes, number)

        def end(chosen: Array) -> None:
            shared.races.end_reads(granules, of_cta, warp, x)

        member = np.array([lane])
        machine.bulk.add(Work(member, effect, end, x), machine.order)
        # Global memory is written no earlier than shared memory is read: this work has no effect of its own.
        machine.box_writes.add(Work(member, _nothing, _nothing, x, at[None], size), machine.order)

    return step


def _examine_sum(x: Instruction, tensor: TensorMap, first: tuple[int, ...], exists: Array) -> None:
    if not tensor.is_float or tensor.element != 4:
        raise unknown(x, f"got elements of {tensor.element} bytes; allowed is float32")
    if not exists.all():
        raise MemoryAccessError(
            f"{x.opcode}, at {x.place}: the box at {first} ends outside of the tensor, which was an illegal "
            "instruction on an H200"
        )


def _nothing(chosen: Array) -> None:
    pass


@builds("cp.async.bulk.commit_group")
def _commit_bulk(machine: Machine, x: Instruction) -> Step:
    def step(mask: Mask) -> None:
        machine.bulk.commit(mask)
        machine.box_writes.commit(mask)

    return step


@builds("cp.async.bulk.wait_group.read")
def _wait_bulk_read(machine: Machine, x: Instruction) -> Step:
    """Wait until shared memory has been read."""
    pending = int(name(x, 0))
    return lambda mask: machine.bulk.wait(pending, mask)


@builds("cp.async.bulk.wait_group")
def _wait_bulk(machine: Machine, x: Instruction) -> Step:
    pending = int(name(x, 0))

    def step(mask: Mask) -> None:
        machine.bulk.wait(pending, mask)
        machine.box_writes.wait(pending, mask)

    return step
