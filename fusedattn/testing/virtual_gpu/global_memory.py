"""Global memory: the tensors of a launch, at their own addresses on the host.

Every access must lie in the elements of a tensor that the launch was given: not in the rest of its storage, nor
between its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusedattn.testing.virtual_gpu.builders import Mask, Step, builds, unknown, vector
from fusedattn.testing.virtual_gpu.faults import MemoryFault
from fusedattn.testing.virtual_gpu.ptx import Address, Instruction
from fusedattn.testing.virtual_gpu.registers import Array

if TYPE_CHECKING:
    from fusedattn.testing.virtual_gpu.machine import Machine

_FIRST = 4096  # no object has an address below


class _Host:
    """The memory of this process as one array, for NumPy's array interface."""

    def __init__(self, dtype: str) -> None:
        n = (2**47 - _FIRST) // np.dtype(dtype).itemsize
        self.__array_interface__ = {"data": (_FIRST, False), "shape": (n,), "typestr": f"<{dtype}", "version": 3}


_HOST = {size: np.asarray(_Host(f"u{size}")) for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class Range:
    """Addresses from `start` to `end`; of these only bytes of elements may be used, or all if `elements` is None."""

    start: int
    end: int
    elements: Array | None


class GlobalMemory:
    """The bytes that a launch may use."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.ranges = _merged([x for x in tensors if x.numel()])
        self.starts = np.array([r.start for r in self.ranges], dtype="i8")
        self.ends = np.array([r.end for r in self.ranges], dtype="i8")

    def check(self, addresses: Array, size: int, x: Instruction) -> None:
        """Fail unless `size` bytes at each address are aligned to `size`, and belong to elements."""
        if (addresses & (size - 1)).any():
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise MemoryFault(f"{x.opcode}, at {x.place}: address {bad:#x} is not a multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for r in self.ranges:
            if r.start <= low and high <= r.end:
                self._check_elements(r, addresses, size, x)
                return
        where = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (where < 0) | (addresses + size > self.ends[where])
        if outside.any():
            raise MemoryFault(f"{x.opcode}, at {x.place}: {self._describe(int(addresses[outside][0]), size)}")
        for i in np.unique(where):
            self._check_elements(self.ranges[i], addresses[where == i], size, x)

    def _check_elements(self, r: Range, addresses: Array, size: int, x: Instruction) -> None:
        if r.elements is None:
            return
        used = r.elements[(addresses - r.start)[:, None] + np.arange(size)].all(axis=1)
        if not used.all():
            bad = int(addresses[~used][0])
            raise MemoryFault(
                f"{x.opcode}, at {x.place}: {size} bytes at byte {bad - r.start} of a tensor are not elements of it"
            )

    def _describe(self, address: int, size: int) -> str:
        if not self.ranges:
            return f"{size} bytes at {address:#x}, and the launch has no tensor"
        nearest = min(self.ranges, key=lambda r: max(r.start - address, address + size - r.end))
        if address < nearest.start:
            return f"{size} bytes at {nearest.start - address} bytes before a tensor of the launch"
        n = nearest.end - nearest.start
        return f"{size} bytes at byte {address - nearest.start} of a tensor of the launch that has {n}"


def _merged(tensors: list[torch.Tensor]) -> list[Range]:
    """The ranges of tensors, one for those that overlap."""
    spans = sorted(((x.data_ptr(), _extent(x), x) for x in tensors), key=lambda span: span[:2])
    groups: list[tuple[int, int, list[torch.Tensor]]] = []
    for start, n_bytes, x in spans:
        if groups and start < groups[-1][1]:
            first, end, members = groups[-1]
            groups[-1] = first, max(end, start + n_bytes), [*members, x]
        else:
            groups.append((start, start + n_bytes, [x]))
    return [Range(start, end, _elements(start, end, members)) for start, end, members in groups]


def _extent(x: torch.Tensor) -> int:
    """The bytes from the first element to the end of the last."""
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize


def _elements(start: int, end: int, tensors: list[torch.Tensor]) -> Array | None:
    """Which bytes belong to elements; None if all do."""
    if any(x.numel() * x.itemsize == end - start and x.is_contiguous() for x in tensors):
        return None
    used = np.zeros(end - start, dtype=bool)
    for x in tensors:
        of_tensor = used[x.data_ptr() - start :]
        view = np.lib.stride_tricks.as_strided(
            of_tensor, (*x.shape, x.itemsize), (*(stride * x.itemsize for stride in x.stride()), 1)
        )
        view[...] = True
    return None if used.all() else used


def load(addresses: Array, size: int) -> Array:
    """Numbers of `size` bytes at checked addresses."""
    return _HOST[size][(addresses - _FIRST) >> (size.bit_length() - 1)]


def save(addresses: Array, size: int, values: Array) -> None:
    """Write numbers of `size` bytes at checked addresses."""
    _HOST[size][(addresses - _FIRST) >> (size.bit_length() - 1)] = values


def access_of(x: Instruction) -> tuple[str, int, int]:
    """The type, its bytes and the number of elements of ``ld.space.v4.b32`` and the like; no other modifiers."""
    words = x.opcode.split(".")[2:]
    n = 1
    if words[0] in ("v2", "v4", "v8"):
        n = int(words.pop(0)[1:])
    if len(words) != 1:
        raise unknown(x)
    kind = words[0]
    return kind, int(kind[1:]) // 8, n


@builds("ld.global")
def _load(machine: Machine, x: Instruction) -> Step:
    kind, size, n = access_of(_plain(x))
    targets = vector(x, 0)
    put = loads_into(machine, x, targets, kind)
    addresses = address_of(machine, x, 1)
    if len(targets) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        machine.counters.sectors(x, at, size * n, mask)
        for i in range(n):
            put(i, load(at + i * size, size), mask)

    return step


def _plain(x: Instruction) -> Instruction:
    """Without modifiers that only advise the caches."""
    words = x.opcode.split(".")
    kept = [word for word in words if word not in _ADVICE and not word.startswith("L2::")]
    return Instruction(".".join(kept), x.operands, x.guard, x.negated, x.place)


_ADVICE = {"L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::no_allocate", "nc", "ca", "cg", "cs", "wb", "wt"}


def loads_into(machine: Machine, x: Instruction, targets: tuple[str, ...], kind: str) -> Any:
    """A function (i, values, mask) that writes loaded numbers to register `i`, extended to its width."""
    size, signed = int(kind[1:]) // 8, kind[0] == "s"
    rows = []
    for target in targets:
        width = machine.registers.bits(target) // 8
        if width < size:
            raise unknown(x)
        rows.append(machine.registers.row(target, f"{'i' if signed else 'u'}{width}"))

    def put(i: int, values: Array, mask: Mask) -> None:
        if signed:
            values = values.view(f"i{size}")
        if mask is True:
            rows[i][...] = values
        else:
            rows[i][mask] = values

    return put


def address_of(machine: Machine, x: Instruction, i: int) -> Any:
    """A function of the mask: the global addresses of operand `i`, of the lanes of the mask, as int64."""
    operand = x.operands[i]
    if not isinstance(operand, Address) or operand.coordinates:
        raise unknown(x)
    base, offset = machine.registers.row(operand.base, "i8"), operand.offset

    def addresses(mask: Mask) -> Array:
        return (base if mask is True else base[mask]) + offset

    return addresses


def sources_of(machine: Machine, x: Instruction, i: int, size: int) -> Any:
    """A function (j, mask): element `j` of the vector at operand `i`, of the lanes of the mask."""
    rows = [machine.registers.value(source, f"u{size}") for source in vector(x, i)]

    def values(j: int, mask: Mask) -> Array:
        row = rows[j]
        return row if mask is True or row.ndim == 0 else row[mask]

    return values


@builds("st.global")
def _store(machine: Machine, x: Instruction) -> Step:
    _, size, n = access_of(_plain(x))
    addresses, values = address_of(machine, x, 0), sources_of(machine, x, 1, size)
    if len(vector(x, 1)) != n:
        raise unknown(x)

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        machine.counters.sectors(x, at, size * n, mask)
        for i in range(n):
            save(at + i * size, size, values(i, mask))

    return step


_ATOMICS = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@builds("atom.global", "red.global")
def _atomic(machine: Machine, x: Instruction) -> Step:
    """Atomic operations of a vector of elements; those of one address follow in the order that the machine chooses."""
    words = [word for word in x.opcode.split(".")[2:] if word not in ("gpu", "sys", "cta", "relaxed", "acq_rel", "acquire", "release", "noftz")]
    operation, kind = words[0], words[-1]
    returns = x.opcode.startswith("atom")
    if operation not in _ATOMICS or len(words) not in (2, 3) or kind not in ("f32", "u32", "s32", "b32", "u64", "s64", "b64", "f64"):
        raise unknown(x)
    size = int(kind[1:]) // 8
    dtype = f"{ {'f': 'f', 's': 'i', 'u': 'u', 'b': 'u'}[kind[0]] }{size}"
    n = int(words[1][1:]) if len(words) == 3 else 1
    addresses, values = address_of(machine, x, 1 if returns else 0), sources_of(machine, x, 2 if returns else 1, size)
    targets = vector(x, 0) if returns else ()
    put = loads_into(machine, x, tuple(y for y in targets if y != "_"), f"b{8 * size}") if returns else None
    function = _ATOMICS[operation]

    def step(mask: Mask) -> None:
        at = addresses(mask)
        machine.memory.check(at, size * n, x)
        machine.counters.sectors(x, at, size * n, mask)
        for i in range(n):
            new = np.broadcast_to(values(i, mask), at.shape).view(dtype)
            old = _in_turn(at + i * size, size, new, function, machine.order.turn(at.size))
            if put is not None and targets[i] != "_":
                put(i, old, mask)

    return step


def _in_turn(at: Array, size: int, new: Array, function: Any, turn: Array) -> Array:
    """Apply atomic operations one after the other; returns the old values, as bits."""
    old = np.empty(at.shape, dtype=f"u{size}")
    left = turn
    while left.size:  # each round takes the first that is left at each address
        _, first = np.unique(at[left], return_index=True)
        chosen = left[first]
        bits = load(at[chosen], size)
        old[chosen] = bits
        save(at[chosen], size, function(bits.view(new.dtype), new[chosen]).astype(new.dtype).view(f"u{size}"))
        left = np.delete(left, first)
    return old
