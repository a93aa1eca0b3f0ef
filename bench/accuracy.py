"""Write the figures of ``docs/accuracy.md`` from ``docs/results/accuracy.json``.

The JSON is the output of ``python -m fusedattn check --json``::

    python -m fusedattn check --json --device cpu \\
        --against sdpa-math --against sdpa-flash --against flex > docs/results/accuracy.json
    python -m bench.accuracy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.report.page import table_of, with_block
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
    if not rows:
        return "none"
    worst = {key: max(_read(row[key]) for row in rows) for key in ("max", "mean", "used")}
    return f"{_numbers(worst)}; {sum(row['ok'] for row in rows)} of {len(rows)}"


def _cell(row: dict[str, Any]) -> str:
    if row["ok"] is None:
        return "none"
    text = _numbers({key: _read(row[key]) for key in ("max", "mean", "used")})
    return text if row["ok"] else f"**{text}**"


def _numbers(row: dict[str, float]) -> str:
    return f"{number(row['max'])}, {number(row['mean'])}, {percent(row['used'])}"


def _read(x: float | None) -> float:
    return float("inf") if x is None else x


def main() -> int:
    """Rewrite the page; return exit status 0."""
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
