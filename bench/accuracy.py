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
from bench.report.style import CEILING, COLORS, OURS, digest, drawing, save_png
from fusedattn.cli.check.outcome import number, percent

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS, PICTURE = DOCS / "accuracy.md", DOCS / "results" / "accuracy.json", DOCS / "images" / "accuracy.png"
TICKS = {"5%": 0.05, "10%": 0.1, "20%": 0.2, "50%": 0.5, "100%": 1, "2x": 2, "5x": 5, "10x": 10, "over": 20}
LEAST, MOST = 0.05, 20.0  # of the plotted shares of the budget; larger ones, and infinities, stand at the edge


def with_figures(page: str, report: dict[str, Any]) -> str:
    """The page with the figures of a report between its comments."""
    return with_block(page, figures(report))


def figures(report: dict[str, Any]) -> str:
    """Markdown: the machine, a table of all cases together, and a table for each dtype, feature by feature."""
    functions = _functions(report)
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


def _functions(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions, ours first."""
    return [{"name": "fusedattn", "features": report["features"]}, *report["against"]]


def used(report: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By dtype and function, the share of the budget that the worst tensor of each case uses; infinite ones too."""
    found: dict[str, dict[str, list[float]]] = {}
    for function in _functions(report):
        for row in function["features"]:
            if row["ok"] is not None:
                of_dtype = found.setdefault(row["dtype"], {}).setdefault(function["name"], [])
                of_dtype.append(float("inf") if row["used"] is None else row["used"])
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """A point for each case, by dtype and function: the share of the budget."""
    shares = used(report)
    with drawing((7.2, 1.9 * len(shares) + 0.6)) as figure:
        panels = figure.subplots(len(shares), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (dtype, of_dtype) in zip(panels, shares.items(), strict=True):
            axes.axvspan(1.0, MOST * 1.2, color="#f4e3da", zorder=0)
            axes.axvline(1.0, color=CEILING, linewidth=1)
            for y, (points, color) in enumerate(zip(of_dtype.values(), (OURS, *COLORS), strict=False)):
                spread = [y + 0.11 * (i % 5 - 2) for i in range(len(points))]
                axes.plot(
                    [min(max(x, LEAST), MOST) for x in points], spread, "o", color=color, markersize=3.5, alpha=0.7
                )
            axes.set_xscale("log")
            axes.set_yticks(range(len(of_dtype)), list(of_dtype))
            axes.set(title=dtype, ylim=(len(of_dtype) - 0.4, -0.6), xlim=(LEAST * 0.9, MOST * 1.2))
            axes.grid(visible=False, axis="y")
            axes.set_xticks(list(TICKS.values()), list(TICKS))
            axes.minorticks_off()
        panels[-1].set_xlabel("share of the error budget; a point for each case, its worst tensor")
        save_png(figure, path, digest(shares))


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
    committed = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_block(PAGE, figures(committed))
    draw(committed, PICTURE)
