"""``python -m bench dashboard``: write docs/dashboard.md, and its plots, from all results of GPUs in bench/results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench.measuring import environment
from bench.report import plot, results, table
from bench.report.page import table_of, write_block
from bench.report.results import Report
from fusedattn.cli.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]
PAGE, IMAGES, RESULTS = ROOT / "docs" / "dashboard.md", ROOT / "docs" / "images" / "gpu", ROOT / "bench" / "results"
SOURCE = "python -m bench dashboard"
OVERVIEW = "overview"
NOTHING = "Nothing has been measured on a GPU yet."


def run(options: argparse.Namespace) -> int:
    """Draw the plots and rewrite the page; return exit status 0."""
    for path in IMAGES.rglob("*.svg"):  # of earlier results
        path.unlink()
    for name, report in latest(RESULTS).items():
        for path in draw(IMAGES / name, report):
            print(path.relative_to(ROOT))
    write_block(PAGE, page(RESULTS), SOURCE)
    return 0


def latest(folder: Path) -> dict[str, Report]:
    """By the name of its folder, the runs of the latest commit on each GPU, if their check is green."""
    runs: dict[str, list[Report]] = {}
    for path in sorted(folder.glob("*/*.json")):
        try:
            report = results.read_committed(path)
        except CommandError:  # the list of files shows it as refused, or as no report
            continue
        if report["environment"]["is_gpu"] and not report["arguments"]["quick"]:
            runs.setdefault(path.parent.name, []).append(report)
    found = {}
    for name, reports in runs.items():
        newest = max(reports, key=lambda report: str(report["started"]))
        same = [report for report in reports if report["environment"] == newest["environment"]]
        found[name] = results.together(same)
    return found


def lines_of(report: Report) -> dict[tuple[str, str], dict[str, list[Report]]]:
    """The panels of each suite and page that have timings at several x."""
    several: dict[tuple[str, str], dict[str, list[Report]]] = {}
    for key, panels in results.by_page(report).items():
        for panel, rows in panels.items():
            if len(rows) > 1 and results.timed(rows):
                several.setdefault(key, {})[panel] = rows
    return several


def draw(folder: Path, report: Report) -> Iterator[Path]:
    """Write the plots of one GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{OVERVIEW}.svg"
    plot.draw_overview(path, report)
    yield path
    for (suite, of_suite), panels in lines_of(report).items():
        path = folder / f"{_slug(suite, of_suite)}.svg"
        plot.draw(path, report, suite, of_suite, panels)
        yield path


def _slug(suite: str, of_suite: str) -> str:
    return environment.slug(f"{suite} {of_suite}")


def page(folder: Path) -> str:
    """Markdown: a section for each GPU, then the files."""
    reports = latest(folder)
    parts = [part for name, report in reports.items() for part in _section(name, report)] or [NOTHING]
    files = list(_files(folder))
    if files:
        parts += ["## All result files", table_of([["file", "device", "date", "commit", "contents"], *files])]
    return "\n\n".join(parts) + "\n"


def _section(name: str, report: Report) -> Iterator[str]:
    device = report["environment"]["device"]
    yield f"## {device}"
    yield f"{results.headline(report)}."
    of_goals = table.goals_reached(report)
    if of_goals:
        yield "### Goals"
        yield of_goals
    yield "### fusedattn over the best of the others"
    yield f"![{device}: the speed of fusedattn over the best of the others](images/gpu/{name}/{OVERVIEW}.svg)"
    for suite, of_suite in lines_of(report):
        yield f"### {suite}: {of_suite}"
        yield f"![{device}, {suite}: {of_suite}](images/gpu/{name}/{_slug(suite, of_suite)}.svg)"


def _files(folder: Path) -> Iterator[list[str]]:
    for path in sorted(x for x in folder.rglob("*") if x.suffix in (".json", ".jsonl", ".txt")):
        shown = path.relative_to(folder).as_posix()
        try:
            report = results.read(path)
        except CommandError:
            device = shown.partition("/")[0]
            yield [f"`{shown}`", device, "", "", _n_lines(path)]
        else:
            found = report["environment"]
            is_green = (report["correctness"] or {}).get("ok")
            verdict = "correct" if is_green else "not correct: refused by plots and tables"
            contents = f"{len(report['results'])} results, {verdict}"
            yield [f"`{shown}`", found["device"], report["started"][:10], found["commit"][:10], contents]


def _n_lines(path: Path) -> str:
    return f"{len(path.read_text(encoding='utf-8').splitlines())} lines"
