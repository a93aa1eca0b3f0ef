"""Hopper's matrix products: four warps multiply matrices that lie in shared memory, or registers, asynchronously.

PTX ISA, "asynchronous warpgroup level matrix instructions": matrix descriptors, layouts and swizzles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import KernelError
from fusedattn.virtual_gpu.groups import Work
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.matrices import (
    SIZES,
    fragment_a,
    fragment_c,
    kinds_match,
    registers_c,
    widened,
)
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, name, vector
from fusedattn.virtual_gpu.registers import Array, Mask, is_number
from fusedattn.virtual_gpu.tensor_map import swizzled
from fusedattn.virtual_gpu.wgmma_registers import GROUP

_SPANS = (16, 128, 64, 32)  # bytes of a row, by the mode of a descriptor
_SWIZZLES = (0, 7, 3, 1)  # of the address bits 7 to 9, those that are added to bits 4 to 6
_KIND = f"({'|'.join(SIZES)})"
_FORM = re.compile(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.{_KIND}\.{_KIND}$")


@cache
def _offsets(rows: int, columns: int, size: int, mode: int, leading: int, stride: int, by_rows: bool) -> Array:
    """The byte of element (row, k), ``(rows, columns)``, before the swizzle; `by_rows`: rows are contiguous."""
    row, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    span, together = _SPANS[mode], 16 // size
    if not by_rows:
        return row % 8 * span + row // 8 * stride + k % together * size + k // together * (leading if mode == 0 else 16)
    if mode:
        per_span = span // size
        return row % per_span * size + row // per_span * leading + k % 8 * span + k // 8 * stride
    return row % together * size + row // together * stride + k % 8 * 16 + k // 8 * leading


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
            raise KernelError(f"{self.x.opcode}, at {self.x.place}: its threads have different descriptors")
        found = np.empty((len(groups), self.rows, self.k), dtype="i4")
        descriptors, which = np.unique(of_lanes[:, 0], return_inverse=True)
        for j, descriptor in enumerate(descriptors):
            found[which == j] = self._decode(int(descriptor))
        return found

    def _decode(self, descriptor: int) -> Array:
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        mode = descriptor >> 62
        if descriptor >> 49 & 7:
            raise unknown(self.x, f"got base offset {descriptor >> 49 & 7}; allowed is 0")
        offsets = _offsets(self.rows, self.k, self.size, mode, leading, stride, self.by_rows)
        return swizzled(start + offsets, _SWIZZLES[mode])

    def chunks(self, addresses: Array) -> Array:
        """The address of each 16 bytes, ``(groups, n)``."""
        together = 16 // self.size
        chosen = addresses[:, ::together, :] if self.by_rows else addresses[:, :, ::together]
        flat = chosen.reshape(len(addresses), -1)
        if (flat & 15).any():
            raise KernelError(f"{self.x.opcode}, at {self.x.place}: a matrix that is not aligned to 16 bytes")
        self.machine.shared.check(flat, 16, self.x)
        return flat


@builds("wgmma.mma_async", modifiers=True)
def _multiply(machine: Machine, x: Instruction) -> Step:
    form = _FORM.match(x.opcode)
    if form is None or not kinds_match(form.group(3), form.group(4)):
        raise unknown(x)
    n, k, kind_a, kind_b = int(form.group(1)), int(form.group(2)), form.group(3), form.group(4)
    size = SIZES[kind_a]
    if k * size != 32:
        raise unknown(x)
    if n % 8 or not 8 <= n <= 256 or len(vector(x, 0)) != n // 2 or machine.n_threads % GROUP:
        raise unknown(x)
    registers, shared, products = machine.registers, machine.shared, machine.products
    from_registers = not isinstance(x.operand(1), str)
    *flags, n_flags = *(int(name(x, i)) for i in range(4, len(x.operands))), len(x.operands) - 4
    transposable = 0 if size != 2 else 1 if from_registers else 2  # operands
    if n_flags != 2 + transposable or any(flag not in (1, -1) for flag in flags[:2]):
        raise unknown(x)
    sign = np.float32(flags[0] * flags[1])
    transposed = [bool(flag) for flag in flags[2:]]
    bank, d = registers.rows(vector(x, 0))
    a: Any = (
        registers.rows(vector(x, 1))[1]
        if from_registers
        else _Operand(machine, x, 1, 64, k, size, bool(transposed and transposed[0]))
    )
    b = _Operand(machine, x, 2, n, k, size, bool(transposed and transposed[-1]))
    scale = name(x, 3)
    keeps = np.full(registers.n_lanes, scale != "0") if is_number(scale) else registers.row(scale, "?")
    d_rows = np.arange(bank.shape[0])[d]
    n_warps = shared.n_warps
    targets, sources = frozenset(vector(x, 0)), frozenset(vector(x, 1) if from_registers else ())
    require_fence = machine.fences.requirement(x)

    def step(mask: Mask) -> None:
        groups = np.arange(registers.n_lanes // GROUP) if mask is True else _whole_groups(mask, x)
        require_fence(groups)
        machine.in_flight.begin(targets, sources, groups, x)
        machine.note_all("product", x, mask, amount=64 * n * k)
        at_b = b.addresses(groups)
        at_a = None if from_registers else a.addresses(groups)
        keep = keeps.reshape(-1, GROUP)[groups]
        if (keep != keep[:, :1]).any():
            raise KernelError(f"{x.opcode}, at {x.place}: its threads have different predicates")
        cta = groups * GROUP // machine.n_threads
        chunks = b.chunks(at_b)
        if at_a is not None:
            chunks = np.concatenate([a.chunks(at_a), chunks], axis=1)
        if machine.counters.counting:
            machine.counters.multiply(x, len(groups) * 64 * n * k)
            machine.counters.operands(x, len(groups), 16 * chunks.shape[1])
        places = chunks + (cta * shared.window)[:, None]
        granules = shared.granules(places.reshape(-1), 16).reshape(len(groups), -1)
        warps = (groups[:, None] * 4 + np.arange(4)) % n_warps  # each of the four reads all of it
        shared.races.begin_reads(granules, cta[:, None], warps, x)
        bases = (cta * shared.window)[:, None, None]
        saved = bank[a].reshape(4, -1, GROUP)[:, groups].reshape(4, -1) if from_registers else None

        def effect(parts: Array) -> None:
            chosen = groups[parts]
            elements = shared.typed[size]
            right = widened(elements[(at_b[parts] + bases[parts]) // size], kind_b)
            if at_a is None:
                assert saved is not None
                of_parts = saved.reshape(4, -1, GROUP)[:, parts].reshape(4, -1)
                left = fragment_a(of_parts, kind_a).reshape(-1, 64, k)
            else:
                left = widened(elements[(at_a[parts] + bases[parts]) // size], kind_a)
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
            shared.races.end_reads(granules[parts], cta[parts][:, None], warps[parts], x)
            machine.in_flight.end(targets, sources, groups[parts])

        machine.wgmma.add(Work(groups, effect, end, x), machine.order)

    return step


def _whole_groups(mask: Array, x: Instruction) -> Array:
    of_groups = mask.reshape(-1, GROUP)
    some = of_groups.any(axis=1)
    if (some != of_groups.all(axis=1)).any():
        raise KernelError(f"{x.opcode}, at {x.place}: only a part of four warps executes it")
    return np.flatnonzero(some)


def _of_whole_groups(x: Instruction, act: Callable[[Mask], None]) -> Step:
    """A step of groups of four warps, which execute it as a whole."""

    def step(mask: Mask) -> None:
        if mask is not True:
            _whole_groups(mask, x)
        act(mask)

    return step


@builds("wgmma.commit_group.sync.aligned")
def _commit(machine: Machine, x: Instruction) -> Step:
    def commit(mask: Mask) -> None:
        machine.note_all("commit", x, mask)
        machine.wgmma.commit(mask)
        machine.fences.commit(mask)

    return _of_whole_groups(x, commit)


@builds("wgmma.wait_group.sync.aligned")
def _wait(machine: Machine, x: Instruction) -> Step:
    pending = int(name(x, 0))

    def wait(mask: Mask) -> None:
        machine.note_all("products", x, mask, amount=pending)
        machine.wgmma.wait(pending, mask)

    return _of_whole_groups(x, wait)


@builds("wgmma.fence.sync.aligned")
def _fence(machine: Machine, x: Instruction) -> Step:
    return _of_whole_groups(x, machine.fences.fence)
