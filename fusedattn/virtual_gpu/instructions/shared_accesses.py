"""Loads and stores of shared memory, also of 8 by 8 matrices: ldmatrix and stmatrix."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.counters import lanes_in
from fusedattn.virtual_gpu.errors import RaceError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.global_accesses import loads_into, sources_of
from fusedattn.virtual_gpu.instructions.warps import WARP, whole_warps
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, access_of, vector
from fusedattn.virtual_gpu.registers import Array, Mask, lanes_of


def shared_addresses(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the lanes: the shared addresses of operand `i`."""
    operand = x.operand(i)
    if not isinstance(operand, Address) or operand.coordinates:
        raise unknown(x)
    registers, offset = machine.registers, operand.offset
    if not registers.has(operand.base):
        fixed = int(registers.value(operand.base, "u4")) + offset
        return lambda lanes: np.full(registers.n_lanes, fixed, dtype="u4")[lanes]
    base, moved = registers.row(operand.base, "u4"), np.uint32(offset % 2**32)
    return lambda lanes: base[lanes] + moved if offset else base[lanes]


DIFFERENT_VALUES = "threads of a warp that store different values to one place of shared memory"


@builds("ld.shared", modifiers=True)
def _load(machine: Machine, x: Instruction) -> Step:
    kind, size, n = access_of(x)
    targets = vector(x, 0)
    if len(targets) != n:
        raise unknown(x)
    addresses, put, shared = shared_addresses(machine, x, 1), loads_into(machine, x, targets, kind), machine.shared

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, size * n, x)
        shared.reads(places, lanes, size * n, x)
        if machine.counters.counting:
            machine.counters.banks(x, "read", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        elements = shared.typed[size]
        first = places // size
        for i in range(n):
            put(i, elements[first + i], mask)

    return step


@builds("st.shared", modifiers=True)
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(x)
    addresses, values, shared = shared_addresses(machine, x, 0), sources_of(machine, x, 1, size), machine.shared
    if len(vector(x, 1)) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, size * n, x)
        if machine.counters.counting:
            machine.counters.banks(x, "write", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        _write(machine, x, places, lanes, [values(i, mask) for i in range(n)])

    return step


def _write(machine: Machine, x: Instruction, places: Array, lanes: Any, parts: list[Array]) -> None:
    """Lanes write the elements of a vector, each ``(n,)`` or ``()``, at places."""
    shared, size = machine.shared, parts[0].itemsize
    shared.writes(places, lanes, parts, x)
    elements, first = shared.typed[size], places // size
    for i, new in enumerate(parts):
        elements[first + i] = new
        lost = elements[first + i] != new
        if lost.any():
            different_values(machine, x, first + i, lost, shared.warp[lanes])
            turn = machine.order.turn(len(places))
            elements[first[turn] + i] = np.broadcast_to(new, places.shape)[turn]


def different_values(machine: Machine, x: Instruction, places: Array, lost: Array, warp: Array) -> None:
    """Threads of these warps store different values to places: one of them stays, and PTX does not say which.

    `lost` are those whose value is not that of the last. The sums of a row differ by rounding between the lanes that
    hold it, if a shuffle is fused with a product. Warps that do so race.
    """
    message = f"{x.opcode}, at {x.place}: threads store different values to the same bytes"
    disputed = np.isin(places, places[lost])
    at, by = places[disputed], warp[disputed]
    order = np.argsort(at, kind="stable")
    same_place = at[order][1:] == at[order][:-1]
    if machine.strict or (same_place & (by[order][1:] != by[order][:-1])).any():
        raise RaceError(message)
    machine.counters.tolerated[f"{DIFFERENT_VALUES}: {x.place}"] += 1


_MATRICES = re.compile(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")


_Rows = Callable[[Mask], tuple[Array, Array, Array]]


def _matrices(machine: Machine, x: Instruction, i: int) -> tuple[int, bool, _Rows]:
    """How many 8 by 8 matrices of 16-bit elements; whether they are transposed; and the rows at operand `i`.

    The rows are a function of the mask: places ``(warps, n, 8)`` in shared memory, the lanes that give them, and the
    warps. Lanes 8 j to 8 j + 7 give the rows of matrix j.
    """
    found = _MATRICES.fullmatch(x.opcode)
    if found is None or len(vector(x, 1 - i)) != int(found.group(1)):
        raise unknown(x)
    n, transposed = int(found.group(1)), found.group(2) is not None
    addresses, shared, n_warps = shared_addresses(machine, x, i), machine.shared, machine.registers.n_lanes // WARP
    loads = x.opcode.startswith("ld")

    def rows(mask: Mask) -> tuple[Array, Array, Array]:
        whole_warps(mask, x)
        warps = np.arange(n_warps) if mask is True else np.flatnonzero(mask.reshape(-1, WARP)[:, 0])
        lanes = (warps[:, None] * WARP + np.arange(8 * n)).reshape(-1)
        places = shared.locate(addresses(lanes), lanes, 16, x)
        if loads:
            shared.reads(places, lanes, 16, x)
        places = places.reshape(-1, n, 8)
        if machine.counters.counting:
            machine.counters.matrices(x, "read" if loads else "write", places)
        return places, lanes, warps

    return n, transposed, rows


# Lane 4 r + c holds elements 2 c and 2 c + 1 of row r.
_ROW, _PAIR = np.divmod(np.arange(32), 4)


@builds("ldmatrix", modifiers=True)
def _load_matrices(machine: Machine, x: Instruction) -> Step:
    _, transposed, rows_of = _matrices(machine, x, 1)
    bank, targets = machine.registers.rows(vector(x, 0))
    shared = machine.shared

    def step(mask: Mask) -> None:
        places, _, warps = rows_of(mask)
        if transposed:  # element (r, c) of the transposed matrix is element (c, r)
            halves = shared.typed[2]
            low, high = (halves[places[..., 2 * _PAIR + i] // 2 + _ROW].astype("u4") for i in (0, 1))
            values = low | high << np.uint32(16)
        else:
            values = shared.typed[4][places[..., _ROW] // 4 + _PAIR]
        _put(bank, targets, values, mask, warps)

    return step


def _put(bank: Array, rows: Any, values: Array, mask: Mask, warps: Array) -> None:
    """Write ``(warps, registers, 32)`` values to registers."""
    by_register = values.transpose(1, 0, 2)
    if mask is True:
        bank[rows] = by_register.reshape(by_register.shape[0], -1)
    else:
        lanes = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        indices = np.arange(bank.shape[0])[rows]
        bank[indices[:, None], lanes] = by_register.reshape(by_register.shape[0], -1)


@builds("stmatrix", modifiers=True)
def _store_matrices(machine: Machine, x: Instruction) -> Step:
    n, transposed, rows_of = _matrices(machine, x, 0)
    bank, sources = machine.registers.rows(vector(x, 1))

    def step(mask: Mask) -> None:
        places, lanes, warps = rows_of(mask)
        values = bank[sources].reshape(n, -1, 32)[:, warps].transpose(1, 0, 2)
        if transposed:
            halves = np.empty((*places.shape, 8), dtype="u2")
            for i in (0, 1):
                halves[..., 2 * _PAIR + i, _ROW] = (values >> np.uint32(16 * i)).astype("u2")
            words = halves.view("u4").reshape(-1, 4)
        else:
            words = values.reshape(-1, 4)  # lane 4 r + c holds word c of row r
        _write(machine, x, places.reshape(-1), lanes, list(words.T))

    return step
