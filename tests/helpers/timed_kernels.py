"""Collect the kernels that timings on a GPU launch, and those of the checks before them, as Triton identifies them.

    python -m tests.helpers.timed_kernels

Nothing is compiled, and no tensor has memory, so that problems have their full size. Prints as JSON how many kernels
are timed, how many are checked, and those that are timed but missing in the check of their work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bench.codegen import launches
from bench.measuring.gate import Gate
from bench.work import attention as attention_work
from bench.work import launch, suites
from bench.work import model as model_work
from bench.work.attention import AttentionWork
from bench.work.launch import LaunchWork
from bench.work.model import ModelWork
from bench.work.work import Work, is_own
from fusedattn import attention, fuse, testing
from fusedattn.backends.triton import appending, ops
from fusedattn.testing import Measurement, Ratios, budget
from fusedattn.testing.cases import Case

CPU = torch.device("cpu")
NO_ERROR = Ratios(0.0, 0.0, 0.0, 0.0)

Kernels = set[tuple[str, str]]  # name, and Triton's key of the compiled kernel


@contextmanager
def collected() -> Iterator[Kernels]:
    """Inside, tensors have no memory, and launches are collected."""
    found: Kernels = set()

    def instead_of_compiling(*, fn: Any, key: str, **others: Any) -> bool:
        found.add((fn.name, key))
        return True

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(launches.compiling("sm_90"))
        enter(triton.knobs.runtime.scope())
        triton.knobs.runtime.jit_cache_hook = instead_of_compiling
        enter(FakeTensorMode())
        enter(patch.object(FakeTensor, "data_ptr", lambda self: 0))  # as aligned as an allocation
        for module, name in ((ops, "attention_fwd"), (ops, "attention_bwd"), (appending, "cache_append")):
            # The GPU implementation of the operator instead of its fake.
            enter(patch.object(module, name, getattr(module, name)._init_fn))
        yield found


@contextmanager
def by_kernels() -> Iterator[None]:
    """Inside, timings and checks run the kernels, as on a GPU, and no results are compared."""
    own, by_triton = attention_work.own, partial(attention, backend="triton")

    def uncompared(actual: dict[str, Any], *others: Any) -> dict[str, Ratios]:
        return dict.fromkeys(actual, NO_ERROR)

    of_budget: dict[str, Any] = {
        "golden": lambda inputs: dict.fromkeys(testing.ALL_TENSORS),
        "baseline": lambda inputs: dict.fromkeys(testing.ALL_TENSORS),
        "bias_terms": lambda inputs: {},
        "compare": lambda *tensors: NO_ERROR,
        "compare_results": uncompared,
    }
    with ExitStack() as stack:
        for owner, name, value in (
            (attention_work, "attention", by_triton),
            (attention_work, "own", lambda direction, device: own(direction, torch.device("cuda"))),
            (launch, "attention", by_triton),
            (launch, "CALLS", 1),
            (model_work, "fuse", partial(fuse, backend="triton")),
            (model_work, "copy", SimpleNamespace(deepcopy=lambda model: model)),  # fake models cannot be copied
            (Gate, "backend", PropertyMock(return_value="triton")),
            (budget, "_judge", lambda actual, inputs, missing: Measurement(inputs, uncompared(actual), missing, {})),
            *((owner, name, value) for owner in (testing, budget) for name, value in of_budget.items()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def timed(work: Work) -> Kernels:
    """The kernels of a piece of work; replayed ones are the called ones."""
    with collected() as found:
        for name, prepare in work.contestants(CPU, {}).items():
            if is_own(name):
                contestant = prepare()
                with torch.no_grad():
                    contestant.answer()
                contestant.set_up()()
    return found


def checked(case: Case) -> Kernels:
    """The kernels of the check of a case."""
    gate = Gate(CPU)
    with collected() as found:
        passed = gate.passes([case])
    if not passed:
        raise RuntimeError(f"the check of {case} does not run: {gate.failures}")
    return found


def works() -> list[Work]:
    """For each panel the work with the shortest and the longest sequences, and models of one layer.

    Left out are a backward alone, whose kernels a backward after a forward also launches, and replayed calls.
    """
    panels: dict[tuple[str, str, str], list[Work]] = {}
    for work in suites.works(list(suites.SUITES), suites.GPU):
        changed = work
        if isinstance(work, LaunchWork):
            if work.how != "called":
                continue
        elif isinstance(work, AttentionWork):
            if work.direction == "backward":
                continue
            changed = replace(work, compiled=False)
        elif isinstance(work, ModelWork):
            changed = replace(work, compiled=False, size=replace(work.size, n_layers=1), n_new=min(work.n_new, 2))
        panels.setdefault((work.place.suite, work.place.page, work.place.panel), []).append(changed)
    ends = (sorted(found, key=lambda work: work.place.x)[:: max(1, len(found) - 1)] for found in panels.values())
    return [work for found in ends for work in found]


def main() -> None:
    """Compare timed and checked kernels."""
    of_case: dict[Case, Kernels] = {}
    every: Kernels = set()
    unchecked: dict[str, list[str]] = {}
    chosen = works()
    with by_kernels():
        for work in chosen:
            for case in work.cases():
                if case not in of_case:
                    of_case[case] = checked(case)
            found = timed(work)
            every |= found
            for name, _ in sorted(found.difference(*(of_case[case] for case in work.cases()))):
                unchecked.setdefault(work.name, []).append(name.rpartition(".")[2])
    print(
        json.dumps(
            {
                "works": len(chosen),
                "timed": len(every),
                "checked": len(set().union(*of_case.values())),
                "unchecked": unchecked,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
