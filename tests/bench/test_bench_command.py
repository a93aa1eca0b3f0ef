"""The commands of the bench harness from end to end, and the output of plot, table and compare for result files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.__main__ import main
from bench.measuring import environment, measure
from bench.measuring.timing import Budget
from bench.report import compare, plot, results, table
from bench.report.page import with_block
from bench.work import suites
from bench.work.work import Work
from fusedattn import attention
from fusedattn.cli.errors import CommandError
from tests.helpers import compiling, quick
from tests.helpers.reports import REPORT

CPU = torch.device("cpu")
QUICK = ("run", "--quick", "--device", "cpu")


def report(**changes: Any) -> dict[str, Any]:
    """Two cases written by hand: 2 ms against 3 ms, and 4 ms against nothing."""

    def contestant(ms: float) -> dict[str, Any]:
        return {"ms": {"median": ms, "q1": ms - 0.1, "q3": ms + 0.1, "n": 9}, "rate": 600.0 / ms, "peak_bytes": None}

    rows = []
    for x, found in ((512, {"fusedattn": contestant(2.0), "flex": contestant(3.0)}),
                     (1024, {"fusedattn": contestant(4.0), "flex": {"reason": "no room"}})):  # fmt: skip
        place = {"suite": "forward", "page": "bfloat16", "panel": "causal", "x_name": "seqlen", "x": x}
        rest = {"priority": 0, "dtype": "bfloat16", "unit": "TFLOP/s", "amount": 0.6, "contestants": found}
        ratios = measure._ratios(found, {"matmul": {"bfloat16": 600.0}}, "TFLOP/s", "bfloat16")
        rows.append({"name": f"forward, bfloat16, causal, seqlen {x}", **place, **rest, **ratios})
    return REPORT | {"results": rows} | changes


def written(folder: Path, name: str = "a.json", **changes: Any) -> Path:
    results.write(folder / name, report(**changes))
    return folder / name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correctness": {"ok": False, "failures": {"causal": "dq uses 300%"}}}, "check is red: causal: dq uses 300%"),
        ({"correctness": {"ok": False, "failures": {}}}, "nothing was checked"),
        ({"correctness": None}, "correctness was not checked"),
        ({"format": 0}, "no report of python -m bench run"),
    ],
)
@pytest.mark.parametrize("command", ["plot", "table"])
def test_a_result_that_is_not_green_is_refused(command: str, changes, message: str, tmp_path: Path, capsys) -> None:
    before = (table.PAGE.read_bytes(), table.README.read_bytes())
    assert main([command, str(written(tmp_path, **changes))]) == 2
    assert message in capsys.readouterr().err
    assert (table.PAGE.read_bytes(), table.README.read_bytes()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("found", [{"commit": "unknown", "dirty": None}, {"commit": "a" * 40, "dirty": True}])
def test_a_table_is_of_a_commit(found: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, environment=REPORT["environment"] | found)
    with pytest.raises(CommandError, match="in no known commit"):
        results.read_committed(path)
    assert results.read_green(path)


def test_tables() -> None:
    made = report()
    page, readme = table.PAGE.read_text(), table.README.read_text()
    new_page, new_readme = table.with_results(page, readme, made)
    row = "| 512 | **300 (2.00 ms)** | 200 (3.00 ms) | 1.50x | 50% |"
    assert row in new_page
    assert "- flex: no room (1 of 2)" in new_page
    assert "GPU X" in new_page
    assert "of whose error budgets at most 70% is used" in new_page
    assert "| forward, bfloat16, causal, seqlen 512 | 300 TFLOP/s | 200 TFLOP/s, flex | 1.50x | 50% |" in new_readme
    assert table.with_results(new_page, new_readme, made) == (new_page, new_readme)


def test_cpu_measurements_are_not_in_the_tables_of_a_gpu() -> None:
    made = report(environment=REPORT["environment"] | {"is_gpu": False, "device": "CPU Y"})
    page, readme = table.PAGE.read_text(), table.README.read_text()
    new_page, new_readme = table.with_results(page, readme, made)
    assert new_readme == readme
    assert new_page.index("### Measured on a CPU") < new_page.index("CPU Y")


def test_blocks_of_a_page_are_told_apart() -> None:
    page = "<!-- figures: a -->\n1\n<!-- end of figures -->\n<!-- figures: b -->\n2\n<!-- end of figures -->\n"
    assert with_block(page, "3\n", "b") == page.replace("2\n", "\n3\n\n")
    with pytest.raises(ValueError, match="got 2 pairs"):
        with_block(page, "3")
    with pytest.raises(ValueError, match="got 0 pairs of the comments 'figures: c"):
        with_block(page, "3", "c")


def test_a_plot_has_all_contestants_that_ran(tmp_path: Path, capsys) -> None:
    assert main(["plot", str(written(tmp_path)), "--out", str(tmp_path / "plots")]) == 0
    (path,) = (tmp_path / "plots").iterdir()
    svg = path.read_text()
    assert path.name == "forward-bfloat16.svg"
    for text in ("fusedattn", "flex", "ceiling", "TFLOP/s", "GPU X", "seqlen", "512", "1k"):
        assert text in svg
    again = tmp_path / "again.svg"
    plot.draw(again, report(), "forward", "bfloat16", results.by_page(report())["forward", "bfloat16"])
    assert again.read_text() == svg


def test_a_panel_in_which_nothing_could_run_is_left_out_of_the_plot(tmp_path: Path, capsys) -> None:
    rows = report()["results"]
    rows += [rows[0] | {"panel": "window", "contestants": {"fusedattn": {"reason": "no room"}}}]
    rows += [rows[-1] | {"page": "float16"}]
    assert main(["plot", str(written(tmp_path, results=rows)), "--out", str(tmp_path / "plots")]) == 0
    (path,) = (tmp_path / "plots").iterdir()
    assert path.name == "forward-bfloat16.svg"
    assert "window" not in path.read_text()
    assert "nothing could run: forward, float16, window" in capsys.readouterr().out


def test_panels_are_in_the_order_of_their_numbers() -> None:
    rows = [report()["results"][0] | {"panel": f"batch {n}"} for n in (8, 1, 128, 32)]
    (panels,) = results.by_page(report(results=rows)).values()
    assert list(panels) == ["batch 1", "batch 8", "batch 32", "batch 128"]


def test_compare(tmp_path: Path, capsys) -> None:
    faster = report()
    faster["results"][0]["contestants"]["fusedattn"]["ms"] = {"median": 1.0, "q1": 0.9, "q3": 1.1, "n": 9}
    faster["results"][1]["contestants"]["fusedattn"]["ms"] = {"median": 4.1, "q1": 3.9, "q3": 4.3, "n": 9}
    results.write(tmp_path / "b.json", faster)
    assert main(["compare", str(written(tmp_path)), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 differ beyond the noise" in out
    changes = list(compare.changes(report(), faster))
    assert [(c.contestant, round(c.ratio, 3), c.beyond_noise) for c in changes] == [
        ("fusedattn", 2.0, True),
        ("flex", 1.0, False),
        ("fusedattn", 0.976, False),
    ]
    assert changes[0].least == pytest.approx(1.9 / 1.1)
    slower = next(iter(compare.changes(faster, report())))
    assert slower.ratio == 0.5
    assert slower.beyond_noise


@pytest.mark.thorough
def test_run_quick_then_plot_and_compare(tmp_path: Path) -> None:
    """It runs every suite and names a reason for each contestant that cannot run; the file is complete and green."""
    arguments = (*QUICK, "--out", str(tmp_path), "--against", "sdpa-math", "--against", "sdpa-cudnn")
    done = compiling.run("-m", "bench", *arguments, COLUMNS="100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    (path,) = (tmp_path / "cpu").iterdir()
    made = json.loads(path.read_text())
    assert made["correctness"]["ok"]
    assert made["not_measured"] == []
    assert {row["suite"] for row in made["results"]} == set(suites.SUITES)
    assert f"{len(made['results'])} of {len(made['results'])} measured" in " ".join(done.stdout.split())
    assert made["ceilings"]["copy"] > 0 < made["ceilings"]["matmul"]["float32"]
    for row in made["results"]:
        for name, found in row["contestants"].items():
            assert ("ms" in found) != bool(found.get("reason")), (row["name"], name)
            assert "cudnn" not in name or "for a GPU only" in found["reason"]
        assert row["panel"] == "CUDA graph, until all are done" or row["speedup"] > 0, row["name"]
    assert "torch.sdpa-cudnn: device: got cpu, but torch has CUDNN_ATTENTION for a GPU only" in done.stdout
    assert main(["plot", str(path), "--out", str(tmp_path / "plots")]) == 0
    assert len(list((tmp_path / "plots").iterdir())) == len(results.by_page(made))
    assert main(["compare", str(path), str(path)]) == 0
    assert "CPU" in table.full(made)


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, as if kernels were not interpreted."""
    monkeypatch.setattr("bench.run.interpreting", lambda: False)
    monkeypatch.setattr("bench.run.torch.set_num_threads", lambda n: None)


@pytest.mark.usefixtures("_compiled")
def test_a_budget_stops_cleanly_and_keeps_earlier_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock passes the end of the budget after the second piece of work."""
    done: list[str] = []

    def fake(work: Work, *arguments: Any) -> dict[str, Any]:
        arguments[-1].check()
        done.append(work.name)
        return report()["results"][0] | {"name": work.name}

    monkeypatch.setattr("bench.run.measure", fake)
    monkeypatch.setattr("bench.run.Budget", functools.partial(Budget, clock=lambda: 6.0 * len(done)))
    arguments = [*QUICK, "--out", str(tmp_path), "--suite", "forward"]
    assert main([*arguments, "--budget", "10"]) == 0
    (path,) = (tmp_path / "cpu").iterdir()
    made = results.read(path)
    assert [row["name"] for row in made["results"]] == done
    assert (len(done), len(made["not_measured"])) == (2, 2)
    assert main([*arguments, "--budget", "1"]) == 0
    assert len(list((tmp_path / "cpu").iterdir())) == 2, "a second run must not replace the first"


@pytest.mark.thorough
@pytest.mark.usefixtures("_compiled")
def test_a_red_run_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("fusedattn.cli.check.command.attention", lambda *a, mask, **k: attention(*a, mask=None, **k))
    assert main([*QUICK, "--out", str(tmp_path), "--suite", "forward", "--filter", ", causal"]) == 1
    assert "not correct: " in capsys.readouterr().out
    (path,) = (tmp_path / "cpu").iterdir()
    with pytest.raises(CommandError, match="check is red"):
        results.read_green(path)


@quick.every(5)
@pytest.mark.parametrize(
    ("arguments", "extra", "message"),
    [
        (["--filter", "no such"], {}, "--filter: got 'no such'"),
        (["--against", "no.such:function"], {}, "--against: No module named 'no'"),
        (["--against", "nothing"], {}, "--against: got 'nothing', allowed are"),
        (["--device", "tpu"], {}, "--device: got 'tpu'"),
        ([], {"TRITON_INTERPRET": "1"}, "the interpreter's times say nothing"),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(arguments: list[str], extra: dict[str, str], message: str) -> None:
    done = compiling.run("-m", "bench", *QUICK, *arguments, **extra)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("_compiled")
def test_list_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--list", "--suite", "decode"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("0 decode, grouped queries 4:1, batch 2")


def test_the_environment_names_the_measured_versions() -> None:
    found = environment.describe(CPU, "b" * 40)
    assert found["commit"] == "b" * 40
    assert found["versions"]["torch"] == torch.__version__
    assert environment.folder(CPU) == "cpu"
    assert environment.state(CPU) == {}


@pytest.mark.thorough
def test_the_benchmarks_of_pytest_run_when_asked() -> None:
    assert " passed" in compiling.output("-m", "pytest", "-q", "-p", "no:cacheprovider", "bench")
