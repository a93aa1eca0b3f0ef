"""The errors that approximate instructions of PTX may have, as its ISA states them for each instruction.

Those of CUDA's library, for eager PyTorch and interpreted kernels, are in :mod:`~fusedattn.virtual_gpu.eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fusedattn.virtual_gpu.registers import Array

Bound = Callable[[Array, Array], Array]  # of the exact result and the first operand


def _ulps(n: int) -> Bound:
    """Units of the last place; results of a sign keep it."""
    return lambda y, x: np.minimum(n * np.spacing(np.abs(y).astype("f4")).astype("f8"), np.abs(y))


def _relative(error: float) -> Bound:
    return lambda y, x: error * np.abs(y)


def _of_angle(y: Array, x: Array) -> Array:
    return np.where(np.abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7)


def _of_logarithm(y: Array, x: Array) -> Array:
    return 2.0**-22 * np.where((x > 0.5) & (x < 2), 1.0, np.abs(y))


_BOUNDS: dict[str, Bound] = {
    "div": _ulps(2),
    "ex2": _ulps(2),
    "rcp": _ulps(1),
    "sqrt": _relative(2.0**-23),
    "rsqrt": _relative(2.0**-22.9),
    "tanh": _relative(2.0**-11),
    "sin": _of_angle,
    "cos": _of_angle,
    "lg2": _of_logarithm,
}


@dataclass(frozen=True)
class Noise:
    """Whether approximate instructions err, by a part of their bound that the bits of their operands decide."""

    on: bool = False
    seed: int = 0

    def of(self, function: str) -> Callable[..., Array]:
        """A function of (exact result in float64, operands), which rounds to float32 and errs.

        Results for operands that are zero or infinite are exact: the ISA states them in a table.
        """
        bound = _BOUNDS[function]

        def noisy(y: Array, *operands: Array) -> Array:
            rounded, limit = y.astype("f4"), bound(y, operands[0])
            found = (y + limit * self._part(*operands)).astype("f4")
            found = np.where(np.abs(found - y) > limit, np.nextafter(found, rounded), found)
            stated = np.any([(x == 0) | np.isinf(x) for x in np.broadcast_arrays(*operands)], axis=0)
            return np.where(stated | ~np.isfinite(y), rounded, found)

        return noisy if self.on else lambda y, *operands: y.astype("f4")

    def _part(self, *operands: Array) -> Array:
        """From -1 to 1, the same for the same operands."""
        state = np.uint32(self.seed * 2654435761 & 0xFFFFFFFF)
        for x in operands:
            state = (np.asarray(x, dtype="f4").view("u4") ^ state) * np.uint32(2246822519)
            state = (state ^ state >> np.uint32(15)) * np.uint32(3266489917)
        return (state >> np.uint32(8)).astype("f8") / 2.0**23 - 1.0
