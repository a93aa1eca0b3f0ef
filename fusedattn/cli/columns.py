"""Plain text in columns, a line at a time."""

from __future__ import annotations

from collections.abc import Sequence


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """``cells`` side by side, each padded to its width: to the left, or to the right where the width is negative."""
    padded = (
        cell.ljust(width) if width >= 0 else cell.rjust(-width) for cell, width in zip(cells, widths, strict=True)
    )
    return " ".join(padded).rstrip()
