"""The measurement of attention in few bits: what it measures is attention, and the page shows the committed figures."""

from __future__ import annotations

import json

import pytest
import torch

from bench.low_precision import models, problems
from bench.low_precision.__main__ import PAGE, PARTS, RESULTS, only, shortened
from bench.low_precision.page import SOURCES, recipes_of, tables
from bench.report.page import with_block
from fusedattn import masks
from fusedattn.low_precision import RECIPES, Recipe
from fusedattn.transformer import GPTModel

pytestmark = pytest.mark.usefixtures("_seed")


def test_the_page_has_the_committed_figures() -> None:
    page, report = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))
    assert with_block(page, tables(report), "python -m bench.low_precision") == page, "run with the argument table"
    assert recipes_of(report) == list(RECIPES)
    assert {(row["source"], row["recipe"]) for row in report["rows"]} == {
        (source, recipe) for source in SOURCES for recipe in (*RECIPES, *PARTS)
    }


def test_a_gpt_by_exact_attention_is_itself() -> None:
    model = GPTModel(256, 32, 2, 2, max_len=40, positions="rotary").eval()
    ids = torch.randint(0, 256, (2, 40))
    expected = model(ids)
    recorder = problems.Recorder()
    for attend in (recorder, problems.attend_by(Recipe())):
        models.replace_attention(model, attend)
        torch.testing.assert_close(model(ids), expected)
    assert [problem.q.shape for problem in recorder.problems] == [(2, 2, 40, 16)] * 2
    models.replace_attention(model, problems.attend_by(RECIPES["NVFP4"]))
    assert (model(ids) - expected).abs().max() > 1e-3


def test_errors() -> None:
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    problem = problems.Problem(q, k, v, masks.causal(), 0.5)
    exact, fp4 = problems.errors_of(problem, {"exact": Recipe(), "NVFP4": RECIPES["NVFP4"]})
    assert exact["error"] < 1e-6
    assert exact["cosine"] == pytest.approx(1.0)
    assert 0.05 < fp4["error"] < fp4["largest"] + 0.5
    # The cosine of a small error e, at right angles, is 1 - e^2 / 2.
    assert 1 - fp4["cosine"] == pytest.approx(fp4["error"] ** 2 / 2, rel=0.5)


def test_statistics() -> None:
    x = torch.ones(1, 1, 50, 8)
    x[..., ::2, :] = -1.0
    found = problems.statistics_of(problems.Problem(x, 3 + 0 * x, x, masks.full(), None))
    assert found == {"q, largest": 1.0, "q, mean": 0.0, "k, largest": 1.0, "k, mean": 1.0}


def test_outliers_are_rare_and_large() -> None:
    x = problems.with_outliers().q
    assert 0.0001 < (x.abs() > 6).float().mean() < 0.001
    assert problems.normal().q.abs().max() < 6


def test_only_some_operands() -> None:
    recipe = only(RECIPES["NVFP4, two levels, smooth k"], ("v",))
    assert (recipe.q, recipe.k, recipe.weights) == (None, None, None)
    assert recipe.v is not None
    assert recipe.smooth_k


def test_numbers_are_shortened_unless_they_are_nearly_one() -> None:
    assert shortened({"a": [0.123456789, 0.999999999], "b": "x"}) == {"a": [0.123457, 0.999999999], "b": "x"}
