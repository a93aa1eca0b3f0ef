"""``python -m bench plot``: plot the rate of every contestant, and ours relative to the best of the others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.measuring import ceilings, environment
from bench.report import results
from bench.report.results import Report
from bench.report.style import CEILING, COLORS, MARKERS, OURS, SVG_STYLE, digest, drawing
from bench.work.work import OWN, is_own

COLUMNS = 3  # panels side by side
PANEL = (4.6, 5.0)  # inches
LETTER = 0.085  # inches, in a legend


def run(options: argparse.Namespace) -> int:
    """Write one figure for each suite and page that has a panel with timings; return exit status 0."""
    report = results.together([results.read_green(path) for path in options.results])
    out = options.out or options.results[0].with_suffix("")
    out.mkdir(parents=True, exist_ok=True)
    for (suite, page), panels in results.by_page(report).items():
        timed = {panel: rows for panel, rows in panels.items() if results.timed(rows)}
        if timed:
            path = out / f"{environment.slug(f'{suite} {page}')}.svg"
            draw(path, report, suite, page, timed)
            print(path)
        for panel in [name for name in panels if name not in timed]:
            print(f"left out, because nothing could run: {suite}, {page}, {panel}")
    return 0


def draw(path: Path, report: Report, suite: str, page: str, panels: dict[str, list[Report]]) -> None:
    """Draw a page; a panel is a pair of axes: the rates above, the speedup below."""
    n_columns = min(COLUMNS, len(panels))
    n_rows = -(-len(panels) // n_columns)
    names = results.contestants([row for rows in panels.values() for row in rows])
    width = max(8.0, PANEL[0] * n_columns)
    legend_columns = max(1, int(width / (0.8 + LETTER * max(map(len, names)))))
    legend_rows = -(-(len(names) + 1) // legend_columns)
    size = (width, PANEL[1] * n_rows + 1.0 + 0.22 * legend_rows)
    with drawing(size, 110, SVG_STYLE, (0.1, 0.08)) as figure:
        figure.suptitle(f"{suite}: {page}\n{_device(report)}", x=0.01, ha="left", fontsize=10)
        grid = figure.add_gridspec(2 * n_rows, n_columns, height_ratios=(2.2, 1.0) * n_rows)
        shown: dict[str, Line2D] = {}
        for i, (panel, rows) in enumerate(panels.items()):
            above = figure.add_subplot(grid[2 * (i // n_columns), i % n_columns])
            below = figure.add_subplot(grid[2 * (i // n_columns) + 1, i % n_columns], sharex=above)
            shown |= _draw_rates(above, report, panel, rows, names)
            _draw_speedup(below, rows)
        order = [name for name in (*names, "ceiling") if name in shown]
        figure.legend(
            [shown[n] for n in order], order, loc="outside lower center", ncols=min(legend_columns, len(order))
        )
        figure.savefig(path, metadata={"Date": None, "Description": description(report, panels)})


def description(report: Report, panels: dict[str, list[Report]]) -> str:
    """What the file keeps of the results that it was drawn from: a test compares them."""
    return f"{_device(report)}; {digest([report['ceilings'], panels])}"


def draw_overview(path: Path, report: Report) -> None:
    """Draw the speedup of every result, a line for each panel, a point for each x."""
    lines = relative(report)
    with drawing((8.0, 1.2 + 0.5 * len(lines)), 110, SVG_STYLE, (0.1, 0.08)) as figure:
        axes = figure.add_subplot()
        figure.suptitle(f"{OWN} / best other\n{_device(report)}", x=0.01, ha="left", fontsize=10)
        axes.axvline(1.0, color=CEILING, linewidth=1)
        for y, (name, speedups) in enumerate(lines.items()):
            axes.text(0.01, y - 0.3, name, va="center")
            axes.hlines(y, min(speedups), max(speedups), color=OURS, alpha=0.4, linewidth=3)
            axes.plot(speedups, [y] * len(speedups), "o", color=OURS, markersize=6)
        axes.set_yticks(range(len(lines)), [""] * len(lines))
        axes.set_ylim(len(lines) - 0.5, -0.7)
        axes.set_xlim(0, max([1.2, *(1.1 * x for speedups in lines.values() for x in speedups)]))
        axes.set_xlabel("less than 1: the best other is faster; a point for each length")
        figure.savefig(path, metadata={"Date": None, "Description": description(report, {"": report["results"]})})


def relative(report: Report) -> dict[str, list[float]]:
    """The speedups of each panel that has one, in the order of x."""
    found = {
        f"{suite}: {page}, {panel}": [row["speedup"] for row in rows if row["speedup"] is not None]
        for (suite, page), panels in results.by_page(report).items()
        for panel, rows in panels.items()
    }
    return {name: speedups for name, speedups in found.items() if speedups}


def _draw_rates(axes: Axes, report: Report, panel: str, rows: list[Report], names: list[str]) -> dict[str, Line2D]:
    """Draw the rates, with bars from quartile to quartile; returns the lines by name."""
    shown: dict[str, Line2D] = {}
    for name in names:
        found = [(row["x"], row, row["contestants"][name]) for row in rows if "ms" in row["contestants"].get(name, {})]
        if not found:
            continue
        rates = [contestant["rate"] for _, _, contestant in found]
        quartiles = [[row["amount"] / c["ms"][q] * 1e3 for _, row, c in found] for q in ("q3", "q1")]
        errors = [[abs(r - q) for r, q in zip(rates, side, strict=True)] for side in quartiles]
        bars = axes.errorbar([x for x, _, _ in found], rates, errors, **_look(name, names), markersize=5, capsize=2)
        shown[name] = bars.lines[0]
    ceiling = ceilings.ceiling(report["ceilings"], rows[0]["unit"], rows[0]["dtype"])
    if ceiling is not None:
        shown["ceiling"] = axes.axhline(ceiling, color=CEILING, linewidth=1, linestyle=":")
    axes.set(title=panel, ylabel=rows[0]["unit"])
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)
    return shown


def _look(name: str, names: list[str]) -> dict[str, Any]:
    """The style of a line: ours has its own colour and is in front; others reuse colours with another marker."""
    alike = [other for other in names if is_own(other) == is_own(name)]
    i = alike.index(name)
    if is_own(name):
        return {"color": OURS, "marker": MARKERS[i], "linestyle": "-", "linewidth": 2.2, "zorder": 3}
    marker = MARKERS[i // len(COLORS) % len(MARKERS)]
    return {"color": COLORS[i % len(COLORS)], "marker": marker, "linestyle": (0, (5, 1.5)), "linewidth": 1.4}


def _draw_speedup(axes: Axes, rows: list[Report]) -> None:
    found = [(row["x"], row["speedup"]) for row in rows if row["speedup"] is not None]
    if found:
        axes.plot(*zip(*found, strict=True), "o-", color=OURS, linewidth=1.8, markersize=4)
    axes.axhline(1.0, color=CEILING, linewidth=1)
    axes.set(xlabel=rows[0]["x_name"], ylabel=f"{OWN} /\nbest other")
    axes.set_ylim(bottom=0, top=max([1.2, *(1.15 * speedup for _, speedup in found)]))
    values = [row["x"] for row in rows]
    if min(values) > 0 and max(values) >= 4 * min(values):
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [_short(x) for x in values])
    axes.minorticks_off()


def _device(report: Report) -> str:
    found = report["environment"]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "triton"))
    return f"{found['device']}, {versions}, {results.commit(report)}"


def _short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"
