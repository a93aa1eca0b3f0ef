"""Plain text in columns, line by line."""

from __future__ import annotations

from collections.abc import Sequence


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """``cells`` in one line, each padded to its width: aligned left, or right if the width is negative."""
    padded = (
        cell.ljust(width) if width >= 0 else cell.rjust(-width) for cell, width in zip(cells, widths, strict=True)
    )
    return " ".join(padded).rstrip()
