"""Registers of all threads, as arrays with one element for each thread.

A lane is one thread of one program: lane ``cta * n_threads + thread``. A register is a row of lanes, and may be viewed
as any type of its width. Registers start with a pattern that is NaN in every float type.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Mask = Literal[True] | Array  # of lanes: all, or a bool array ``(n_lanes,)``

# PTX types that NumPy has; bfloat16 is stored as b16.
DTYPES: dict[str, str] = {
    **{f"{kind}{8 * n}": f"{letter}{n}" for n in (1, 2, 4, 8) for kind, letter in (("s", "i"), ("u", "u"), ("b", "u"))},
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
    "pred": "?",
    "bf16": "u2",
    "f16x2": "u4",
    "bf16x2": "u4",
    "tf32": "u4",
}
_BANKS = {1: "?", 16: "u2", 32: "u4", 64: "u8"}
_POISON = {1: False, 16: 0xFFF9, 32: 0xFFF9_FFF9, 64: 0xFFF9_FFF9_FFF9_FFF9}
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d+|\d+)U?$")


class Registers:
    """The registers of a kernel, for a number of lanes."""

    def __init__(self, registers: Mapping[str, int], n_lanes: int, symbols: Mapping[str, int]) -> None:
        """`registers` are the bits of each; `symbols` are names of memory, and their addresses."""
        rows: dict[int, int] = dict.fromkeys(_BANKS, 0)
        self.n_lanes, self.symbols = n_lanes, symbols
        self.row_of: dict[str, tuple[int, int]] = {}
        for name, bits in registers.items():
            width = max(bits, 16) if bits > 1 else 1
            self.row_of[name] = width, rows[width]
            rows[width] += 1
        self.banks = {bits: np.empty((n, n_lanes), dtype=_BANKS[bits]) for bits, n in rows.items()}
        self.clear()

    def clear(self) -> None:
        """Poison every register."""
        for bits, bank in self.banks.items():
            bank.fill(_POISON[bits])

    def has(self, name: str) -> bool:
        return name in self.row_of

    def bits(self, name: str) -> int:
        return self.row_of[name][0]

    def row(self, name: str, dtype: str) -> Array:
        """A register as NumPy `dtype`, ``(n_lanes,)``; of a wider register, its low part (not to be written)."""
        bits, row = self.row_of[name]
        lanes = self.banks[bits][row]
        if bits == 1:
            return lanes
        wanted = np.dtype(dtype).itemsize * 8
        if wanted == bits:
            return lanes.view(dtype)
        if wanted > bits:
            raise ValueError(f"{name}: {bits} bits read as {wanted}")
        return lanes.view(dtype)[:: bits // wanted]

    def rows(self, names: Sequence[str]) -> tuple[Array, Any]:
        """The bank of registers of one width, and their rows in it; a slice if these are consecutive."""
        places = [self.row_of[name] for name in names]
        if len({bits for bits, _ in places}) != 1:
            raise ValueError(f"registers of different widths: {', '.join(names)}")
        rows = [row for _, row in places]
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        return self.banks[places[0][0]], slice(rows[0], rows[0] + len(rows)) if consecutive else np.array(rows)

    def value(self, name: str, dtype: str) -> Array:
        """A register, number or symbol as an operand to read: ``(n_lanes,)``, or one element for all lanes."""
        if name in self.row_of:
            return self.row(name, dtype)
        if name in self.symbols:
            return np.array(self.symbols[name], dtype=dtype)
        return number(name, dtype)


def is_number(text: str) -> bool:
    return _NUMBER.match(text) is not None


def number(text: str, dtype: str) -> Array:
    """A number of PTX, of a NumPy dtype: its bits, if it is written as the bits of a float."""
    if not is_number(text):
        raise ValueError(f"operand {text}")
    kind = np.dtype(dtype)
    if text[:2].lower() in ("0f", "0d"):
        raw = bytes.fromhex(text[2:])[::-1]
        if kind.kind == "f":
            return np.array(struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0], dtype=kind)
        return np.frombuffer(raw, dtype=kind)[0].reshape(())
    if "." in text:
        return np.array(float(text), dtype=kind)
    value = int(text.rstrip("U"), 0)
    if kind.kind == "b":
        return np.array(value != 0)
    bits = 8 * kind.itemsize
    return np.array(value & (1 << bits) - 1, dtype=f"u{kind.itemsize}").view(kind)


def store(target: Array, values: Any, mask: Mask) -> None:
    """Write the lanes of a mask."""
    if mask is True:
        target[...] = values
    else:
        np.copyto(target, values, where=mask)


def lanes_of(mask: Mask) -> Any:
    """An index that selects the lanes of a mask."""
    return slice(None) if mask is True else np.flatnonzero(mask)
