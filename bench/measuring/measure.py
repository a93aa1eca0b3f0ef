"""Measure one piece of work: which contestants can do it, whether they agree, and the time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.measuring import ceilings
from bench.measuring.gate import Gate
from bench.measuring.timing import Budget, Rounds, SetUp, Stopwatch, interleaved, spread, synchronize
from bench.work.work import HOPPER, OWN, Contestant, Work, is_own
from fusedattn.cli.demo.memory import peak_memory
from fusedattn.testing.peers import Peer

# Rounding errors in 16 bits are far below this; a different mask, scale or layout is far above.
MOST_DIFFERENT = 0.02
WARM_UPS = 3


@dataclass
class Ready:
    """A contestant that can do the work."""

    set_up: SetUp
    peak_bytes: int | None  # beyond its inputs


def measure(
    work: Work,
    device: torch.device,
    functions: Mapping[str, Peer],
    gate: Gate,
    measured: dict[str, Any],
    rounds: Rounds,
    budget: Budget,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Any]:
    """The result as JSON: for each contestant its times and rate, or the reason why it has none.

    If the work does not pass the gate, nothing is timed. A call that this package does not support is a reason like any
    other; if the package fails, or differs from every other, that is a failure of the gate. `measured` are the
    ceilings; `stopwatch` replaces the work's own in tests.

    Raises:
        OutOfTimeError: the budget is spent before there is enough to report.
    """
    budget.check()
    contestants: dict[str, Any] = {}
    if gate.passes(work.cases()):
        with work.surroundings(device):
            ready, reasons = _prepare(work, device, functions, gate, budget)
            samples, failures = interleaved(
                {name: contestant.set_up for name, contestant in ready.items()},
                stopwatch or work.stopwatch(device),
                rounds,
                budget,
            )
        reasons |= {name: reason(error) for name, error in failures.items()}
        if OWN in failures:
            gate.failures[work.name] = reasons[OWN]
        for name, times in samples.items():
            found = spread([ms / work.repeats for ms in times])
            rate = work.amount / found.median * 1e3
            contestants[name] = {"ms": asdict(found), "rate": rate, "peak_bytes": ready[name].peak_bytes}
    else:
        reasons = {OWN: "not timed, because it is not within the error budget"}
    contestants |= {name: {"reason": text} for name, text in reasons.items()}
    dtype = str(work.dtype).removeprefix("torch.")
    return {
        "name": work.name,
        **asdict(work.place),
        "priority": work.priority,
        "dtype": dtype,
        "unit": work.unit,
        "amount": work.amount,
        "contestants": contestants,
        **_ratios(contestants, measured, work.unit, dtype),
    }


def _ratios(contestants: dict[str, Any], measured: dict[str, Any], unit: str, dtype: str) -> dict[str, Any]:
    """The best of ours and the best of the others, the speedup of ours, and its share of the ceiling."""
    medians = {name: found["ms"]["median"] for name, found in contestants.items() if "ms" in found}
    # Kernels that a user must choose are timed, but are not what the package offers.
    own = min((name for name in medians if is_own(name) and name != HOPPER), key=medians.__getitem__, default=None)
    peer = min((name for name in medians if not is_own(name)), key=medians.__getitem__, default=None)
    ceiling = ceilings.ceiling(measured, unit, dtype)
    return {
        "best_own": own,
        "best_peer": peer,
        "speedup": None if own is None or peer is None else medians[peer] / medians[own],
        "of_ceiling": None if own is None or ceiling is None else contestants[own]["rate"] / ceiling,
    }


def _prepare(
    work: Work, device: torch.device, functions: Mapping[str, Peer], gate: Gate, budget: Budget
) -> tuple[dict[str, Ready], dict[str, str]]:
    """The contestants that can do the work and agree with ours, warmed up; and the reasons for the others."""
    ready: dict[str, Ready] = {}
    reasons: dict[str, str] = {}
    differ: list[str] = []
    ours: Tensor | None = None
    for name, prepare in work.contestants(device, functions).items():
        budget.check()
        try:
            contestant: Contestant = prepare()
            with torch.no_grad():
                answer = contestant.answer()
            if ours is not None and (difference := _difference(answer, ours)) > MOST_DIFFERENT:
                differ.append(name)
                raise ArithmeticError(f"computes something else: it differs from {OWN} by {difference:.2g} of the norm")
            ready[name] = Ready(contestant.set_up, _peak(contestant.set_up, device))
        except Exception as error:  # a failure is a result too
            reasons[name] = reason(error)
            if name == OWN and not isinstance(error, NotImplementedError):
                gate.failures[work.name] = reasons[name]
        else:
            ours = answer if name == OWN else ours
        if name in reasons and device.type == "cuda":
            torch.cuda.empty_cache()
    if differ and not any(name not in (OWN, *differ) for name in ready):
        gate.failures[work.name] = f"differs from every other: {reasons[differ[0]]}"
    return ready, reasons


def _difference(a: Tensor, b: Tensor) -> float:
    """The difference of two tensors relative to the norm of the second; infinite if one has a NaN."""
    a, b = a.detach().float(), b.detach().float()
    difference = ((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
    return difference if difference == difference else float("inf")


def warm_up(set_up: SetUp, device: torch.device) -> None:
    """Compile, choose algorithms, fill caches."""
    for _ in range(WARM_UPS):
        set_up()()
    synchronize(device)


def _peak(set_up: SetUp, device: torch.device) -> int | None:
    """The peak memory of a run, after all compilation."""
    warm_up(set_up, device)
    with peak_memory(device) as peak:
        set_up()()
        synchronize(device)
    return peak.bytes


def reason(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, NotImplementedError) and line else f"{type(error).__name__}: {line}"
