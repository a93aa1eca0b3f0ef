"""The parts of rich that the commands use, as plain lines, for a Python without rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedattn.cli.tables import Column


class PlainConsole:
    """Prints text as it is."""

    def print(self, text: str = "", **look: Any) -> None:
        print(text, flush=True)

    def print_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        cells = [[column.header for column in columns], *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            parts = (
                text.rjust(width) if column.justify == "right" else text.ljust(width)
                for text, width, column in zip(row, widths, columns, strict=True)
            )
            self.print("  ".join(parts).rstrip())


class PlainProgress:
    """Shows nothing: the printed lines show the progress."""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def add_task(self, description: str, total: float) -> Any:
        """Return a task that is not shown."""

    def update(self, task: Any, **change: Any) -> None:
        """Do nothing."""

    def advance(self, task: Any) -> None:
        """Do nothing."""
