"""How the matrix units sum products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusedattn.virtual_gpu.registers import Array


@dataclass(frozen=True)
class Products:
    """How products are summed: in float32, or (`truncating`) as Hopper's matrix units are observed to do.

    They add the terms of one instruction to the accumulator with the accumulator's precision, and cut off the rest.
    """

    truncating: bool = False

    def add(self, a: Array, b: Array, c: Array | None) -> Array:
        """``a @ b + c``, in float32; batches of matrices."""
        if not self.truncating:
            product = np.matmul(a, b)
            return product if c is None else product + c
        total = np.matmul(a.astype("f8"), b.astype("f8"))
        total = total if c is None else total + c
        rounded = total.astype("f4")
        too_far = np.abs(rounded.astype("f8")) > np.abs(total)
        return np.where(too_far, np.nextafter(rounded, np.float32(0)), rounded)
