"""``python -m tests.tools.learn_pictures`` draws the pictures of docs/learn into docs/images/learn.

They show block decisions of kernels/masking.py, numbers of small examples and sizes of tensors; nothing is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from bench.report.style import drawing, save_png
from fusedattn import masks
from fusedattn.cli.demo.figure import FUSED, HELD_OUT, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/images/learn"
PALE, LINE = "#e4eeee", "#8a8a8a"  # areas, outlines
BLOCKS = ("#0b6e6e", "#d1743c", "#5b6fb5", "#7a9a3c")  # successive blocks

HEAD_DIM, TILE = 64, 64  # of the memory picture
REGISTER_FILE = 256 * 1024  # bytes a streaming multiprocessor, sm_80 to sm_100


def draw_memory(figure: Figure) -> None:
    """Sizes of tensors, and of the scores that a program holds."""
    left, right = figure.subplots(1, 2)
    lengths = [2**i for i in range(7, 18)]
    left.plot(lengths, [2 * n * n for n in lengths], color=REFERENCE, linewidth=2)
    left.plot(lengths, [4 * 2 * n * HEAD_DIM + 4 * n for n in lengths], color=FUSED, linewidth=2)
    left.set(title="In memory, one head, float16", ylabel="size")
    left.text(2**12.6, 2**26.6, "scores", color=REFERENCE, ha="right")
    left.text(2**13, 2**20.0, "q, k, v, out, lse", color=FUSED)
    right.plot(lengths, [4 * TILE * n for n in lengths], color=REFERENCE, linewidth=2)
    right.plot(lengths, [4 * TILE * TILE for _ in lengths], color=FUSED, linewidth=2)
    right.axhline(REGISTER_FILE, color=HELD_OUT, linewidth=1, linestyle="--")
    right.set(title=f"In registers, scores of {TILE} queries")
    right.text(2**12.6, 2**21.2, "step 1: every key", color=REFERENCE, ha="right")
    right.text(2**17, 2**14.35, f"steps 2 to 6: {TILE} keys at a time", color=FUSED, ha="right")
    right.text(2**17, 2**17.7, "register file of a multiprocessor", color=HELD_OUT, ha="right", va="top")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([2**i for i in (7, 9, 11, 13, 15, 17)], ["128", "512", "2k", "8k", "32k", "128k"])
        axes.set_xlabel("keys, and queries" if axes is left else "keys")
        axes.minorticks_off()
    left.set_yticks([2**i for i in (15, 20, 25, 30, 35)], ["32 KiB", "1 MiB", "32 MiB", "1 GiB", "32 GiB"])
    right.set_yticks([2**i for i in (14, 18, 20, 25)], ["16 KiB", "256 KiB", "1 MiB", "32 MiB"])


def draw_online_softmax(figure: Figure) -> None:
    """Scores of one query in blocks, and m_i and l_i after each."""
    block, n_blocks = 8, 4
    scores = 1.2 * torch.randn(n_blocks * block, generator=torch.Generator().manual_seed(39)).double()
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1.0))
    m_i, l_i = -torch.inf, 0.0
    for i, part in enumerate(scores.split(block)):
        keys = range(i * block, (i + 1) * block)
        left.vlines(keys, 0, part, color=BLOCKS[i], linewidth=2.5)
        left.plot(keys, part, "o", color=BLOCKS[i], markersize=4)
        m_new = max(m_i, part.max().item())
        left.hlines(m_new, i * block - 0.4, (i + 1) * block - 0.6, color=HELD_OUT, linewidth=2)
        left.text((i + 0.5) * block - 0.5, m_new + 0.15, f"m_i {m_new:.2f}", color=HELD_OUT, ha="center", va="bottom")
        alpha = 2.0 ** ((m_i - m_new) * 1.4426950408889634)
        added = (part - m_new).exp().sum().item()
        right.bar(i, l_i * alpha, color=PALE, edgecolor=LINE, linewidth=0.8)
        right.bar(i, added, bottom=l_i * alpha, color=BLOCKS[i])
        right.text(i, l_i * alpha + added + 0.12, f"alpha {alpha:.2f}", ha="center", color=HELD_OUT)
        m_i, l_i = m_new, l_i * alpha + added
    left.axhline(0, color=LINE, linewidth=0.8)
    left.set(title="Scores of one query, by block of 8 keys", xlabel="key", ylabel="score")
    left.set_xticks(range(0, n_blocks * block + 1, block))
    left.set_ylim(top=scores.max().item() + 0.9)
    right.set(title="l_i after each block", xlabel="block", ylabel="sum of weights")
    right.set_xticks(range(n_blocks), [str(i + 1) for i in range(n_blocks)])
    right.margins(y=0.25)
    right.text(0.01, 0.98, "pale: l_i before the block, times alpha", transform=right.transAxes, va="top")
    right.grid(axis="x", visible=False)


def draw_loop_order(figure: Figure) -> None:
    """The order in which blocks of scores are made, keys outside and queries outside."""
    n = 4
    for axes, outer in zip(figure.subplots(1, 2), ("keys", "queries"), strict=True):
        for row in range(n):
            for column in range(n):
                number = column * n + row if outer == "keys" else column
                color = PALE if outer == "keys" else BLOCKS[row]
                axes.add_patch(Rectangle((column, row), 0.92, 0.92, color=color, alpha=1 if outer == "keys" else 0.3))
                axes.text(column + 0.46, row + 0.46, str(number + 1), ha="center", va="center", fontsize=11)
        _grid_axes(axes, (0, n), (0, n))
        axes.set(xlabel="tiles of keys and values", ylabel="tiles of queries")
    keys, queries = figure.axes
    keys.set_title("FlashAttention: keys in the outer loop")
    queries.set_title("FlashAttention-2: queries in the outer loop")
    for column in range(n):
        keys.add_patch(_arrow((column + 0.8, 0.15), (column + 0.8, n - 0.25), FUSED))
    keys.text(n + 0.1, 2, "acc, m_i, l_i of each\ntile of queries are\nread and written\nin every column", va="center")
    for row in range(n):
        queries.add_patch(_arrow((0.12, row + 0.78), (n - 0.25, row + 0.78), BLOCKS[row]))
        queries.text(
            n + 0.1, row + 0.46, f"program {row}: acc, m_i, l_i\nstay in registers", va="center", color=BLOCKS[row]
        )
    for axes in (keys, queries):
        axes.set_xlim(-0.1, n + 2.6)


def draw_blocks(figure: Figure) -> None:
    """Blocks that the kernels visit, under three masks."""
    from bench.work.visited import visited

    n, block_m, block_n = 256, 32, 32
    shown = {
        "causal": masks.causal(),
        "causal, window of 80 keys": masks.causal() & masks.window(79, 0),
        "causal, first 40 keys padded": masks.causal() & masks.padding((torch.arange(n) >= 40)[None]),
    }
    for axes, (title, mask) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        dense = mask.dense(n, n)[0, 0]
        axes.imshow((~dense).numpy(), cmap="Greys", vmin=0, vmax=9, extent=(0, n, n, 0), interpolation="none")
        for block in visited(mask, n, n, block_m, block_n):
            size = (min(block_n, n - block.start_n), block_m)
            look = {"facecolor": FUSED if block.is_full else REFERENCE, "edgecolor": "white", "alpha": 0.55}
            axes.add_patch(Rectangle((block.start_n, block.start_m), *size, **look, linewidth=1.5))
        _grid_axes(axes, (0, n), (0, n))
        axes.set(title=title, xlabel="keys")
        axes.set_xticks([0, 128, 256])
        axes.set_yticks([0, 128, 256])
    figure.axes[0].set_ylabel("queries")
    looks: list[dict[str, Any]] = [{"facecolor": color, "alpha": 0.55} for color in (FUSED, REFERENCE)]
    areas = [Rectangle((0, 0), 1, 1, **look) for look in (*looks, {"facecolor": "#e3e3e3"})]
    labels = ["full: no mask arithmetic", "boundary: decided pair by pair", "hidden, not visited"]
    figure.legend(areas, labels, loc="outside lower center", ncols=3)


def draw_rotation(figure: Figure) -> None:
    """Two pairs of features at successive positions, and scores by distance."""
    fast, slow, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    for axes, pair in ((fast, 0), (slow, 3)):
        theta = 10000.0 ** -(pair / 16)
        axes.add_patch(Circle((0, 0), 1, fill=False, color=LINE, linewidth=0.8))
        for position in range(6):
            angle = torch.tensor(position * theta + 0.3)
            tip = (angle.cos().item(), angle.sin().item())
            axes.add_patch(_arrow((0, 0), tip, FUSED if position else HELD_OUT))
            axes.text(1.18 * tip[0], 1.18 * tip[1], str(position), ha="center", va="center")
        axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
        axes.set_title(f"pair {pair}, positions 0 to 5")
        axes.axis("off")
    generator = torch.Generator().manual_seed(3)
    a_q, b_q, a_k, b_k = torch.randn(4, 16, generator=generator).double()
    theta = 10000.0 ** -(torch.arange(16).double() / 16)
    distance = torch.arange(0, 61)

    def turned(a: torch.Tensor, b: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position[:, None] * theta
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    looks: list[dict[str, Any]] = [
        {"color": REFERENCE, "linewidth": 5, "alpha": 0.45},
        {"color": FUSED, "linewidth": 1.8},
    ]
    for position, look in zip((60, 1000), looks, strict=True):
        query = turned(a_q, b_q, torch.tensor([position]))
        right.plot(
            distance,
            (query @ turned(a_k, b_k, position - distance).mT)[0],
            label=f"query at {position}",
            **look,
        )
    right.set(title="Score of rotated q and k", ylabel="score", xlabel="distance from key to query (positions)")
    right.legend()


def _box(axes: Axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.8) -> None:
    look: dict[str, Any] = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "linewidth": 1.4}
    axes.add_patch(FancyBboxPatch((x, y), width, height, facecolor="white", edgecolor=color, **look))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=HELD_OUT, linespacing=1.5)


def draw_backward(figure: Figure) -> None:
    """What each kernel of the backward reads and writes."""
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(-0.1, 14.1), ylim=(-0.2, 5.4))
    _box(axes, 0, 3.2, 2.4, "kept by the forward\nout", LINE, 1.2)
    _box(axes, 0, 1.0, 2.4, "gradient of out\ndout", LINE, 1.2)
    _box(axes, 3.4, 2.1, 2.5, "delta, one per query\nrowsum(dout * out)", BLOCKS[2], 1.2)
    for y, color, owned, walked, sums in (
        (2.95, FUSED, "keys", "queries", "dv += p^T dout,   dk += ds^T q"),
        (0.2, REFERENCE, "queries", "keys", "dq += ds k"),
    ):
        lines = (
            f"a program for each tile of {owned}",
            f"for each block of {walked}: p, ds from",
            "q, k, v, dout, lse, delta;",
            sums,
        )
        _box(axes, 7.2, y, 5.1, "\n".join(lines), color, 2.2)
    _box(axes, 13.0, 3.65, 1.0, "dk, dv", FUSED)
    _box(axes, 13.0, 0.9, 1.0, "dq", REFERENCE)
    for start, end in (
        ((2.45, 3.5), (3.35, 3.0)), ((2.45, 1.9), (3.35, 2.4)), ((5.95, 2.9), (7.15, 3.5)), ((5.95, 2.5), (7.15, 1.9)),
        ((12.35, 4.05), (12.95, 4.05)), ((12.35, 1.3), (12.95, 1.3)),
    ):  # fmt: skip
        axes.add_patch(_arrow(start, end, LINE))


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.4, shrinkA=0, shrinkB=0
    )


def _grid_axes(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Rows downward, as in a matrix; no ticks."""
    axes.set(xlim=x, ylim=y[::-1], aspect="equal", xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


# File name: the function that draws, and the size in inches.
PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "memory": (draw_memory, (9.2, 3.4)),
    "online_softmax": (draw_online_softmax, (9.2, 3.4)),
    "loop_order": (draw_loop_order, (9.2, 3.1)),
    "blocks": (draw_blocks, (9.2, 3.6)),
    "rotation": (draw_rotation, (9.2, 3.1)),
    "backward": (draw_backward, (9.2, 3.4)),
}


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Write one picture as a PNG, and return its path."""
    function, size = PICTURES[name]
    path = folder / f"{name}.png"
    with drawing(size) as figure:
        function(figure)
        save_png(figure, path)
    return path


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        print(draw(name).relative_to(ROOT))
