"""The output of a run: a progress line while it measures, and a table at the end; plain lines without rich."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from bench import goals
from bench.goals import Verdict
from bench.report import results
from bench.report.plain import PlainConsole, PlainProgress
from bench.report.results import Report
from fusedattn.cli import tables
from fusedattn.cli.tables import Column

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

Console: TypeAlias = "RichConsole | PlainConsole"


def console() -> Console:
    """A console for output; without colours if it is not a terminal."""
    if importlib.util.find_spec("rich") is None:
        return PlainConsole()
    from rich.console import Console

    return Console(highlight=False)


def progress(console: Console) -> Progress | PlainProgress:
    """A progress bar with the name of the current work."""
    if isinstance(console, PlainConsole):
        return PlainProgress()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the terminal, if its width is known."""
    if isinstance(console, PlainConsole):
        console.print_table(columns, rows)
    else:
        tables.print_table(console, columns, rows)


def print_results(console: Console, report: Report) -> None:
    """Print a table for each panel, and below those of a suite the reasons why some contestants could not run."""
    for suite in dict.fromkeys(row["suite"] for row in report["results"]):
        of_suite = [row for row in report["results"] if row["suite"] == suite]
        for (_, page), panels in results.by_page({"results": of_suite}).items():
            for panel, rows in panels.items():
                console.print(f"{suite}: {page}, {panel}", style="bold", markup=False)
                _print_rows(console, rows)
        for text in reasons(of_suite):
            console.print(text, markup=False, style="dim")
        console.print()
    found = [verdict for verdict in goals.verdicts(report) if verdict.n_found]
    if found:
        console.print("goals", style="bold")
        _print_goals(console, found)


def _print_goals(console: Console, verdicts: list[Verdict]) -> None:
    figures = ("at least", "lowest", "results", "reached")
    columns = [Column("goal"), *(Column(name, justify="right", no_wrap=True) for name in figures)]
    columns.append(Column("where lowest", overflow="fold"))
    print_table(console, columns, [tuple(goal_cells(verdict)) for verdict in verdicts])


def goal_cells(verdict: Verdict) -> Iterator[str]:
    """The goal, its bound, the lowest figure, the number of figures, whether it is reached, and where it is lowest."""
    goal, lowest = verdict.goal, verdict.lowest
    yield goal.name
    yield f"{goal.at_least:.2f}"
    yield "–" if lowest is None else f"{lowest[1]:.3f}"
    yield f"{verdict.n_found} of {goal.n_results}"
    yield {True: "yes", False: "no", None: "–"}[verdict.is_reached]
    yield "–" if lowest is None else lowest[0]


def _print_rows(console: Console, rows: list[Report]) -> None:
    figures = (rows[0]["x_name"], "fusedattn", "spread", rows[0]["unit"], "ceiling", "speedup", "of")
    columns = [Column(name, justify="right", no_wrap=True) for name in figures]
    columns.append(Column("best other", overflow="fold"))
    print_table(console, columns, [tuple(_cells(row)) for row in rows])


def _cells(row: Report) -> Iterable[str]:
    yield f"{row['x']:,g}"
    own = row["contestants"].get(row["best_own"])
    if own is None:
        yield from ("none", "", "", "")
    else:
        ms = own["ms"]
        yield milliseconds(ms["median"])
        yield f"{(ms['q3'] - ms['q1']) / ms['median'] if ms['median'] else 0.0:.0%}"
        yield number(own["rate"])
        yield "" if row["of_ceiling"] is None else f"{row['of_ceiling']:.0%}"
    peer = row["contestants"].get(row["best_peer"])
    yield "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    yield "" if peer is None else milliseconds(peer["ms"]["median"])
    yield row["best_peer"] or "none"


def reasons(rows: list[Report]) -> list[str]:
    """Each reason once, with the contestant and the number of results that it concerns."""
    every = ((name, found.get("reason")) for row in rows for name, found in row["contestants"].items())
    counted = Counter((name, text) for name, text in every if text is not None)
    return [f"{name}: {text} ({n} of {len(rows)})" for (name, text), n in counted.items()]


def milliseconds(ms: float) -> str:
    """A time in a suitable unit."""
    return f"{number(1e3 * ms)} us" if ms < 1.0 else f"{number(ms)} ms" if ms < 1e3 else f"{number(ms / 1e3)} s"


def number(x: float) -> str:
    """A number in three digits, or with all digits before the point."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:#.3g}"
