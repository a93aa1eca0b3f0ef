"""Every argument at once, with hostile values, and proof that a broken kernel is detected; ``make fuzz`` tries more."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing import Case
from tests.conftest import DEVICE, INTERPRETING, torch_attention_beside_lse, triton_attention
from tests.helpers import contract, quick
from tests.helpers.contract import check
from tests.helpers.hostile import LAYOUTS, FuzzProblem
from tests.helpers.problems import HALF, PROBLEMS, SMALL
from tests.helpers.strategies import problems
from tests.tools import fuzz, reproduce


def test_results_that_cannot_be_compared_with_the_truth():
    """Rotations of ordinary size can be compared, and so can large scores without a rotation."""
    chosen = PROBLEMS["scores of 100,000, of which the rounding of a rotation chooses the largest"]
    assert contract.rounding_decides(chosen.inputs(DEVICE))
    tiny = FuzzProblem(replace(HALF, seqlen_k=2, seed=0), magnitudes={"v": 1e-40, "dout": 1e4}, dlse=False)
    assert _residual_is_lost(tiny)
    kept = (
        replace(tiny, magnitudes={"v": 1e-36}),
        replace(tiny, magnitudes={"v": 0.0}),
        replace(tiny, case=replace(tiny.case, dtype=torch.float32)),
    )
    assert not any(map(_residual_is_lost, kept))
    ordinary = (replace(chosen, magnitudes={}), FuzzProblem(replace(HALF, rope="half")), PROBLEMS["scores of 1e4"])
    assert not any(contract.rounding_decides(problem.inputs(DEVICE)) for problem in ordinary)


def _residual_is_lost(problem):
    inputs = problem.inputs(DEVICE)
    return contract.residual_is_lost(inputs, testing.golden(inputs))


ALSO_QUICK = [
    PROBLEMS[name]
    for name in (
        "rows of the lowest bias, which gets no gradient",
        "the highest sink, 16 bits",
        "sinks far above and far below the scores",
    )
]


@quick.every(2, problem=lambda problem: problem in ALSO_QUICK)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_contract_holds(problem):
    check(problem)


# On a GPU most problems compile their own kernels.
@quick.only(seed=0)
@pytest.mark.parametrize("seed", range(4 if INTERPRETING else 2))
def test_the_contract_holds_for_drawn_problems(seed):
    fuzz.checked(seed, check, problems(), max_examples=fuzz.RUN, database=None)()


def test_overflow_is_recognised():
    assert not check(PROBLEMS["overflow"])
    assert check(PROBLEMS["scores of 1e4"])


def wrong_out(change: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[..., Any]:
    """The kernels, with `change` applied to out."""

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        result = triton_attention(q, k, v, **options)
        x = {"q": q, "k": k, "v": v, "return_lse": False, **options}
        return (change(result[0], x), result[1]) if x["return_lse"] else change(result, x)

    return function


def wrong_lse(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        result = triton_attention(q, k, v, **options)
        return (result[0], change(result[1])) if isinstance(result, tuple) else result

    return function


def wrong_gradient(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The kernels, with another gradient of q, k, v, the sinks or a tensor of the bias."""

    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(change)
        return x

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        x = {"q": q, "k": k, "v": v, **options}
        if name in x:
            x[name] = hooked(x[name])
        else:
            x["bias"] = replace(x["bias"], **{name: hooked(getattr(x["bias"], name))})
        return triton_attention(**x)

    return function


def wrong_row(x: Tensor, row: int = -1) -> Tensor:
    """``x``, too large by 1e-4 in one row of each head."""
    factor = torch.ones_like(x[0, 0, :, :1])
    factor[row] += 1e-4
    return x * factor


def overwrite(x: Tensor, start: int) -> None:
    """Write into the memory of ``x`` without autograd noticing: its first element, or one that is not its own."""
    x.data.as_strided((1,), (1,), start).fill_(0.5)


MASKED = FuzzProblem(replace(SMALL, causal="bottom_right", seqlen_k=15))
EMPTY = replace(MASKED, rows="some empty")
POISONED = replace(MASKED, poison=(("v", "nan", "one element"),))
BESIDE = replace(MASKED, case=replace(SMALL, causal="top_left"), poison=(("v", "nan", "one element"),))
POISONED_KEY = replace(MASKED, poison=(("k", "nan", "one element"),))

BIASED = FuzzProblem(replace(MASKED.case, bias="per_head", relative="per_query", sinks=True))
EMPTY_WITH_SINKS = replace(EMPTY, case=replace(MASKED.case, sinks=True))

FAULTS: dict[str, tuple[Callable[..., Any], FuzzProblem, str]] = {
    "one row of out": (wrong_out(lambda out, x: wrong_row(out)), MASKED, "out .*budget"),
    "a row beside one that a NaN reaches": (wrong_out(lambda out, x: wrong_row(out, 0)), BESIDE, "out .*budget"),
    "lse": (wrong_lse(lambda lse: lse * (1 + 1e-4)), MASKED, "lse .*budget"),
    "one row of dq": (wrong_gradient("q", wrong_row), MASKED, "dq .*budget"),
    "one row of dk": (wrong_gradient("k", wrong_row), MASKED, "dk .*budget"),
    "one row of dv": (wrong_gradient("v", wrong_row), MASKED, "dv .*budget"),
    "a NaN that spreads": (wrong_out(lambda out, x: out + 0 * x["v"].sum(2).amax(1)[:, None, None]), POISONED, "out"),
    "a NaN that is lost": (wrong_out(lambda out, x: out.nan_to_num()), POISONED, "out: .*lost"),
    "a NaN that is lost in lse": (wrong_lse(lambda lse: lse.nan_to_num(neginf=-math.inf)), POISONED_KEY, "lse: .*lost"),
    "a NaN that is lost in dq": (wrong_gradient("q", lambda g: g.nan_to_num()), POISONED, "dq is not"),
    "a NaN that is lost in dk": (wrong_gradient("k", lambda g: g.nan_to_num()), POISONED, "dk: .*lost"),
    "out of an empty row": (wrong_out(lambda out, x: out + 1e-30), EMPTY, "out of what sees nothing"),
    "-0.0 in an empty row": (wrong_out(lambda out, x: torch.where(out == 0, -0.0, out)), EMPTY, "-0.0"),
    "lse of an empty row": (wrong_lse(lambda lse: lse.clamp(min=-1e30)), EMPTY, "lse of what sees nothing"),
    "lse of a row that is not empty": (wrong_lse(lambda lse: lse - math.inf), FuzzProblem(SMALL), "lse is -inf"),
    "dq of an empty row": (wrong_gradient("q", lambda g: g + 1e-30), EMPTY, "dq of what sees nothing"),
    "dk of a hidden key": (
        wrong_gradient("k", lambda g: g + 1e-30),
        replace(MASKED, case=replace(SMALL, padding="right", seed=1)),
        "dk of what sees nothing",
    ),
    "another run, another number": (wrong_out(lambda out, x: out * (1 + 1e-5 * torch.rand(()))), MASKED, "out"),
    "numbers that depend on what is needed": (
        wrong_out(lambda out, x: out if x["k"].requires_grad else out * (1 + 1e-6)),
        replace(MASKED, needed="v"),
        "out",
    ),
    "numbers that depend on return_lse": (
        wrong_out(lambda out, x: out if x["return_lse"] else out * (1 + 1e-6)),
        MASKED,
        "out without lse",
    ),
    "strides": (
        wrong_out(lambda out, x: out.contiguous()),
        replace(MASKED, layouts={"q": "transposed"}),
        "out has strides",
    ),
    "dtype": (wrong_lse(lambda lse: lse.double()), MASKED, "lse is"),
    "an input as the output": (wrong_out(lambda out, x: x["q"].view_as(x["q"])), MASKED, "share memory"),
    "an input that is modified": (
        wrong_out(lambda out, x: overwrite(x["v"], x["v"].storage_offset()) or out),  # type: ignore[func-returns-value]
        MASKED,
        "v was modified",
    ),
    "memory before an input": (
        wrong_out(lambda out, x: overwrite(x["v"], 0) or out),  # type: ignore[func-returns-value]
        MASKED,
        "v was modified",
    ),
    "one row of dbias": (wrong_gradient("tensor", wrong_row), BIASED, "dbias .*budget"),
    "drelative": (wrong_gradient("relative", lambda g: g * (1 + 1e-4)), BIASED, "drelative .*budget"),
    "dsinks": (wrong_gradient("sinks", lambda g: g * (1 + 1e-3)), BIASED, "dsinks .*budget"),
    "dbias of a hidden pair": (wrong_gradient("tensor", lambda g: g + 1e-30), BIASED, "dbias of what sees nothing"),
    "a NaN in a bias that is lost": (
        wrong_out(lambda out, x: out.nan_to_num()),
        replace(BIASED, poison=(("bias", "nan", "some rows"),)),
        "out: .*lost",
    ),
    "a NaN in a bias that is lost in its gradient": (
        wrong_gradient("tensor", lambda g: g.nan_to_num()),
        replace(BIASED, poison=(("v", "nan", "one element"),)),
        "dbias: .*lost",
    ),
    "a bias that is modified": (
        wrong_out(lambda out, x: overwrite(x["bias"].tensor, x["bias"].tensor.storage_offset()) or out),  # type: ignore[func-returns-value]
        BIASED,
        r"tensor\(x\) was modified",
    ),
    "lse of an empty row that has a sink": (
        wrong_lse(lambda lse: lse + 1e-3),
        EMPTY_WITH_SINKS,
        "lse of what sees nothing is neither",
    ),
    "an exception": (wrong_out(lambda out, x: out.view(7)), MASKED, "RuntimeError"),
}


@quick.every(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(monkeypatch, fault):
    function, problem, message = FAULTS[fault]
    monkeypatch.setattr(contract, "triton_attention", function)
    with pytest.raises(AssertionError, match=message) as raised:
        check(problem)
    assert str(raised.value).startswith(f"{problem.command}\n")


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        (MASKED, wrong_row),
        (EMPTY, lambda out: out + 1e-30),
        (POISONED, lambda out: out.nan_to_num()),
    ],
    ids=["accuracy", "empty rows", "a NaN that is lost"],
)
def test_faults_of_the_torch_backend_are_noticed(monkeypatch, problem, change):
    def function(*x: Tensor, **options: Any) -> Any:
        result = torch_attention_beside_lse(*x, **options)
        return (change(result[0]), result[1]) if isinstance(result, tuple) else change(result)

    monkeypatch.setattr(contract, "torch_attention_beside_lse", function)
    with pytest.raises(AssertionError, match="torch backend: out"):
        check(problem)


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), FuzzProblem(Case()), POISONED], ids=str)
def test_a_problem_prints_as_the_call_that_makes_it(problem):
    """The call also works in a shell, between double quotes."""
    assert reproduce.problem_of(repr(problem)) == problem
    assert not set(repr(problem)) & set('"$`\\!\n')


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_inputs_every_time(layout):
    """In every layout, tensors lie between NaN, and begin at the requested offset."""
    case = replace(SMALL, batch=2, nheads_kv=2)
    problem = FuzzProblem(case, layouts={"k": layout}, storage_offset=3, magnitudes={"k": 2.0})
    one, two = problem.inputs(DEVICE), problem.inputs(DEVICE)
    plain = replace(problem, layouts={}).inputs(DEVICE)
    assert torch.equal(one.k, two.k)
    assert one.k.storage_offset() % 64 == 3
    assert one.k.stride(-1) == (0 if layout == "over_everything" else 1)
    assert (one.k.shape, one.k.stride()) != (plain.k.shape, plain.k.stride()) or layout == "negated"
    assert torch.equal(one.k, plain.k) != (layout == "windows" or layout.startswith("over_"))
    memory = torch.empty(0, dtype=one.k.dtype, device=DEVICE).set_(one.k.untyped_storage())
    assert memory[:64].isnan().all()
    assert memory[-64:].isnan().all()


def test_strided_constants_are_the_same_numbers():
    case = replace(SMALL, padding="uneven", boolean="full", rope="half", rope_tables="per_batch", rope_positions=True)
    plain, strided = (FuzzProblem(case, strided_constants=s).inputs(DEVICE) for s in (False, True))
    for of, name in (("mask", "valid"), ("mask", "allowed"), ("rope", "cos"), ("rope", "sin"), ("rope", "positions_q")):
        x, y = getattr(getattr(plain, of), name), getattr(getattr(strided, of), name)
        assert torch.equal(x, y)
        assert x.stride() != y.stride()


def test_poison_is_where_it_should_be():
    case = replace(SMALL, seqlen_k=40, padding="uneven")
    hidden = FuzzProblem(case, poison=(("k", "nan", "hidden"),)).inputs(DEVICE)
    assert torch.equal(hidden.k.isnan().all(-1)[:, 0], ~hidden.mask.valid)
    one = FuzzProblem(case, poison=(("v", "-inf", "one element"),)).inputs(DEVICE)
    assert int(one.v.isinf().sum()) == 1
    some = FuzzProblem(case, poison=(("dout", "inf", "some rows"),)).inputs(DEVICE)
    assert 0 < int(some.dout.isinf().all(-1).sum()) < some.dlse.numel()


def test_reproduce(monkeypatch, capsys):
    problem = FuzzProblem(replace(SMALL, seqlen_q=3, seqlen_k=3), needed="k")
    monkeypatch.setattr(sys, "argv", ["reproduce", repr(problem)])
    assert reproduce.main() == 0
    assert capsys.readouterr().out == "holds\n"
    monkeypatch.setattr(contract, "triton_attention", wrong_lse(lambda lse: lse + 1))
    assert reproduce.main() == 1
    assert problem.command in capsys.readouterr().err


@pytest.mark.thorough
def test_the_command_runs_in_a_shell():
    problem = FuzzProblem(replace(SMALL, seqlen_q=3, seqlen_k=3), poison=(("k", "nan", "one element"),))
    command = problem.command.replace("python", f"'{sys.executable}' -W ignore", 1)
    done = subprocess.run(
        command, shell=True, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.returncode) == ("holds\n", 0), done.stderr


def test_the_long_mode(monkeypatch, tmp_path, capsys):
    """It counts problems, keeps a failure, and tries it first the next time."""
    monkeypatch.setattr(fuzz, "DATABASE", str(tmp_path / "database"))
    monkeypatch.setattr(fuzz, "MAX_FAILURES", 1)
    tried: list[FuzzProblem] = []

    def fails_on_float16(problem: FuzzProblem) -> bool:
        tried.append(problem)
        if problem.case.dtype == torch.float16:
            raise AssertionError(f"{problem.command}\nbecause")
        return True

    subject = fuzz.SUBJECTS["calls"]
    assert fuzz.main(25, tmp_path / "fuzz.json", subject._replace(check=lambda problem: True)) == 0
    results = json.loads((tmp_path / "fuzz.json").read_text())
    assert 25 <= results["problems"] < 25 + fuzz.RUN
    assert results["problems"] == sum(results["by_dtype"].values()) == results["compared_with_float64"]
    assert capsys.readouterr().out.startswith(f"{results['problems']} problems (float32 ")

    subject = subject._replace(check=fails_on_float16)
    assert fuzz.main(100, tmp_path / "fuzz.json", subject) == 1
    n_tried = json.loads((tmp_path / "fuzz.json").read_text())["problems"]
    assert n_tried < len(tried)  # without the problems tried to shrink the failure
    (command,) = json.loads((tmp_path / "fuzz.json").read_text())["failures"]
    assert f"{command}\n    because\n" in capsys.readouterr().out
    assert "dtype=torch.float16" in command

    tried.clear()
    assert fuzz.main(100, tmp_path / "fuzz.json", subject) == 1
    assert tried[0].command == command


def test_inputs_of_a_case_alone_are_those_of_the_case():
    inputs, expected = FuzzProblem(SMALL).inputs(DEVICE), testing.make_inputs(SMALL, DEVICE)
    for name in ("q", "k", "v", "dout", "dlse"):
        assert torch.equal(getattr(inputs, name), getattr(expected, name))
