"""Candidates for tuning: the tiles tried, the faults that exclude a tile, and their storage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch

from bench.codegen.in_flight import Touch
from bench.codegen.report import Report
from bench.tuning import candidates
from bench.tuning.candidates import Found
from bench.tuning.slots import Part, Slot
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import configs
from fusedattn.kernels.configs import FewQueries, TileConfig
from tests.helpers.compiling import output
from tests.helpers.slots import TILE, slot

CONFIGS = [*itertools.product(get_args(Part), configs.TABLE, (torch.bfloat16, torch.float32), (64, 128, 256))]


@pytest.mark.parametrize(("part", "arch", "dtype", "head_dim"), CONFIGS)
def test_a_grid_has_tiles_of_the_architecture(part: Part, arch: configs.Arch, dtype, head_dim: int) -> None:
    its = Slot(part, "streamed", dtype, head_dim)
    found = list(candidates.grid(its, arch))
    assert len(set(found)) == len(found) > 10
    styles = {tile.style for tile in found}
    newest = arch in ("sm_90", "sm_100")
    assert newest or styles == {"pointers"}
    assert ("descriptors" in styles) == (newest and part != "few")
    for tile in found:
        if part == "few":
            FewQueries(tile, candidates.SPLITS[0])
        else:
            with its.holding(tile):
                assert getattr(configs.lookup(arch, head_dim, dtype), part) == tile


def report(tile: TileConfig, kernel: str = "attention_fwd", **found: Any) -> Report:
    blocks = {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BOUNDARY": tile.BOUNDARY}
    shown = blocks | {"num_warps": 4, "num_stages": 1}
    usual: dict[str, Any] = {"registers": 100, "ctas_per_sm": 2, "tensor_core": 1, "hgmma": 1}
    return Report(kernel, "sm_90", 128, "bf16", "plain", shown, True, **usual | found)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TileConfig, str], list[Report]]], list[Any]]:
    """Return given reports by tile and features instead of compiling, and list the compilations."""

    def stand_in(function: Callable[[TileConfig, str], list[Report]]) -> list[Any]:
        compiled: list[Any] = []

        def compiling(case: Any) -> list[Report]:
            compiled.append((case.config.BOUNDARY, *case.features, case.inference))
            return function(case.config, case.features[0])

        monkeypatch.setattr("bench.codegen.compilations.compile_case", compiling)
        monkeypatch.setattr("bench.codegen.predictions.predict", Mock(side_effect=NotImplementedError))
        return compiled

    return stand_in


BOUNDARY_SPILLS = {"loop_spills": (0, 3, 0), "spill_bytes": 8}  # a forward: full blocks, boundary blocks, repair
FWD = slot("fwd", 128, torch.bfloat16)
SMALL_TILE = TileConfig(64, 32, 4, 1)
SOUND = [Found(TileConfig(64, n, 4, 1), 100, 2, 9.0) for n in (16, 32, 64, 128)]


def test_the_widest_boundary_blocks_without_a_fault(compiler) -> None:
    hardest, *others = candidates.FEATURES["streamed"]
    compiled = compiler(lambda tile, features: [report(tile, **(BOUNDARY_SPILLS if tile.BOUNDARY > 16 else {}))])
    (found,) = candidates.clean_forms(FWD, "sm_90", SMALL_TILE)
    assert found == Found(replace(SMALL_TILE, BOUNDARY=16), 100, 2, None)
    assert compiled == [(32, hardest, ()), (16, hardest, ()), *((16, x, (x,)) for x in (hardest, *others))]


def test_a_backward_is_not_compiled_without_gradients(compiler) -> None:
    compiled = compiler(lambda tile, features: [report(tile, "attention_bwd_dq")])
    (found,) = candidates.clean_forms(slot("dq", 128, torch.bfloat16), "sm_90", SMALL_TILE)
    assert found.config == replace(SMALL_TILE, BOUNDARY=32)
    assert compiled == [(32, x, ()) for x in candidates.FEATURES["streamed"]]


@pytest.mark.parametrize(
    "fault",
    [
        {"loop_spills": (1, 0, 0), "spill_bytes": 8},
        {"serialized_wgmma": True},
        BOUNDARY_SPILLS | {"serialized_wgmma": True},
        {"shared_bytes": 10**6},
        {"error": "OutOfResources"},
        {"loop_spills": (0,), "spill_bytes": 8},
    ],
)
def test_narrower_boundary_blocks_are_not_tried_in_vain(compiler, fault: dict[str, Any]) -> None:
    compiled = compiler(lambda tile, features: [report(tile, **fault)])
    assert candidates.clean_forms(FWD, "sm_90", SMALL_TILE) == []
    assert [boundary for boundary, *_ in compiled] == [32]


def test_one_fault_anywhere_is_enough(compiler) -> None:
    last = candidates.FEATURES["streamed"][-1]
    compiler(lambda tile, features: [report(tile), report(tile, registers=99, serialized_wgmma=features == last)])
    done: list[int] = []
    assert candidates.clean(FWD, "sm_90", [SMALL_TILE] * 2, 1, lambda: done.append(1)) == []
    assert len(done) == 2


def test_persistent_programs_are_tried_where_they_are_written(compiler) -> None:
    pipelined = replace(SMALL_TILE, style="pipelined", BOUNDARY=32)
    compiler(lambda tile, features: [report(tile)])
    forms = [found.config for found in candidates.clean_forms(FWD, "sm_90", pipelined)]
    assert forms == [pipelined, replace(pipelined, persistent=1)]
    compiler(lambda tile, features: [report(tile, serialized_wgmma=bool(tile.persistent))])
    assert [found.config for found in candidates.clean_forms(FWD, "sm_90", pipelined)] == [pipelined]
    compiler(lambda tile, features: [report(tile)])
    scored = slot("fwd", 128, torch.bfloat16, "scored")
    assert [found.config for found in candidates.clean_forms(scored, "sm_90", pipelined)] == [pipelined]


def test_the_best_by_the_model_are_kept_and_the_table_s_own_comes_first() -> None:
    found = SOUND
    own = configs.lookup("sm_90", 128, torch.bfloat16).fwd
    assert list(candidates.to_time(FWD, "sm_90", found, 2).values()) == [own, found[0].config, found[1].config]
    assert len(candidates.to_time(FWD, "sm_90", [Found(own, 1, 1, None)], 2)) == 1
    two = candidates.to_time(slot("one_pass", 64, torch.bfloat16), "sm_90", found, 1)
    assert list(two.values()) == [None, found[0].config]
    few = candidates.to_time(slot("few", 128, torch.bfloat16), "sm_90", found[1:2], 1)
    assert [x.split for x in few.values() if isinstance(x, FewQueries)] == [512, *candidates.SPLITS]
    names = [candidates.tile(x) for x in (own, replace(own, persistent=1), replace(own, BOUNDARY_STAGES=1), None)]
    assert len(set(names)) == 4


TOUCH = Touch(0x100, "MOV", "operand written", (100,), (0xF0,), 0)


def test_registers_in_flight_keep_a_tile_apart(compiler) -> None:
    """They neither exclude a tile nor lead to narrower boundary blocks; they do not excuse another fault."""
    pipelined = replace(SMALL_TILE, style="pipelined", BOUNDARY=32)
    last = candidates.FEATURES["streamed"][-1]
    compiled = compiler(lambda tile, features: [report(tile, touches=(TOUCH,) if features == last else ())])
    found = candidates.clean_forms(FWD, "sm_90", pipelined)
    assert [(x.config, x.in_flight) for x in found] == [(pipelined, True), (replace(pipelined, persistent=1), True)]
    assert {boundary for boundary, *_ in compiled} == {32}
    spills = {"spill_bytes": 8, "loop_spills": (0, 1, 0)}
    compiler(lambda tile, _: [report(tile, touches=(TOUCH,), **(spills if tile.BOUNDARY > 16 else {}))])
    assert {x.config.BOUNDARY for x in candidates.clean_forms(FWD, "sm_90", pipelined)} == {16}
    compiler(lambda tile, _: [report(tile, touches=(TOUCH,), serialized_wgmma=True)])
    assert candidates.clean_forms(FWD, "sm_90", pipelined) == []
    compiler(lambda tile, _: [report(tile)])
    assert not any(x.in_flight for x in candidates.clean_forms(FWD, "sm_90", pipelined))


def test_tiles_with_registers_in_flight_are_timed_in_a_place_of_their_own() -> None:
    tiles = (TileConfig(64, 64, 4, 1, "pipelined", boundary) for boundary in (16, 32, 64))
    fast = [Found(tile, 100, 2, 99.0, in_flight=True) for tile in tiles]
    names = candidates.to_time(FWD, "sm_90", fast + SOUND, 4)
    _, *others = names.values()
    assert others == [*(x.config for x in SOUND), fast[0].config, fast[1].config]
    assert candidates.in_flight(names, fast + SOUND) == [candidates.tile(x.config) for x in fast[:2]]
    few = candidates.to_time(slot("few", 128, torch.bfloat16), "sm_90", fast + SOUND, 1)
    _, *others = few.values()
    assert others == [FewQueries(x.config, n) for x in (SOUND[0], fast[0]) for n in candidates.SPLITS]
    assert candidates.in_flight(few, fast + SOUND) == [candidates.tile(x) for x in others[len(candidates.SPLITS) :]]


def test_candidates_are_kept_by_slot(tmp_path: Path) -> None:
    path = candidates.path("sm_90", tmp_path)
    a, b = slot("fwd"), slot("dq")
    tile = TileConfig(64, 32, 4, 1, "pipelined", 32, 1, 1, True)
    ours = [Found(tile, 200, 1, 512.5), Found(TILE, 128, 2, None, True)]
    candidates.save(path, {a.name: ours})
    candidates.save(path, {b.name: []})
    assert (candidates.load(path, a), candidates.load(path, b)) == (ours, [])
    candidates.save(path, {a.name: ours[1:]})
    assert candidates.load(path, a) == ours[1:]
    assert candidates.load(path, slot("few")) is None
    assert candidates.load(tmp_path / "other.json", a) is None
    for text in ("[", json.dumps({a.name: [{"config": {"BLOCK": 16}}]}), json.dumps({a.name: [1]})):
        path.write_text(text)
        with pytest.raises(CommandError, match="got no file of python -m bench tune --compile"):
            candidates.load(path, a)


@pytest.mark.thorough
def test_candidates_come_from_machine_code(tmp_path: Path) -> None:
    """The table's own tile has no fault; four warps for 128x128 have too few registers."""
    program = f"""
import torch
from pathlib import Path
from bench.tuning import candidates
from bench.tuning.slots import Slot
from fusedattn.kernels.configs import TileConfig
slot = Slot("dq", "streamed", torch.bfloat16, 128)
found = candidates.clean(slot, "sm_90", [slot.config("sm_90"), TileConfig(128, 128, 4, 1)], 1, bool)
candidates.save(Path({str(tmp_path)!r}) / "found.json", {{slot.name: found}})
"""
    output("-c", program)
    its = slot("dq", 128, torch.bfloat16)
    own = configs.lookup("sm_90", 128, torch.bfloat16).dq
    (found,) = candidates.load(tmp_path / "found.json", its)
    assert replace(found.config, BOUNDARY=own.BOUNDARY) == own
    assert found.config.BOUNDARY >= own.BOUNDARY
    assert 100 < found.registers <= 255
    assert found.predicted is not None
