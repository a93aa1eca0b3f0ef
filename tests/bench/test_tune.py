"""Tuning: the candidates, proof that they run, that no wrong one is timed, and which one is called faster."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch

import bench.__main__ as command
from bench.measuring import processes
from bench.measuring.timing import Budget, Spread
from bench.report import results
from bench.tuning import candidates, slots, trial, tune
from bench.tuning.candidates import Found
from bench.tuning.slots import Part, Slot
from bench.tuning.trial import Timing
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import configs
from fusedattn.kernels.configs import FewQueries, TileConfig
from fusedattn.testing.cases import Case
from tests.conftest import INTERPRETING
from tests.helpers.compiling import ROOT
from tests.helpers.interpreted import interpreted, seen_launches
from tests.helpers.slots import TILE, slot

CPU = torch.device("cpu")

SMALL = Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=40, seqlen_k=48, head_dim=16, dtype=torch.float16)
# The kernel whose config each part is.
KERNELS: dict[Part, str] = {part: kernels[0] for part, kernels in candidates.KERNELS.items() if part != "few"}


def launched(timed: Callable[[], object]) -> set[tuple[str, int | None, int | None]]:
    """The kernels that a call runs, and their tiles."""
    with seen_launches() as launches:
        timed()
    return {(kernel, tile.get("BLOCK_M"), tile.get("BLOCK_N")) for kernel, tile in launches}


def test_the_candidates_that_are_kept_can_be_tried() -> None:
    """They belong to the slots tried by default, and the table would refuse no tile of theirs."""
    for path in sorted((ROOT / command.CANDIDATES).glob("*-triton-*.json")):
        arch = path.name.partition("-")[0]
        assert arch in configs.TABLE
        chosen = {its.name: its for its in tune.slots(command.build_parser().parse_args(["tune"]))}
        for name in json.loads(path.read_text()):
            found = candidates.load(path, chosen[name])
            assert found
            own, *others = candidates.to_time(chosen[name], arch, found)
            assert own == candidates.tile(chosen[name].config(arch))
            assert len(others) >= 6


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "apart", lambda function, *arguments: function(*arguments))


@interpreted
@pytest.mark.parametrize(("part", "kernel"), KERNELS.items())
def test_the_timed_kernel_is_that_of_the_slot_with_the_candidate(part: Part, kernel: str) -> None:
    for which, set_ups in slot(part).set_ups(SMALL, CPU, {"a": TILE}).items():
        tiled = {(name, m, n) for name, m, n in launched(set_ups["a"]()) if n is not None and m is not None}
        assert tiled == {(kernel, TILE.BLOCK_M, TILE.BLOCK_N)}, which


@interpreted
def test_without_one_pass_both_kernels_run() -> None:
    timed = slot("one_pass").set_ups(SMALL, CPU, {"two kernels": None})["backward"]["two kernels"]()
    assert {"attention_bwd_dkdv", "attention_bwd_dq"} <= {name for name, *_ in launched(timed)}


@interpreted
def test_few_queries_have_the_candidate_and_its_splits() -> None:
    case = replace(SMALL, seqlen_q=1, seqlen_k=150)
    few = FewQueries(TileConfig(16, 32, 4, 1, BOUNDARY=32), split=64)
    found = launched(slot("few").set_ups(case, CPU, {"a": few})["inference"]["a"]())
    assert ("attention_fwd", 16, 32) in found
    assert "attention_combine" in {name for name, *_ in found}


@interpreted
def test_the_table_is_as_it_was_after_a_trial() -> None:
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


def test_a_wrong_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch, in_this_process) -> None:
    """Tiles of 64 rows keep the budget, of 128 exceed it, and of 1024 do not run."""

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
def test_a_candidate_is_checked_by_the_kernels(monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    small = replace(SMALL, seqlen_q=20, seqlen_k=24)
    monkeypatch.setattr(Slot, "small_cases", lambda _: {"a": small})
    names = [name for name, _ in trial._used(slot(part), CPU)]
    assert names[:5] == [f"{x} of a" for x in ("out", "lse", "dq", "dk", "dv")]
    assert ("out without gradients of a" in names) == (part == "fwd")
    verdicts: list[str] = []
    found = launched(lambda: verdicts.extend(trial.verdict(slot(part), TILE, CPU)))
    assert verdicts == [""]
    assert (KERNELS[part], TILE.BLOCK_M, TILE.BLOCK_N) in found


def one_then_exit(number: int) -> Any:
    yield number
    os._exit(number)


def one_then_silence(number: int) -> Any:
    yield number
    time.sleep(600)


def two(number: int) -> Any:
    yield from (number, os.getpid())


@pytest.mark.thorough
def test_answers_before_a_process_dies_or_hangs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    number, process = trial.apart(two, 5)
    assert number == 5
    assert process != os.getpid()
    for function, silence, message in ((one_then_exit, 60.0, "ended with status 7"), (one_then_silence, 0.5, "no ans")):
        monkeypatch.setattr(processes, "SILENCE", 60.0)
        answers = trial.apart(function, 7)
        assert next(answers) == 7
        monkeypatch.setattr(processes, "SILENCE", silence)
        with pytest.raises(trial.ProcessError, match=message):
            next(answers)


def test_a_check_that_dies_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "apart", Mock(side_effect=trial.ProcessError("its process ended with status 7")))
    assert trial.wrong(slot("fwd"), {"a": TILE}, CPU, 1, Budget()) == {"a": "its process ended with status 7"}
    spent = trial.wrong(slot("fwd"), {"a": TILE}, CPU, 1, Budget(0.0))
    assert spent == {"a": "not checked, because the budget was spent"}


@pytest.mark.parametrize(("part", "head_dim"), [*itertools.product(get_args(Part), (64, 128, 256))])
def test_for_triton_some_small_problem_is_the_same_as_each_that_is_timed(part: Part, head_dim: int) -> None:
    """Otherwise the timing would compile again, one by one, the kernels that the check compiled in many processes."""

    def classes(case: Case) -> tuple[Any, ...]:
        numbers = (case.nheads_q, case.nheads_kv, case.seqlen_q, case.seqlen_k)
        others = replace(case, batch=1, nheads_q=1, nheads_kv=1, seqlen_q=1, seqlen_k=1)
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


def test_gains_and_noise() -> None:
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


def timed(tiles: dict[str, TileConfig], budget: Budget | None = None) -> dict[str, Timing]:
    """The timings of a forward, by a stopwatch that always reads 3 ms."""
    return trial.timed(slot("fwd"), tiles, CPU, lambda device: lambda timed: 3.0, budget or Budget())


@interpreted
@pytest.mark.usefixtures("in_this_process")
def test_all_candidates_take_turns_and_one_that_fails_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(Slot, "cases", lambda _: {"a": SMALL, "b": replace(SMALL, causal="top_left")})
    tiles = {"good": TILE, "bad": replace(TILE, num_stages=9)}

    def failing(self: Slot, candidate: Any, inputs: Any, which: str) -> Any:
        ran.append((candidate.num_stages, which))
        if candidate.num_stages == 9:
            raise RuntimeError("out of shared memory")
        return lambda: None

    monkeypatch.setattr(Slot, "_set_up", failing)
    found = timed(tiles)
    assert found["bad"] == Timing({}, "RuntimeError: out of shared memory")
    assert ran.count((9, "inference")) == 1
    assert (9, "training") not in ran
    assert set(found["good"].ms) == {f"{x}, {which}" for x in "ab" for which in ("inference", "training")}
    assert found["good"].ms["a, training"].median == 3.0
    ran.clear()
    assert timed(tiles, Budget(0.0)) == {"good": Timing(), "bad": Timing()}
    assert timed({}) == {}
    assert not ran


@interpreted
def test_timings_before_the_device_broke_are_kept(monkeypatch: pytest.MonkeyPatch, in_this_process) -> None:
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
    monkeypatch.setattr("bench.measuring.timing.synchronize", synchronize)
    tiles = {"own": TILE, "bad": replace(TILE, num_stages=9), "last": replace(TILE, BLOCK_N=64)}
    found = timed(tiles)
    assert found["bad"] == Timing({}, "RuntimeError: an illegal memory access was encountered")
    for name in ("own", "last"):
        assert list(found[name].ms) == ["a, inference"]
        assert "cpu does not work any more, after bad" in found[name].reason


def tuned(folder: Path, *chosen: Slot, stopwatch: Any = None, budget: float | None = None) -> int:
    """The exit status of a command without a GPU."""
    options = argparse.Namespace(
        candidates=folder, budget=budget, commit="c" * 40, out=folder, keep=3, jobs=1
    )  # fmt: skip
    return tune.tune(list(chosen), CPU, lambda _: stopwatch, options, tune.terminal.console())


@pytest.mark.thorough
@interpreted
def test_a_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, in_this_process) -> None:
    its = slot("dq")
    tiles = [replace(TILE, BLOCK_M=rows) for rows in (16, 64, 128)]
    candidates.save(candidates.path("interpreter", tmp_path), {its.name: [Found(x, 99, 1, None) for x in tiles]})
    monkeypatch.setattr(Slot, "cases", lambda _: {"a": SMALL})
    monkeypatch.setattr(Slot, "small_cases", lambda _: {"a": replace(SMALL, seqlen_q=20, seqlen_k=24)})
    verdict, wrong = trial.verdict, ["dq uses 300%"]
    monkeypatch.setattr(trial, "verdict", lambda s, x, d: iter(wrong) if x.BLOCK_M == 128 else verdict(s, x, d))
    ms = {32: 4.0, 16: 5.0, 64: 2.0}

    def stopwatch(timed: Any) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots.torch.autograd, "grad", lambda *_: configs.lookup("interpreter", 16, torch.float16).dq)
            return ms[timed().BLOCK_M]

    other = slot("fwd")
    assert tuned(tmp_path, other, its, stopwatch=stopwatch) == 0
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
        tuned(tmp_path, other)
    with pytest.raises(CommandError, match="no report of python -m bench run"):
        results.read(written)
    assert tuned(tmp_path, its, budget=1e-9) == 0
    assert "the budget is spent" in capsys.readouterr().out


@interpreted
def test_a_table_that_is_wrong_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    its = slot("fwd")
    candidates.save(candidates.path("interpreter", tmp_path), {its.name: []})
    monkeypatch.setattr(trial, "apart", lambda *_: iter(["out uses 300%"]))
    assert tuned(tmp_path, its) == 1
    assert "out uses 300%" in capsys.readouterr().out


def test_choices_of_the_command() -> None:
    parser = command.build_parser()

    def names(*arguments: str) -> list[str]:
        return [x.name for x in tune.slots(parser.parse_args(["tune", *arguments]))]

    assert len(names()) == 2 * len(get_args(Part))
    chosen = names("--part", "fwd", "--dtype", "float32", "--head-dim", "256", "--work", "pairwise")
    assert chosen == ["fwd pairwise float32 256"]
    assert names("--work", "scored", "--head-dim", "64") == [f"{x} scored bfloat16 64" for x in ("fwd", "dkdv", "dq")]
    assert get_args(Part) == command.PARTS
    assert get_args(configs.Work) == command.WORK
    assert set(command.ARCHS) == set(configs.TABLE)


@pytest.mark.parametrize(("interpret", "message"), [("1", "the interpreter compiles nothing"), ("0", "needs a GPU")])
def test_nothing_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys, interpret: str, message: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert command.main(["tune", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
