"""Tables in a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

LEAST = 16  # characters; the minimum width of a column that may be wrapped


@dataclass(frozen=True)
class Column:
    """A column with the field names of rich, for modules that must import without rich."""

    header: str
    justify: Literal["left", "right"] = "left"
    no_wrap: bool = False
    overflow: Literal["ellipsis", "fold"] = "ellipsis"
    vertical: Literal["top", "bottom"] = "top"


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, ruled: bool = False
) -> None:
    """Print a table; in a narrow terminal, split it into tables below each other, each with the first column.

    Columns with ``no_wrap`` keep their width. The headers are bold above a line if `ruled`, else dim.
    """
    from rich import box
    from rich import table as rich_table

    widths = [_width(i, columns, rows) for i in range(len(columns))]
    for gap in (2, 1):
        parts = list(_parts(console.width, widths, gap))
        if len(parts) == 1:
            break
    look: Any = {"show_edge": False, "header_style": "dim", "box": None, "padding": (0, gap, 0, 0), "pad_edge": False}
    if ruled:  # the box itself leaves one character between columns
        look |= {"header_style": "bold", "box": box.SIMPLE_HEAD, "padding": (0, gap - 1, 0, 0)}
    for number, part in enumerate(parts):
        table = rich_table.Table(*(rich_table.Column(**vars(columns[i])) for i in part), **look)
        for row in rows:
            table.add_row(*(row[i] for i in part))
        if number:
            console.print()
        console.print(table)


def _parts(width: int, widths: Sequence[int], gap: int) -> Iterator[list[int]]:
    """The columns of each table: the first, and as many of the others, in order, as fit beside it."""
    part, used = [0], widths[0]
    for i, its_width in enumerate(widths[1:], 1):
        if len(part) > 1 and used + gap + its_width > width:
            yield part
            part, used = [0], widths[0]
        part.append(i)
        used += gap + its_width
    yield part


def _width(i: int, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    from rich.text import Text

    cells = [Text.from_markup(row[i]) for row in rows]
    longest = max((cell.cell_len for cell in (*cells, *Text(str(columns[i].header)).split())), default=0)
    return longest if columns[i].no_wrap else min(longest, LEAST)
