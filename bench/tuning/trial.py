"""Candidates on a GPU: each checked in a process of its own, those that are correct timed in turns."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.gate import without_gradients
from bench.measuring import WARM_UPS, reason
from bench.timing import Budget, Rounds, SetUp, Spread, Stopwatch, interleaved, spread
from bench.tuning.slots import Candidate, Slot
from fusedattn import attention, testing
from fusedattn.cases import make_inputs

ROUNDS = Rounds(least=10, most=40, seconds=1.5)
SECONDS_TO_CHECK = 180.0  # a kernel that hangs is not waited for


def wrong(slot: Slot, candidates: Mapping[str, Candidate], device: torch.device, jobs: int) -> dict[str, str]:
    """Why candidates must not be timed, by name: they leave the error budget on small problems, fail, or hang.

    What a process compiles stays in Triton's cache on disk, where the timing finds it. A process ends with its
    candidate: one that has broken its context on the GPU breaks no other.
    """
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda candidate: _apart(slot, candidate, device), candidates.values())
        return {name: text for name, text in zip(candidates, verdicts, strict=True) if text}


def _apart(slot: Slot, candidate: Candidate, device: torch.device) -> str:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_verdict, args=(sender, slot, candidate, device))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS_TO_CHECK) else f"no answer in {SECONDS_TO_CHECK:g} s"
    except EOFError:
        process.join()
        return f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send_verdict(sender: Connection, slot: Slot, candidate: Candidate, device: torch.device) -> None:
    sender.send(verdict(slot, candidate, device))


def verdict(slot: Slot, candidate: Candidate, device: torch.device) -> str:
    """What is wrong with a candidate; empty where it is correct."""
    try:
        with slot.holding(candidate):
            used = dict(_used(slot, device))
    except Exception as error:
        return reason(error)
    return ", ".join(f"{name} uses {share:.0%} of the error budget" for name, share in used.items() if not share <= 1.0)


def _used(slot: Slot, device: torch.device) -> Iterator[tuple[str, float]]:
    """The share of the error budget that each tensor of each small problem uses."""
    function = functools.partial(attention, backend="triton", deterministic=slot.part != "one_pass")
    for problem, case in slot.small_cases().items():
        inputs = make_inputs(case, device)
        ratios = testing.check(function, inputs)
        if "inference" in slot.passes:
            ratios["out without gradients"] = without_gradients(inputs, "triton")
        yield from ((f"{tensor} of {problem}", ratio.used) for tensor, ratio in ratios.items())


@dataclass(frozen=True)
class Timing:
    """Of one candidate: milliseconds by ``<problem>, <pass>``; or why there are none."""

    ms: dict[str, Spread]
    reason: str = ""

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {"reason": self.reason} if self.reason else {"ms": {name: asdict(x) for name, x in self.ms.items()}}


def timed(
    slot: Slot,
    candidates: Mapping[str, Candidate],
    device: torch.device,
    stopwatch: Stopwatch,
    shuffle: random.Random,
    budget: Budget,
    rounds: Rounds = ROUNDS,
) -> dict[str, Timing]:
    """Each candidate on every problem of the slot, all in turns.

    Raises:
        OutOfTimeError: the budget is spent before there is enough to report.
    """
    ms: dict[str, dict[str, Spread]] = {name: {} for name in candidates}
    reasons: dict[str, str] = {}
    for problem, case in slot.cases().items():
        left = {name: candidate for name, candidate in candidates.items() if name not in reasons}
        for which, set_ups in slot.set_ups(case, device, left).items():
            ready, failures = _warm(set_ups, budget)
            samples, others = interleaved(ready, stopwatch, rounds, shuffle, budget)
            reasons |= {name: reason(error) for name, error in (failures | others).items()}
            for name, found in samples.items():
                ms[name][f"{problem}, {which}"] = spread(found)
    return {name: Timing({} if name in reasons else ms[name], reasons.get(name, "")) for name in candidates}


def _warm(set_ups: Mapping[str, SetUp], budget: Budget) -> tuple[dict[str, SetUp], dict[str, Exception]]:
    """Those that run, compiled, and what the others raised."""
    ready: dict[str, SetUp] = {}
    failures: dict[str, Exception] = {}
    for name, set_up in set_ups.items():
        budget.check()
        try:
            for _ in range(WARM_UPS):
                set_up()()
        except Exception as error:
            failures[name] = error.with_traceback(None)
        else:
            ready[name] = set_up
    return ready, failures


def gains(timings: Mapping[str, Timing], own: str) -> dict[str, dict[str, float]]:
    """How many times as fast as the table's each candidate is, by problem and pass; nothing where that has no time."""
    base = timings[own].ms
    return {
        name: {key: base[key].median / x.median for key, x in timing.ms.items() if key in base}
        for name, timing in timings.items()
        if timing.ms and base
    }


def ranked(timings: Mapping[str, Timing], own: str) -> list[tuple[str, float]]:
    """Candidates and the geometric mean of their gains, the best first."""
    means = [(name, statistics.geometric_mean(found.values())) for name, found in gains(timings, own).items()]
    return sorted(means, key=lambda pair: -pair[1])


def is_faster(timings: Mapping[str, Timing], own: str, name: str) -> bool:
    """Whether the quartiles of a candidate lie below the table's on every problem: the difference is no noise."""
    base, found = timings[own].ms, timings[name].ms
    return bool(found) and all(found[key].q3 < base[key].q1 for key in base)
