"""``python -m bench compare``: compare two result files case by case, and mark differences beyond noise."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench.report import results, terminal
from bench.report.results import Report
from bench.report.terminal import print_table
from bench.work.work import is_own
from fusedattn.cli.tables import Column


@dataclass(frozen=True)
class Change:
    """One contestant in one case; `ratio` is the time in A over that in B, so that more than 1 is faster in B."""

    work: str
    contestant: str
    ratio: float
    least: float
    most: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the quartiles of A and B do not overlap."""
        return not self.least <= 1.0 <= self.most


def changes(a: Report, b: Report) -> Iterator[Change]:
    """The change of every contestant that both reports timed in the same case."""
    in_b = {row["name"]: row for row in b["results"]}
    for row in a["results"]:
        others = in_b.get(row["name"], {"contestants": {}})["contestants"]
        for name, found in row["contestants"].items():
            if "ms" in found and "ms" in others.get(name, {}):
                x, y = found["ms"], others[name]["ms"]
                yield Change(row["name"], name, x["median"] / y["median"], x["q1"] / y["q3"], x["q3"] / y["q1"])


def run(options: argparse.Namespace) -> int:
    a, b = results.read(options.a), results.read(options.b)
    found = list(changes(a, b))
    console = terminal.console()
    for name, report in (("A", a), ("B", b)):
        console.print(f"{name}: {results.headline(report)}", markup=False)
        if not report["correctness"]["ok"]:
            console.print(f"{name} is not correct: its check is red", markup=False, style="red")
    columns = [Column(name, justify="right", no_wrap=True) for name in ("A / B", "from", "to", "beyond noise")]
    columns += [Column(name, overflow="fold") for name in ("contestant", "work")]
    print_table(console, columns, [_cells(change) for change in found if is_own(change.contestant)])
    console.print(_summary(found), markup=False)
    only = {row["name"] for row in a["results"]} ^ {row["name"] for row in b["results"]}
    if only:
        console.print(f"in one of the two alone: {len(only)} cases", markup=False)
    return 0


def _cells(change: Change) -> tuple[str, ...]:
    verdict = ("faster" if change.ratio > 1.0 else "slower") if change.beyond_noise else ""
    numbers = (f"{x:.2f}x" for x in (change.ratio, change.least, change.most))
    return (*numbers, verdict, change.contestant, change.work)


def _summary(found: list[Change]) -> str:
    own = [change for change in found if is_own(change.contestant)]
    others = [change.ratio for change in found if not is_own(change.contestant)]
    beyond = sum(change.beyond_noise for change in own)
    text = f"{beyond} of {len(own)} differ beyond the noise: the ranges from quartile to quartile do not overlap."
    if others:
        middle, least, most = statistics.median(others), min(others), max(others)
        text += f" The others, as a measure of the machine: {middle:.2f}x, from {least:.2f}x to {most:.2f}x."
    return text
