"""Stopwatches, and the rounds in which contestants take turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)

Timed = Callable[[], object]
SetUp = Callable[[], Timed]  # runs the untimed preparation; returns the function to time

# More than the L2 cache of any GPU. The GPU is busy writing it while the host queues the timed launches; one flush is
# too short for a backward on a fast GPU.
FLUSH_BYTES, FLUSHES = 2**30, 4

SHUFFLE = random.Random(0)  # the order of turns, the same in every process


class OutOfTimeError(Exception):
    """The budget is spent before there is enough to report."""


class Stopwatch(Protocol):
    """Times one run, in milliseconds."""

    def __call__(self, timed: Timed) -> float: ...


class DeviceStopwatch:
    """Time on the GPU between two CUDA events, with an L2 cache that holds none of the inputs."""

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, timed: Timed) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.flush.device)
        for _ in range(FLUSHES):
            self.flush.zero_()
        begin.record()
        timed()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class HostStopwatch:
    """Time on the host. On a GPU: until the call returns, or, with `wait`, until the GPU is done too."""

    def __init__(
        self, device: torch.device, *, wait: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.wait, self.clock = device, wait, clock

    def __call__(self, timed: Timed) -> float:
        synchronize(self.device)
        start = self.clock()
        timed()
        if self.wait:
            synchronize(self.device)
        return 1e3 * (self.clock() - start)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def still_works(device: torch.device) -> bool:
    """Whether no kernel has broken the context of this process."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


class Budget:
    """A limit in seconds; None for no limit."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = None if seconds is None else clock() + seconds

    @property
    def left(self) -> float:
        """The seconds left, at least 0."""
        return math.inf if self.end is None else max(0.0, self.end - self.clock())

    @property
    def is_spent(self) -> bool:
        return self.left == 0.0

    def check(self) -> None:
        if self.is_spent:
            raise OutOfTimeError


@dataclass(frozen=True)
class Rounds:
    """The number of rounds: at least `least`, then until `most` or `seconds`, whichever comes first."""

    least: int = 10
    most: int = 50
    seconds: float = 2.0


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` samples."""

    median: float
    q1: float
    q3: float
    n: int


def spread(samples: list[float]) -> Spread:
    """The spread of one sample or more; quartiles by linear interpolation between the samples."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q1, q3, len(samples))


def without_set_up(runs: Mapping[Name, Timed]) -> dict[Name, SetUp]:
    """Functions to time that need no preparation."""
    return {name: lambda run=run: run for name, run in runs.items()}  # type: ignore[misc]


def medians(runs: Mapping[Name, SetUp], stopwatch: Stopwatch, rounds: Rounds) -> dict[Name, float]:
    """The median of each of :func:`interleaved` runs, in milliseconds; raises what one of them raised."""
    samples, failures = interleaved(runs, stopwatch, rounds, Budget())
    if failures:
        raise next(iter(failures.values()))
    return {name: spread(found).median for name, found in samples.items()}


def interleaved(
    runs: Mapping[Name, SetUp], stopwatch: Stopwatch, rounds: Rounds, budget: Budget
) -> tuple[dict[Name, list[float]], dict[Name, Exception]]:
    """Samples of each run, in milliseconds, and exceptions by run; a run that raised takes no further turn.

    In every round each run has one turn, in a new random order, so that drifting clocks and the effects of the previous
    run affect all alike.

    Raises:
        OutOfTimeError: the budget is spent before the least number of rounds.
    """
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    failures: dict[Name, Exception] = {}
    began = budget.clock()
    for done in range(rounds.most):
        if done >= rounds.least and (budget.is_spent or budget.clock() - began >= rounds.seconds):
            break
        order = list(samples)
        SHUFFLE.shuffle(order)
        for name in order:
            if done < rounds.least:
                budget.check()
            try:
                samples[name].append(stopwatch(runs[name]()))
            except Exception as error:  # for example, if others left too little memory
                failures[name] = error.with_traceback(None)  # frames of a traceback hold tensors
                del samples[name]
    return samples, failures
