"""``python -m bench.mask_gallery`` draws every mask into docs/images/masks, and writes docs/masks.md.

The blocks are those that kernels/masking.py visits, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.mask_entries import BIASES, COMBINATIONS, MASKS, SPARSE, Entry
from bench.report.page import write_block
from bench.report.style import STYLE, digest, drawing, save_png
from fusedattn import biases, masks
from fusedattn.cli.demo.figure import FUSED, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from bench.work.visited import Block

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, FOLDER = DOCS / "masks.md", DOCS / "images" / "masks"
SOURCE = "python -m bench.mask_gallery"
SECTIONS = {"Masks": MASKS, "Sparse masks": SPARSE, "Combinations": COMBINATIONS, "Biases": BIASES}

# What a pair is. Orange and teal differ in brightness too, for readers who cannot tell their hues apart.
HIDDEN, BESIDE, VISIBLE, FULL = range(4)
COLORS = ("#e4e4e4", "#f7d9bd", REFERENCE, FUSED)
DPI, WIDTH, LEFT, TOP, RIGHT, BOTTOM, BAR = 130, 512, 70, 16, 26, 56, 80  # pixels; WIDTH: of the axes


@dataclass(frozen=True)
class Drawn:
    """The kind of each pair, uint8 ``(seqlen_q, seqlen_k)``, and the visited blocks."""

    pairs: Tensor
    visited: list[Block]
    n_blocks: int  # of the grid


def value_of(entry: Entry) -> Any:
    """The mask or bias that the text of an entry makes."""
    from bench.mask_function import checkers, checkers_eager

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, entry.seqlen_k, 64, generator=generator)
    names = {"masks": masks, "biases": biases, "torch": torch, "q": q, "k": k, "generator": generator}
    return eval(entry.source, names | {"checkers": checkers, "checkers_eager": checkers_eager})


def drawn(entry: Entry) -> Drawn:
    """What the picture of a mask shows."""
    from bench.work.visited import visited

    mask, tile = value_of(entry), entry.tile
    dense = mask.dense(entry.seqlen_q, entry.seqlen_k, batch=1, nheads=1)[0, 0]
    pairs = torch.full(dense.shape, HIDDEN, dtype=torch.uint8)
    found = visited(mask, entry.seqlen_q, entry.seqlen_k, tile, tile)
    for block in found:
        at = slice(block.start_m, block.start_m + tile), slice(block.start_n, block.start_n + tile)
        pairs[at] = FULL if block.is_full else torch.where(dense[at], VISIBLE, BESIDE).to(torch.uint8)
    blocks = -(-entry.seqlen_q // tile) * -(-entry.seqlen_k // tile)
    return Drawn(pairs, found, blocks)


def description(entry: Entry, values: Tensor) -> str:
    """What the file keeps of its mask, or of its bias in hundredths."""
    whole = values if values.dtype == torch.uint8 else (100 * values).round().to(torch.int32)
    return f"{entry.source}: {digest(whole.contiguous().numpy().tobytes())}"


def dense_bias(entry: Entry) -> Tensor:
    """The values of a bias, ``(seqlen_q, seqlen_k)``."""
    bias: Tensor = value_of(entry).dense(entry.seqlen_q, entry.seqlen_k)
    return bias[0, 0].float()


def draw(entry: Entry, folder: Path = FOLDER) -> Path:
    """Write the picture of an entry; a pair is a square of whole pixels."""
    path = folder / f"{entry.name}.png"
    height = WIDTH * entry.seqlen_q // entry.seqlen_k
    width, tall = LEFT + WIDTH + RIGHT + (BAR if entry in BIASES else 0), TOP + height + BOTTOM
    with drawing((width / DPI, tall / DPI), DPI, STYLE | {"axes.grid": False, "font.size": 11}, None) as figure:
        axes = figure.add_axes((LEFT / width, BOTTOM / tall, WIDTH / width, height / tall))
        if entry in BIASES:
            values = dense_bias(entry)
            image = _show(axes, values, cmap="cividis")
            bar = ((LEFT + WIDTH + 14) / width, BOTTOM / tall, 16 / width, height / tall)
            figure.colorbar(image, cax=figure.add_axes(bar))
        else:
            found = drawn(entry)
            values = found.pairs
            _draw_blocks(axes, found, entry.tile)
        axes.set_xticks([0, entry.seqlen_k // 2, entry.seqlen_k])
        axes.set_yticks([0, entry.seqlen_q] if entry.seqlen_q < 64 else [0, entry.seqlen_q // 2, entry.seqlen_q])
        axes.tick_params(length=0)
        axes.set_xlabel("keys", labelpad=1)
        axes.set_ylabel("queries", labelpad=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        save_png(figure, path, description(entry, values), 64 if entry in BIASES else 24)
    return path


def _show(axes: Axes, values: Tensor, **look: Any) -> AxesImage:
    extent = (0, values.shape[1], values.shape[0], 0)  # rows downward
    return axes.imshow(values.numpy(), extent=extent, interpolation="none", aspect="auto", **look)


def _draw_blocks(axes: Axes, found: Drawn, tile: int) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    _show(axes, found.pairs, cmap=ListedColormap(COLORS), vmin=0, vmax=len(COLORS) - 1)
    for block in found.visited:
        axes.add_patch(Rectangle((block.start_n, block.start_m), tile, tile, fill=False, color="white", linewidth=0.8))


def page() -> str:
    """Markdown: a picture, its call and a sentence for each entry."""
    return (
        "\n\n".join(part for title, entries in SECTIONS.items() for part in (f"## {title}", *_entries(entries))) + "\n"
    )


def _entries(entries: tuple[Entry, ...]) -> Iterator[str]:
    for entry in entries:
        yield f"### {entry.title}"
        yield f"![{_alternative(entry)}](images/masks/{entry.name}.png)"
        yield f"`{entry.source}`"
        yield f"{_counted(entry)}{entry.use}"


def _alternative(entry: Entry) -> str:
    sizes = f"{entry.seqlen_q} queries and {entry.seqlen_k} keys"
    return f"{entry.title}: {sizes}" if entry in BIASES else f"{entry.title}: {sizes}, blocks of {entry.tile}"


def _counted(entry: Entry) -> str:
    if entry in BIASES:
        return ""
    found = drawn(entry)
    n_full = sum(block.is_full for block in found.visited)
    full = "1 of these is" if n_full == 1 else f"{n_full or 'none'} of these are"
    return f"Visits {len(found.visited)} of {found.n_blocks} blocks; {full} full. "


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.png"):
        path.unlink()
    for entries in SECTIONS.values():
        for entry in entries:
            print(draw(entry).name)
    write_block(PAGE, page(), SOURCE)
