"""The demo's figure: the loss of the training, time and memory against sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedattn.cli.timing import Comparison, Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FUSED, REFERENCE, HELD_OUT, QUIET = "#0b6e6e", "#d1743c", "#2b2b2b", "#8a8a8a"

# Of every figure.
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
    """Write it as a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.4), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1.0))
        _draw_loss(figure.add_subplot(grid[:, 0]), losses, held_out)
        time, memory = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        _draw_lines(time, comparisons, lambda cost: None if cost.seconds is None else 1e3 * cost.seconds)
        time.set(title="Forward and backward, batch 1", ylabel="time (ms)")
        time.tick_params(labelbottom=False)
        time.legend(loc="upper left")
        _draw_lines(memory, comparisons, lambda cost: None if cost.peak_bytes is None else cost.peak_bytes / 2**20)
        memory.set(title="Peak memory beyond the model", ylabel="memory (MiB)", xlabel="sequence length (tokens)")
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
    """Averages over `reach` neighbours on either side, over fewer near the ends."""
    smoothed = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def _draw_lines(axes: Axes, comparisons: Sequence[Comparison], value: Any) -> None:
    from matplotlib.ticker import LogLocator

    lengths = [comparison.seqlen for comparison in comparisons]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    nothing = True
    for name, color in (("reference", REFERENCE), ("fused", FUSED)):
        costs: list[Cost] = [getattr(comparison, name) for comparison in comparisons]
        points = [(n, y) for n, y in zip(lengths, map(value, costs), strict=True) if y]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name, linewidth=1.8, markersize=5)
            nothing = False
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.margins(y=0.12)
    if nothing:
        axes.text(0.5, 0.5, "not measured here", transform=axes.transAxes, ha="center", color=QUIET)
        axes.set_yticks([])
        return
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 10 else f"{y:g}")
    axes.minorticks_off()
