"""Calls of linear attention, drawn at random, and proof that a broken one is detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import LinearState
from tests.conftest import INTERPRETING
from tests.helpers import linear, quick
from tests.helpers.linear import LinearProblem
from tests.helpers.linear_contract import check
from tests.helpers.linear_strategies import linear_problems
from tests.tools import fuzz, reproduce

# Problems that random ones rarely contain.
PROBLEMS = {
    "everything packed": LinearProblem(
        seqlen_q=80, lengths=(64, 0, 13), nheads_q=3, nheads_kv=1, head_dim=20, head_dim_v=70, feature_map="jit",
        valid="some", initial_state=True, dtype=torch.bfloat16, poisoned=True, transposed=True,
    ),
    "no keys after a state": LinearProblem(seqlen_q=3, seqlen_k=0, causal=False, initial_state=True),
    "one feature of one value": LinearProblem(seqlen_q=65, head_dim=1, head_dim_v=1, dtype=torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_contract_holds(problem):
    assert check(problem)


@quick.only(seed=0)
@pytest.mark.parametrize("seed", range(6 if INTERPRETING else 2))
def test_the_contract_holds_for_drawn_problems(seed):
    fuzz.checked(seed, check, linear_problems(), max_examples=fuzz.RUN, database=None)()


Change = Callable[[Tensor, LinearState], tuple[Tensor, LinearState]]


def a_row(x: Tensor) -> Tensor:
    factor = torch.ones_like(x)
    factor[:, :, -1] += 1e-4
    return x * factor


FAULTS: dict[str, tuple[Change, str]] = {
    "a row of out": (lambda out, state: (a_row(out), state), "beyond the budget: out"),
    "the state": (lambda out, state: (out, LinearState(a_row(state.kv), state.k_sum)), "beyond the budget: kv"),
    "sums of features": (lambda out, state: (out, LinearState(state.kv, 1.0001 * state.k_sum)), "budget: .*k_sum"),
    "NaN": (lambda out, state: (out * torch.nan, state), "out is not finite"),
    "another dtype": (lambda out, state: (out.double(), state), "out"),
    "an exception": (lambda out, state: (out.view(7), state), "RuntimeError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(monkeypatch, fault):
    change, message = FAULTS[fault]
    original = linear.on_backend
    monkeypatch.setattr(
        linear, "on_backend", lambda backend: lambda *x, **options: change(*original(backend)(*x, **options))
    )
    problem = LinearProblem(seqlen_q=9)
    with pytest.raises(AssertionError, match=message) as raised:
        check(problem)
    assert str(raised.value).startswith(f"{problem.command}\n")


def test_an_argument_that_is_overwritten_is_noticed(monkeypatch):
    original = linear.on_backend

    def overwriting(backend: str) -> linear.LinearFunction:
        def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            found = original(backend)(q, k, v, **options)
            v.detach()[0, 0, 0, 0] = 9.0
            return found

        return function

    monkeypatch.setattr(linear, "on_backend", overwriting)
    with pytest.raises(AssertionError, match=r"an argument was modified|modified by an inplace operation"):
        check(LinearProblem(seqlen_q=9))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_prints_as_the_call_that_makes_it(problem):
    """The call also works in a shell, between double quotes."""
    assert reproduce.problem_of(repr(problem)) == problem
    assert not set(repr(problem)) & set('"$`\\!\n')


def test_the_long_mode(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "DATABASE", str(tmp_path / "database"))
    subject = fuzz.SUBJECTS["linear"]._replace(check=lambda problem: True)
    assert fuzz.main(60, tmp_path / "fuzz.json", subject) == 0
    results = json.loads((tmp_path / "fuzz.json").read_text())
    assert results["problems"] == sum(results["by_dtype"].values()) == results["compared_with_float64"]
    assert results["of_these"]["packed"] > 0
    assert capsys.readouterr().out.startswith(f"{results['problems']} problems (float32 ")
