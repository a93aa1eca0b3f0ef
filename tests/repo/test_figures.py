"""docs/testing.md shows the committed results."""

from __future__ import annotations

from tests.tools import figures


def test_the_page_has_the_committed_figures():
    page = figures.PAGE.read_text(encoding="utf-8")
    assert figures.with_figures(page) == page, "run: python -m tests.tools.figures"
