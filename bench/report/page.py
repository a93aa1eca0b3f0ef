"""Pages of the documentation with places for generated figures, each between two comments."""

import re
from collections.abc import Iterable
from pathlib import Path


def with_block(page: str, figures: str, source: str = "") -> str:
    """The page with `figures`, Markdown, in the place whose first comment is ``figures: <source>...``.

    Raises:
        ValueError: the page has no such place, or several.
    """
    place = re.compile(rf"(<!-- figures: {re.escape(source)}[^\n]*? -->\n).*?(<!-- end of figures -->)", re.DOTALL)
    found = len(place.findall(page))
    if found != 1:
        raise ValueError(
            f"page: got {found} pairs of the comments 'figures: {source}...' and 'end of figures' to write between, "
            "allowed is one"
        )
    return place.sub(lambda match: f"{match[1]}\n{figures}\n{match[2]}", page)


def write_block(path: Path, figures: str, source: str = "") -> None:
    """Rewrite a page :func:`with_block`."""
    path.write_text(with_block(path.read_text(encoding="utf-8"), figures, source), encoding="utf-8")


def table_of(rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown; the first row is the head."""
    head, *body = (list(map(str, cells)) for cells in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))
