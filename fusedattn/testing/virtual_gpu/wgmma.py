"""Hopper's matrix products: four warps multiply matrices that lie in shared memory, or registers, asynchronously.

PTX ISA, "asynchronous warpgroup level matrix instructions": matrix descriptors, layouts and swizzles.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedattn.testing.virtual_gpu.builders import Mask, Step, builds, name, unknown, vector
from fusedattn.testing.virtual_gpu.faults import AsyncFault, Fault
from fusedattn.testing.virtual_gpu.groups import Work
from fusedattn.testing.virtual_gpu.matrices import fragment_a, fragment_c, registers_c, widened
from fusedattn.testing.virtual_gpu.ptx import Instruction
from fusedattn.testing.virtual_gpu.registers import Array, is_number

if TYPE_CHECKING:
    from fusedattn.testing.virtual_gpu.machine import Machine

GROUP = 128  # threads
_SPANS = (16, 128, 64, 32)  # bytes of a row, by the mode of a descriptor
_SWIZZLES = (0, 7, 3, 1)  # of the address bits 7 to 9, those that are added to bits 4 to 6
_FORM = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32)\.(bf16|f16|tf32)$")


@lru_cache(maxsize=None)
def _offsets(rows: int, columns: int, size: int, mode: int, leading: int, stride: int, by_rows: bool) -> Array:
    """The byte of element (row, k), ``(rows, columns)``, before the swizzle; `by_rows`: rows are contiguous (MN-major)."""
    row, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    span, together = _SPANS[mode], 16 // size
    if not by_rows:
        return (
            row % 8 * span
            + row // 8 * stride
            + k % together * size
            + k // together * (leading if mode == 0 else 16)
        )
    if mode:
        per_span = span // size
        return row % per_span * size + row // per_span * leading + k % 8 * span + k // 8 * stride
    return row % together * size + row // together * stride + k % 8 * 16 + k // 8 * leading


def swizzled(addresses: Array, bits: int) -> Array:
    return addresses ^ (addresses >> 7 & bits) << 4


class _Operand:
    """A matrix in shared memory: its elements' addresses, from descriptors."""

    def __init__(self, machine: Machine, x: Instruction, i: int, rows: int, k: int, size: int, by_rows: bool) -> None:
        self.machine, self.x = machine, x
        self.descriptors = machine.registers.row(name(x, i), "u8")
        self.rows, self.k, self.size, self.by_rows = rows, k, size, by_rows

    def addresses(self, groups: Array) -> Array:
        """Of each group of warps and element, ``(groups, rows, k)``."""
        of_lanes = self.descriptors.reshape(-1, GROUP)[groups]
        if (of_lanes != of_lanes[:, :1]).any():
            raise Fault(f"{self.x.opcode}, at {self.x.place}: its threads have different descriptors")
        found = np.empty((len(groups), self.rows, self.k), dtype="i4")
        descriptors, which = np.unique(of_lanes[:, 0], return_inverse=True)
        for j, descriptor in enumerate(descriptors):
            found[which == j] = self._decode(int(descriptor))
        return found

    def _decode(self, descriptor: int) -> Array:
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        mode = descriptor >> 62
        if descriptor >> 49 & 7:
            raise unknown(self.x)  # a base offset: matrices that are not aligned to their swizzle
        offsets = _offsets(self.rows, self.k, self.size, mode, leading, stride, self.by_rows)
        return swizzled(start + offsets, _SWIZZLES[mode])

    def chunks(self, addresses: Array) -> Array:
        """The address of each 16 bytes, ``(groups, n)``."""
        together = 16 // self.size
        chosen = addresses[:, ::together, :] if self.by_rows else addresses[:, :, ::together]
        flat = chosen.reshape(len(addresses), -1)
        if (flat & 15).any():
            raise Fault(f"{self.x.opcode}, at {self.x.place}: a matrix that is not aligned to 16 bytes")
        self.machine.shared.check(flat, 16, self.x)
        return flat


@builds("wgmma.mma_async")
def _multiply(machine: Machine, x: Instruction) -> Step:
    form = _FORM.match(x.opcode)
    if form is None or form.group(3) != form.group(4):
        raise unknown(x)
    n, k, kind = int(form.group(1)), int(form.group(2)), form.group(3)
    size = 4 if kind == "tf32" else 2
    if k * size != 32:
        raise unknown(x)
    registers, shared, products = machine.registers, machine.shared, machine.products
    from_registers = not isinstance(x.operands[1], str)
    *flags, n_flags = *(int(name(x, i)) for i in range(4, len(x.operands))), len(x.operands) - 4
    transposable = 0 if kind == "tf32" else 1 if from_registers else 2
    if n_flags != 2 + transposable or any(flag not in (1, -1) for flag in flags[:2]):
        raise unknown(x)
    sign = np.float32(flags[0] * flags[1])
    transposed = [bool(flag) for flag in flags[2:]]
    bank, d = registers.rows(vector(x, 0))
    a: Any = registers.rows(vector(x, 1))[1] if from_registers else _Operand(
        machine, x, 1, 64, k, size, bool(transposed and transposed[0])
    )
    b = _Operand(machine, x, 2, n, k, size, bool(transposed and transposed[-1]))
    scale = name(x, 3)
    keeps = np.full(registers.n_lanes, scale != "0") if is_number(scale) else registers.row(scale, "?")
    d_rows = np.arange(bank.shape[0])[d]
    n_warps = shared.n_warps
    targets, sources = vector(x, 0), vector(x, 1) if from_registers else ()
    machine.fences.require(x)

    def step(mask: Mask) -> None:
        groups = np.arange(registers.n_lanes // GROUP) if mask is True else _whole_groups(mask, x)
        machine.in_flight.begin(targets, sources, x)
        at_b = b.addresses(groups)
        at_a = None if from_registers else a.addresses(groups)
        keep = keeps.reshape(-1, GROUP)[groups]
        if (keep != keep[:, :1]).any():
            raise Fault(f"{x.opcode}, at {x.place}: its threads have different predicates")
        cta = groups * GROUP // machine.n_threads
        chunks = b.chunks(at_b)
        if at_a is not None:
            chunks = np.concatenate([a.chunks(at_a), chunks], axis=1)
        places = chunks + (cta * shared.window)[:, None]
        granules = shared.granules(places.reshape(-1), 16).reshape(len(groups), -1)
        # Each of the four warps reads all of it.
        of_warps = np.repeat(granules, 4, axis=0)
        cta_of_warps = np.repeat(cta, 4)[:, None]
        warp = (groups[:, None] * 4 + np.arange(4)).reshape(-1) % n_warps
        reading = shared.races.begin_reads(of_warps, cta_of_warps, warp[:, None], x)
        remaining = np.ones(len(groups), dtype=bool)
        bases = (cta * shared.window)[:, None, None]
        saved = bank[a].reshape(4, -1, GROUP)[:, groups].reshape(4, -1) if from_registers else None

        def effect(parts: Array) -> None:
            chosen = groups[parts]
            elements = shared.typed[size]
            right = widened(elements[(at_b[parts] + bases[parts]) // size], kind)
            if at_a is None:
                assert saved is not None
                of_parts = saved.reshape(4, -1, GROUP)[:, parts].reshape(4, -1)
                left = fragment_a(of_parts, kind).reshape(-1, 64, k)
            else:
                left = widened(elements[(at_a[parts] + bases[parts]) // size], kind)
            if sign < 0:
                left = -left
            lanes = (chosen[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
            whole = len(lanes) == registers.n_lanes
            before = bank[d] if whole else bank[d_rows[:, None], lanes]
            old = fragment_c(before.view("f4")).reshape(-1, 64, n)
            kept = keep[parts][:, 0]
            c = old if kept.all() else np.where(kept[:, None, None], old, np.float32(0)) if kept.any() else None
            result = registers_c(products.add(left, right.transpose(0, 2, 1), c).reshape(-1, 16, n)).view("u4")
            if whole:
                bank[d] = result
            else:
                bank[d_rows[:, None], lanes] = result

        def end(parts: Array) -> None:
            remaining[parts] = False
            rows = np.repeat(parts, 4)
            shared.races.end_reads(reading, of_warps[rows], warp[rows][:, None], of_warps[np.repeat(remaining, 4)], x)
            if not remaining.any():
                machine.in_flight.end(targets, sources)

        machine.wgmma.add(Work(groups * 4, effect, end, x), machine.order)

    return step


def _whole_groups(mask: Array, x: Instruction) -> Array:
    of_groups = mask.reshape(-1, GROUP)
    some = of_groups.any(axis=1)
    if (some != of_groups.all(axis=1)).any():
        raise Fault(f"{x.opcode}, at {x.place}: only a part of four warps executes it")
    return np.flatnonzero(some)


@builds("wgmma.commit_group.sync.aligned")
def _commit(machine: Machine, x: Instruction) -> Step:
    return lambda mask: machine.wgmma.commit(mask)


@builds("wgmma.wait_group.sync.aligned")
def _wait(machine: Machine, x: Instruction) -> Step:
    pending = int(name(x, 0))
    return lambda mask: machine.wgmma.wait(pending, mask)


@builds("wgmma.fence.sync.aligned")
def _fence(machine: Machine, x: Instruction) -> Step:
    return lambda mask: None  # machine.fences knows where it must stand


class InFlight:
    """Registers of products that nobody has waited for: accumulators must not be touched, sources not be written."""

    def __init__(self) -> None:
        self.targets: dict[str, int] = {}
        self.sources: dict[str, int] = {}

    def begin(self, targets: tuple[str, ...], sources: tuple[str, ...], x: Instruction) -> None:
        """A product takes accumulators, which may be those of the one before, and sources."""
        if any(source in self.targets for source in sources):
            raise AsyncFault(f"{x.opcode}, at {x.place}: multiplies accumulators of a product that is not complete")
        for table, names in ((self.targets, targets), (self.sources, sources)):
            for register in names:
                table[register] = table.get(register, 0) + 1

    def end(self, targets: tuple[str, ...], sources: tuple[str, ...]) -> None:
        for table, names in ((self.targets, targets), (self.sources, sources)):
            for register in names:
                table[register] -= 1
                if not table[register]:
                    del table[register]

    def check(self, x: Instruction, touched: frozenset[str], written: frozenset[str]) -> None:
        """Fail if an instruction touches accumulators or writes sources."""
        used = self.targets.keys() & touched or self.sources.keys() & written
        if used:
            raise AsyncFault(
                f"{x.opcode}, at {x.place}: uses {min(used)}, which belongs to a product that is not complete"
            )


WRITES_AFTER_FENCE = "registers of wgmma written after wgmma.fence"


class Fences:
    """A wgmma.fence must stand before a product, and after all other writes of its registers.

    LLVM moves such writes past the fence; NVIDIA's assembler then orders them itself. So only the fence is required,
    unless the machine is strict.
    """

    def __init__(
        self, instructions: list[Instruction], starts: set[int], liberties: Counter[str], *, strict: bool
    ) -> None:
        self.instructions, self.starts, self.liberties, self.strict = instructions, starts, liberties, strict

    def require(self, x: Instruction) -> None:
        """Fail unless a fence stands before a product, in its block."""
        registers = {*vector(x, 0), *(vector(x, 1) if not isinstance(x.operands[1], str) else ())}
        written = False
        for i in range(self._index(x) - 1, -1, -1):
            before = self.instructions[i]
            if before.opcode.startswith("wgmma.fence"):
                break
            if i in self.starts:
                raise AsyncFault(f"{x.opcode}, at {x.place}: no wgmma.fence before it")
            if before.opcode.startswith("wgmma.mma_async"):
                written |= bool(set(vector(before, 0)) & registers) and vector(before, 0) != vector(x, 0)
            else:
                written |= bool(written_by(before) & registers)
        if written:
            self.liberties[f"{WRITES_AFTER_FENCE}: {x.place}"] += 1
            if self.strict:
                raise AsyncFault(f"{x.opcode}, at {x.place}: no wgmma.fence after its registers were written")

    def _index(self, x: Instruction) -> int:
        return next(i for i, other in enumerate(self.instructions) if other is x)


def written_by(x: Instruction) -> frozenset[str]:
    """The registers that an instruction writes, of those that compute or load."""
    if not x.operands or x.opcode.startswith(("st.", "red.", "bar.", "cp.", "bra", "stmatrix", "mbarrier.arrive")):
        return frozenset()
    first = x.operands[0]
    if isinstance(first, str):
        return frozenset({first})
    return frozenset(first) if isinstance(first, tuple) else frozenset()
