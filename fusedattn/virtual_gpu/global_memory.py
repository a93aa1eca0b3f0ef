"""Global memory: the tensors of a launch, at their own addresses on the host.

Every access must lie in the elements of a tensor that the launch was given: not in the rest of its storage, nor
between its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusedattn.virtual_gpu.errors import MemoryAccessError
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array

_FIRST = 4096  # no object has an address below


class _Host:
    """The memory of this process as one array, for NumPy's array interface."""

    def __init__(self, dtype: str) -> None:
        n = (2**47 - _FIRST) // np.dtype(dtype).itemsize
        self.__array_interface__ = {"data": (_FIRST, False), "shape": (n,), "typestr": f"<{dtype}", "version": 3}


_HOST = {size: np.asarray(_Host(f"u{size}")) for size in (1, 2, 4, 8)}


@dataclass
class Stored:
    """Numbers that tell which store was the last on each granule, or 0, and when; and which atomic operation, if any.

    The latter is negative if several programs had some there.
    """

    writers: Array
    times: Array
    atomics: Array | None = None


@dataclass
class Range:
    """Addresses from `start` to `end`; of these only bytes of elements may be used, or all if `elements` is None."""

    start: int
    end: int
    elements: Array | None
    last_stores: Stored | None = field(default=None, init=False)

    def stored(self, granule: int) -> Stored:
        """What is known of each granule; the same granules in all calls."""
        if self.last_stores is None:
            n = (self.end - 1) // granule - self.start // granule + 1
            self.last_stores = Stored(np.zeros(n, dtype="i8"), np.zeros(n, dtype="i8"))
        return self.last_stores


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
            raise MemoryAccessError(f"{x.opcode}, at {x.place}: address {bad:#x} is not a multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for r in self.ranges:
            if r.start <= low and high <= r.end:
                self._check_elements(r, addresses, size, x)
                return
        where = np.searchsorted(self.starts, addresses, side="right") - 1  # -1: before all, or there is none
        outside = where < 0
        outside[~outside] = addresses[~outside] + size > self.ends[where[~outside]]
        if outside.any():
            raise MemoryAccessError(f"{x.opcode}, at {x.place}: {self._describe(int(addresses[outside][0]), size)}")
        for i in np.unique(where):
            self._check_elements(self.ranges[i], addresses[where == i], size, x)

    def by_range(self, addresses: Array) -> Iterator[tuple[Range, Any]]:
        """The ranges of checked addresses, each with an index of those that lie in it."""
        where = np.searchsorted(self.starts, addresses, side="right") - 1
        if (where == where[0]).all():
            yield self.ranges[where[0]], slice(None)
        else:
            yield from ((self.ranges[i], where == i) for i in np.unique(where))

    def _check_elements(self, r: Range, addresses: Array, size: int, x: Instruction) -> None:
        if r.elements is None:
            return
        used = r.elements[(addresses - r.start)[:, None] + np.arange(size)].all(axis=1)
        if not used.all():
            bad = int(addresses[~used][0])
            raise MemoryAccessError(
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
