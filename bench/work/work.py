"""One thing to be timed: which contestants do it, what must be correct first, and where it stands in a figure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.measuring.timing import DeviceStopwatch, HostStopwatch, SetUp, Stopwatch
from fusedattn.testing.cases import Case
from fusedattn.testing.peers import Peer

OWN = "fusedattn"
ONE_PASS = f"{OWN}, one pass"  # deterministic=False


def is_own(name: str) -> bool:
    """Whether a contestant is this package: ``"fusedattn"``, or that in some form, ``"fusedattn, compiled"``."""
    return name.partition(",")[0] == OWN


@dataclass(frozen=True)
class Contestant:
    """One way of doing a piece of work."""

    set_up: SetUp
    answer: Callable[[], Tensor]  # what must be the same for all


@dataclass(frozen=True)
class Place:
    """Where a result stands: in a suite, a page (a figure, a heading), a panel of it, at a value of x."""

    suite: str
    page: str
    panel: str
    x_name: str
    x: float

    def __str__(self) -> str:
        parts = [self.suite, self.page, self.panel, f"{self.x_name} {self.x:g}"]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Work(ABC):
    """A piece of work; `priority` 0 is the most important."""

    place: Place
    priority: int

    @property
    def name(self) -> str:
        """One line, unique among all work."""
        return str(self.place)

    @property
    @abstractmethod
    def unit(self) -> str:
        """Of the rate: ``"TFLOP/s"``, ``"GB/s"``, ``"tokens/s"`` or ``"calls/s"``."""

    @property
    @abstractmethod
    def amount(self) -> float:
        """What one run does, in these units times seconds."""

    @property
    def repeats(self) -> int:
        """How many runs one timed sample is."""
        return 1

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @abstractmethod
    def cases(self) -> list[Case]:
        """The small problems whose gradients must be within the error budget before this is timed."""

    @abstractmethod
    def contestants(self, device: torch.device, functions: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        """By name, what prepares a contestant; it raises where that cannot do this work. The first is our own.

        Args:
            device: where to work.
            functions: attention functions to measure beside ours, where the work is attention alone.
        """

    def surroundings(self, device: torch.device) -> AbstractContextManager[None]:
        """What it is prepared and timed in."""
        return nullcontext()

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """What times it."""
        return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch(device)
