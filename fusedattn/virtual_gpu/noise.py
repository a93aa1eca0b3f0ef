"""The errors that approximate instructions may have, as PTX ISA states them for each instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.registers import Array

# Relative errors, in units of 2^-23; those of lg2, sin and cos are absolute.
_RELATIVE = {"ex2": 2.0**0.5, "rcp": 1.0, "sqrt": 1.0, "rsqrt": 2.0**0.1, "tanh": 2.0**12}
_ABSOLUTE = {"lg2": 2.0**0.4, "sin": 2.0**2.5, "cos": 2.0**2.5}
_UNIT = 2.0**-23


@dataclass(frozen=True)
class Noise:
    """Whether approximate instructions err, by a part of their bound that the bits of their operands decide."""

    on: bool = False
    seed: int = 0

    def of(self, function: str) -> Callable[..., Any]:
        """Perturb a result y of ``function.approx``, by (y, operand)."""
        if not self.on:
            return lambda y, *operands: y
        if function in _ABSOLUTE:
            bound = _ABSOLUTE[function] * _UNIT
            return lambda y, *operands: (y + bound * self._part(*operands)).astype("f4")
        return self._relative(_RELATIVE[function] * _UNIT)

    @property
    def two_ulp(self) -> Callable[..., Any]:
        """Perturb a quotient of div.full or div.approx."""
        return self._relative(2 * _UNIT) if self.on else lambda y, *operands: y

    def _relative(self, bound: float) -> Callable[..., Any]:
        return lambda y, *operands: (y * (1 + bound * self._part(*operands))).astype("f4")

    def _part(self, *operands: Array) -> Array:
        """From -1 to 1, the same for the same operands."""
        state = np.uint32(self.seed * 2654435761 & 0xFFFFFFFF)
        for x in operands:
            state = (np.asarray(x, dtype="f4").view("u4") ^ state) * np.uint32(2246822519)
            state = (state ^ state >> np.uint32(15)) * np.uint32(3266489917)
        return (state >> np.uint32(8)).astype("f8") / 2.0**23 - 1.0
