"""Calls in 8 bits, drawn at random, and proof that a broken one is detected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import FP8
from fusedattn.testing import Case
from tests.conftest import INTERPRETING, triton_attention
from tests.helpers import quick
from tests.helpers.fp8_contract import FP8Problem, check
from tests.helpers.fp8_strategies import fp8_problems
from tests.tools import fuzz, reproduce

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="no number of a GPU's sums is known to the bit")

# Problems that random ones rarely contain.
PROBLEMS = {
    "everything": FP8Problem(
        Case(batch=3, nheads_q=2, nheads_kv=1, seqlen_q=45, seqlen_k=170, causal="bottom_right", padding="uneven",
             empty_batch=True, boolean="full", rope="interleaved", rotary_dim=20, rope_tables="per_batch", scale=0.3,
             head_dim_v=24, window=(160, 20), prefix=True, documents="packed", layout=32, tree=True, mask_function=True,
             bias="per_head", bias_inf=True, alibi="per_batch", relative="per_query", softcap=3.0, score_mod=True,
             sinks=True, dropout_p=0.2, qk_norm="per_head", seed=33),
        FP8("tensor", rotate=True), hidden=math.nan, unseen=math.nan, transposed=True,
    ),
    "three blocks": FP8Problem(Case(seqlen_q=129, seqlen_k=300, dtype=torch.bfloat16, window=(140, 0)), hidden=1e30),
    "no keys": FP8Problem(Case(seqlen_k=0)),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_contract_holds(problem):
    assert check(problem)


@quick.only(seed=0)
@pytest.mark.parametrize("seed", range(6))
def test_the_contract_holds_for_drawn_problems(seed):
    fuzz.checked(seed, check, fp8_problems(), max_examples=fuzz.RUN, database=None)()


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def a_row(x: Tensor) -> Tensor:
    factor = torch.ones_like(x)
    factor[:, :, -1] += 0.1
    return x * factor


FAULTS: dict[str, tuple[Change, str]] = {
    "a row of out": (lambda out, lse: (a_row(out), lse), "out: .* beyond their rounding"),
    "lse": (lambda out, lse: (out, lse + 1e-4), "lse: .* beyond their rounding"),
    "NaN": (lambda out, lse: (out * math.nan, lse), "out: .* beyond their rounding"),
    "a row that sees nothing": (lambda out, lse: (out, lse.masked_fill(lse > 1.0, -math.inf)), "lse: other rows"),
    "another dtype": (lambda out, lse: (out.double(), lse), "out is torch.float64"),
    "an exception": (lambda out, lse: (out.view(7), lse), "RuntimeError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault):
    change, message = FAULTS[fault]
    problem = FP8Problem(Case(batch=1, seqlen_q=9, seqlen_k=40, head_dim=16))
    with pytest.raises(AssertionError, match=message) as raised:
        check(problem, lambda *x, **options: change(*triton_attention(*x, **options)))
    assert str(raised.value).startswith(f"{problem.command}\n")


def test_an_argument_that_is_overwritten_is_noticed():
    def overwriting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = triton_attention(q, k, v, **options)
        v.view(-1)[0] += 1
        return found

    with pytest.raises(AssertionError, match="v was modified"):
        check(FP8Problem(Case(batch=1, seqlen_q=9, seqlen_k=40)), overwriting)


def test_a_problem_can_be_written_down():
    for problem in PROBLEMS.values():
        assert reproduce.problem_of(repr(problem)).command == problem.command
