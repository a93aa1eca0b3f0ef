"""Tuning: what is tried, that it is what runs, that nothing wrong is timed, and which one is called faster."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import bench.__main__ as command
from bench import processes, results, tune
from bench.codegen.in_flight import Touch
from bench.codegen.report import Report
from bench.timing import Budget, Spread
from bench.tuning import candidates, slots, trial
from bench.tuning.candidates import Found
from bench.tuning.slots import Part, Slot
from bench.tuning.trial import Timing
from fusedattn.cases import Case
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import configs
from fusedattn.kernels.configs import FewQueries, TileConfig
from tests.conftest import INTERPRETING

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETING, reason="where kernels are compiled, the interpreter sees none")

SMALL = Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=40, seqlen_k=48, head_dim=16, dtype=torch.float16)
TILE = TileConfig(64, 32, 4, 1, EDGE=16)
CONFIGS = [*itertools.product(get_args(Part), configs.TABLE, (torch.bfloat16, torch.float32), (64, 128, 256))]


def slot(part: Part, head_dim: int = 16, dtype: torch.dtype = torch.float16, work: configs.Work = "streamed") -> Slot:
    return Slot(part, work, dtype, head_dim)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Kernels with the tiles they ran in."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__
    seen: list[Any] = []

    def seeing(executor: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        seen.append((executor.fn.__name__, named.get("BLOCK_M"), named.get("BLOCK_N")))
        run(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", seeing)
    return seen


def test_the_candidates_that_are_kept_can_be_tried() -> None:
    """Those of the slots that are tried by default, and no tile that the table would refuse."""
    for path in sorted((ROOT / command.CANDIDATES).glob("*.json")):
        arch = path.name.partition("-")[0]
        assert arch in configs.TABLE
        names = set(json.loads(path.read_text()))
        for its in tune.slots(command.build_parser().parse_args(["tune"])):
            if its.name in names:
                found = candidates.load(path, its)
                assert found
                own, *others = candidates.to_time(its, arch, found)
                assert own == candidates.tile(its.config(arch))
                assert len(others) >= 6
                names.remove(its.name)
        assert not names


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "apart", lambda function, *arguments: function(*arguments))


@interpreted
@pytest.mark.parametrize(
    ("part", "kernel"),
    [
        ("fwd", "attention_fwd"),
        ("dkdv", "attention_bwd_dkdv"),
        ("dq", "attention_bwd_dq"),
        ("one_pass", "attention_bwd_dkdv"),
    ],
)
def test_what_is_timed_is_the_kernel_of_the_slot_with_the_candidate(part: Part, kernel: str, launched) -> None:
    its = slot(part)
    for which, set_ups in its.set_ups(SMALL, CPU, {"a": TILE}).items():
        timed = set_ups["a"]()
        launched.clear()
        timed()
        tiled = {(name, m, n) for name, m, n in launched if n is not None and m is not None}
        assert tiled == {(kernel, TILE.BLOCK_M, TILE.BLOCK_N)}, which


@interpreted
def test_without_one_pass_both_kernels_run(launched) -> None:
    timed = slot("one_pass").set_ups(SMALL, CPU, {"two kernels": None})["backward"]["two kernels"]()
    launched.clear()
    timed()
    assert {"attention_bwd_dkdv", "attention_bwd_dq"} <= {name for name, *_ in launched}


@interpreted
def test_few_queries_have_the_candidate_and_its_splits(launched) -> None:
    case = replace(SMALL, seqlen_q=1, seqlen_k=150)
    few = FewQueries(TileConfig(16, 32, 4, 1, EDGE=32), split=64)
    slot("few").set_ups(case, CPU, {"a": few})["inference"]["a"]()()
    assert ("attention_fwd", 16, 32) in launched
    assert "attention_combine" in {name for name, *_ in launched}


@interpreted
def test_the_table_is_as_it_was_after_a_trial(launched) -> None:
    before = (configs.lookup, configs.lookup_few_queries)
    with slot("fwd").holding(TILE):
        assert configs.lookup("interpreter", 16, torch.float16) == replace(configs.INTERPRETER, fwd=TILE)
    with slot("few").holding(few := FewQueries(TILE, 64)):
        assert configs.lookup_few_queries("interpreter", 16, torch.float16) is few
        assert configs.lookup("interpreter", 16, torch.float16) == configs.INTERPRETER
    assert (configs.lookup, configs.lookup_few_queries) == before


def test_every_slot_has_work_of_its_own_kind() -> None:
    """Cases reach the entry of the table that the slot names: the launcher asks for the same kind of work."""
    asked: list[str] = []
    lookup = configs.lookup

    def asking(arch: configs.Arch, head_dim: int, dtype: torch.dtype, work: configs.Work = "streamed"):
        asked.append(work)
        return lookup(arch, head_dim, dtype, work)

    for work in get_args(configs.Work):
        its = slot("fwd", work=work)
        for case in its.small_cases().values():
            small = replace(case, batch=1, seqlen_q=20, seqlen_k=20, nheads_q=1, nheads_kv=1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(configs, "lookup", asking)
                set_ups = its.set_ups(small, torch.device("cpu" if INTERPRETING else "cuda"), {"own": TILE})
                set_ups["inference"]["own"]()()
        assert set(asked) == {work}
        asked.clear()


@pytest.mark.parametrize(("part", "arch", "dtype", "head_dim"), CONFIGS)
def test_a_grid_has_tiles_of_the_architecture(part: Part, arch: configs.Arch, dtype, head_dim: int) -> None:
    its = Slot(part, "streamed", dtype, head_dim)
    found = list(candidates.grid(its, arch))
    assert len(set(found)) == len(found) > 10
    styles = {tile.style for tile in found}
    newest = arch in ("sm_90", "sm_100")
    assert newest or styles == {"pointers"}
    assert ("descriptors" in styles) == (newest and part != "few")
    assert ("specialized" in styles) == (arch == "sm_90" and part == "fwd" and dtype == torch.bfloat16)
    for tile in found:
        if part == "few":
            FewQueries(tile, candidates.SPLITS[0])
        else:
            with its.holding(tile):
                assert getattr(configs.lookup(arch, head_dim, dtype), part) == tile


def report(tile: TileConfig, kernel: str = "attention_fwd", **found: Any) -> Report:
    shown = {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "EDGE": tile.EDGE, "num_warps": 4, "num_stages": 1}
    usual: dict[str, Any] = {"registers": 100, "ctas_per_sm": 2, "tensor_core": 1, "hgmma": 1}
    return Report(kernel, "sm_90", 128, "bf16", "plain", shown, True, **usual | found)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TileConfig, str], list[Report]]], list[Any]]:
    """Reports by tile and features, in place of a compilation; what was compiled."""

    def stand_in(function: Callable[[TileConfig, str], list[Report]]) -> list[Any]:
        compiled: list[Any] = []

        def compiling(case: Any) -> list[Report]:
            compiled.append((case.config.EDGE, *case.features, case.inference))
            return function(case.config, case.features[0])

        monkeypatch.setattr("bench.codegen.compilations.compile_case", compiling)
        monkeypatch.setattr("bench.codegen.predictions.predict", lambda _: _not_known())
        return compiled

    return stand_in


def _not_known() -> Any:
    raise NotImplementedError


EDGED = {"loop_spills": (0, 3, 0), "spill_bytes": 8}  # of a forward: full blocks, boundary, repair
FWD = slot("fwd", 128, torch.bfloat16)
SMALL_TILE = TileConfig(64, 32, 4, 1)


def test_the_widest_boundary_blocks_without_a_fault(compiler) -> None:
    hardest, *others = candidates.FEATURES["streamed"]
    compiled = compiler(lambda tile, features: [report(tile, **(EDGED if tile.EDGE > 16 else {}))])
    (found,) = candidates.clean_forms(FWD, "sm_90", SMALL_TILE)
    assert found == Found(replace(SMALL_TILE, EDGE=16), 100, 2, None)
    assert compiled == [(32, hardest, ()), (16, hardest, ()), *((16, x, (x,)) for x in (hardest, *others))]


def test_a_backward_is_not_compiled_without_gradients(compiler) -> None:
    compiled = compiler(lambda tile, features: [report(tile, "attention_bwd_dq")])
    (found,) = candidates.clean_forms(slot("dq", 128, torch.bfloat16), "sm_90", SMALL_TILE)
    assert found.config == replace(SMALL_TILE, EDGE=32)
    assert compiled == [(32, x, ()) for x in candidates.FEATURES["streamed"]]


@pytest.mark.parametrize(
    "fault",
    [
        {"loop_spills": (1, 0, 0), "spill_bytes": 8},
        {"serialized_wgmma": True},
        EDGED | {"serialized_wgmma": True},
        {"shared_bytes": 10**6},
        {"error": "OutOfResources"},
        {"loop_spills": (0,), "spill_bytes": 8},
    ],
)
def test_narrower_boundary_blocks_are_not_tried_in_vain(compiler, fault: dict[str, Any]) -> None:
    compiled = compiler(lambda tile, features: [report(tile, **fault)])
    assert candidates.clean_forms(FWD, "sm_90", SMALL_TILE) == []
    assert [edge for edge, *_ in compiled] == [32]


def test_one_fault_anywhere_is_enough(compiler) -> None:
    last = candidates.FEATURES["streamed"][-1]
    compiler(lambda tile, features: [report(tile), report(tile, registers=99, serialized_wgmma=features == last)])
    done: list[int] = []
    assert candidates.clean(FWD, "sm_90", [SMALL_TILE] * 2, 1, lambda: done.append(1)) == []
    assert len(done) == 2


def test_persistent_programs_are_tried_where_they_are_written(compiler) -> None:
    pipelined = replace(SMALL_TILE, style="pipelined", EDGE=32)
    compiler(lambda tile, features: [report(tile)])
    forms = [found.config for found in candidates.clean_forms(FWD, "sm_90", pipelined)]
    assert forms == [pipelined, replace(pipelined, persistent=1)]
    compiler(lambda tile, features: [report(tile, serialized_wgmma=bool(tile.persistent))])
    assert [found.config for found in candidates.clean_forms(FWD, "sm_90", pipelined)] == [pipelined]
    compiler(lambda tile, features: [report(tile)])
    scored = slot("fwd", 128, torch.bfloat16, "scored")
    assert [found.config for found in candidates.clean_forms(scored, "sm_90", pipelined)] == [pipelined]


def test_specialised_tiles_are_judged_by_their_own_kernel(compiler) -> None:
    tile = TileConfig(128, 64, 4, 2, "specialized")
    compiler(lambda config, _: [report(config, spill_bytes=8), report(config, "attention_fwd_specialized")])
    (found,) = candidates.clean_forms(FWD, "sm_90", tile)
    assert found.config == tile
    compiler(lambda config, _: [report(config)])
    assert candidates.clean_forms(FWD, "sm_90", tile) == []  # its kernel takes none of the calls


def test_the_best_by_the_model_are_kept_and_the_table_s_own_comes_first() -> None:
    its = slot("fwd", 128, torch.bfloat16)
    found = [Found(TileConfig(64, n, 4, 1), 100, 2, 9.0) for n in (16, 32, 64, 128)]
    own = configs.lookup("sm_90", 128, torch.bfloat16).fwd
    assert list(candidates.to_time(its, "sm_90", found, 2).values()) == [own, found[0].config, found[1].config]
    assert len(candidates.to_time(its, "sm_90", [Found(own, 1, 1, None)], 2)) == 1
    two = candidates.to_time(slot("one_pass", 64, torch.bfloat16), "sm_90", found, 1)
    assert list(two.values()) == [configs.lookup("sm_90", 64, torch.bfloat16).one_pass, None, found[0].config]
    few = candidates.to_time(slot("few", 128, torch.bfloat16), "sm_90", found[1:2], 1)
    assert [x.split for x in few.values() if isinstance(x, FewQueries)] == [512, *candidates.SPLITS]
    names = [candidates.tile(x) for x in (own, replace(own, persistent=1), replace(own, EDGE_STAGES=1), None)]
    assert len(set(names)) == 4


TOUCH = Touch(0x100, "MOV", "operand written", (100,), (0xF0,), 0)


def test_registers_in_flight_keep_a_tile_apart(compiler) -> None:
    """It is no reason to leave it out, nor to try narrower boundary blocks; with another fault it is none less."""
    pipelined = replace(SMALL_TILE, style="pipelined", EDGE=32)
    last = candidates.FEATURES["streamed"][-1]
    compiled = compiler(lambda tile, features: [report(tile, touches=(TOUCH,) if features == last else ())])
    found = candidates.clean_forms(FWD, "sm_90", pipelined)
    assert [(x.config, x.in_flight) for x in found] == [(pipelined, True), (replace(pipelined, persistent=1), True)]
    assert {edge for edge, *_ in compiled} == {32}
    compiled = compiler(
        lambda tile, _: [report(tile, touches=(TOUCH,), spill_bytes=8 * (tile.EDGE > 16), loop_spills=(0, 1, 0))]
    )
    assert {x.config.EDGE for x in candidates.clean_forms(FWD, "sm_90", pipelined)} == {16}
    compiler(lambda tile, _: [report(tile, touches=(TOUCH,), serialized_wgmma=True)])
    assert candidates.clean_forms(FWD, "sm_90", pipelined) == []
    compiler(lambda tile, _: [report(tile)])
    assert not any(x.in_flight for x in candidates.clean_forms(FWD, "sm_90", pipelined))


def test_tiles_with_registers_in_flight_are_timed_in_a_place_of_their_own() -> None:
    its = slot("fwd", 128, torch.bfloat16)
    fast = [Found(TileConfig(64, 64, 4, 1, "pipelined", edge), 100, 2, 99.0, in_flight=True) for edge in (16, 32, 64)]
    sound = [Found(TileConfig(64, n, 4, 1), 100, 2, 9.0) for n in (16, 32, 64, 128)]
    names = candidates.to_time(its, "sm_90", fast + sound, 4)
    _, *others = names.values()
    assert others == [*(x.config for x in sound), fast[0].config, fast[1].config]
    assert candidates.in_flight(names, fast + sound) == [candidates.tile(x.config) for x in fast[:2]]
    few = candidates.to_time(slot("few", 128, torch.bfloat16), "sm_90", fast + sound, 1)
    _, *others = few.values()
    assert others == [FewQueries(x.config, n) for x in (sound[0], fast[0]) for n in candidates.SPLITS]
    assert candidates.in_flight(few, fast + sound) == [candidates.tile(x) for x in others[len(candidates.SPLITS) :]]


def test_candidates_are_kept_by_slot(tmp_path: Path) -> None:
    path = candidates.path("sm_90", tmp_path)
    a, b = slot("fwd"), slot("dq")
    ours = [
        Found(TileConfig(64, 32, 4, 1, "pipelined", 32, 1, 1, True), 200, 1, 512.5),
        Found(TILE, 128, 2, None, True),
    ]
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


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, in_this_process) -> None:
    """Of 64, 128 and 1024 rows the first keeps the budget, and the last does not run."""

    def used(its: Slot, device: torch.device) -> Any:
        rows = configs.lookup("interpreter", 16, torch.float16).fwd.BLOCK_M
        if rows == 1024:
            raise RuntimeError("no room")
        yield from {"out of causal": rows / 100, "lse of causal": float("nan") if rows == 128 else 0.5}.items()

    monkeypatch.setattr(trial, "_used", used)
    tiles = {str(rows): replace(TILE, BLOCK_M=rows) for rows in (64, 128, 1024)}
    assert trial.wrong(slot("fwd"), tiles, CPU, 1, Budget()) == {
        "128": "out of causal uses 128% of the error budget, lse of causal uses nan% of the error budget",
        "1024": "RuntimeError: no room",
    }


@interpreted
@pytest.mark.parametrize("part", ["fwd", "dq", "one_pass"])
def test_a_candidate_is_checked_by_the_kernels(monkeypatch: pytest.MonkeyPatch, launched, part: Part) -> None:
    small = replace(SMALL, seqlen_q=20, seqlen_k=24)
    monkeypatch.setattr(Slot, "small_cases", lambda _: {"a": small})
    names = [name for name, _ in trial._used(slot(part), CPU)]
    assert names[:5] == [f"{x} of a" for x in ("out", "lse", "dq", "dk", "dv")]
    assert ("out without gradients of a" in names) == (part == "fwd")
    assert list(trial.verdict(slot(part), TILE, CPU)) == [""]
    kernel = {"fwd": "attention_fwd", "dq": "attention_bwd_dq", "one_pass": "attention_bwd_dkdv"}[part]
    assert (kernel, TILE.BLOCK_M, TILE.BLOCK_N) in launched


def one_then_exit(number: int) -> Any:
    yield number
    os._exit(number)


def one_then_silence(number: int) -> Any:
    yield number
    time.sleep(600)


def two(number: int) -> Any:
    yield from (number, os.getpid())


def test_a_process_that_dies_or_hangs_has_said_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    number, process = trial.apart(two, 5)
    assert number == 5
    assert process != os.getpid()
    for function, message in ((one_then_exit, "its process ended with status 7"), (one_then_silence, "no answer in")):
        monkeypatch.setattr(processes, "SILENCE", 60.0)
        answers = trial.apart(function, 7)
        assert next(answers) == 7
        monkeypatch.setattr(processes, "SILENCE", 0.5 if function is one_then_silence else 60.0)
        with pytest.raises(trial.ProcessError, match=message):
            next(answers)


def dying(*_: Any) -> Any:
    raise trial.ProcessError("its process ended with status 7")


def test_a_check_that_dies_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "apart", dying)
    assert trial.wrong(slot("fwd"), {"a": TILE}, CPU, 1, Budget()) == {"a": "its process ended with status 7"}
    spent = trial.wrong(slot("fwd"), {"a": TILE}, CPU, 1, Budget(0.0))
    assert spent == {"a": "not checked, because the budget was spent"}


def test_a_specialised_tile_must_be_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = TileConfig(32, 16, 4, 2, "specialized")

    def used(its: Slot, device: torch.device) -> Any:
        warnings.warn("a warp-specialised kernel is not launched: it spills registers", RuntimeWarning, stacklevel=1)
        yield "out", 0.5

    monkeypatch.setattr(trial, "_used", used)
    monkeypatch.setattr(trial.guard, "knows", lambda device: True)
    (text,) = trial.verdict(slot("fwd"), tile, CPU)
    assert text == "RuntimeWarning: a warp-specialised kernel is not launched: it spills registers"
    monkeypatch.setattr(trial.guard, "knows", lambda device: False)
    (text,) = trial.verdict(slot("fwd"), tile, CPU)
    assert text == "specialized kernels are not launched on this GPU, or with this Triton"


@pytest.mark.parametrize(("part", "head_dim"), [*itertools.product(get_args(Part), (64, 128, 256))])
def test_for_triton_some_small_problem_is_the_same_as_each_that_is_timed(part: Part, head_dim: int) -> None:
    """Else the timing would compile again, one after the other, what the check has compiled in many processes."""

    def classes(case: Case) -> tuple[Any, ...]:
        numbers = (case.nheads_q, case.nheads_kv, case.seqlen_q, case.seqlen_k)
        fields = {x.name: getattr(case, x.name) for x in dataclasses.fields(case) if not x.name.startswith("seqlen")}
        others = {name: x for name, x in fields.items() if name not in ("batch", "nheads_q", "nheads_kv")}
        return tuple((x == 1, x % 16 == 0) for x in numbers), repr(others)

    for work in get_args(configs.Work) if part in ("fwd", "dkdv", "dq") else ("streamed",):
        its = slot(part, head_dim, torch.bfloat16, work)
        small = {classes(case) for case in its.small_cases().values()}
        for name, case in its.cases().items():
            assert classes(case) in small, (name, case)


def test_programs_that_walk_over_tiles_have_several_when_they_are_checked() -> None:
    for head_dim in (64, 128, 256):
        for case in slot("fwd", head_dim).small_cases().values():
            assert case.batch * case.nheads_q * -(-case.seqlen_q // 128) > 132  # multiprocessors of an H100


def spread(median: float, around: float = 0.1) -> Spread:
    return Spread(median, median - around, median + around, 9)


TIMINGS = {
    "own": Timing({"x": spread(2.0), "y": spread(4.0)}),
    "both": Timing({"x": spread(1.0), "y": spread(2.0)}),
    "one": Timing({"x": spread(1.0), "y": spread(4.0)}),
    "near": Timing({"x": spread(1.9), "y": spread(3.7)}),
    "none": Timing({}, "no room"),
}


def test_gains_and_what_is_no_noise() -> None:
    assert trial.base(TIMINGS) == "own"
    assert trial.gains(TIMINGS)["one"] == {"x": 2.0, "y": 1.0}
    assert [name for name, _ in trial.ranked(TIMINGS)] == ["both", "one", "near", "own"]
    assert dict(trial.ranked(TIMINGS))["one"] == pytest.approx(2**0.5)
    assert [name for name in TIMINGS if trial.is_faster(TIMINGS, name)] == ["both"]


def test_where_the_table_s_own_is_wrong_others_are_compared_with_the_first() -> None:
    without = {"own": Timing({}, "dq uses 300%")} | {x: TIMINGS[x] for x in ("one", "both")}
    assert trial.base(without) == "one"
    assert dict(trial.ranked(without)) == {"both": pytest.approx(2**0.5), "one": 1.0}
    nothing = {"own": Timing({}, "no room")}
    assert (trial.base(nothing), trial.gains(nothing), trial.ranked(nothing)) == (None, {}, [])
    assert not trial.is_faster(nothing, "own")


def test_a_candidate_that_was_not_timed_on_every_problem_is_not_called_faster() -> None:
    part = TIMINGS | {"part": Timing({"x": spread(1.0)}, "its process ended")}
    assert not trial.is_faster(part, "part")
    assert dict(trial.ranked(part))["part"] == 2.0


@interpreted
def test_all_candidates_take_turns_and_one_that_fails_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, in_this_process
) -> None:
    its, ran = slot("fwd"), []
    monkeypatch.setattr(Slot, "cases", lambda _: {"a": SMALL, "b": replace(SMALL, causal="top_left")})
    tiles = {"good": TILE, "bad": replace(TILE, num_stages=9)}

    def failing(self: Slot, candidate: Any, inputs: Any, which: str) -> Any:
        ran.append((candidate.num_stages, which))
        if candidate.num_stages == 9:
            raise RuntimeError("out of shared memory")
        return lambda: None

    monkeypatch.setattr(Slot, "_set_up", failing)
    found = trial.timed(its, tiles, CPU, lambda device: lambda timed: 3.0, 0, Budget())
    assert found["bad"] == Timing({}, "RuntimeError: out of shared memory")
    assert ran.count((9, "inference")) == 1
    assert (9, "training") not in ran
    assert set(found["good"].ms) == {f"{x}, {which}" for x in "ab" for which in ("inference", "training")}
    assert found["good"].ms["a, training"].median == 3.0
    spent = trial.timed(its, tiles, CPU, lambda device: lambda timed: 3.0, 0, Budget(0.0))
    assert spent == {"good": Timing(), "bad": Timing()}
    assert trial.timed(its, {}, CPU, lambda device: pytest.fail("nothing to time"), 0, Budget()) == {}


@interpreted
def test_what_was_timed_before_the_device_broke_is_kept(monkeypatch: pytest.MonkeyPatch, in_this_process) -> None:
    monkeypatch.setattr(Slot, "cases", lambda _: {"a": SMALL})
    broken: list[bool] = []

    def breaking(self: Slot, candidate: Any, inputs: Any, which: str) -> Any:
        if candidate.num_stages == 9 and which == "training":
            broken.append(True)
            raise RuntimeError("an illegal memory access was encountered")
        return lambda: None

    def synchronize(device: torch.device) -> None:
        if broken:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(Slot, "_set_up", breaking)
    monkeypatch.setattr("bench.timing.synchronize", synchronize)
    tiles = {"own": TILE, "bad": replace(TILE, num_stages=9), "last": replace(TILE, BLOCK_N=64)}
    found = trial.timed(slot("fwd"), tiles, CPU, lambda device: lambda timed: 3.0, 0, Budget())
    assert found["bad"] == Timing({}, "RuntimeError: an illegal memory access was encountered")
    for name in ("own", "last"):
        assert list(found[name].ms) == ["a, inference"]
        assert "cpu does not work any more, after bad" in found[name].reason


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "candidates": folder, "budget": None, "seed": 0, "commit": "c" * 40, "out": folder, "keep": 3, "jobs": 1,
    }  # fmt: skip
    return argparse.Namespace(**usual | changes)


@interpreted
def test_a_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, in_this_process) -> None:
    its = slot("dq")
    tiles = [replace(TILE, BLOCK_M=rows) for rows in (16, 64, 128)]
    candidates.save(candidates.path("interpreter", tmp_path), {its.name: [Found(x, 99, 1, None) for x in tiles]})
    monkeypatch.setattr(Slot, "cases", lambda _: {"a": SMALL})
    monkeypatch.setattr(Slot, "small_cases", lambda _: {"a": replace(SMALL, seqlen_q=20, seqlen_k=24)})
    verdict = trial.verdict
    monkeypatch.setattr(
        trial, "verdict", lambda s, x, d: iter(["dq uses 300%"]) if x.BLOCK_M == 128 else verdict(s, x, d)
    )  # fmt: skip
    ms = {32: 4.0, 16: 5.0, 64: 2.0}

    def stopwatch(timed: Any) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots.torch.autograd, "grad", lambda *_: configs.lookup("interpreter", 16, torch.float16).dq)
            return ms[timed().BLOCK_M]

    other = slot("fwd")
    assert tune.tune([other, its], CPU, lambda _: stopwatch, options(tmp_path), tune.terminal.console()) == 0
    (written,) = tmp_path.rglob("*-tune.json")
    found = json.loads(written.read_text())
    named = {rows: candidates.tile(replace(TILE, BLOCK_M=rows)) for rows in (16, 64, 128)}
    own = candidates.tile(configs.INTERPRETER.dq)
    (result,) = found["slots"].values()
    assert result["gain"] == {named[64]: 2.0, own: 1.0, named[16]: 0.8}
    assert result["candidates"][named[128]] == {"reason": "dq uses 300%"}
    assert result["candidates"][own]["ms"]["a, backward"]["n"] >= trial.ROUNDS.least
    shown = capsys.readouterr().out
    assert shown.index(named[64]) < shown.index(own) < shown.index(named[16])
    assert f"does not have them: {other.name}\n" in shown
    assert "1 of 2 slots" in shown
    with pytest.raises(CommandError, match="no candidates; python -m bench tune --compile interpreter finds them"):
        tune.tune([other], CPU, lambda _: stopwatch, options(tmp_path), tune.terminal.console())
    with pytest.raises(CommandError, match="no report of python -m bench run"):
        results.read(written)
    assert tune.tune([its], CPU, lambda _: stopwatch, options(tmp_path, budget=1e-9), tune.terminal.console()) == 0
    assert "the budget is spent" in capsys.readouterr().out


@interpreted
def test_a_table_that_is_wrong_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    its = slot("fwd")
    candidates.save(candidates.path("interpreter", tmp_path), {its.name: []})
    monkeypatch.setattr(trial, "apart", lambda *_: iter(["out uses 300%"]))
    assert (
        tune.tune([its], CPU, lambda _: pytest.fail("nothing to time"), options(tmp_path), tune.terminal.console()) == 1
    )
    assert "out uses 300%" in capsys.readouterr().out


def test_what_is_asked_for() -> None:
    parser = command.build_parser()

    def names(*arguments: str) -> list[str]:
        return [x.name for x in tune.slots(parser.parse_args(["tune", *arguments]))]

    assert len(names()) == 2 * len(get_args(Part))
    assert names("--part", "fwd", "--dtype", "float32", "--head-dim", "256", "--work", "dense") == [
        "fwd dense float32 256"
    ]
    assert names("--work", "scored", "--head-dim", "64") == [f"{x} scored bfloat16 64" for x in ("fwd", "dkdv", "dq")]
    assert get_args(Part) == command.PARTS
    assert get_args(configs.Work) == command.WORK
    assert set(command.ARCHS) == set(configs.TABLE)


@pytest.mark.parametrize(("interpret", "message"), [("1", "the interpreter compiles nothing"), ("0", "asked of a GPU")])
def test_nothing_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys, interpret: str, message: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert command.main(["tune", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_candidates_come_from_machine_code(tmp_path: Path) -> None:
    """The table's own tile has no fault; four warps for 128x128 have too few registers."""
    program = f"""
import torch
from pathlib import Path
from bench.tuning import candidates
from bench.tuning.slots import Slot
from fusedattn.kernels.configs import TileConfig
slot = Slot("dq", "streamed", torch.bfloat16, 128)
found = candidates.clean(slot, "sm_90", [slot.config("sm_90"), TileConfig(128, 128, 4, 1)], jobs=1)
candidates.save(Path({str(tmp_path)!r}) / "found.json", {{slot.name: found}})
"""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=300)
    its = slot("dq", 128, torch.bfloat16)
    own = configs.lookup("sm_90", 128, torch.bfloat16).dq
    (found,) = candidates.load(tmp_path / "found.json", its)
    assert replace(found.config, EDGE=own.EDGE) == own
    assert found.config.EDGE >= own.EDGE
    assert 100 < found.registers <= 255
    assert found.predicted is not None
