"""Try candidates on a GPU: check each in a separate process, then time the correct ones in turns, in another."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.measuring.gate import without_gradients
from bench.measuring.measure import reason, warm_up
from bench.measuring.processes import ProcessError, apart
from bench.measuring.timing import (
    Budget,
    OutOfTimeError,
    Rounds,
    SetUp,
    Spread,
    Stopwatch,
    interleaved,
    spread,
    still_works,
)
from bench.tuning.slots import Candidate, Slot
from fusedattn import attention, testing
from fusedattn.testing.cases import make_inputs

ROUNDS = Rounds(least=10, most=40, seconds=1.5)


def wrong(
    slot: Slot, candidates: Mapping[str, Candidate], device: torch.device, jobs: int, budget: Budget
) -> dict[str, str]:
    """Why candidates must not be timed, by name: they exceed the error budget on small problems, fail, or hang.

    Compiled kernels stay in Triton's cache on disk, where the process that times them finds them.
    """

    def why(candidate: Candidate) -> str:
        if budget.is_spent:
            return "not checked, because the budget was spent"
        try:
            return next(apart(verdict, slot, candidate, device))
        except ProcessError as error:
            return str(error)

    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(why, candidates.values())
        return {name: text for name, text in zip(candidates, verdicts, strict=True) if text}


def verdict(slot: Slot, candidate: Candidate, device: torch.device) -> Iterator[str]:
    """Yield one text: the faults of a candidate, empty if it is correct."""
    try:
        with slot.holding(candidate):
            used = dict(_used(slot, device))
    except Exception as error:
        yield reason(error)
    else:
        beyond = (f"{x} uses {share:.0%} of the error budget" for x, share in used.items() if not share <= 1.0)
        yield ", ".join(beyond)


def _used(slot: Slot, device: torch.device) -> Iterator[tuple[str, float]]:
    """The share of the error budget that each tensor of each small problem uses."""
    function = functools.partial(attention, backend="triton", deterministic=slot.part != "one_pass")
    for problem, case in slot.small_cases().items():
        inputs = make_inputs(case, device)
        ratios = testing.check(function, inputs)
        if "inference" in slot.passes:
            ratios["out without gradients"] = without_gradients(inputs, "triton")
        yield from ((f"{tensor} of {problem}", ratio.used) for tensor, ratio in ratios.items())


@dataclass
class Timing:
    """The timings of one candidate: milliseconds by ``<problem>, <pass>``, and the reason if some are missing."""

    ms: dict[str, Spread] = field(default_factory=dict)
    reason: str = ""

    def as_object(self) -> dict[str, Any]:
        ms = {name: asdict(x) for name, x in self.ms.items()}
        return ({"ms": ms} if ms else {}) | ({"reason": self.reason} if self.reason else {})


def timed(
    slot: Slot,
    candidates: Mapping[str, Candidate],
    device: torch.device,
    stopwatch: Callable[[torch.device], Stopwatch],
    budget: Budget,
) -> dict[str, Timing]:
    """Time candidates in turns on every problem of the slot, until the budget is spent or their process dies."""
    timings = {name: Timing() for name in candidates}
    if candidates:
        try:
            for what, spreads, reasons in apart(turns, slot, dict(candidates), device, stopwatch, budget.left):
                for name, found in spreads.items():
                    timings[name].ms[what] = found
                for name, text in reasons.items():
                    timings[name] = Timing({}, text)
        except ProcessError as error:
            for timing in timings.values():
                timing.reason = timing.reason or f"{error}, in which one of all candidates was timed"
    return timings


def turns(
    slot: Slot,
    candidates: dict[str, Candidate],
    device: torch.device,
    stopwatch_of: Callable[[torch.device], Stopwatch],
    seconds: float,
) -> Iterator[tuple[str, dict[str, Spread], dict[str, str]]]:
    """Yield problem and pass, times of the candidates, and reasons for missing ones, until the time is up."""
    budget, stopwatch = Budget(seconds), stopwatch_of(device)
    left = dict(candidates)
    try:
        for problem, case in slot.cases().items():
            for which, set_ups in slot.set_ups(case, device, left).items():
                ready, failures = _warm({name: x for name, x in set_ups.items() if name in left}, device, budget)
                samples, others = interleaved(ready, stopwatch, ROUNDS, budget)
                reasons = {name: reason(error) for name, error in (failures | others).items()}
                yield f"{problem}, {which}", {name: spread(found) for name, found in samples.items()}, reasons
                if not still_works(device):
                    raise ProcessError(f"{device} does not work any more, after {', '.join(reasons)}")
                left = {name: candidate for name, candidate in left.items() if name not in reasons}
    except OutOfTimeError:
        return


def _warm(
    set_ups: Mapping[str, SetUp], device: torch.device, budget: Budget
) -> tuple[dict[str, SetUp], dict[str, Exception]]:
    """The setups that run, compiled, and the errors of the others; stops, without setups, if one breaks the device."""
    ready: dict[str, SetUp] = {}
    failures: dict[str, Exception] = {}
    for name, set_up in set_ups.items():
        budget.check()
        try:
            warm_up(set_up, device)
        except Exception as error:
            failures[name] = error.with_traceback(None)
            if not still_works(device):
                return {}, failures
        else:
            ready[name] = set_up
    return ready, failures


def base(timings: Mapping[str, Timing]) -> str | None:
    """The candidate to compare with: the first that has times, which is the table's own if that is correct."""
    return next((name for name, timing in timings.items() if timing.ms), None)


def gains(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """The speed of each candidate relative to the base, by problem and pass."""
    first = base(timings)
    if first is None:
        return {}
    of_base = timings[first].ms
    return {
        name: {key: of_base[key].median / x.median for key, x in timing.ms.items() if key in of_base}
        for name, timing in timings.items()
        if timing.ms
    }


def ranked(timings: Mapping[str, Timing]) -> list[tuple[str, float]]:
    """Candidates and the geometric mean of their gains, the best first."""
    means = [(name, statistics.geometric_mean(found.values())) for name, found in gains(timings).items() if found]
    return sorted(means, key=lambda pair: -pair[1])


def is_faster(timings: Mapping[str, Timing], name: str) -> bool:
    """Whether a candidate is faster beyond noise: its quartiles lie below those of the base on every problem."""
    first = base(timings)
    if first is None:
        return False
    of_base, found = timings[first].ms, timings[name].ms
    return set(of_base) == set(found) and all(found[key].q3 < of_base[key].q1 for key in of_base)
