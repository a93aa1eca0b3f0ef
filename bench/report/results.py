"""Result files: written during a run; read by ``plot``, ``table``, ``compare``; refused if not green."""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measuring import environment
from fusedattn.cli.errors import CommandError

FORMAT = 1

Report = dict[str, Any]


def new_path(out: Path, device: torch.device, commit: str | None, ending: str = "") -> Path:
    """The path of a new file: a second one of the same day and commit gets a number."""
    found = environment.describe(device, commit)["commit"][:10]
    stem = f"{datetime.date.today().isoformat()}-{found}{ending}"
    folder = out / environment.folder(device)
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


def write(path: Path, report: Report) -> None:
    """Write a report, or other JSON; a killed run leaves its last results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(report, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader finds the old text or the new."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read(path: Path) -> Report:
    """A report.

    Raises:
        CommandError: there is no such file, or it is not a report of this format.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise CommandError(f"{path}: got no report of python -m bench run, format {FORMAT}")
    return report


def read_green(path: Path) -> Report:
    """A report whose correctness check found nothing wrong.

    Raises:
        CommandError: as :func:`read`; or the verdict is red or absent.
    """
    report = read(path)
    verdict = report.get("correctness")
    if not verdict:
        raise CommandError(f"{path}: refused, because correctness was not checked")
    if not verdict["ok"]:
        what = "; ".join(f"{name}: {text}" for name, text in verdict["failures"].items()) or "nothing was checked"
        raise CommandError(f"{path}: refused, because the correctness check is red: {what}")
    return report


def read_committed(path: Path) -> Report:
    """A green report of a commit that others can check out.

    Raises:
        CommandError: as :func:`read_green`; or files differed from the commit, or the commit is unknown.
    """
    report = read_green(path)
    if report["environment"]["commit"] == "unknown" or report["environment"]["dirty"]:
        raise CommandError(f"{path}: refused, because it was measured on changes that are in no known commit")
    return report


def together(reports: Sequence[Report]) -> Report:
    """One report of several runs of the same commit on the same machine, without repeated measurements.

    Each result compares contestants of one run; its share of the ceiling is from that run too.

    Raises:
        CommandError: the runs differ in device, commit or versions, or one was quick.
    """
    first, *others = reports
    for other in others:
        differ = [key for key, x in first["environment"].items() if other["environment"].get(key) != x]
        differ += ["--quick"] if other["arguments"]["quick"] != first["arguments"]["quick"] else []
        if differ:
            raise CommandError(
                f"FILE: got runs that differ in {', '.join(differ)}, allowed are runs of one environment"
            )
    rows: dict[str, Report] = {}
    for report in reports:
        rows |= {row["name"]: row for row in report["results"] if row["name"] not in rows}
    ceilings = {"matmul": {}, "copy": first["ceilings"].get("copy")}
    for report in reversed(reports):
        ceilings["matmul"] |= report["ceilings"].get("matmul", {})
    return first | {
        "ceilings": ceilings,
        "correctness": one_verdict([report["correctness"] for report in reports]),
        "results": list(rows.values()),
    }


def one_verdict(verdicts: Sequence[Report]) -> Report:
    """The verdicts of several gates, merged into one."""
    cases = sum(verdict["cases"] for verdict in verdicts)
    used = [verdict["most_used"] for verdict in verdicts if verdict["most_used"] is not None]
    failures = {name: text for verdict in verdicts for name, text in verdict["failures"].items()}
    found = {"ok": cases > 0 and not failures, "cases": cases, "most_used": max(used, default=None)}
    return verdicts[-1] | found | {"failures": failures}


def headline(report: Report) -> str:
    """One line: the device, versions and commit."""
    versions = ", ".join(f"{name} {version}" for name, version in report["environment"]["versions"].items())
    return f"{report['environment']['device']}; {versions}; {commit(report)}; {report['started'][:10]}"


def commit(report: Report) -> str:
    changed = " with changes" if report["environment"]["dirty"] else ""
    return f"commit {report['environment']['commit'][:10]}{changed}"


def by_page(report: Report) -> dict[tuple[str, str], dict[str, list[Report]]]:
    """Results by suite and page, the most important page first, then by panel and in the order of x."""
    from bench.work.suites import SUITES

    order = list(SUITES)
    rows = sorted(report["results"], key=lambda row: (order.index(row["suite"]), row["priority"]))
    found: dict[tuple[str, str], dict[str, list[Report]]] = {}
    for row in rows:
        found.setdefault((row["suite"], row["page"]), {}).setdefault(row["panel"], []).append(row)
    return {
        page: {panel: sorted(panels[panel], key=lambda row: row["x"]) for panel in sorted(panels, key=_by_number)}
        for page, panels in found.items()
    }


def _by_number(text: str) -> list[tuple[int, str]]:
    """A key that sorts "batch 8" before "batch 32"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def contestants(rows: list[Report]) -> list[str]:
    """The names in all of these results, in order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row["contestants"]))


def timed(rows: list[Report]) -> list[str]:
    """The contestants that could run in one of these results."""
    return [name for name in contestants(rows) if any("ms" in row["contestants"].get(name, {}) for row in rows)]
