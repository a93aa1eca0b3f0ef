"""A piece of work to time: its contestants, the checks that must pass first, and its place in a figure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bench.measuring.timing import DeviceStopwatch, HostStopwatch, SetUp, Stopwatch
from fusedattn.testing.cases import Case
from fusedattn.testing.peers import Peer

OWN = "fusedattn"
ONE_PASS = f"{OWN}, one pass"  # deterministic=False
HOPPER = f"{OWN}, for Hopper"  # by the kernels that must be chosen


def is_own(name: str) -> bool:
    """Whether a contestant is this package: ``"fusedattn"``, or a form of it such as ``"fusedattn, compiled"``."""
    return name.partition(",")[0] == OWN


@dataclass(frozen=True)
class Contestant:
    """One way of doing a piece of work."""

    set_up: SetUp
    answer: Callable[[], Tensor]  # a result that must be the same for all


@dataclass(frozen=True)
class Place:
    """The place of a result: a suite, a page (a figure, a heading), a panel of it, and a value of x."""

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

    repeats: ClassVar[int] = 1  # runs in one timed sample
    place: Place
    priority: int

    @property
    def name(self) -> str:
        """One line, unique among all work."""
        return str(self.place)

    @property
    @abstractmethod
    def unit(self) -> str:
        """The unit of the rate: ``"TFLOP/s"``, ``"GB/s"``, ``"tokens/s"`` or ``"calls/s"``."""

    @property
    @abstractmethod
    def amount(self) -> float:
        """The amount of work of one run, in this unit times seconds."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""

    @abstractmethod
    def cases(self) -> list[Case]:
        """The small problems whose gradients must be within the error budget before this is timed."""

    @abstractmethod
    def contestants(self, device: torch.device, functions: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        """Functions by name that prepare a contestant, or raise if it cannot do this work. The first is our own.

        Args:
            device: the device to run on.
            functions: other attention functions to measure, if the work is attention alone.
        """

    def surroundings(self, device: torch.device) -> AbstractContextManager[None]:
        """A context in which the work is prepared and timed."""
        return nullcontext()

    def stopwatch(self, device: torch.device) -> Stopwatch:
        return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch(device)
