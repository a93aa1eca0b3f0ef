"""Run the programs of a kernel: threads of several programs step by step, together as far as they take one path.

Instructions between branches and barriers form a block. Threads at the same block run together; of several groups of
threads, that with the first block of the code runs next, so that paths that part meet again where they end. Waiting for
a barrier, for a copy or for nothing at all are states of threads: if all wait, copies in flight are completed, and if
there is none the program is stuck, which is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedattn.testing.virtual_gpu import builders
from fusedattn.testing.virtual_gpu.barriers import MBarriers
from fusedattn.testing.virtual_gpu.builders import Mask, Step
from fusedattn.testing.virtual_gpu.copies import TensorMap
from fusedattn.testing.virtual_gpu.counters import Counters
from fusedattn.testing.virtual_gpu.faults import Deadlock, Fault, MemoryFault
from fusedattn.testing.virtual_gpu.global_memory import GlobalMemory
from fusedattn.testing.virtual_gpu.groups import Groups, Order
from fusedattn.testing.virtual_gpu.matrices import Products
from fusedattn.testing.virtual_gpu.noise import Noise
from fusedattn.testing.virtual_gpu.ptx import Address, Instruction, Kernel
from fusedattn.testing.virtual_gpu.registers import Array, Registers, is_number
from fusedattn.testing.virtual_gpu.shared_memory import BASE, SharedMemory
from fusedattn.testing.virtual_gpu.wgmma import Fences, InFlight, written_by

_SPECIAL = {f"%{name}.{axis}": 32 for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid": 32}
_PARAMETERS = 2**46  # the addresses of the kernel's parameters begin here: nothing else of a process lies there
_ENDS = ("bra", "ret", "exit", "bar.sync", "barrier.sync", "bar.arrive", "barrier.cta.sync")
MAX_BLOCKS = 20_000_000


@dataclass
class _Block:
    """Instructions that run one after the other, and how the threads go on: by `end`, or with the next block."""

    steps: list[Step]
    instructions: list[Instruction]
    touched: list[frozenset[str]]
    written: list[frozenset[str]]
    end: Instruction | None
    has_products: bool
    entered: int = 0  # by warps


class Machine:
    """A kernel on `n_ctas` programs at a time."""

    def __init__(
        self,
        kernel: Kernel,
        n_ctas: int,
        shared_bytes: int,
        counters: Counters,
        *,
        order: Order,
        products: Products,
        noise: Noise,
        strict: bool = False,
    ) -> None:
        self.kernel, self.n_ctas, self.n_threads = kernel, n_ctas, kernel.n_threads
        self.order, self.products, self.noise = order, products, noise
        self.counters = counters
        n_lanes = n_ctas * kernel.n_threads
        addresses = {"global_smem": BASE}
        self.parameter_addresses: dict[str, int] = {}
        at = _PARAMETERS
        for parameter in kernel.parameters:
            self.parameter_addresses[parameter.name] = at
            at += max(parameter.n_bytes, 128)
        self.registers = Registers(kernel.registers | _SPECIAL, n_lanes, addresses | self.parameter_addresses)
        self.shared = SharedMemory(
            kernel, n_ctas, kernel.n_threads, shared_bytes, counters.liberties, strict=strict
        )
        self.memory = GlobalMemory([])
        self.parameters = {p.name: np.zeros(1, dtype=f"u{p.n_bytes}") for p in kernel.parameters if not p.opaque}
        self.maps: dict[int, TensorMap] = {}
        self._clear_async()
        self.blocks, starts = [], _block_starts(kernel)
        self.fences = Fences(kernel.instructions, set(starts), counters.liberties, strict=strict)
        self.block_of = {start: i for i, start in enumerate(starts)}
        for start, stop in zip(starts, [*starts[1:], len(kernel.instructions)], strict=True):
            self.blocks.append(self._block(kernel.instructions[start:stop]))

    def _clear_async(self) -> None:
        n_warps = self.n_ctas * self.n_threads // 32
        self.copies, self.bulk, self.wgmma = Groups(n_warps), Groups(n_warps), Groups(n_warps)
        self.in_flight, self.mbarriers = InFlight(), MBarriers()
        self.boxes: list[Any] = []

    def _block(self, instructions: list[Instruction]) -> _Block:
        end = instructions[-1] if instructions and instructions[-1].opcode.startswith(_ENDS) else None
        inner = instructions[:-1] if end is not None else instructions
        return _Block(
            [builders.build(self, x) for x in inner],
            inner,
            [frozenset(x.names) for x in inner],
            [written_by(x) for x in inner],
            end,
            any(x.opcode.startswith("wgmma") for x in inner),
        )

    def run(
        self,
        programs: Sequence[int],
        grid: tuple[int, int, int],
        parameters: dict[str, int | float | bytes],
        maps: dict[str, TensorMap],
        memory: GlobalMemory,
    ) -> None:
        """Run as many programs as the machine has place for, by their numbers in the grid."""
        self.memory = memory
        self.maps = {self.parameter_addresses[name]: tensor for name, tensor in maps.items()}
        for name, value in parameters.items():
            self.parameters[name][...] = value
        self.registers.clear()
        self.shared.clear()
        self._clear_async()
        absent = self.n_ctas - len(programs)
        self._set_special([*programs, *[0] * absent], grid)
        n_lanes = self.registers.n_lanes
        self.uniform: int | None = None if absent else 0  # the block of all threads
        self.at = np.zeros(n_lanes, dtype="i4")  # the block of each thread; -1 after its end
        self.at[len(programs) * self.n_threads :] = -1
        self.waits_at = np.full(n_lanes, -1, dtype="i4")  # the number of the barrier for which a thread waits
        self.stalled = np.zeros(n_lanes, dtype=bool)  # it asked whether an mbarrier's phase has ended
        self.stalled_by: Instruction | None = None
        self._loop()
        for groups in (self.copies, self.bulk, self.wgmma):
            groups.check_empty()
        if self.boxes:
            raise Fault(f"{self.boxes[0].x.opcode}, at {self.boxes[0].x.place}: in flight when the program ended")
        self.counters.programs += len(programs)

    def _set_special(self, programs: Sequence[int], grid: tuple[int, int, int]) -> None:
        thread = np.arange(self.n_threads, dtype="u4")
        number = np.repeat(np.array(programs, dtype="u4"), self.n_threads)
        values = {
            "%tid.x": np.tile(thread, self.n_ctas),
            "%laneid": np.tile(thread % 32, self.n_ctas),
            "%ntid.x": self.n_threads,
            "%ctaid.x": number % grid[0],
            "%ctaid.y": number // grid[0] % grid[1],
            "%ctaid.z": number // (grid[0] * grid[1]),
            "%tid.y": 0,
            "%tid.z": 0,
            "%ntid.y": 1,
            "%ntid.z": 1,
        } | {f"%nctaid.{axis}": n for axis, n in zip("xyz", grid, strict=True)}
        for name, value in values.items():
            self.registers.row(name, "u4")[...] = value

    def _loop(self) -> None:
        blocks, warps = self.blocks, self.n_ctas * self.n_threads // 32
        entered = 0
        while True:
            chosen = self._choose()
            if chosen is None:
                return
            number, mask = chosen
            block = blocks[number]
            block.entered += warps if mask is True else int(np.count_nonzero(mask.reshape(-1, 32).any(axis=1)))
            self.counters.instructions += len(block.steps) + (block.end is not None)
            if block.has_products or self.in_flight.targets:
                self._run_checked(block, mask)
            else:
                for step in block.steps:
                    step(mask)
            self._go_on(number, block, mask)
            entered += 1
            if entered > MAX_BLOCKS:
                raise Deadlock(f"{self.kernel.name}: {MAX_BLOCKS} blocks, and no end")

    def _run_checked(self, block: _Block, mask: Mask) -> None:
        """Run a block while products may be in flight."""
        in_flight = self.in_flight
        for step, x, touched, written in zip(
            block.steps, block.instructions, block.touched, block.written, strict=True
        ):
            if in_flight.targets and not x.opcode.startswith("wgmma"):
                in_flight.check(x, touched, written)
            step(mask)

    def _choose(self) -> tuple[int, Mask] | None:
        """The block to run next, and its threads."""
        if self.uniform is not None and not self.stalled.any():
            return (self.uniform, True) if self.uniform >= 0 else None
        if self.uniform is not None:
            self.at[...] = self.uniform
            self.uniform = None
        while True:
            ready = (self.at >= 0) & (self.waits_at < 0) & ~self.stalled
            if ready.any():
                break
            if (self.at < 0).all():
                return None
            self._unblock()
        first = int(self.at[ready].min())
        mask = ready & (self.at == first)
        if mask.all():
            self.uniform = first
            return first, True
        return first, mask

    def _unblock(self) -> None:
        """All threads wait: complete a copy, or fail."""
        if self.boxes:
            i = 0 if self.order.asynchronous != "random" else int(self.order.random.integers(len(self.boxes)))
            self.boxes.pop(i).complete()
            return
        waits = []
        if self.stalled.any():
            x = self.stalled_by
            waits.append(f"{np.count_nonzero(self.stalled)} threads for an mbarrier at {x.place if x else '?'}")
        for barrier in np.unique(self.waits_at[self.waits_at >= 0]):
            there = self.waits_at == barrier
            before = self.blocks[int(self.at[there][0]) - 1].end
            waits.append(f"{np.count_nonzero(there)} threads at barrier {barrier}, at {before.place if before else '?'}")
        ended = np.count_nonzero(self.at < 0)
        raise Deadlock(f"{self.kernel.name}: {'; '.join(waits)}; {ended} threads have ended")

    def stall(self, lanes: Array, x: Instruction) -> None:
        """Threads wait for an mbarrier."""
        self.stalled[lanes] = True
        self.stalled_by = x

    def wake(self, cta: int) -> None:
        """A phase of an mbarrier of a program has ended: its threads ask again."""
        self.stalled[cta * self.n_threads : (cta + 1) * self.n_threads] = False

    def tensor_map(self, address: int, x: Instruction) -> TensorMap:
        if address not in self.maps:
            raise MemoryFault(f"{x.opcode}, at {x.place}: there is no tensor map at {address:#x}")
        return self.maps[address]

    def _go_on(self, number: int, block: _Block, mask: Mask) -> None:
        """Send the threads of a mask to their next blocks."""
        end = block.end
        if end is None:
            self._send(number + 1, mask)
        elif end.opcode in ("ret", "exit"):
            self._part(end, mask, -1, number + 1)
        elif end.opcode in ("bra", "bra.uni"):
            self._part(end, mask, self.block_of[self.kernel.labels[str(end.operands[0])]], number + 1)
        else:
            if end.guard:
                raise builders.unknown(end)
            self._send(number + 1, mask)
            self._arrive(end, mask)

    def _send(self, target: int, mask: Mask) -> None:
        if mask is True:
            self.uniform = target
        else:
            self.at[mask] = target

    def _part(self, end: Instruction, mask: Mask, target: int, following: int) -> None:
        """A branch, perhaps of some threads only."""
        if not end.guard:
            self._send(target, mask)
            return
        taken = self.registers.row(end.guard, "?")
        taken = ~taken if end.negated else taken
        n = np.count_nonzero(taken if mask is True else taken & mask)
        if mask is True and n in (0, taken.size):
            self.uniform = target if n else following
            return
        self.at[mask] = np.where(taken, target, following)[mask] if mask is not True else np.where(taken, target, following)
        self.uniform = None

    def _arrive(self, end: Instruction, mask: Mask) -> None:
        """bar.sync: go on when all threads of the program, or so many as the operand says, have arrived."""
        if not end.opcode.startswith(("bar.sync", "barrier.sync")):
            raise builders.unknown(end)
        self.counters.barriers += 1
        numbers = [int(str(operand)) for operand in end.operands if is_number(str(operand))]
        if len(numbers) != len(end.operands):
            raise builders.unknown(end)
        barrier, count = numbers[0], (numbers[1:] or [self.n_threads])[0]
        if mask is True and count == self.n_threads:
            self.shared.races.join_all(slice(None))
            return
        if mask is True:
            self.at[...] = self.uniform
            self.uniform = None
            mask = np.ones(self.registers.n_lanes, dtype=bool)
        self.waits_at[mask] = barrier
        of_ctas = self.waits_at.reshape(self.n_ctas, -1)
        for cta in np.flatnonzero(mask.reshape(self.n_ctas, -1).any(axis=1)):
            there = of_ctas[cta] == barrier
            n = np.count_nonzero(there)
            if n > count:
                raise Fault(f"{end.opcode}, at {end.place}: {n} threads at a barrier of {count}")
            if n == count:
                of_ctas[cta, there] = -1
                warps = np.flatnonzero(there.reshape(-1, 32).any(axis=1))
                if len(warps) == self.shared.n_warps:
                    self.shared.races.join_all([cta])
                else:
                    self.shared.races.join(int(cta), warps)

    def count(self) -> None:
        """Add the instructions of the blocks that ran to the counters."""
        for block in self.blocks:
            for x in [*block.instructions, *([block.end] if block.end is not None else [])]:
                self.counters.by_opcode[x.opcode] += block.entered
            block.entered = 0


def _block_starts(kernel: Kernel) -> list[int]:
    """The numbers of the instructions at which blocks begin."""
    targets = {
        kernel.labels[str(x.operands[0])] for x in kernel.instructions if x.opcode.startswith("bra") and x.operands
        and str(x.operands[0]) in kernel.labels
    }
    after = {i + 1 for i, x in enumerate(kernel.instructions) if x.opcode.startswith(_ENDS)}
    return sorted({0, *(i for i in targets | after if i < len(kernel.instructions))})


@builders.builds("ld.param")
def _load_parameter(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    operand = x.operands[1]
    if len(words) != 3 or not isinstance(operand, Address) or operand.offset:
        raise builders.unknown(x)
    size, signed = int(words[2][1:]) // 8, words[2][0] == "s"
    if operand.base not in machine.parameters:
        raise builders.unknown(x)
    width = machine.registers.bits(builders.name(x, 0)) // 8
    out = machine.registers.row(builders.name(x, 0), f"{'i' if signed else 'u'}{width}")
    value = machine.parameters[operand.base].view("u1")[:size].view(f"{'i' if signed else 'u'}{size}")
    return lambda mask: builders.store(out, value[0], mask)
