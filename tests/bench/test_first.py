"""``python -m bench first``: its jobs cover every kernel, and no failure loses a known result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.first import jobs, plan, pool, timings
from bench.first.jobs import Answer, Job
from bench.first.pool import Kernels
from bench.first.records import Record, Records, read_json
from bench.measuring.timing import Budget
from fusedattn import attention, testing
from tests.helpers.accesses import OUTPUTS
from tests.helpers.compiling import ROOT, environment
from tests.helpers.interpreted import interpreted, seen_launches

CPU = torch.device("cpu")


@pytest.mark.thorough
@interpreted
def test_each_kernel_is_called_once_at_least() -> None:
    named: list[str] = []
    for job in plan.SMOKE:
        kernels = job.name.split(", ")
        with seen_launches() as launches:
            answer = plan.smaller(job).run(CPU)
        assert answer.ok, answer.text
        assert set(kernels) <= {kernel for kernel, _ in launches}
        named += kernels
    assert sorted(named) == sorted(OUTPUTS)


def test_kernels_that_a_gpu_does_not_have_are_left_out() -> None:
    for job in plan.HOPPER:
        assert job.run(CPU) == Answer(True, "these kernels are for compute capability 9.0")


def test_jobs_are_in_the_order_of_importance_and_have_names() -> None:
    for device_type in ("cuda", "cpu"):
        found = plan.jobs(device_type)
        assert len({(job.part, job.name) for job in found}) == len(found)
        parts = list(dict.fromkeys(job.part for job in found))
        assert parts == ["smoke", "styles", "check bfloat16", "check float16", "check float32", "goals' kernels"]
        assert [job.part for job in found] == sorted((job.part for job in found), key=parts.index)
    goals = plan.works("cuda")
    assert {job.name for job in plan.jobs("cuda") if isinstance(job, jobs.Before)} == {work.name for work in goals}
    suites = list(dict.fromkeys(work.place.suite for work in goals))
    assert suites[:2] == ["forward", "backward"]
    assert {job.case.head_dim for job in plan.STYLES} == {64, 128, 256}


@interpreted
def test_styles_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in one bit of one element, far below the error budget."""
    (job, *_) = (job for job in plan.jobs("cpu") if isinstance(job, jobs.Styles))
    assert job.run(CPU).ok
    both = jobs._both_forwards
    calls: list[int] = []

    def changed(inputs: Any) -> Any:
        found = both(inputs)
        calls.append(1)
        if len(calls) > job.REPEATS:
            found["out"].view(torch.int16)[0, 0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(jobs, "_both_forwards", changed)
    answer = job.run(CPU)
    assert len(calls) == 2 * job.REPEATS
    assert not answer.ok
    assert answer.text.startswith("descriptors: out has 1 of ")
    assert "budget" not in answer.text


@interpreted
def test_a_call_that_gives_other_bits_the_third_time_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    job = plan.smaller(plan.SMOKE[0])
    run = testing.run
    calls: list[int] = []

    def changed(*arguments: Any) -> Any:
        found = run(*arguments)
        calls.append(1)
        if len(calls) == job.CALLS:
            found["dk"].view(torch.int16)[0, 0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(testing, "run", changed)
    answer = job.run(CPU)
    assert len(calls) == job.CALLS
    assert not answer.ok
    assert answer.text.startswith("dk has 1 of ")


@interpreted
def test_a_feature_beyond_the_budget_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedattn.cli.check.command.attention", lambda *a, mask, **k: attention(*a, mask=None, **k))
    answer = jobs.Check("causal", testing.CASES[1]).run(CPU)
    assert not answer.ok
    assert "out uses " in answer.text


@dataclass(frozen=True)
class Behaving(Job):
    """A job for the pool that behaves as its name says."""

    part = "x"

    def run(self, device: torch.device) -> Answer:
        what = self.name.split()[0]
        if what == "dies":
            os._exit(7)
        if what == "hangs":
            time.sleep(600)
        if what == "raises":
            raise ValueError("no such thing")
        return Answer(what != "wrong", self.name, {"x": float("inf")})


@pytest.mark.thorough
def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    """Other jobs and later ones still get their results, and no job hangs longer than allowed."""
    names = ["dies", "hangs", "right 1", "raises", "wrong", "right 2"]
    found = pool.run_jobs([Behaving(name) for name in names], CPU, 2, 5.0, Budget(), Kernels())
    records = {record.name: record for record in found}
    assert {name: record.ok for name, record in records.items()} == {name: "right" in name for name in names}
    assert records["dies"].text == "its process ended with status 7"
    assert records["hangs"].text == "its process was silent for 5 s: it hangs"
    assert records["raises"].text == "ValueError: no such thing"


@pytest.mark.thorough
def test_a_spent_budget_leaves_the_rest_for_another_call() -> None:
    began = time.monotonic()
    assert list(pool.run_jobs([Behaving("hangs")], CPU, 1, 60.0, Budget(3.0), Kernels())) == []
    assert time.monotonic() - began < 30.0


def test_a_kernel_that_another_process_has_compiled_is_counted_once() -> None:
    kernels = Kernels()
    for hash, was_found in (("a", False), ("a", True), ("b", True), ("b", True)):
        kernels.add(hash, was_found)
    assert (kernels.compiled, kernels.found) == ({"a"}, {"b"})


def test_records_outlive_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first, second = Record("x", "one", True, figures={"out": 0.5}), Record("x", "two", False, "why")
    records = Records(path)
    records.add(first)
    records.add(second)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert Records(path).by_key == {first.key: first}
        assert path.read_bytes() == whole[: whole.index(b"\n") + 1]
    path.write_bytes(whole)
    again = Records(path)
    again.add(replace(second, ok=True, text="", figures={"out": float("nan")}))
    assert Records(path).by_key[second.key] == Record("x", "two", True, figures={"out": None})
    assert [record.name for record in again.of("x")] == ["one", "two"]


def breaking(connection: Any, works: list[Any], device: str, measured: Any, *_: Any) -> None:
    """Send messages as measure_all does; the name of each work selects what happens."""
    verdict = {"ok": True, "cases": 1, "most_used": 0.5, "failures": {}}
    if not measured:
        connection.send(("ceilings", {"copy": 1.0}))
    for work in works:
        connection.send(("alive", None))
        if work.name == "dies":
            os._exit(9)
        row = {"name": work.name, "contestants": {"fusedattn": {"reason": "no"} if work.name == "refused" else {}}}
        connection.send(("row", (row, verdict)))
        if work.name == "breaks":
            connection.send(("broken", None))
            return
    connection.send(("end", None))


@pytest.mark.thorough
def test_timing_goes_on_after_a_job_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "measure_all", breaking)
    works: list[Any] = [SimpleNamespace(name=name) for name in ("dies", "one", "breaks", "refused", "two")]
    report = {"results": [], "ceilings": {}, "correctness": timings.NOTHING}
    found = [(w.name, text) for w, text in timings.timed(works, report, CPU, 60.0, Budget(), Kernels())]
    death = "while it was timed, its process ended with status 9"
    assert found == [("dies", death), ("one", ""), ("breaks", ""), ("refused", "no"), ("two", "")]
    assert [row["name"] for row in report["results"]] == ["one", "breaks", "refused", "two"]
    assert report["ceilings"] == {"copy": 1.0}
    verdict = report["correctness"]
    assert (verdict["ok"], verdict["failures"]) == (False, {"dies": death})


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench", "first", "--device", "cpu", "--jobs", "2", "--out", str(out), *arguments]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **options)


@pytest.mark.thorough
def test_calls_that_are_killed_at_any_moment_add_up(tmp_path: Path) -> None:
    """Each call finds the complete results of earlier calls, and adds to them."""

    def done() -> dict[tuple[str, str], Record]:
        return Records(tmp_path / "results.jsonl").by_key

    before: dict[tuple[str, str], Record] = {}
    for _ in range(2):
        seconds = random.uniform(0.0, 25.0)
        print("cut after", seconds)
        call = start(tmp_path)
        time.sleep(seconds)
        os.killpg(call.pid, signal.SIGKILL)
        call.communicate()
        for path in tmp_path.glob("*.json"):
            assert isinstance(read_json(path), dict)
        found = done()
        assert before.items() <= found.items()
        before = found

    # A wrong result is kept, shown again, and repeated only on request.
    keys = {(job.part, job.name) for job in plan.jobs("cpu")} | {(plan.TIMINGS, w.name) for w in plan.works("cpu")}
    wrong = ("smoke", "qk_prologue")
    Records(tmp_path / "results.jsonl").add(Record(*wrong, ok=False, text="it hangs"))
    for again, status in (((), 1), (("--again",), 0)):
        call = start(tmp_path, *again)
        out, _ = call.communicate(timeout=600)
        assert call.returncode == status, out
        assert ("WRONG smoke: qk_prologue: it hangs" in out) == bool(status)
        found = done()
        assert found.keys() == keys
        assert all(found[key] == record for key, record in before.items() if key != wrong)
    report = read_json(tmp_path / "timings.json")
    assert {row["name"] for row in report["results"]} == {work.name for work in plan.works("cpu")}
    assert report["format"] == "stubbed", "no table may take these for measurements"
    assert report["correctness"]["ok"]
    assert len(list(tmp_path.iterdir())) <= 8
    assert (tmp_path / "summary.txt").read_text().strip() in out


@pytest.mark.thorough
def test_a_folder_of_other_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps({"sources": "others", "calls": []}))
    call = start(tmp_path)
    out, _ = call.communicate(timeout=120)
    assert call.returncode == 2
    assert "whose results differ in sources" in out
