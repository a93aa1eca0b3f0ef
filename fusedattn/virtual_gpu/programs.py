"""Run the programs of a kernel: threads of several programs step by step, together as far as they take one path.

Instructions between branches and barriers form a block. Threads at the same block run together; of several groups of
threads, that with the first block of the code runs next, so that paths that part meet again where they end. Waiting for
a barrier, for a copy or for nothing at all are states of threads: if all wait, copies in flight are completed, and if
there is none, waits for mbarriers time out. If that changes nothing, the program is stuck, which is an error. With a
random schedule, warps run ahead of others instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError, DeadlockError, KernelError
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.instructions import build, unknown
from fusedattn.virtual_gpu.instructions.builders import Step
from fusedattn.virtual_gpu.instructions.warps import WARP, whole_warps
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import BRANCHES, ENDS, INDEXED, RETURNS, Instruction, name
from fusedattn.virtual_gpu.registers import Array, Mask, is_number, store
from fusedattn.virtual_gpu.tensor_map import TensorMap
from fusedattn.virtual_gpu.trace import Prefixes
from fusedattn.virtual_gpu.wgmma_registers import GROUP, written_by

MAX_BLOCKS = 2_000_000
MAX_TIME_OUTS = 1000  # of all threads, one after the other, while no mbarrier changes
_NOT_READY = 2**31 - 1
_REDRAW = 1 / 16  # of the choices of a random schedule, after which other warps run ahead


@dataclass
class _Block:
    """Instructions that run one after the other, and how the threads go on: by `end`, or with the next block."""

    steps: list[Step]
    instructions: list[Instruction]
    touched: list[frozenset[str]]
    written: list[frozenset[str]]
    end: Instruction | None
    has_products: bool
    is_collective: bool  # an instruction is for whole warps
    prefixes: Prefixes | None  # if events are traced
    entered: Array | int = 0  # how often by each warp of a program, if it is counted


class Programs:
    """The programs of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine, kernel = machine, machine.kernel
        starts = kernel.block_starts()
        self.block_of = {start: i for i, start in enumerate(starts)}
        stops = [*starts[1:], len(kernel.instructions)]
        self.blocks = [self._block(kernel.instructions[i:j]) for i, j in zip(starts, stops, strict=True)]
        self.collective = np.array(
            [*(block.is_collective for block in self.blocks), False]
        )  # by block; ended: the last
        self.together = GROUP if any(block.has_products for block in self.blocks) else WARP  # threads never apart

    def _block(self, instructions: list[Instruction]) -> _Block:
        end = instructions[-1] if instructions and instructions[-1].opcode in ENDS else None
        if end is not None and len(end.operands) > ENDS[end.opcode]:
            raise unknown(end, f"got {len(end.operands)} operands; allowed are {ENDS[end.opcode]}")
        inner = instructions[:-1] if end is not None else instructions
        return _Block(
            [build(self.machine, x) for x in inner],
            inner,
            [frozenset(x.names) for x in inner],
            [written_by(x) for x in inner],
            end,
            any(x.opcode.startswith("wgmma") for x in inner),
            any(".sync" in x.opcode for x in inner),
            Prefixes(instructions) if self.machine.counters.trace is not None else None,
        )

    def run(
        self,
        programs: Sequence[int],
        grid: tuple[int, int, int],
        parameters: dict[str, int],
        maps: dict[str, TensorMap],
        memory: GlobalMemory,
    ) -> None:
        """Run as many programs as the machine has place for, by their numbers in the grid."""
        machine = self.machine
        machine.begin(programs, grid, parameters, maps, memory)
        if machine.counters.trace is not None:
            machine.counters.trace.begin(programs, machine.n_threads // WARP)
        n_lanes = machine.registers.n_lanes
        present = len(programs) * machine.n_threads
        self.uniform: int | None = 0 if present == n_lanes else None  # the block of all threads
        self.at = np.zeros(n_lanes, dtype="i4")  # the block of each thread; -1 after its end
        self.at[present:] = -1
        self.waits_at = np.full(n_lanes, -1, dtype="i4")  # the number of the barrier for which a thread waits
        self.counts: dict[tuple[int, int], int] = {}  # by program and barrier for which threads wait
        self.ahead = self._draw()  # with a random schedule: the warps, or groups of four, that run first
        self.time_outs: tuple[int, Any, int] = 0, None, 0  # how many; the mbarriers and all of the state at the last
        self._loop()
        for groups in (machine.copies, machine.bulk, machine.wgmma):
            groups.check_empty()
        if machine.boxes:
            x = machine.boxes[0].x
            raise AsyncError(f"{x.opcode}, at {x.place}: nobody waited for it before the program ended")
        machine.mbarriers.check_phases(machine.kernel.name)
        machine.global_work.check_awaited(machine.shared.races)
        machine.counters.programs += len(programs)

    def _loop(self) -> None:
        blocks, counting, trace = self.blocks, self.machine.counters.counting, self.machine.counters.trace
        entered = 0
        while True:
            chosen = self._choose()
            if chosen is None:
                return
            number, mask = chosen
            block = blocks[number]
            if counting:
                block.entered = block.entered + self._entering(mask)
            if trace is not None and block.prefixes is not None:
                trace.enter(block.prefixes)
            self.machine.counters.instructions += len(block.steps) + (block.end is not None)
            if block.has_products or self.machine.in_flight.targets:
                self._run_checked(block, mask)
            else:
                for step in block.steps:
                    step(mask)
            self._go_on(number, block, mask)
            if trace is not None:
                trace.leave(self.machine.warps(mask))
            entered += 1
            if entered > MAX_BLOCKS:
                raise DeadlockError(f"{self.machine.kernel.name}: {MAX_BLOCKS} blocks, and no end")

    def _entering(self, mask: Mask) -> Array:
        """The programs in which each warp has a thread in the mask, ``(warps,)``."""
        n_warps = self.machine.n_threads // 32
        if mask is True:
            return np.full(n_warps, self.machine.n_ctas)
        return mask.reshape(-1, n_warps, 32).any(axis=2).sum(axis=0)

    def _run_checked(self, block: _Block, mask: Mask) -> None:
        """Run a block while products may be in flight."""
        in_flight = self.machine.in_flight
        for step, x, touched, written in zip(
            block.steps, block.instructions, block.touched, block.written, strict=True
        ):
            if in_flight.targets and not x.opcode.startswith("wgmma") and in_flight.concerned(touched, written):
                in_flight.check(x, touched, written, self._taking(x) & mask if x.guard else mask)
            step(mask)

    def _taking(self, x: Instruction) -> Array:
        """The threads for which the guard of an instruction holds."""
        if not x.guard:
            return np.ones(self.machine.registers.n_lanes, dtype=bool)
        guard = self.machine.registers.row(x.guard, "?")
        return ~guard if x.negated else guard

    def _choose(self) -> tuple[int, Mask] | None:
        """The block to run next, and its threads."""
        in_step = self.machine.order.schedule == "lockstep"
        if self.uniform is not None and in_step and not self.machine.stalled.any():
            return (self.uniform, True) if self.uniform >= 0 else None
        if self.uniform is not None:
            self.at[...] = self.uniform
            self.uniform = None
        ready = self._ready()
        if ready is None:
            return None
        first, mask = self._first(ready) if in_step else self._at_random(ready)
        if mask.all():
            self.uniform = first
            return first, True
        return first, mask

    def _ready(self) -> Array | None:
        """The threads that may run, at least one; None if all have ended.

        Threads wait for those of their warp that wait for an mbarrier, so that warps stay whole, if they can.
        """
        while True:
            ready = (self.at >= 0) & (self.waits_at < 0) & ~self.machine.stalled
            whole = ready
            if self.machine.stalled.any():
                whole = ready & ~np.repeat(self.machine.stalled.reshape(-1, WARP).any(axis=1), WARP)
            if whole.any():
                return self._without_parts(whole)
            if self.machine.boxes:
                self._complete()
            elif ready.any():
                return ready
            elif (self.at < 0).all():
                return None
            elif not self._time_out():
                raise DeadlockError(self._state())

    def _without_parts(self, ready: Array) -> Array:
        """Ready threads without those that wait, at a block for whole warps, for others of their warp."""
        apart = ready & self.collective[self.at]
        if not apart.any():
            return ready
        of_warps = self.at.reshape(-1, WARP)
        present = of_warps >= 0
        first = np.where(present, of_warps, _NOT_READY).min(axis=1)
        together = (of_warps == first[:, None]) | ~present
        held = apart & ~np.repeat(together.all(axis=1), WARP)
        left = ready & ~held
        return left if left.any() else ready

    def _time_out(self) -> bool:
        """Let mbarrier.try_wait give up, as all threads wait, and no copy is in flight; whether there is hope in it."""
        machine, (n, before, last) = self.machine, self.time_outs
        mbarriers = sorted((at, x.phase, x.pending, x.bytes) for at, x in machine.mbarriers.table.items())
        arrays = (self.at, self.waits_at, machine.shared.bytes, *machine.registers.banks.values())
        state = hash((tuple(mbarriers), *(array.tobytes() for array in arrays)))
        n = n + 1 if mbarriers == before else 1
        if not machine.stalled.any() or (n > 1 and state == last) or n > MAX_TIME_OUTS:
            return False
        self.time_outs = n, mbarriers, state
        machine.stalled.fill(False)
        return True

    def _first(self, ready: Array) -> tuple[int, Array]:
        """The first block of the code at which threads are ready, and these."""
        first = int(self.at[ready].min())
        return first, ready & (self.at == first)

    def _at_random(self, ready: Array) -> tuple[int, Array]:
        """The block of some warps that run ahead of others until the next draw, or have to wait; and its threads."""
        random, n = self.machine.order.random, self.together
        if random.random() < _REDRAW:
            self.ahead = self._draw()
        first = np.where(ready, self.at, _NOT_READY).reshape(-1, n).min(axis=1)  # of each warp, or four of them
        can = first < _NOT_READY
        if (can & self.ahead).any():
            can &= self.ahead
        number = int(random.choice(first[can]))
        return number, ready & (self.at == number) & np.repeat(can & (first == number), n)

    def _draw(self) -> Array:
        return self.machine.order.random.random(self.machine.registers.n_lanes // self.together) < 0.5

    def _complete(self) -> None:
        """All threads wait: complete a copy."""
        if self.machine.order.asynchronous == "random":
            self.machine.boxes.pop(int(self.machine.order.random.integers(len(self.machine.boxes)))).complete()
            return
        # The oldest of each program, so that programs stay together.
        oldest = {box.cta: box for box in reversed(self.machine.boxes)}
        self.machine.boxes = [box for box in self.machine.boxes if oldest[box.cta] is not box]
        for box in oldest.values():
            box.complete()

    def _state(self) -> str:
        """What the threads wait for, in words."""
        waits = []
        if self.machine.stalled.any():
            x = self.machine.stalled_by
            waits.append(f"{np.count_nonzero(self.machine.stalled)} threads for an mbarrier at {x.place if x else '?'}")
        for barrier in np.unique(self.waits_at[self.waits_at >= 0]):
            there = self.waits_at == barrier
            before = self.blocks[int(self.at[there][0]) - 1].end
            waits.append(
                f"{np.count_nonzero(there)} threads at barrier {barrier}, at {before.place if before else '?'}"
            )
        ended = np.count_nonzero(self.at < 0)
        return f"{self.machine.kernel.name}: {'; '.join(waits)}; {ended} threads have ended"

    def _go_on(self, number: int, block: _Block, mask: Mask) -> None:
        """Send the threads of a mask to their next blocks."""
        end = block.end
        if end is None:
            self._send(number + 1, mask)
        elif end.opcode in RETURNS:
            self._part(end, mask, -1, number + 1)
        elif end.opcode in BRANCHES:
            targets = [self.block_of[target] for target in self.machine.kernel.targets(end)]
            self._part(
                end, mask, self._indexed(end, mask, targets) if end.opcode == INDEXED else targets[0], number + 1
            )
        else:
            if end.guard:
                raise unknown(end, f"got predicate {end.guard}; allowed is none")
            self._send(number + 1, mask)
            self._arrive(end, mask)

    def _send(self, target: int, mask: Mask) -> None:
        if mask is True:
            self.uniform = target
        else:
            self.at[mask] = target

    def _indexed(self, end: Instruction, mask: Mask, targets: list[int]) -> Array:
        """The block of each thread, by the register of a brx.idx."""
        index = self.machine.registers.row(name(end, 0), "u4")
        taking = self._taking(end) & mask
        if (index[taking] >= len(targets)).any():
            raise KernelError(f"{end.opcode}, at {end.place}: got {index[taking].max()} for {len(targets)} targets")
        return np.array(targets, dtype="i4")[np.minimum(index, len(targets) - 1)]

    def _part(self, end: Instruction, mask: Mask, target: int | Array, following: int) -> None:
        """A branch, perhaps of some threads only, or of each to its own target."""
        if isinstance(target, int):
            if not end.guard:
                self._send(target, mask)
                return
            n = np.count_nonzero(self._taking(end) & mask)
            if mask is True and n in (0, self.at.size):
                self.uniform = target if n else following
                return
        taken = self._taking(end)
        store(self.at, np.where(taken, target, following), mask)
        self.uniform = None

    def _arrive(self, end: Instruction, mask: Mask) -> None:
        """bar.sync: go on when all threads of the program, or so many as the operand says, have arrived."""
        if end.opcode.startswith("bar.") or ".aligned" in end.opcode:
            whole_warps(mask, end)
        numbers = [int(str(operand)) for operand in end.operands if is_number(str(operand))]
        if len(numbers) != len(end.operands):
            raise unknown(end, "got a register; allowed are numbers")
        barrier, count = numbers[0], (numbers[1:] or [self.machine.n_threads])[0]
        if not 0 <= barrier < 16 or count % WARP or not 0 < count <= self.machine.n_threads:
            raise KernelError(
                f"{end.opcode}, at {end.place}: got barrier {barrier} of {count} threads; allowed are barriers 0 to "
                f"15, of whole warps, at most {self.machine.n_threads} threads"
            )
        self.machine.note_all("barrier", end, mask, barrier, count)
        if mask is True and count == self.machine.n_threads:
            self.machine.counters.barriers[count] += self.machine.n_ctas
            self.machine.shared.races.join_all(slice(None))
            return
        if mask is True:
            self.at[...] = self.uniform
            self.uniform = None
            mask = np.ones(self.machine.registers.n_lanes, dtype=bool)
        self.waits_at[mask] = barrier
        of_ctas = self.waits_at.reshape(self.machine.n_ctas, -1)
        for cta in np.flatnonzero(mask.reshape(self.machine.n_ctas, -1).any(axis=1)):
            there = of_ctas[cta] == barrier
            n = np.count_nonzero(there)
            before = self.counts.setdefault((int(cta), barrier), count)
            if before != count:
                raise KernelError(f"{end.opcode}, at {end.place}: {count} threads, and others wait for {before}")
            if n > count:
                raise KernelError(f"{end.opcode}, at {end.place}: {n} threads at a barrier of {count}")
            if n == count:
                self.machine.counters.barriers[count] += 1
                of_ctas[cta, there] = -1
                del self.counts[int(cta), barrier]
                warps = np.flatnonzero(there.reshape(-1, 32).any(axis=1))
                if len(warps) == self.machine.shared.n_warps:
                    self.machine.shared.races.join_all([cta])
                else:
                    self.machine.shared.races.join(int(cta), warps)

    def count(self) -> None:
        """Add the instructions of the blocks that ran to the counters."""
        for block in self.blocks:
            if np.any(block.entered):
                for x in [*block.instructions, *([block.end] if block.end is not None else [])]:
                    self.machine.counters.issue(x, np.asarray(block.entered))
            block.entered = 0
