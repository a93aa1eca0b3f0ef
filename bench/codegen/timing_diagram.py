"""The timing diagram of docs/kernels.md: what each party of the forward for Hopper does, clock by clock.

It is drawn from intervals in docs/results/hopper.json, which ``python -m bench.codegen.hopper --update`` writes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.codegen.timeline import COPIES, TENSOR, Action, Timeline
from bench.report.style import STYLE, drawing

PATH = Path(__file__).parents[2] / "docs" / "images" / "hopper-schedule.png"
BLOCKS = 2  # shown
GROUPS = "group 1", "group 2"
NAMES = {TENSOR: "tensor\ncore", "group 1": "group 1", "group 2": "group 2", COPIES: "copies\nof tiles"}
ROWS = {row: len(NAMES) - 1.0 - i for i, row in enumerate(NAMES)}
HEIGHT = 0.76
SHORTEST = 40  # clocks: shorter waits are not drawn
LABELLED = 170  # clocks: a bar has room for its text from here on
WAITING = "#ecece8"
COLORS = {
    "scores": "#0b6e6e",
    "values": "#4f62a8",
    "softmax": "#d1743c",
    "issue": "#eebf9e",
    "k": "#8a8a84",
    "v": "#b9b9b2",
}
Bar = tuple[str, str, int, int, str]  # row, label, start, end, party


def bars(timeline: Timeline, actions: dict[str, list[Action]], block: float) -> list[Bar]:
    """The bars of some blocks in the steady state, from the beginning of a block of the first group on."""
    scores = [x for x in timeline.intervals if x.place == TENSOR and x.party == "group 1" and x.label == "scores"]
    start = scores[2 * len(scores) // 3].start
    end = start + BLOCKS * block
    found = [
        (x.place, x.label, x.start, x.end, x.party)
        for x in timeline.intervals
        if x.place in (TENSOR, COPIES) or (x.place in GROUPS and x.end - x.start >= SHORTEST)
    ]
    for group in GROUPS:
        waits = sorted((a, b) for row, _, a, b, _ in found if row == group)
        clocks = timeline.issued[group]
        issued = [at for at, x in zip(clocks, actions[group], strict=True) if x.step.kind == "wgmma"]
        for (_, a), (b, _) in itertools.pairwise(waits):
            first = min((at for at in issued if a <= at < b), default=b)
            found += [(group, "softmax", a, first, group), (group, "issue", first, b, group)]
    cut = [(row, label, max(a, start) - start, min(b, end) - start, party) for row, label, a, b, party in found]
    return sorted(_joined((row, label, round(a), round(b), party) for row, label, a, b, party in cut if b > a))


def _joined(found: Iterator[Bar]) -> list[Bar]:
    """Bars of a row and label that overlap, or nearly, as one: halves of a tile, products that instructions part."""
    joined: list[Bar] = []
    for row, label, a, b, party in sorted(found, key=lambda x: (x[0], x[1], x[4], x[2])):
        last = joined[-1] if joined else None
        if last and (last[0], last[1], last[4]) == (row, label, party) and a - last[3] < SHORTEST:
            joined[-1] = (row, label, last[2], max(b, last[3]), party)
        else:
            joined.append((row, label, a, b, party))
    return joined


def description(diagram: dict[str, Any]) -> str:
    """What the file keeps of the results that it was drawn from: a test compares them."""
    return json.dumps(diagram)


def draw(path: Path, diagram: dict[str, Any]) -> None:
    """Write the diagram of docs/results/hopper.json as a PNG."""
    shown, block = diagram["bars"], diagram["block"]
    last = max(end for *_, end, _ in shown)
    with drawing((8, 5.2), 150, STYLE | {"axes.grid": False, "font.size": 13}) as figure:
        figure.suptitle(f"Two blocks of keys, {block:,.0f} clocks each (a model)", x=0.01, ha="left", fontsize=14)
        axes = figure.add_subplot()
        for bar in shown:
            _draw_bar(axes, bar)
        ticks = [i * block for i in range(BLOCKS + 1)]
        for at in ticks[1:-1]:
            axes.axvline(at, color="#55554f", linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        axes.set_yticks(list(ROWS.values()), [NAMES[row] for row in ROWS])
        axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks])
        axes.set(xlim=(0, last * 1.001), ylim=(-0.5, len(ROWS) - 0.5), xlabel="clocks of the multiprocessor")
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        figure.savefig(path, metadata={"Software": None, "Description": description(diagram)})


def _draw_bar(axes: Axes, bar: Bar) -> None:
    row, label, start, end, party = bar
    height, at = HEIGHT, ROWS[row]
    if row == COPIES:  # the next tile is asked for before one has arrived
        height, at = HEIGHT / 2, at + (HEIGHT / 4 if label == "k" else -HEIGHT / 4)
    color = COLORS.get(label, WAITING)
    axes.barh(at, end - start, height, left=start, color=color, edgecolor="white", linewidth=1.5)
    if end - start < LABELLED:
        return
    text = {"issue": "issues", "products": "waits", "others": "waits", "tile": "waits"}.get(label, label)
    if row == TENSOR:
        text += f"\n{party}"
    dark = label in ("scores", "values", "softmax", "k")
    axes.text(
        (start + end) / 2, at, text, ha="center", va="center", color="white" if dark else "#44443f",
        fontsize=12, linespacing=1.2, rotation=0 if end - start > 400 or row == COPIES else 90,
    )  # fmt: skip
