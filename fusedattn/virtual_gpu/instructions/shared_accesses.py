"""Loads and stores of shared memory, also of 8 by 8 matrices: ldmatrix and stmatrix."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.counters import lanes_in
from fusedattn.virtual_gpu.errors import RaceError
from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.instructions.global_accesses import loads_into, sources_of
from fusedattn.virtual_gpu.instructions.warps import whole_warps
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, access_of, vector
from fusedattn.virtual_gpu.registers import Array, Mask, lanes_of


def shared_addresses(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the lanes: the shared addresses of operand `i`."""
    operand = x.operands[i]
    if not isinstance(operand, Address) or operand.coordinates:
        raise unknown(x)
    registers, offset = machine.registers, operand.offset
    if not registers.has(operand.base):
        fixed = int(registers.value(operand.base, "u4")) + offset
        return lambda lanes: np.full(registers.n_lanes, fixed, dtype="u4")[lanes]
    base, moved = registers.row(operand.base, "u4"), np.uint32(offset % 2**32)
    return lambda lanes: base[lanes] + moved if offset else base[lanes]


DIFFERENT_VALUES = "threads of a warp that store different values to one place of shared memory"


@builds("ld.shared")
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


@builds("st.shared")
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(x)
    addresses, values, shared = shared_addresses(machine, x, 0), sources_of(machine, x, 1, size), machine.shared
    if len(vector(x, 1)) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        lanes = lanes_of(mask)
        at = addresses(lanes)
        places = shared.locate(at, lanes, size * n, x)
        shared.writes(places, lanes, size * n, x)
        if machine.counters.counting:
            machine.counters.banks(x, "write", at, size * n, lanes_in(mask, machine.registers.n_lanes))
        elements = shared.typed[size]
        first = places // size
        for i in range(n):
            new = values(i, mask)
            elements[first + i] = new
            lost = elements[first + i] != new
            if lost.any():
                _settle(machine, x, elements, first + i, new, lost, shared.warp[lanes])

    return step


def _settle(
    machine: Machine, x: Instruction, elements: Array, places: Array, new: Array, lost: Array, warp: Array
) -> None:
    """Threads store different values to one place: one of them stays, and PTX does not say which.

    The sums of a row differ by rounding between the lanes that hold it, if a shuffle is fused with a product. Warps
    that do so race.
    """
    message = f"{x.opcode}, at {x.place}: threads store different values to the same bytes"
    disputed = np.isin(places, places[lost])
    at, by = places[disputed], warp[disputed]
    order = np.argsort(at, kind="stable")
    same_place = at[order][1:] == at[order][:-1]
    if machine.strict or (same_place & (by[order][1:] != by[order][:-1])).any():
        raise RaceError(message)
    machine.counters.liberties[f"{DIFFERENT_VALUES}: {x.place}"] += 1
    turn = machine.order.turn(len(places))
    elements[places[turn]] = np.broadcast_to(new, places.shape)[turn]


_MATRICES = re.compile(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")


def _matrices(x: Instruction) -> tuple[int, bool]:
    """The number of 8 by 8 matrices of 16-bit elements, and whether they are transposed."""
    found = _MATRICES.fullmatch(x.opcode)
    if found is None:
        raise unknown(x)
    return int(found.group(1)), found.group(2) is not None


def _row_places(machine: Machine, x: Instruction, mask: Mask, addresses: Any, n: int) -> tuple[Array, Any, Array]:
    """Places of the rows of `n` matrices, ``(warps, n, 8)``; the lanes that gave them, and the warps.

    Lanes 8 i to 8 i + 7 have the rows of matrix i.
    """
    whole_warps(mask, x)
    n_lanes = machine.registers.n_lanes
    warps = np.arange(n_lanes // 32) if mask is True else np.flatnonzero(mask.reshape(-1, 32)[:, 0])
    lanes = (warps[:, None] * 32 + np.arange(8 * n)).reshape(-1)
    places = machine.shared.locate(addresses(lanes), lanes, 16, x)
    return places.reshape(-1, n, 8), lanes, warps


# Lane 4 r + c holds elements 2 c and 2 c + 1 of row r.
_ROW, _PAIR = np.divmod(np.arange(32), 4)


@builds("ldmatrix")
def _load_matrices(machine: Machine, x: Instruction) -> Step:
    n, transposed = _matrices(x)
    targets = vector(x, 0)
    if len(targets) != n:
        raise unknown(x)
    addresses, shared = shared_addresses(machine, x, 1), machine.shared
    bank, rows = machine.registers.rows(targets)

    def step(mask: Mask) -> None:
        places, lanes, warps = _row_places(machine, x, mask, addresses, n)
        shared.reads(places.reshape(-1), lanes, 16, x)
        if machine.counters.counting:
            machine.counters.matrices(x, "read", places)
        if transposed:  # element (r, c) of the transposed matrix is element (c, r)
            halves = shared.typed[2]
            low, high = (halves[places[..., 2 * _PAIR + i] // 2 + _ROW].astype("u4") for i in (0, 1))
            values = low | high << np.uint32(16)
        else:
            values = shared.typed[4][places[..., _ROW] // 4 + _PAIR]
        _put(bank, rows, values, mask, warps)

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


@builds("stmatrix")
def _store_matrices(machine: Machine, x: Instruction) -> Step:
    n, transposed = _matrices(x)
    sources = vector(x, 1)
    if len(sources) != n:
        raise unknown(x)
    addresses, shared = shared_addresses(machine, x, 0), machine.shared
    bank, rows = machine.registers.rows(sources)

    def step(mask: Mask) -> None:
        places, lanes, warps = _row_places(machine, x, mask, addresses, n)
        shared.writes(places.reshape(-1), lanes, 16, x)
        if machine.counters.counting:
            machine.counters.matrices(x, "write", places)
        values = bank[rows].reshape(n, -1, 32)[:, warps].transpose(1, 0, 2)
        if transposed:
            halves = shared.typed[2]
            for i in (0, 1):
                halves[places[..., 2 * _PAIR + i] // 2 + _ROW] = (values >> np.uint32(16 * i)).astype("u2")
        else:
            shared.typed[4][places[..., _ROW] // 4 + _PAIR] = values

    return step
