"""Write the figures of ``docs/accuracy.md`` from ``docs/results/accuracy.json``.

The JSON is the output of ``python -m fusedattn check --json``::

    python -m fusedattn check --json --device cpu \\
        --against sdpa-math --against sdpa-flash --against flex > docs/results/accuracy.json
    python -m bench.accuracy
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.report.page import table_of, with_block, write_block
from fusedattn.cli.check.outcome import number, percent

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "accuracy.md", DOCS / "results" / "accuracy.json"


def with_figures(page: str, report: dict[str, Any]) -> str:
    """The page with the figures of a report between its comments."""
    return with_block(page, figures(report))


def figures(report: dict[str, Any]) -> str:
    """Markdown: the machine, a table of all cases together, and a table for each dtype, feature by feature."""
    functions = [{"name": "fusedattn", "features": report["features"]}, *report["against"]]
    dtypes = list(dict.fromkeys(row["dtype"] for row in report["features"]))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [f"{report['how']}, {report['device']}; {versions}."]
    parts.append(
        table_of([["all cases", *dtypes], *([f["name"], *(_summary(f, d) for d in dtypes)] for f in functions)])
    )
    for dtype in dtypes:
        by_case = {f["name"]: {row["case"]: row for row in f["features"] if row["dtype"] == dtype} for f in functions}
        names = list(by_case)
        rows = ([case, *(_cell(by_case[name][case]) for name in names)] for case in by_case["fusedattn"])
        parts += [f"### {dtype}", table_of([["case", *names], *rows])]
    return "\n\n".join(parts) + "\n"


def _summary(function: dict[str, Any], dtype: str) -> str:
    """The worst numbers of a function in one dtype, and the number of cases within the budget."""
    rows = [row for row in function["features"] if row["dtype"] == dtype and row["ok"] is not None]
    return f"{_worst(rows)}; {sum(row['ok'] for row in rows)} of {len(rows)}" if rows else "none"


def _cell(row: dict[str, Any]) -> str:
    if row["ok"] is None:
        return "none"
    return _worst([row]) if row["ok"] else f"**{_worst([row])}**"


def _worst(rows: list[dict[str, Any]]) -> str:
    """The largest of each figure; infinite figures are None in JSON."""
    largest, mean, used = (
        max(float("inf") if row[key] is None else row[key] for row in rows) for key in ("max", "mean", "used")
    )
    return f"{number(largest)}, {number(mean)}, {percent(used)}"


if __name__ == "__main__":
    write_block(PAGE, figures(json.loads(RESULTS.read_text(encoding="utf-8"))))
