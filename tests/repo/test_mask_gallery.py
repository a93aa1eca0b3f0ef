"""docs/masks.md shows every mask, as the code draws it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench import mask_gallery
from bench.mask_entries import BIASES, COMBINATIONS, MASKS, SPARSE, Entry
from bench.report.page import with_block
from bench.report.style import drawn_from
from fusedattn import masks

SHOWN = (*MASKS, *SPARSE, *COMBINATIONS)
MOST_BYTES = 1_000_000
RUN = f"run: {mask_gallery.SOURCE}"


def builders() -> set[str]:
    """The public functions of fusedattn.masks that make a mask; as_mask only converts one."""
    functions = inspect.getmembers(masks, inspect.isfunction)
    found = {name for name, f in functions if not name.startswith("_") and f.__annotations__["return"] == "Mask"}
    return found - {"as_mask"}


def test_every_builder_has_an_entry() -> None:
    assert {"causal", "top_blocks"} <= builders()
    named = {name for entry in (*MASKS, *SPARSE) for name in re.findall(r"masks\.(\w+)\(", entry.source)}
    assert not builders() - named, "add entries to bench/mask_entries.py"


def test_the_page_is_current() -> None:
    page = mask_gallery.PAGE.read_text(encoding="utf-8")
    assert with_block(page, mask_gallery.page(), mask_gallery.SOURCE) == page, RUN


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.name)
def test_pictures_of_masks_are_current_and_true(entry: Entry) -> None:
    """Every visible pair lies in a visited block, and no pair of a full block is hidden."""
    found = mask_gallery.drawn(entry)
    dense = mask_gallery.value_of(entry).dense(entry.seqlen_q, entry.seqlen_k, batch=1, nheads=1)[0, 0]
    assert torch.equal(found.pairs >= mask_gallery.VISIBLE, dense)
    assert drawn_from(mask_gallery.FOLDER / f"{entry.name}.png") == mask_gallery.description(entry, found.pairs), RUN


@pytest.mark.parametrize("entry", BIASES, ids=lambda entry: entry.name)
def test_pictures_of_biases_are_current(entry: Entry) -> None:
    described = mask_gallery.description(entry, mask_gallery.dense_bias(entry))
    assert drawn_from(mask_gallery.FOLDER / f"{entry.name}.png") == described, RUN


def test_there_are_no_other_pictures_and_all_are_small() -> None:
    paths = list(mask_gallery.FOLDER.iterdir())
    assert sorted(path.stem for path in paths) == sorted(entry.name for entry in (*SHOWN, *BIASES))
    assert sum(path.stat().st_size for path in paths) < MOST_BYTES


def test_the_colours_of_a_picture(tmp_path: Path) -> None:
    """The last query of a causal mask sees a full block and its own key; the first does not see the last key."""
    (entry,) = (entry for entry in MASKS if entry.name == "causal")
    with Image.open(mask_gallery.draw(entry, tmp_path)) as image:
        shown = image.convert("RGB")
    with Image.open(mask_gallery.FOLDER / "causal.png") as committed:
        assert shown.size == committed.size
    scale = mask_gallery.WIDTH // entry.seqlen_k

    def color(i: int, j: int) -> str:
        x, y = mask_gallery.LEFT + j * scale + scale // 2, mask_gallery.TOP + i * scale + scale // 2
        return "#{:02x}{:02x}{:02x}".format(*shown.getpixel((x, y)))

    hidden, beside, visible, full = mask_gallery.COLORS
    assert [color(5, 125), color(4, 11), color(11, 4), color(125, 5)] == [hidden, beside, visible, full]
