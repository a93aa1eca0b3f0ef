"""Asynchronous work on global memory: until its wait, nobody may write what it reads, nor touch what it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError, RaceError
from fusedattn.virtual_gpu.groups import Groups
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.races import Races
from fusedattn.virtual_gpu.registers import Array
from fusedattn.virtual_gpu.tensor_map import TensorMap


@dataclass(eq=False)
class Box:
    """A box of a tensor that the accelerator reads for a program, to arrive at a shared address and on an mbarrier."""

    x: Instruction
    tensor: TensorMap
    first: tuple[int, ...]
    cta: int
    start: int
    barrier: int
    arrived: int | None = field(default=None, init=False)  # when, in the time of Races

    def addresses(self) -> Array:
        """The global addresses of the elements that exist, ``(n,)``."""
        addresses, exists = self.tensor.elements(self.first)
        return addresses[exists]


class GlobalWork:
    """What copies by threads and writes of boxes in flight do in global memory, of the programs that run together."""

    def __init__(self, copies: Groups, box_writes: Groups) -> None:
        self.copies, self.box_writes = copies, box_writes
        self.boxes: dict[TensorMap, dict[tuple[int, int], Box]] = {}  # the last at each shared address of a program

    def load(self, box: Box) -> None:
        self.boxes.setdefault(box.tensor, {})[box.cta, box.start] = box

    def check_awaited(self, races: Races) -> None:
        """Fail if a program ends with a box in shared memory of which no warp knows that it arrived.

        An earlier box at the same address was waited for, or the later one would be a race.
        """
        for boxes in self.boxes.values():
            for box in boxes.values():
                if box.arrived is not None and not races.knows_of_tma(box.cta, box.arrived, box.barrier):
                    raise AsyncError(f"{box.x.opcode}, at {box.x.place}: nobody waited for it before the program ended")

    def read(self, x: Instruction, at: Array, size: int) -> None:
        """Fail if one of `size` bytes at addresses, which are read, is written as a box."""
        if self.box_writes.work and at.size:
            self._examine(self.box_writes, x, at, size, "touches what", "has not finished writing to")

    def write(self, x: Instruction, at: Array, size: int, *, atomic: bool = False) -> None:
        """Fail if one of `size` bytes at addresses, which are written, is read by cp.async or written as a box."""
        if self.copies.work and at.size:
            self._examine(self.copies, x, at, size, "overwrites what", "is still reading")
        if not atomic:
            self.read(x, at, size)

    def write_boxes(self, x: Instruction, at: Array, size: int, cta: Array, warp: Array, races: Races) -> None:
        """Fail if warps of programs write what the accelerator still reads for these programs, as far as they know."""
        if not self.boxes or not at.size:
            return
        low, high = int(at.min()), int(at.max()) + size
        for tensor, boxes in self.boxes.items():
            if tensor.address < high and low < _end(tensor):
                for box in boxes.values():
                    unaware = cta == box.cta
                    if box.arrived is not None:
                        unaware &= races.known_of_tma(box.cta, warp, box.barrier) < box.arrived
                    if unaware.any() and _overlap(box.addresses(), tensor.element, at[unaware], size):
                        raise RaceError(_message(x, "overwrites what", box.x, "is still reading"))

    def _examine(self, groups: Groups, x: Instruction, at: Array, size: int, does: str, state: str) -> None:
        low, high = int(at.min()), int(at.max()) + size
        for work in groups.work:
            first, last = work.bounds
            if first < high and low < last + work.size and _overlap(work.addresses, work.size, at, size):
                raise RaceError(_message(x, does, work.x, state))


def _message(x: Instruction, does: str, other: Instruction, state: str) -> str:
    return f"{x.opcode}, at {x.place}, {does} {other.opcode} at {other.place} {state}"


def _end(tensor: TensorMap) -> int:
    return (
        tensor.address
        + tensor.element
        + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    )


def _overlap(one: Any, size: int, other: Array, other_size: int) -> bool:
    """Whether `size` bytes at one of some addresses are also among `other_size` bytes at one of others."""
    ordered = np.sort(one, axis=None)
    if not ordered.size:
        return False
    before = np.searchsorted(ordered, other + other_size) - 1  # the last that begins before the other ends
    return bool(((before >= 0) & (ordered[before] + size > other)).any())
