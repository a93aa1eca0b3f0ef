"""The picture: the loss beside that of one process, and which process computes which part of attention."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fusedattn.cli.demo.figure import FUSED, HELD_OUT, REFERENCE, STYLE
from fusedattn.distributed.example.shares import Shares
from fusedattn.distributed.example.training import Losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (FUSED, REFERENCE, "#5b4b8a", "#c9a227", "#4f86c6", "#a23b56", "#7a9e3f", "#8a8a8a")  # of parts, in turn
HIDDEN = "#f4f4f4"
MOST_ROWS = 720  # of the map; a longer sequence is drawn by some of its tokens
MOST_NAMES = 8


def draw(path: Path, title: str, shares: Shares, split: Losses, alone: Losses | None, processes: str) -> None:
    """Write the picture as a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 6.2), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        n_rows = 1 if alone is None else 2
        grid = figure.add_gridspec(n_rows, 2, width_ratios=(1.15, 1.0), height_ratios=(1.6, 1.0)[:n_rows])
        of_loss = figure.add_subplot(grid[0, 0])
        _draw_loss(of_loss, split, alone, processes)
        if alone is None:
            of_loss.set_xlabel("step")
        else:
            below = figure.add_subplot(grid[1, 0], sharex=of_loss)
            of_loss.tick_params(labelbottom=False)
            _draw_differences(below, split, alone)
        right = grid[:, 1].subgridspec(2, 1, height_ratios=(4.0, 1.0))
        _draw_pairs(figure.add_subplot(right[0]), shares)
        _name_parts(figure.add_subplot(right[1]), shares)
        figure.savefig(path)


def _draw_loss(axes: Axes, split: Losses, alone: Losses | None, processes: str) -> None:
    steps = range(1, len(split.steps) + 1)
    if alone is not None:
        axes.plot(steps, alone.steps, color=REFERENCE, linewidth=5, alpha=0.55, label="one process alone")
    axes.plot(steps, split.steps, color=FUSED, linewidth=1.5, label=processes)
    axes.set(title="Loss of each step", ylabel="nats per byte")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_differences(axes: Axes, split: Losses, alone: Losses) -> None:
    differences = split.differences(alone)
    axes.plot(range(1, len(differences) + 1), differences, ".", color=FUSED, markersize=5)
    spacing = torch.finfo(torch.float32).eps * 2.0 ** math.floor(math.log2(alone.steps[0]))
    axes.axhline(spacing, color=HELD_OUT, linewidth=1, linestyle=":", label="spacing of float32 at the first loss")
    shown = [x for x in (*differences, spacing) if 0.0 < x < math.inf]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown))) + 1
    axes.set_yscale("symlog", linthresh=10.0**low)  # with a place for 0
    axes.set_yticks([0.0, *(10.0**power for power in range(low, high + 1))])
    axes.set_ylim(-0.2 * 10.0**low, 10.0**high)
    axes.set(title="Difference of the two losses", xlabel="step", ylabel="nats per byte")
    axes.legend(loc="upper right")


def _draw_pairs(axes: Axes, shares: Shares) -> None:
    """The map of queries (rows) and keys (columns), with the colour of the part that computes a pair."""
    from matplotlib.colors import to_rgb

    tokens = torch.linspace(0, shares.seqlen - 1, min(shares.seqlen, MOST_ROWS)).round().long()
    rows = torch.tensor([to_rgb(_color(part)) for part in range(shares.n_parts)])[shares.part_of_query()[tokens]]
    visible = tokens <= tokens[:, None]  # (query, key)
    image = torch.where(visible[..., None], rows[:, None], torch.tensor(to_rgb(HIDDEN)))
    axes.imshow(image.numpy(), extent=(0, shares.seqlen, shares.seqlen, 0), interpolation="nearest")
    axes.grid(visible=False)
    axes.set(title="Causal attention, by process", xlabel="key (token)", ylabel="query (token)")


def _name_parts(axes: Axes, shares: Shares) -> None:
    """The legend of the map, in axes of its own."""
    from matplotlib.patches import Patch

    axes.set_axis_off()
    patches = []
    if shares.n_parts <= MOST_NAMES:
        for part, (name, share) in enumerate(zip(shares.names(), shares.of_pairs(), strict=True)):
            patches.append(Patch(color=_color(part), label=f"{name}: {100 * share:.1f} %"))
    axes.legend(
        handles=patches, title=_balance(shares), title_fontsize=10, loc="upper center", borderaxespad=0.0, ncols=2,
        alignment="left",
    )  # fmt: skip


def _color(part: int) -> str:
    return COLORS[part % len(COLORS)]


def _balance(shares: Shares) -> str:
    """How evenly the pairs are shared out, and how evenly another split would."""
    if shares.n_parts == 1:
        return f"{shares.names()[0]}, each with some heads" if shares.n_sharing > 1 else "one process, all pairs"
    by_heads = ", in each part by heads" if shares.n_sharing > 1 else ""
    other = replace(shares, balance="contiguous" if shares.balance == "zigzag" else "zigzag")
    lines = (f"{x.balance}: {_range(x.of_pairs())} of the pairs" for x in (shares, other))
    return f"{next(lines)}{by_heads}\n({next(lines)})"


def _range(values: list[float]) -> str:
    least, most = (f"{100 * x:.1f}" for x in (min(values), max(values)))
    return f"{least} %" if least == most else f"{least} to {most} %"
