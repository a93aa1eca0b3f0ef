"""Output of commands: tables in terminals of any width, and pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from bench import goals
from bench.report import compare, terminal
from fusedattn.cli.demo import figure, report
from fusedattn.cli.demo.timing import Comparison, Cost
from fusedattn.cli.demo.verify import Kind
from fusedattn.cli.tables import Column, print_table
from fusedattn.testing import Ratios

WIDTHS = (30, 44, 80, 120)


def printed(width: int, show: Any, *arguments: Any) -> str:
    """The output of `show` in a terminal; every line must fit and be complete."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(console, *arguments)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    return text


def kinds() -> list[Kind]:
    names = ("loss per token", "logits", "grad embedding", "grad q, k, v", "grad attn out", "grad FFN", "grad norms")
    return [Kind(name, 24, 5.2e-06, 4.1e-06, Ratios(1.23, 0.98, 1.02, 0.87)) for name in names]


def comparisons(peak: int | None = 2**30) -> list[Comparison]:
    costs = Cost(12.345, peak), Cost(1.234, None if peak is None else peak // 4)
    return [Comparison(length, *costs) for length in (256, 32768)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_the_demo_fit(width: int) -> None:
    text = printed(width, report.show_agreement, kinds())
    for cell in ("grad q, k, v", "24", "5.2e-06", "4.1e-06", "1.23", "0.98", "87%", "ok"):
        assert text.count(cell) >= len(kinds()) or cell == "grad q, k, v", cell
    text = printed(width, report.show_costs, comparisons())
    assert all(cell in text for cell in ("32768", "12,345", "1,234", "10.0x", "1,024", "256", "4.0x"))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_the_benchmarks_fit(width: int) -> None:
    spread = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    row = {
        "suite": "forward", "x": 32768, "x_name": "seqlen", "unit": "TFLOP/s", "of_ceiling": 0.71, "speedup": 1.25,
        "best_own": "fusedattn", "best_peer": "torch.sdpa-cudnn",
        "contestants": {"fusedattn": {"ms": spread, "rate": 512.0}, "torch.sdpa-cudnn": {"ms": spread, "rate": 409.6}},
    }  # fmt: skip
    text = printed(width, terminal._print_rows, [row])
    assert all(cell in text for cell in ("32,768", "1.00 ms", "20%", "512", "71%", "1.25x", "torch.sdpa-"))
    found = [goals.Verdict(goal, {"the longest of the sequences": 1.125}) for goal in goals.GOALS]
    text = printed(width, terminal._print_goals, found)
    assert all(cell in text for cell in ("decode", "0.92", "1.125", "1 of 8", "no", "sequences"))
    change = compare.Change("forward, causal, seqlen 4096", "fusedattn", 1.23, 1.1, 1.3)
    columns = [Column(name, no_wrap=True) for name in ("A / B", "from", "to", "beyond noise")]
    columns += [Column("contestant"), Column("work")]
    text = printed(width, print_table, columns, [compare._cells(change)])
    assert all(cell in text for cell in ("1.23x", "1.10x", "1.30x", "faster", "fusedattn", "4096"))


def test_a_wide_terminal_shows_one_table() -> None:
    assert printed(80, report.show_agreement, kinds()).count("grad norms") == 1
    assert printed(44, report.show_agreement, kinds()).count("grad norms") == 2
    assert printed(80, report.show_costs, comparisons()).count("32768") == 1


def test_the_last_loss_does_not_end_the_smoothed_curve() -> None:
    smoothed = figure._smooth([6.0, 4.0, *[2.0] * 40, 5.0])
    assert smoothed[0] == 6.0
    assert smoothed[-1] < 2.5


def panels(monkeypatch: pytest.MonkeyPatch, path: Path, compared: list[Comparison]) -> list[str]:
    """The panel titles of the demo's figure."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda drawn, path: saved.append(drawn))
    figure.draw(path, "title", [3.0, 2.0, 1.0], 1.5, compared)
    return [axes.get_title(loc="left") for axes in saved[0].axes]


def test_a_panel_without_measurements_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    training, time, memory = panels(monkeypatch, tmp_path, comparisons())
    assert panels(monkeypatch, tmp_path, comparisons(peak=None)) == [training, time]
    assert panels(monkeypatch, tmp_path, []) == [training]
    assert memory.startswith("Peak memory")
