"""Predictions for the kernels for Hopper: calls by hand, and the files that are made from the committed results."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from PIL import Image

from bench.codegen import hopper, hopper_tables, timing_diagram
from bench.codegen.hopper_replay import TABLES, Variant, sizes_of
from bench.codegen.loops import Step
from bench.codegen.timeline import COPIES, TENSOR, Action, Interval, Timeline
from fusedattn.kernels.hopper_configs import HopperConfig
from tests.helpers.compiling import output

H200 = hopper_tables.H200
REPLAYED = """
from bench.codegen.hopper_replay import Variant, compiled, programs
variant = Variant({part!r}, {head_dim}, causal={causal})
for program in programs(variant, compiled(variant), {tiles}, 5):
    labels = {{x.label for x in program.timeline.intervals}}
    print(len(program.actions), program.clocks, program.timeline.busy(0, program.clocks), *sorted(labels))
"""


def entry(part: str = "fwd", block: float = 2048.0, tile: float = 0.0, **others: Any) -> dict[str, Any]:
    variant = {"part": part, "head_dim": 128, "causal": False, "config": [], "options": [], "training": False}
    figures = {"busy": 1.0, "spill_bytes": 0, "shared_bytes": 1, "rows": 128, "persistent": True}
    return {"variant": variant, "block": block, "tile": tile, **figures, **others}


def test_the_seconds_of_a_call() -> None:
    """132 programs share 2,048 tiles of 64 blocks: 15.5 each, and the last round is not full."""
    problem = hopper_tables.workload(8192, 128, causal=False)
    tiles = problem.batch * problem.nheads_q * 8192 // 128
    rounds = -(-tiles // H200.multiprocessors)
    found = hopper_tables.seconds(entry(tile=1000.0), problem)
    assert found == pytest.approx(rounds * (64 * 2048 + 1000) / H200.hertz)
    alone = hopper_tables.seconds(entry(tile=1000.0, persistent=False), problem)
    assert alone == pytest.approx(rounds * (64 * 2048 + 1000 + 2 * H200.hbm_latency) / H200.hertz)


def test_the_tensor_core_bounds_a_block() -> None:
    """The products of 128 queries and 128 keys: 2,048 clocks at head_dim 128."""
    assert hopper_tables.product_clocks(entry()) == 2048
    assert hopper_tables.product_clocks(entry("dkdv", rows=64)) == 2048
    assert hopper_tables.product_clocks(entry("dq", rows=64)) == 1536


def test_variants_change_fields_that_the_config_has() -> None:
    known = {field.name for field in fields(HopperConfig)}
    found = list(hopper.variants(list(TABLES), []))
    assert len(set(found)) == len(found)
    assert found[0] == Variant("fwd", min(TABLES["fwd"]))
    for variant in found:
        usual = vars(TABLES[variant.part][variant.head_dim])
        assert {name for name, _ in variant.config} <= known & set(hopper.GRID)
        assert all(usual[name] != x for name, x in variant.config)
    assert any(variant.config for variant in found)


def test_the_sizes_of_a_call() -> None:
    """A program owns 128 rows, and walks over blocks of the other side."""
    forward, backward = Variant("fwd", 128, config=(("BLOCK", 64),)), Variant("dkdv", 128)
    assert (sizes_of(forward, 2, 5).seqlen_q, sizes_of(forward, 2, 5).seqlen_k) == (256, 320)
    block = TABLES["dkdv"][128].BLOCK
    assert (sizes_of(backward, 1, 3).seqlen_q, sizes_of(backward, 1, 3).seqlen_k) == (3 * block, 128)


def test_the_fastest_variant_comes_first() -> None:
    slow = entry(block=3000.0)
    slow["variant"] = slow["variant"] | {"config": [["BLOCK", 64]]}
    causal = entry(block=1.0)
    causal["variant"] = causal["variant"] | {"causal": True}
    ranked = hopper_tables.ranked({"fits": [slow, causal, entry()]})
    assert [x["block"] for x in ranked] == [2048.0, 3000.0]
    assert [hopper_tables.described(x["variant"]) for x in ranked] == ["as in the table", "BLOCK 64"]


def test_the_bars_of_a_block() -> None:
    """Of 100 clocks: the group issues at 0 and 10, waits from 20 on, and computes weights from 50 on."""
    every = []
    for i in range(6):
        start = 100.0 * i
        every += [Interval(TENSOR, "scores", start, start + 50, "group 1")]
        every += [Interval("group 1", "products", start + 20, start + 20 + timing_diagram.SHORTEST, "group 1")]
        every += [Interval(COPIES, "k", start + 5, start + 25, "producer")]
        every += [Interval(COPIES, "k", start + 15, start + 35, "producer")]
    product = Action(Step("wgmma", macs=512, commits=True))
    issued = {"group 1": [100.0 * i for i in range(6)], "group 2": []}
    actions = {"group 1": [product] * 6, "group 2": []}
    found = timing_diagram.bars(Timeline(every, issued), actions, 100.0)
    in_first = [x for x in found if x[2] < 100]
    wait = 20 + timing_diagram.SHORTEST
    assert ("group 1", "issue", 0, 20, "group 1") in in_first
    assert ("group 1", "products", 20, wait, "group 1") in in_first
    assert ("group 1", "softmax", wait, 100, "group 1") in in_first
    assert (COPIES, "k", 5, 35, "producer") in in_first


def test_the_page_is_made_from_the_results() -> None:
    results = hopper_tables.load()
    page = hopper_tables.DOCUMENT.read_text(encoding="utf-8")
    assert hopper_tables.figures(results) in page, "run: python -m bench.codegen.hopper --update"


def test_the_candidates_are_made_from_the_results() -> None:
    committed = json.loads(hopper_tables.CANDIDATES.read_text(encoding="utf-8"))
    assert committed == hopper_tables.ranked(hopper_tables.load())


def test_the_diagram_is_made_from_the_results(tmp_path: Path) -> None:
    diagram = hopper_tables.load()["diagram"]
    timing_diagram.draw(tmp_path / "drawn.png", diagram)
    for path in (tmp_path / "drawn.png", timing_diagram.PATH):
        with Image.open(path) as image:
            assert json.loads(image.text["Description"]) == diagram  # type: ignore[attr-defined]
    assert matplotlib.image.imread(tmp_path / "drawn.png").std() > 0.1  # something is on it


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "head_dim", "causal", "tiles"),
    [("fwd", 128, False, 2), ("fwd", 64, True, 2), ("dkdv", 128, False, 1), ("dq", 128, True, 2)],
)
def test_a_kernel_is_replayed(part: str, head_dim: int, causal: bool, tiles: int) -> None:
    """The machine code of a kernel has the events of its PTX, and no party waits for ever."""
    lines = output("-c", REPLAYED.format(part=part, head_dim=head_dim, causal=causal, tiles=tiles)).splitlines()
    persistent = part == "fwd" and not causal
    assert len(lines) == (1 if persistent else tiles)
    for line in lines:
        parties, clocks, busy, *labels = line.split()
        assert parties == "3"
        assert float(clocks) > 1000
        assert 0.1 < float(busy) < 1
        assert {"tile", "products", "scores", *(("k", "v") if part != "dkdv" else ("q", "dout"))} <= set(labels)
