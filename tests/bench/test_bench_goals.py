"""The goals of the package: each refers to existing work, and reports are judged correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import goals
from bench.__main__ import main
from bench.goals import GOALS, Goal
from bench.report import results, table, terminal
from bench.work import suites
from bench.work.model import ModelWork
from fusedattn.cli.errors import CommandError
from fusedattn.transformer import GPTModel
from tests.helpers.reports import REPORT


def row(x: float, *, name: str = "", suite: str = "forward", page: str = "p", panel: str = "a", **found: Any) -> Any:
    """A result: the package takes 4 ms, and 2 ms with a peak of 1 byte; the other takes 3 ms with a peak of 2 bytes."""

    def contestant(ms: float, peak: int) -> dict[str, Any]:
        return {"ms": {"median": ms, "q1": ms, "q3": ms, "n": 9}, "rate": 1.0, "peak_bytes": peak}

    contestants = {
        "fusedattn": contestant(4.0, 9),
        "fusedattn, one pass": contestant(2.0, 1),
        "flex": contestant(3.0, 2),
    }
    ratios = {"best_own": "fusedattn, one pass", "best_peer": "flex", "speedup": 1.5, "of_ceiling": 0.7}
    place = {"suite": suite, "page": page, "panel": panel, "x": x}
    return {"name": name or f"at {x:g}", **place, "contestants": contestants, **ratios, **found}


def goal(at_least: float, figure: goals.Figure = goals.over_best_other, xs: tuple[float, ...] = (1, 2)) -> Goal:
    return Goal("g", figure, at_least, "forward", ("p",), ("a",), xs)


def test_all_that_the_goals_are_about_is_measured() -> None:
    places = [work.place for work in suites.works(list(suites.SUITES), suites.GPU)]
    for each in GOALS:
        found = [place for place in places if each.concerns(place.suite, place.page, place.panel, place.x)]
        assert len(found) == each.n_results, each.name
        assert all(map(goals.concerned, found))
    assert 0 < sum(bool(goals.concerned(place)) for place in places) < len(places)


def test_models_have_as_many_parameters_as_they_are_called_by() -> None:
    units = {"k": 1e3, "M": 1e6}
    for scale in (suites.GPU, suites.CPU, suites.QUICK):
        for work in suites.works(["training"], scale):
            assert isinstance(work, ModelWork)
            model = work._model(torch.device("meta"))
            assert isinstance(model, GPTModel)
            named = float(work.size.parameters[:-1]) * units[work.size.parameters[-1]]
            assert sum(x.numel() for x in model.parameters()) == pytest.approx(named, rel=0.04)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (goals.over_best_other, 1.5),
        (goals.default_over_best_other, 0.75),
        (goals.of_ceiling, 0.7),
        (goals.memory_of_best_other, 2.0),
    ],
)
def test_figures(figure: goals.Figure, expected: float) -> None:
    assert figure(row(1)) == expected
    nothing = dict.fromkeys(("best_own", "best_peer", "speedup", "of_ceiling"))
    assert figure(row(1, **nothing, contestants={})) is None


def test_the_lowest_result_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(at_least: float, *rows: Any) -> tuple[bool | None, int]:
        monkeypatch.setattr(goals, "GOALS", (goal(at_least),))
        (verdict,) = goals.verdicts(REPORT | {"results": list(rows)})
        return verdict.is_reached, verdict.n_found

    assert reached(1.0, row(1), row(2, speedup=1.1)) == (True, 2)
    assert reached(1.2, row(1), row(2, speedup=1.1)) == (False, 2)
    assert reached(1.0, row(1)) == (None, 1)  # no goal is missed, but some results are
    assert reached(1.6, row(1)) == (False, 1)
    assert reached(1.0, row(1), row(2, speedup=None)) == (None, 1)
    assert reached(1.0, row(1), row(2, suite="rope"), row(2, page="q"), row(2, panel="b"), row(3)) == (None, 1)
    assert reached(1.0) == (None, 0)


def test_a_verdict_says_where_it_is_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "GOALS", (goal(1.2), goal(0.9, goals.of_ceiling, xs=(7,))))
    missed, missing = goals.verdicts(REPORT | {"results": [row(1), row(2, speedup=1.125)]})
    assert list(terminal.goal_cells(missed)) == ["g", "1.20", "1.125", "2 of 2", "no", "at 2"]
    assert list(terminal.goal_cells(missing)) == ["g", "0.90", "–", "0 of 1", "–", "–"]


def test_goals_are_not_about_smaller_work_of_the_same_name() -> None:
    assert list(goals.verdicts(REPORT | {"results": [row(1)]}))
    for other in ({"environment": {"is_gpu": False}}, {"arguments": {"quick": True}}):
        assert not list(goals.verdicts(REPORT | other | {"results": [row(1)]}))


def test_goals_are_of_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.run.interpreting", lambda: False)
    assert main(["run", "--goals", "--list", "--device", "cpu"]) == 2
    assert "the goals are for a GPU" in capsys.readouterr().err
    monkeypatch.setattr(suites, "scale_for", lambda *_, quick: suites.GPU)
    assert main(["run", "--goals", "--list", "--device", "cpu", "--suite", "decode"]) == 0
    assert capsys.readouterr().out == "1 decode, grouped queries 4:1, batch 32, cached tokens 4096\n"


def report(*rows: Any, **changes: Any) -> dict[str, Any]:
    return REPORT | {"results": list(rows)} | changes


def test_runs_of_one_commit_on_one_machine_are_one_report() -> None:
    verdict = REPORT["correctness"] | {"cases": 3, "most_used": 0.75}
    a = report(row(1), row(2))
    again = {"ceilings": {"matmul": {"bfloat16": 500.0, "float16": 700.0}, "copy": 3000.0}, "correctness": verdict}
    b = report(row(2, speedup=9.0), row(3), **again)
    both = results.together([a, b])
    assert [(x["x"], x["speedup"]) for x in both["results"]] == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert both["ceilings"] == {"matmul": {"bfloat16": 600.0, "float16": 700.0}, "copy": 4000.0}
    assert both["correctness"] == verdict | {"cases": 7}
    assert results.together([a]) == a


def test_runs_of_different_commits_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = table.PAGE.read_bytes()
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, commit in zip(paths, ("a" * 40, "b" * 40), strict=True):
        results.write(Path(path), report(row(1), environment=REPORT["environment"] | {"commit": commit}))
    for command in ("table", "plot"):
        assert main([command, *paths]) == 2
        assert "differ in commit" in capsys.readouterr().err
    assert table.PAGE.read_bytes() == page


def test_a_quick_run_is_not_a_part_of_another() -> None:
    with pytest.raises(CommandError, match="differ in --quick"):
        results.together([report(row(1)), report(row(2), arguments={"quick": True})])


def test_a_page_has_the_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "GOALS", (goal(1.2),))
    made = report(row(1, x_name="seqlen", unit="TFLOP/s", priority=0))
    assert "| g | 1.20 | 1.500 | 1 of 2 | – | at 1 |" in table.full(made)
    monkeypatch.setattr(goals, "GOALS", (goal(1.2, xs=(9,)),))
    assert "Goals" not in table.full(made)
