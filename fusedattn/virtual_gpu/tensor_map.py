"""Tensors as the tensor memory accelerator sees them, and the swizzle of addresses in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusedattn.virtual_gpu.errors import MemoryAccessError
from fusedattn.virtual_gpu.registers import Array


def swizzled(addresses: Array, bits: int) -> Array:
    """Add the address bits 7 to 9 that are in `bits` to bits 4 to 6."""
    return addresses ^ (addresses >> 7 & bits) << 4


@dataclass(frozen=True)
class TensorMap:
    """A tensor as the accelerator sees it: `shape`, `strides` in bytes and `box`, the innermost dimension last."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int  # bytes
    swizzle: int  # address bits 7 to 9 that are added to bits 4 to 6
    is_float: bool
    fill: int = 0  # the bits of elements beyond the tensor

    def __post_init__(self) -> None:
        if self.address % 16 or any(stride % 16 for stride in self.strides[:-1]):
            raise MemoryAccessError(
                f"a tensor map of address {self.address:#x} and strides {self.strides}: not multiples of 16"
            )
        if self.strides[-1] != self.element or any(n < 1 for n in (*self.shape, *self.box)):
            raise MemoryAccessError(
                f"a tensor map of shape {self.shape}, strides {self.strides} and box {self.box}: empty, or its last "
                "dimension is not contiguous"
            )
        if self.swizzle and self.box[-1] * self.element != 16 * (self.swizzle + 1):
            raise MemoryAccessError(f"a tensor map of box {self.box}: rows that are not as long as the swizzle")
        if any(n > 256 for n in self.box) or self.box[-1] * self.element % 16:
            raise MemoryAccessError(f"a tensor map of box {self.box}: more than 256, or rows not of whole 16 bytes")

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    def elements(self, first: tuple[int, ...]) -> tuple[Array, Array]:
        """The global addresses of a box's elements, and which of them exist; of the shape of the box."""
        addresses, exists = np.full(self.box, self.address, dtype="i8"), np.ones(self.box, dtype=bool)
        for i, (start, n, size, stride) in enumerate(zip(first, self.box, self.shape, self.strides, strict=True)):
            index = (start + np.arange(n, dtype="i8")).reshape([-1 if i == j else 1 for j in range(len(self.box))])
            addresses = addresses + index * stride
            exists = exists & (index >= 0) & (index < size)
        return addresses, exists

    def targets(self, start: int) -> Array:
        """The shared addresses of a box's elements, one row after the other, of the shape of the box."""
        offsets = np.arange(int(np.prod(self.box))) * self.element
        return swizzled(start + offsets, self.swizzle).reshape(self.box)
