"""Attention over tokens that are split among processes, beside float64 and eager PyTorch on one process."""

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
from tests.conftest import BACKENDS, assert_results_accurate, inputs_of
from tests.distributed import sharded
from tests.distributed.own_tokens import context_of, contexts_of
from tests.distributed.processes import NEEDS_PROCESSES, in_processes
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=37, seqlen_k=37, head_dim=16)

# The fields of BASE that each problem changes.
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "fewer queries than keys, aligned at the start": {"causal": "top_left", "seqlen_q": 22},
    "fewer queries than keys": {"causal": "bottom_right", "seqlen_q": 22, "window": (9, 2)},
    "more queries than keys": {"causal": "bottom_right", "seqlen_k": 22},
    "padding, and an empty batch": {"padding": "uneven", "empty_batch": True, "causal": "bottom_right"},
    "documents": {"documents": "packed", "causal": "bottom_right"},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "boolean": {"boolean": "full"},
    "blocks": {"layout": 16, "seqlen_q": 128, "seqlen_k": 128},
    "tree": {"tree": True},
    "mask function": {"mask_function": True},
    "rope": {"rope": "half", "causal": "bottom_right"},
    "positions, interleaved": {"rope": "interleaved", "rope_positions": True, "rope_tables": "per_batch"},
    "norm": {"qk_norm": "per_head", "rope": "half", "causal": "bottom_right"},
    "norm across heads": {"qk_norm": "across_heads", "rope": "half"},
    "bias": {"bias": "full"},
    "alibi and relative": {"alibi": True, "relative": "per_query", "causal": "bottom_right"},
    "sinks and soft-cap": {"sinks": True, "softcap": 0.7, "window": (9, 0)},
    "score function": {"score_mod": True},
    "dropout": {"dropout_p": 0.3, "causal": "bottom_right"},
    "a KV head for all": {"nheads_kv": 1, "causal": "bottom_right"},
    "bfloat16": {"dtype": torch.bfloat16, "causal": "bottom_right", "rope": "half"},
    "float16": {"dtype": torch.float16, "padding": "left"},
    "fewer tokens than processes": {"seqlen_q": 3, "seqlen_k": 3, "causal": "bottom_right"},
}


def case_of(problem: str) -> Case:
    return replace(BASE, name=problem, **PROBLEMS[problem])


def solve_all(backend: str, modes: tuple[str, ...], problems: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """In each process: the results of every problem in every mode."""
    contexts = {mode: context_of(mode) for mode in modes}
    return {
        (mode, problem): sharded.solve(inputs_of(case_of(problem)), context, backend)
        for mode, context in contexts.items()
        for problem in problems
    }


Solved = Callable[..., Any]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """The results by number of processes and backend: all problems of one run share processes, which start slowly."""
    directory = tmp_path_factory.mktemp("processes")

    @functools.cache
    def results(world: int, backend: str) -> dict[tuple[str, str], dict[str, Tensor]]:
        problems = list(PROBLEMS) if backend == "torch" else list(INTERPRETED)
        folder = directory / f"{world}{backend}"
        return in_processes(world, folder, solve_all, backend, contexts_of(world), problems)[0]

    return results


# By the kernels, which the interpreter takes long to run; tests/public/test_shard.py has the others.
INTERPRETED = ("causal", "documents", "alibi and relative", "dropout", "bfloat16")

RUNS = [
    (world, backend, mode, problem)
    for world in (2, 4)
    for backend in BACKENDS
    for mode in contexts_of(world)
    for problem in (PROBLEMS if backend == "torch" else INTERPRETED)
]


@quick.only(world=2, backend="torch")
@pytest.mark.parametrize(("world", "backend", "mode", "problem"), RUNS)
def test_processes_keep_the_error_budget(solved: Solved, world: int, backend: str, mode: str, problem: str) -> None:
    inputs = inputs_of(case_of(problem))
    found = solved(world, backend)[mode, problem]
    assert_results_accurate(found, inputs, testing.golden(inputs), testing.baseline(inputs), problem)
