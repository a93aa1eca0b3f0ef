"""``check``: the error budget, feature by feature, on this machine."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedattn import attention, testing
from fusedattn.cli import machine
from fusedattn.cli.columns import line
from fusedattn.cli.errors import CommandError
from fusedattn.cli.parser import DTYPES
from fusedattn.support import Backend
from fusedattn.testing import Case, Ratios

EXPLANATION = f"""\
Error against float64 over that of eager PyTorch in the same dtype; shown is the
tensor that uses most of its budget. Allowed are max {testing.MAX_FACTOR}, mean {testing.MEAN_FACTOR} and worst
row {testing.MAX_FACTOR}, and always one unit in the last place (row "-": a row that needs it).
"""
FAILED = Ratios(math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Outcome:
    """One case in one dtype: the ratios of each tensor, or the error that it ended with."""

    case: str
    dtype: str
    ratios: dict[str, Ratios]
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and all(r.ok for r in self.ratios.values())

    @property
    def worst(self) -> tuple[str, Ratios]:
        """The tensor that uses most of its budget."""
        if self.error is not None:
            return "-", FAILED
        return max(self.ratios.items(), key=lambda item: item[1].used)


def run(options: argparse.Namespace) -> int:
    """Exit status 0 if every case is within the budget, 1 if not."""
    device = machine.choose_device(options.device)
    machine.choose_how_triton_runs(device)
    if options.backend == "triton" and (problems := machine.triton_problems(device)):
        raise CommandError(machine.no_triton(problems))
    cases = [case for case in testing.CASES if options.feature.lower() in case.name.lower()]
    if not cases:
        names = ", ".join(repr(case.name) for case in testing.CASES)
        raise CommandError(f"--feature: got {options.feature!r}, which is in none of the names {names}")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the cases are small, and threads that wait for each other cost more than they do
    outcomes = _outcomes(cases, options.dtype or DTYPES, options.backend, device)
    if options.json:
        return _print_json(list(outcomes), options.backend, device)
    return _print_table(outcomes, cases, options.backend, device)


def _outcomes(
    cases: Iterable[Case], dtypes: Iterable[str], backend: Backend, device: torch.device
) -> Iterator[Outcome]:
    for case in cases:
        for dtype in dict.fromkeys(dtypes):
            try:
                ratios = measure(replace(case, dtype=getattr(torch, dtype)), backend, device)
            except Exception as error:  # a kernel that does not run is a result too, and the others still count
                yield Outcome(case.name, dtype, {}, " ".join(f"{type(error).__name__}: {error}".split()))
            else:
                yield Outcome(case.name, dtype, ratios)


def measure(case: Case, backend: Backend, device: torch.device) -> dict[str, Ratios]:
    """What each tensor of a case uses of its budget."""
    inputs = testing.make_inputs(case, device)
    if backend == "triton":
        return testing.check(partial(attention, backend="triton"), inputs)
    # The lse of the torch backend is the reference's own, so that only what comes without it is worth measuring.
    inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    ratios = testing.check(_torch_backend, inputs)
    return {tensor: ratios[tensor] for tensor in ratios if tensor != "lse"}


def _torch_backend(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    out = attention(q, k, v, backend="torch", **arguments)
    _, lse = attention(q, k, v, backend="torch", return_lse=True, **arguments)
    return out, lse


def _print_table(outcomes: Iterable[Outcome], cases: list[Case], backend: Backend, device: torch.device) -> int:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    print(machine.describe(device), machine.how_it_runs(backend, device), versions, "", sep="\n")
    print(EXPLANATION)
    widths = (max(len(case.name) for case in cases), 8, 6, -4, -4, -4, -5, 4)
    print(line(("case", "dtype", "tensor", "max", "mean", "row", "used", ""), widths))
    done = []
    for outcome in outcomes:
        tensor, ratios = outcome.worst
        row = "-" if outcome.ok and ratios.row > testing.MAX_FACTOR else _number(ratios.row)
        numbers = (_number(ratios.max), _number(ratios.mean), row, _percent(ratios.used))
        cells = (outcome.case, outcome.dtype, tensor, *numbers, "ok" if outcome.ok else "FAIL")
        print(line(cells, widths), flush=True)
        if outcome.error is not None:
            print(f"  {outcome.error}", flush=True)
        done.append(outcome)
    failed = sum(not outcome.ok for outcome in done)
    worst = max(done, key=lambda outcome: outcome.worst[1].used)
    tensor, ratios = worst.worst
    print(f"\n{len(done) - failed} of {len(done)} within the budget")
    print(f"most used: {_percent(ratios.used)}, by {tensor} of '{worst.case}' in {worst.dtype}")
    return 1 if failed else 0


def _number(x: float) -> str:
    if x < 99:
        return f"{x:.2f}" if x < 9.99 else f"{x:.0f}"
    return f"{x:.0e}".replace("e+0", "e").replace("e+", "e")


def _percent(used: float) -> str:
    return f"{100 * used:.0f}%" if used < 9.99 else ">999%"


def _print_json(outcomes: list[Outcome], backend: Backend, device: torch.device) -> int:
    results: list[dict[str, object]] = []
    for outcome in outcomes:
        common = {"case": outcome.case, "dtype": outcome.dtype}
        for tensor, r in outcome.ratios.items():
            numbers = {name: _finite(getattr(r, name)) for name in ("max", "mean", "row", "used")}
            results.append({**common, "tensor": tensor, **numbers, "ok": r.ok})
        if outcome.error is not None:
            numbers = dict.fromkeys(("max", "mean", "row", "used"))
            results.append({**common, "tensor": None, **numbers, "ok": False, "error": outcome.error})
    ok = all(outcome.ok for outcome in outcomes)
    report = {
        "device": machine.describe(device),
        "backend": backend,
        "versions": machine.versions(),
        "results": results,
        "ok": ok,
    }
    print(json.dumps(report, indent=1, allow_nan=False))
    return 0 if ok else 1


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
