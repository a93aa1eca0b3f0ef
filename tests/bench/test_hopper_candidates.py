"""Variants of the kernels for Hopper that a GPU can time: their order, and how a call gets one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tuning import hopper as tuning
from fusedattn.kernels import configs, hopper, hopper_configs, hopper_fwd


def entry(part: str, config: list[list[Any]], options: list[list[Any]]) -> dict[str, Any]:
    variant = {"part": part, "head_dim": 128, "causal": False, "config": config, "options": options, "training": False}
    return {"variant": variant, "predicted": 600.0}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    listed = [
        entry("fwd", [["STAGES", 3]], []),
        entry("fwd", [], []),
        entry("fwd", [], [["turns", False], ["persistent", False]]),
        entry("fwd", [["BLOCK", 64]], []),
        entry("dq", [["BLOCK", 128]], []),
    ]
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps(listed), encoding="utf-8")
    return path


def test_the_table_comes_first_then_the_best(source: Path) -> None:
    found = tuning.candidates(source, kept=2)
    assert {slot.name: list(names) for slot, names in found.items()} == {
        "fwd streamed bfloat16 128": ["as in the table", "STAGES 3", "without turns, one tile in a program"],
        "dq streamed bfloat16 128": ["as in the table", "BLOCK 128"],
    }


def test_a_call_gets_the_variant(source: Path) -> None:
    """Inside, the table and the launcher are those of the variant, and recorded launches are not repeated."""
    slot = tuning.slot_of("fwd", 128)
    names = tuning.candidates(source)[slot]
    before = dict(hopper_configs.FORWARD), configs.lookup, hopper.chosen, hopper_fwd.programs_of
    with slot.holding(names["BLOCK 64"]):
        assert hopper_configs.FORWARD[128].BLOCK == 64
        assert hopper.chosen == "all"
        assert hopper.FEWEST_QUERIES == 1
        assert configs.lookup is not before[1]
    with slot.holding(names["without turns, one tile in a program"]):
        assert hopper_fwd._constants(2, turns=True).named["TURNS"] is False
        assert hopper_fwd.programs_of(1, 500, torch.device("cpu")) == (500, None)
    assert (dict(hopper_configs.FORWARD), configs.lookup, hopper.chosen, hopper_fwd.programs_of) == before


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        tuning.main([])
    assert "cuda" in capsys.readouterr().err
