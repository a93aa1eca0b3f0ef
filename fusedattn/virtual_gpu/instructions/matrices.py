"""Products of matrices held in registers: mma.sync, and the fragments that wgmma shares with it.

Lane ``4 g + t`` of a warp holds rows g and g + 8, and columns from 2 t on. PTX ISA, "warp-level matrix instructions".
"""

from __future__ import annotations

import numpy as np

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.float8 import from_float8
from fusedattn.virtual_gpu.instructions.floats import from_bf16
from fusedattn.virtual_gpu.instructions.warps import WARP, whole_warps
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Instruction, vector
from fusedattn.virtual_gpu.registers import Array, Mask

SIZES = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}  # bytes of an operand's element


def kinds_match(a: str, b: str) -> bool:
    """Whether a product takes operands of these kinds: of one kind, or both of 8 bits."""
    return a == b or SIZES[a] == SIZES[b] == 1


def widened(bits: Array, kind: str) -> Array:
    """float32 values of stored operands, of as many bits as they have; the low ones of TF32 are ignored."""
    if SIZES[kind] == 1:
        return from_float8(bits, kind)
    if kind == "bf16":
        return from_bf16(bits)
    if kind == "f16":
        return bits.view("f2").astype("f4")
    return (bits & np.uint32(0xFFFFE000)).view("f4")


def fragment_a(registers: Array, kind: str) -> Array:
    """``(4, lanes)`` registers of a warp's A as ``(warps, 16, k)``; k is 32 bytes."""
    parts = _elements(registers, kind).reshape(2, 2, -1, 8, 4, 4 // SIZES[kind])  # column half, row half, warp, g, t
    return widened(np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4, 5)).reshape(-1, 16, 32 // SIZES[kind]), kind)


def _fragment_b(registers: Array, kind: str) -> Array:
    """``(2, lanes)`` registers as ``(warps, k, 8)``."""
    parts = _elements(registers, kind).reshape(2, -1, 8, 4, 4 // SIZES[kind])  # row half, warp, g, t
    return widened(np.ascontiguousarray(parts.transpose(1, 0, 3, 4, 2)).reshape(-1, 32 // SIZES[kind], 8), kind)


def _elements(registers: Array, kind: str) -> Array:
    return np.ascontiguousarray(registers).view(f"u{SIZES[kind]}")


def fragment_c(registers: Array) -> Array:
    """``(n / 2, lanes)`` float32 registers of a warp's accumulators as ``(warps, 16, n)``."""
    parts = registers.reshape(-1, 2, 2, registers.shape[1] // 32, 8, 4)  # column block, row half, pair, warp, g, t
    n = 8 * parts.shape[0]
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, n)


def registers_c(matrices: Array) -> Array:
    """The opposite of :func:`fragment_c`."""
    warps, _, n = matrices.shape
    parts = matrices.reshape(warps, 2, 8, n // 8, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, warps * 32)


@builds("mma.sync.aligned", modifiers=True)
def _mma(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")[3:]
    if len(words) != 7 or words[1:4] != ["row", "col", "f32"] or words[6] != "f32":
        raise unknown(x)
    kind_a, kind_b = words[4:6]
    k = 32 // SIZES[kind_a]
    if not kinds_match(kind_a, kind_b) or words[0] != f"m16n8k{k}":
        raise unknown(x)
    registers, products = machine.registers, machine.products
    bank, d = registers.rows(vector(x, 0))
    (_, a), (_, b) = (registers.rows(vector(x, i)) for i in (1, 2))
    sources = [registers.value(name, "f4") for name in vector(x, 3)]

    def step(mask: Mask) -> None:
        whole_warps(mask, x)
        if machine.counters.counting:
            n_warps = (registers.n_lanes if mask is True else np.count_nonzero(mask)) // WARP
            machine.counters.multiply(x, n_warps * 16 * 8 * k)
        c = fragment_c(np.stack([np.broadcast_to(y, (registers.n_lanes,)) for y in sources]))
        result = registers_c(products.add(fragment_a(bank[a], kind_a), _fragment_b(bank[b], kind_b), c)).view("u4")
        if mask is True:
            bank[d] = result
        else:
            rows = np.arange(bank.shape[0])[d]
            lanes = np.flatnonzero(mask)
            bank[rows[:, None], lanes] = result[:, lanes]

    return step
