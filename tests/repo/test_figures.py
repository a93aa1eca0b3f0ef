"""docs/testing.md and docs/virtual-gpu.md show the committed results."""

from __future__ import annotations

import json

from bench.report.page import with_block
from tests.tools import figures


def test_the_page_has_the_committed_figures():
    page = figures.PAGE.read_text(encoding="utf-8")
    assert figures.with_figures(page) == page, "run: python -m tests.tools.figures"


def test_the_page_of_the_virtual_gpu_has_the_committed_results():
    page = figures.VIRTUAL_GPU.read_text(encoding="utf-8")
    results = json.loads((figures.ROOT / "docs/results/compiled.json").read_text(encoding="utf-8"))
    assert with_block(page, figures.compiled_tables(results) + "\n") == page, "run: python -m tests.tools.figures"
