"""Write the table of supported features in docs/features.md, from fusedattn/support.py.

    python -m bench.support

rewrites it; a test checks that it is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.report.page import with_block
from fusedattn.support import FEATURES

PAGE = Path(__file__).parents[1] / "docs" / "features.md"


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| feature | argument | `triton` | `torch` |"
    yield "| --- | --- | --- | --- |"
    for feature in FEATURES:
        yield f"| {feature.name} | {feature.how} | {feature.triton} | {feature.torch} |"


def document(text: str) -> str:
    """`text` with the table between its comments."""
    return with_block(text, "\n".join(table()) + "\n", "python -m bench.support")


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
