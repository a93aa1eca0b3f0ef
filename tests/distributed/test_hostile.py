"""Problems that are easy to get wrong when tokens are split: few of them, hidden NaN, huge scores, odd numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing import Case
from tests.conftest import BACKENDS, EVERYTHING, assert_equal, assert_results_accurate
from tests.distributed import sharded
from tests.distributed.own_tokens import context_of, contexts_of
from tests.distributed.processes import NEEDS_PROCESSES, in_steps, without_trouble
from tests.helpers import quick
from tests.helpers.hostile import LAYOUTS, FuzzProblem

pytestmark = NEEDS_PROCESSES

BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=29, seqlen_k=29, head_dim=8)
CAUSAL = replace(BASE, causal="bottom_right")


def hidden(*values: str) -> tuple[tuple[str, str, str], ...]:
    """One of these values in all keys and values that no query sees, and in biases of hidden scores."""
    return tuple((name, values[i % len(values)], "hidden") for i, name in enumerate("kv"))


PROBLEMS: dict[str, FuzzProblem] = {
    "NaN in padding": FuzzProblem(replace(CAUSAL, padding="uneven"), poison=hidden("nan")),
    "infinity in padding on the left": FuzzProblem(replace(BASE, padding="left"), poison=hidden("inf", "-inf")),
    "NaN in a batch of padding": FuzzProblem(
        replace(BASE, padding="uneven", empty_batch=True, sinks=True), poison=hidden("nan", "inf")
    ),
    "a batch of padding": FuzzProblem(replace(BASE, padding="right", empty_batch=True)),
    "NaN outside of documents": FuzzProblem(
        replace(CAUSAL, documents="shuffled", padding="uneven"), poison=hidden("nan")
    ),
    "NaN behind a window": FuzzProblem(
        replace(BASE, seqlen_q=7, causal="bottom_right", window=(4, 0)), poison=hidden("nan", "inf")
    ),
    "the largest numbers in padding": FuzzProblem(replace(BASE, padding="uneven"), poison=hidden("highest", "lowest")),
    "some queries see nothing": FuzzProblem(BASE, rows="some empty"),
    "each query sees one key": FuzzProblem(BASE, rows="one key"),
    "no query sees anything": FuzzProblem(replace(BASE, boolean=None), rows="all empty", poison=hidden("nan")),
    "no query sees anything but sinks": FuzzProblem(replace(BASE, sinks=True), rows="all empty", poison=hidden("nan")),
    "one token": FuzzProblem(replace(CAUSAL, seqlen_q=1, seqlen_k=1)),
    "two tokens": FuzzProblem(replace(CAUSAL, seqlen_q=2, seqlen_k=2, sinks=True)),
    "one query": FuzzProblem(replace(CAUSAL, seqlen_q=1)),
    "one key": FuzzProblem(replace(BASE, seqlen_k=1)),
    "a key and causal queries": FuzzProblem(replace(CAUSAL, seqlen_q=5, seqlen_k=1)),
    "no keys": FuzzProblem(replace(BASE, seqlen_k=0)),
    "no keys but sinks": FuzzProblem(replace(BASE, seqlen_k=0, sinks=True)),
    "no queries": FuzzProblem(replace(BASE, seqlen_q=0)),
    "no tokens": FuzzProblem(replace(CAUSAL, seqlen_q=0, seqlen_k=0)),
    "no batch": FuzzProblem(replace(CAUSAL, batch=0)),
    "three tokens, with a bias": FuzzProblem(
        replace(CAUSAL, seqlen_q=3, seqlen_k=3, bias="full", relative="per_query")
    ),
    "two tokens, with a bias that broadcasts": FuzzProblem(replace(CAUSAL, seqlen_q=2, seqlen_k=2, bias="per_key")),
    "three tokens of a tree": FuzzProblem(replace(BASE, seqlen_q=3, seqlen_k=5, tree=True)),
    "scores of 1e4": FuzzProblem(CAUSAL, magnitudes={"q": 100.0, "k": 100.0}),
    "scores of 1e30": FuzzProblem(replace(BASE, window=(8, 8)), magnitudes={"q": 1e15, "k": 1e15}),
    "the largest scores of float16": FuzzProblem(
        replace(CAUSAL, dtype=torch.float16), magnitudes={"q": 100.0, "k": 100.0}
    ),
    "a bias of 1e4": FuzzProblem(replace(CAUSAL, bias="full"), magnitudes={"bias": 1e4}),
    "a bias of -inf": FuzzProblem(replace(CAUSAL, bias="full", bias_inf=True)),
    "sinks that take all weight": FuzzProblem(replace(CAUSAL, sinks=True), magnitudes={"sinks": 500.0}),
    "large values": FuzzProblem(replace(CAUSAL, dtype=torch.bfloat16), magnitudes={"v": 1e30, "dout": 1e-30}),
    "denormals": FuzzProblem(CAUSAL, magnitudes={"k": 1e-40, "v": 1e-40, "dout": 1e-30}),
    "keys and values with an offset": FuzzProblem(replace(CAUSAL, offset=30.0)),
    "a negative scale": FuzzProblem(replace(CAUSAL, scale=-0.7)),
    "a scale of 0": FuzzProblem(replace(CAUSAL, scale=0.0)),
    "other features of values": FuzzProblem(replace(CAUSAL, head_dim_v=5)),
    "one feature": FuzzProblem(replace(CAUSAL, head_dim=1)),
    "twelve heads for three": FuzzProblem(replace(CAUSAL, nheads_q=12, nheads_kv=3)),
    "twelve heads for six": FuzzProblem(replace(CAUSAL, nheads_q=12, nheads_kv=6)),
    "four heads for one": FuzzProblem(replace(CAUSAL, nheads_kv=1, sinks=True, alibi="per_batch")),
    "primes": FuzzProblem(replace(CAUSAL, seqlen_q=31, seqlen_k=53)),
    "primes, more queries": FuzzProblem(replace(CAUSAL, seqlen_q=53, seqlen_k=31)),
    "primes, aligned at the start": FuzzProblem(replace(BASE, causal="top_left", seqlen_q=31, seqlen_k=53)),
    "a window narrower than a chunk": FuzzProblem(replace(BASE, window=(1, 0))),
    "a window ahead": FuzzProblem(replace(BASE, window=(0, 40))),
    "a prefix from the start": FuzzProblem(replace(BASE, prefix=True, causal="top_left", seqlen_q=20)),
    "a bias for each query": FuzzProblem(replace(CAUSAL, bias="per_query", dtype=torch.bfloat16)),
    "a bias of float32 for bfloat16": FuzzProblem(
        replace(CAUSAL, bias="per_head", dtype=torch.bfloat16, bias_dtype=torch.float32)
    ),
    "a mask that broadcasts": FuzzProblem(replace(CAUSAL, boolean="broadcast"), broadcast={"boolean": (2,)}),
    "blocks": FuzzProblem(replace(CAUSAL, layout=16, seqlen_q=128, seqlen_k=256)),
    "dropout with sinks": FuzzProblem(replace(CAUSAL, dropout_p=0.4, sinks=True, nheads_kv=1)),
    "dropout of nearly all": FuzzProblem(replace(CAUSAL, dropout_p=0.95)),
    "float64": FuzzProblem(replace(CAUSAL, dtype=torch.float64, rope="half", softcap=0.5)),
    "everything": FuzzProblem(replace(EVERYTHING, layout=None, nheads_q=4, nheads_kv=2)),
    "everything, strided": FuzzProblem(
        replace(EVERYTHING, layout=None, nheads_q=4, nheads_kv=2), strided_constants=True
    ),
}

LAYOUT_PROBLEM = FuzzProblem(replace(CAUSAL, dtype=torch.bfloat16, seqlen_q=19))
OF_LAYOUTS = ("transposed", "seqlen_first", "packed", "sliced", "every_other")

# By the kernels, which the interpreter takes long to run.
ONLY_INTERPRETED = ("scores of 1e30",)  # torch's functions compute the weights from lse, which rounds too much there
INTERPRETED = ("NaN in padding", "one token", "no keys", "scores of 1e4", "primes", *ONLY_INTERPRETED)


def solve(step: str, backend: str) -> dict[str, Tensor]:
    """In each process: the results of a problem."""
    of_context, name = step.split(": ")
    if name in OF_LAYOUTS:
        inputs, layout = LAYOUT_PROBLEM.inputs("cpu"), LAYOUTS[name]
        return sharded.solve(inputs, context_of(of_context), backend, layout)
    return sharded.solve(PROBLEMS[name].inputs("cpu"), context_of(of_context), backend)


def names_of(backend: str) -> tuple[str, ...]:
    if backend == "triton":
        return INTERPRETED
    return (*(name for name in PROBLEMS if name not in ONLY_INTERPRETED), *OF_LAYOUTS)


Solved = Callable[..., Any]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """The results of each rank by number of processes and backend: all problems share processes, which start slowly."""
    directory = tmp_path_factory.mktemp("processes")

    @functools.cache
    def results(world: int, backend: str) -> dict[str, list[Any]]:
        steps = [f"{x}: {y}" for x in contexts_of(world) for y in names_of(backend)]
        seconds = 30.0 if backend == "torch" else 300.0
        return in_steps(world, directory / f"{world}{backend}", solve, steps, backend, seconds=seconds)

    return results


RUNS = [
    (world, backend, of_context, name)
    for world in (2, 4)
    for backend in BACKENDS
    for of_context in contexts_of(world)
    for name in names_of(backend)
]


@quick.only(world=2, backend="torch")
@pytest.mark.parametrize(("world", "backend", "of_context", "name"), RUNS)
def test_hostile_problems_keep_the_error_budget(
    solved: Solved, world: int, backend: str, of_context: str, name: str
) -> None:
    found = without_trouble(solved(world, backend)[f"{of_context}: {name}"])
    for other in found[1:]:  # joined tokens, and gradients summed over all ranks
        assert_equal(other, found[0])
    problem = LAYOUT_PROBLEM if name in OF_LAYOUTS else PROBLEMS[name]
    inputs = replace(problem, poison=()).inputs("cpu")  # what is hidden changes nothing
    assert_results_accurate(found[0], inputs, testing.golden(inputs), testing.baseline(inputs), name)


@pytest.mark.parametrize("of_context", contexts_of(2))
def test_a_batch_of_padding_has_no_results(solved: Solved, of_context: str) -> None:
    found = without_trouble(solved(2, "torch")[f"{of_context}: a batch of padding"])
    for results in found:
        assert (results["out"][-1] == 0.0).all()
        assert (results["lse"][-1] == -torch.inf).all()
        assert all((results[name][-1] == 0.0).all() for name in ("dq", "dk", "dv"))
        assert results["out"][0].any()


@pytest.mark.parametrize("of_context", contexts_of(2))
@pytest.mark.parametrize("name", ["NaN in padding", "NaN outside of documents", "NaN in a batch of padding"])
def test_hidden_nan_reaches_nothing(solved: Solved, of_context: str, name: str) -> None:
    found = without_trouble(solved(2, "torch")[f"{of_context}: {name}"])
    for results in found:
        assert not any(x.isnan().any() for x in results.values())
