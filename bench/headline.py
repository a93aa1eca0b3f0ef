"""``python -m bench.headline`` draws the pictures of the first page: a batch with padding, and its cost on a GPU.

The blocks are those that the kernels visit; the times are those of a committed run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench.report import results
from bench.report.results import Report
from bench.report.style import digest, drawing, save_png
from bench.work.work import OWN, is_own
from fusedattn import masks
from fusedattn.cli.demo.figure import FUSED, REFERENCE

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = ROOT / "docs/images/padding-blocks.png"
TIMES = ROOT / "docs/images/padding-times.png"
RUN = ROOT / "bench/results/nvidia-h200/2026-11-27-565a2b0.json"
CASE = "padding, causal, forward and backward, padding (%) 50"
EAGER = "torch.sdpa-math"  # 29 times; its bar would leave no room for the others
SEQLEN, BLOCK = 256, 32  # of the drawn batch
HIDDEN = "#dedede"
LEGEND = {"with mask arithmetic": REFERENCE, "without": FUSED, "skipped": "#5f5f5f"}


def times(report: Report) -> dict[str, float]:
    """Median times of the case, as multiples of ours: ours first, then the others, the fastest first."""
    (row,) = (row for row in report["results"] if row["name"] == CASE)
    medians = {
        name: entry["ms"]["median"]
        for name, entry in row["contestants"].items()
        if "ms" in entry and (name == OWN or not is_own(name)) and name != EAGER
    }
    return {name: medians[name] / medians[OWN] for name in sorted(medians, key=lambda name: medians[name])}


def draw(path: Path, panel: Callable[[Axes], None]) -> None:
    """Write one panel as a PNG."""
    with drawing((5, 3.8), dpi=150, pad=(0.1, 0.1)) as figure:
        panel(figure.subplots())
        save_png(figure, path, description())


def description() -> str:
    """What the files keep of the committed run: a test compares it."""
    return digest(times(results.read_green(RUN)))


def draw_blocks(axes: Axes) -> None:
    """The blocks of scores that the kernel visits if the second half of a sequence is padding."""
    from bench.work.visited import visited  # after TRITON_INTERPRET is set

    mask = masks.causal() & masks.padding((torch.arange(SEQLEN) < SEQLEN // 2)[None])
    axes.add_patch(Rectangle((0, 0), SEQLEN, SEQLEN, color=HIDDEN))
    for block in visited(mask, SEQLEN, SEQLEN, BLOCK, BLOCK):
        color = FUSED if block.is_full else REFERENCE
        axes.add_patch(Rectangle((block.start_n, block.start_m), BLOCK, BLOCK, facecolor=color, edgecolor="white"))
    for line, (words, color) in enumerate(LEGEND.items()):
        axes.text(
            0.97, 0.95 - 0.08 * line, words, color=color, weight="bold", transform=axes.transAxes, ha="right", va="top"
        )
    axes.set(title="Blocks of scores, half of the keys padding", xlim=(0, SEQLEN), ylim=(SEQLEN, 0), aspect="equal")
    axes.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def draw_times(axes: Axes) -> None:
    """A bar for each contestant."""
    report = results.read_green(RUN)
    found = times(report)
    device = report["environment"]["device"].partition(",")[0]
    names = [name.removeprefix("torch.") for name in found]
    colors = [FUSED if name == OWN else "#a9a9a9" for name in found]
    axes.barh(names, list(found.values()), color=colors)
    for i, value in enumerate(found.values()):
        axes.text(value, i, f" {value:.2f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(found.values()) * 1.1)
    axes.grid(axis="y", visible=False)
    axes.set(title="Time on a GPU, head_dim 128", xlabel=f"forward and backward, {device}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    draw(BLOCKS, draw_blocks)
    draw(TIMES, draw_times)
