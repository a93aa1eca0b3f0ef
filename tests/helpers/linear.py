"""The contract of linear attention as assertions; cases, truth and baseline are those of fusedattn.testing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing.budget import Results, compare
from fusedattn.testing.linear import DEFINITION as TRUTH
from fusedattn.testing.linear import EAGER, LinearFunction
from fusedattn.testing.linear import linear_golden as truth
from fusedattn.testing.linear import linear_on as on_backend
from fusedattn.testing.linear import run_linear as run
from fusedattn.testing.linear_cases import MAPS, LinearCase, LinearInputs
from fusedattn.testing.linear_cases import feature_map_of as map_of
from fusedattn.testing.linear_cases import make_linear_inputs as inputs_of
from fusedattn.testing.linear_terms import sums_of_terms
from tests.conftest import TERMS_LIMIT
from tests.helpers.hostile import call_of

__all__ = ["EAGER", "LEAVES", "MAPS", "TRUTH", "LinearFunction", "LinearInputs", "LinearProblem", "assert_budget"]
__all__ += ["assert_same", "beyond_terms", "inputs_of", "map_of", "on_backend", "ratios", "run", "truth"]

LEAVES = ("q", "k", "v", "kv", "k_sum")


@dataclass(frozen=True, repr=False)
class LinearProblem(LinearCase):
    """A case that can be written down."""

    def __repr__(self) -> str:
        return call_of(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.tools.reproduce "{self!r}"'


def ratios(
    actual: Results, problem: LinearProblem, inputs: LinearInputs, expected: Results | None = None
) -> dict[str, testing.Ratios]:
    """The share of the error budget that each result uses."""
    expected = truth(problem, inputs) if expected is None else expected
    beside = run(EAGER, problem, inputs)
    return {name: compare(x, expected[name], beside[name]) for name, x in actual.items()}


def beyond_terms(
    actual: Results, problem: LinearProblem, inputs: LinearInputs, names: Sequence[str], units: float | None = None
) -> list[str]:
    """Those of `names` with an element that is further from the truth than the units of its terms allow."""
    expected, terms = truth(problem, inputs), sums_of_terms(problem, inputs)
    unit = (units or TERMS_LIMIT[problem.dtype]) * torch.finfo(problem.dtype).eps
    return [
        name
        for name in names
        if not ((actual[name].double() - expected[name]).abs() <= unit * terms[name] + 1e-30).all()
    ]


def assert_budget(problem: LinearProblem, backend: str, device: str, *, few: bool = False) -> None:
    """Fail if a result exceeds the error budget.

    With `few`, for problems in which few numbers decide: eager PyTorch may be exact by accident, and a result may
    instead be as near as units in the last place of the sums of its absolute terms.
    """
    inputs = inputs_of(problem, device)
    actual = run(on_backend(backend), problem, inputs)
    found = ratios(actual, problem, inputs)
    bad = {name: x for name, x in found.items() if not x.used <= 1.0}
    if few and bad:
        bad = {name: bad[name] for name in beyond_terms(actual, problem, inputs, list(bad))}
    assert not bad, f"{problem.command} on {backend}: " + "; ".join(
        f"{name} {r.max:.2f}x max, {r.mean:.2f}x mean, {r.row:.2f}x row, {r.used:.3f} of the budget"
        for name, r in bad.items()
    )


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless all numbers are the same bits, NaN among them."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name].nan_to_num(7.0), x.nan_to_num(7.0)), name
        assert torch.equal(actual[name].isnan(), x.isnan()), name
