"""The demo's figure: the loss of the training, time and memory against sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedattn.cli.demo.timing import Comparison, Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FUSED, REFERENCE, HELD_OUT = "#0b6e6e", "#d1743c", "#2b2b2b"

# The style of every figure of the project.
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


def draw(path: Path, title: str, losses: Sequence[float], held_out: float, comparisons: Sequence[Comparison]) -> None:
    """Write the figure as a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.4), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        shown = [panel for panel in _PANELS if any(panel.value(c.fused) for c in comparisons)]
        grid = figure.add_gridspec(max(1, len(shown)), 1 + bool(shown), width_ratios=(1.15, 1.0)[: 1 + bool(shown)])
        _draw_loss(figure.add_subplot(grid[:, 0]), losses, held_out)
        for i, panel in enumerate(shown):
            axes = figure.add_subplot(grid[i, 1])
            _draw_lines(axes, comparisons, panel.value)
            axes.set(title=panel.title, ylabel=panel.label)
            if i == 0:
                axes.legend(loc="upper left")
            if panel is shown[-1]:
                axes.set_xlabel("sequence length (tokens)")
            else:
                axes.tick_params(labelbottom=False)
        figure.savefig(path)


def _draw_loss(axes: Axes, losses: Sequence[float], held_out: float) -> None:
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=FUSED, alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(losses), color=FUSED, linewidth=2, label="training")
    axes.plot(
        [len(losses)], [held_out], "D", color=HELD_OUT, markersize=5, label=f"held-out text, at the end: {held_out:.2f}"
    )
    axes.set(title="Training the fused model", xlabel="step", ylabel="loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.legend()


def _smooth(values: Sequence[float], reach: int = 8) -> list[float]:
    """Averages over `reach` neighbours on either side; over fewer on both sides at the start, because the loss is steep
    there, and over the available ones at the end.
    """
    smoothed = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


@dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    value: Callable[[Cost], float | None]


_PANELS = (
    _Panel("Forward and backward, batch 1", "time (ms)", lambda cost: cost.milliseconds),
    _Panel("Peak memory beyond the model", "memory (MiB)", lambda cost: cost.mebibytes),
)


def _draw_lines(axes: Axes, comparisons: Sequence[Comparison], value: Callable[[Cost], float | None]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = [comparison.seqlen for comparison in comparisons]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, color in (("reference", REFERENCE), ("fused", FUSED)):
        costs: list[Cost] = [getattr(comparison, name) for comparison in comparisons]
        points = [(n, y) for n, y in zip(lengths, map(value, costs), strict=True) if y]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name, linewidth=1.8, markersize=5)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 10 else f"{y:g}")
    axes.minorticks_off()
