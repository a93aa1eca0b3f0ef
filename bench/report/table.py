"""``python -m bench table``: write the figures of docs/performance.md and README.md, from green result files.

Results of a GPU go into the tables of both; results of a CPU only under a separate heading of the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench import goals
from bench.report import results
from bench.report.page import table_of, with_block
from bench.report.results import Report
from bench.report.terminal import goal_cells, milliseconds, number, reasons

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
GPU, CPU = "python -m bench table, GPU", "python -m bench table, CPU"
HEADLINES = ("forward", "backward", "decode", "training")


def run(options: argparse.Namespace) -> int:
    found = [results.read_committed(path) for path in options.results]
    kinds = ([report for report in found if report["environment"]["is_gpu"] is kind] for kind in (True, False))
    reports = [results.together(of_kind) for of_kind in kinds if of_kind]
    page, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    for report in reports:
        page, readme = with_results(page, readme, report)
    PAGE.write_text(page, encoding="utf-8")
    README.write_text(readme, encoding="utf-8")
    return 0


def with_results(page: str, readme: str, report: Report) -> tuple[str, str]:
    """docs/performance.md and README.md with a report in their places; README has no place for a CPU's."""
    if report["environment"]["is_gpu"]:
        return with_block(page, full(report), GPU), with_block(readme, short(report), GPU)
    return with_block(page, full(report), CPU), readme


def full(report: Report) -> str:
    """Markdown: the machine, and a table for each panel, contestants side by side."""
    verdict, ceilings = report["correctness"], report["ceilings"]
    products = ", ".join(f"{number(rate)} TFLOP/s in {dtype}" for dtype, rate in ceilings.get("matmul", {}).items())
    parts = [
        f"{results.headline(report)}.",
        f"Ceilings, measured in the same run: matrix product {products}; copy {number(ceilings['copy'])} GB/s. "
        f"Checked before: {verdict['cases']} problems, of whose error budgets at most {verdict['most_used']:.0%} is "
        f"used (allowed {verdict['limit']:.0%}).",
    ]
    of_goals = goals_reached(report)
    parts += ["#### Goals", of_goals] if of_goals else []
    for (suite, page), panels in results.by_page(report).items():
        parts.append(f"#### {suite}: {page}")
        for panel, rows in panels.items():
            parts.append(f"{panel}, {rows[0]['unit']} (time)")
            parts.append(table_of(_panel(rows)))
        notes = reasons([row for rows in panels.values() for row in rows])
        parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def goals_reached(report: Report) -> str:
    """Markdown: a table of the goals; empty without a figure for any of them."""
    found = list(goals.verdicts(report))
    if not any(verdict.n_found for verdict in found):
        return ""
    head = ["goal", "at least", "lowest", "results", "reached", "where lowest"]
    return table_of([head, *(list(goal_cells(verdict)) for verdict in found)])


def _panel(rows: list[Report]) -> Iterator[list[str]]:
    """Rows of a panel, with the contestants that could run; the others are in the notes."""
    names = results.timed(rows)
    yield [rows[0]["x_name"], *names, "fusedattn over best other", "of ceiling"]
    for row in rows:
        cells = (_cell(row["contestants"].get(name, {}), name == row["best_own"]) for name in names)
        yield [f"{row['x']:g}", *cells, _times(row["speedup"]), _percent(row["of_ceiling"])]


def _cell(found: Report, is_best: bool) -> str:
    if "ms" not in found:
        return "–"
    text = f"{number(found['rate'])} ({milliseconds(found['ms']['median'])})"
    return f"**{text}**" if is_best else text


def short(report: Report) -> str:
    """Markdown: the most important results, one line each."""
    rows = [row for row in report["results"] if row["priority"] == 0 and row["suite"] in HEADLINES]
    lines = [["what", "fusedattn", "best other", "", "of ceiling"]]
    for row in rows:
        own, peer = (row["contestants"].get(row[key], {}) for key in ("best_own", "best_peer"))
        ours, theirs = (f"{number(c['rate'])} {row['unit']}" if "rate" in c else "–" for c in (own, peer))
        theirs += f", {row['best_peer']}" if row["best_peer"] else ""
        lines.append([row["name"], ours, theirs, _times(row["speedup"]), _percent(row["of_ceiling"])])
    return f"{results.headline(report)}.\n\n{table_of(lines)}\n"


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}x"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
