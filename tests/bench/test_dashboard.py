"""docs/dashboard.md has the latest green results of each GPU, all files, and plots of these results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench.report import dashboard, plot, results
from bench.report.page import with_block
from bench.report.style import drawn_from
from tests.helpers.reports import REPORT

RUN = f"run: {dashboard.SOURCE}"


def report(commit: str, started: str, speedups: dict[int, float], **changes: Any) -> dict[str, Any]:
    """The forward at some lengths, where the others take 1 ms."""

    def contestant(ms: float) -> dict[str, Any]:
        return {"ms": {"median": ms, "q1": ms, "q3": ms, "n": 9}, "rate": 600.0 / ms, "peak_bytes": None}

    place = {"suite": "forward", "page": "bfloat16", "panel": "causal", "x_name": "seqlen"}
    rest = {"priority": 0, "dtype": "bfloat16", "unit": "TFLOP/s", "amount": 0.6, "of_ceiling": None}
    rows = [
        {"name": f"seqlen {x}", "x": x, **place, **rest, "speedup": speedup,
         "best_own": "fusedattn", "best_peer": "flex",
         "contestants": {"fusedattn": contestant(1.0 / speedup), "flex": contestant(1.0)}}
        for x, speedup in speedups.items()
    ]  # fmt: skip
    environment = REPORT["environment"] | {"commit": commit}
    return REPORT | {"started": started, "environment": environment, "results": rows} | changes


@pytest.mark.parametrize("folder", ["", "gpu-x"])
def test_without_results_the_page_says_that_nothing_was_measured(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    assert dashboard.latest(tmp_path) == {}
    assert dashboard.page(tmp_path) == f"{dashboard.NOTHING}\n"


def test_results_of_a_cpu_are_no_results_of_a_gpu(tmp_path: Path) -> None:
    environment = REPORT["environment"] | {"is_gpu": False}
    results.write(tmp_path / "cpu" / "a.json", report("a" * 40, "2026-01-01", {512: 1.5}, environment=environment))
    text = dashboard.page(tmp_path)
    assert text.startswith(dashboard.NOTHING)
    assert "`cpu/a.json`" in text


def test_the_latest_commit_is_shown_and_every_file_is_listed(tmp_path: Path) -> None:
    red = {"correctness": {"ok": False, "failures": {"causal": "dq"}}}
    results.write(tmp_path / "gpu-x" / "b-old.json", report("a" * 40, "2026-01-01T10", {512: 0.5}))
    results.write(tmp_path / "gpu-x" / "a-new.json", report("b" * 40, "2026-01-02T10", {512: 1.5}))
    results.write(tmp_path / "gpu-x" / "a-new-2.json", report("b" * 40, "2026-01-02T11", {1024: 1.25}))
    results.write(tmp_path / "gpu-x" / "red.json", report("c" * 40, "2026-01-03T10", {512: 9.0}, **red))
    (tmp_path / "gpu-x" / "first.jsonl").write_text("{}\n{}\n")
    found = dashboard.latest(tmp_path)
    assert list(found) == ["gpu-x"]
    assert plot.relative(found["gpu-x"]) == {"forward: bfloat16, causal": [1.5, 1.25]}
    text = dashboard.page(tmp_path)
    assert "| `gpu-x/first.jsonl` | gpu-x |  |  | 2 lines |" in text
    assert re.search(r"`gpu-x/red.json`.*not correct", text)
    assert re.search(r"`gpu-x/b-old.json`.*1 results, correct", text)
    assert "![GPU X, forward: bfloat16](images/gpu/gpu-x/forward-bfloat16.svg)" in text
    paths = list(dashboard.draw(tmp_path / "images", found["gpu-x"]))
    assert [path.name for path in paths] == ["overview.svg", "forward-bfloat16.svg"]
    overview = paths[0].read_text()
    assert "forward: bfloat16, causal" in overview
    assert "bbbbbbbbbb" in overview


def test_the_committed_page_has_the_committed_results() -> None:
    page = dashboard.PAGE.read_text(encoding="utf-8")
    assert with_block(page, dashboard.page(dashboard.RESULTS), dashboard.SOURCE) == page, RUN


def test_the_committed_plots_have_the_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files say which results they show; writing the text of many plots again would take longer."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, metadata: path.write_text(metadata["Description"]))
    committed = {path.relative_to(dashboard.IMAGES): drawn_from(path) for path in dashboard.IMAGES.rglob("*.svg")}
    drawn = {
        path.relative_to(tmp_path): path.read_text()
        for name, found in dashboard.latest(dashboard.RESULTS).items()
        for path in dashboard.draw(tmp_path / name, found)
    }
    assert drawn == committed, RUN
