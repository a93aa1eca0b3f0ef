"""The pictures of docs/learn are up to date with their script, are small, and show correct blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from bench.work.visited import visited
from fusedattn import masks
from tests.tools import learn_pictures

PAGE = learn_pictures.ROOT / "docs/learn/README.md"
MOST_BYTES = 60_000


def test_the_page_shows_every_picture() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(\.\./images/learn/(\w+)\.png\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(learn_pictures.PICTURES)
    assert {path.name for path in learn_pictures.FOLDER.iterdir()} == {f"{name}.png" for name in shown}


def test_pictures_are_small() -> None:
    assert max(path.stat().st_size for path in learn_pictures.FOLDER.iterdir()) < MOST_BYTES


def test_script_draws(tmp_path: Path) -> None:
    path = learn_pictures.draw("blocks", tmp_path)
    with Image.open(path) as drawn, Image.open(learn_pictures.FOLDER / path.name) as committed:
        assert drawn.size == committed.size
        assert len(drawn.convert("RGB").getcolors()) > 8, "the picture is empty"
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & masks.window(79, 0)], ids=["causal", "window"])
def test_pictured_blocks_are_true(mask: masks.Mask) -> None:
    """Every visible pair lies in a block, no pair of a full block is hidden, and no block is hidden."""
    dense = mask.dense(256, 256)[0, 0]
    left = dense.clone()
    for block in visited(mask, 256, 256, 32, 32):
        pairs = dense[block.start_m : block.start_m + 32, block.start_n : block.start_n + 32]
        assert bool(pairs.all()) >= block.is_full
        assert pairs.any()
        left[block.start_m : block.start_m + 32, block.start_n : block.start_n + 32] = False
    assert not left.any()
