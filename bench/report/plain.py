"""What of rich the commands use, as plain lines, for a Python that lacks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedattn.cli.tables import Column


class PlainConsole:
    """Prints text as it is."""

    def print(self, text: str = "", **look: Any) -> None:
        """A line; what it should look like is not used."""
        print(text, flush=True)

    def print_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as what is in them."""
        cells = [[column.header for column in columns], *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            parts = (
                text.rjust(width) if column.justify == "right" else text.ljust(width)
                for text, width, column in zip(row, widths, columns, strict=True)
            )
            self.print("  ".join(parts).rstrip())


class PlainProgress:
    """Shows nothing: the lines that are printed say how far the work is."""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def add_task(self, description: str, total: float) -> Any:
        """A task that nobody looks at."""

    def update(self, task: Any, **change: Any) -> None:
        """Nothing to be seen."""

    def advance(self, task: Any) -> None:
        """Nothing to be seen."""
