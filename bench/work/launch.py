"""The host time of a call: small problems, with and without a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measuring.timing import HostStopwatch, Stopwatch, Timed
from bench.work.work import OWN, Contestant, Work
from fusedattn import attention, masks
from fusedattn.testing.cases import Case, Inputs, make_inputs
from fusedattn.testing.peers import Peer

CALLS = 20  # in one sample; few enough to never fill the queue of a GPU


@dataclass(frozen=True)
class CallsWork(Work):
    """`CALLS` calls of one case in a row."""

    unit: ClassVar[str] = "calls/s"
    amount: ClassVar[float] = 1.0
    repeats: ClassVar[int] = CALLS
    case: Case

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def cases(self) -> list[Case]:
        return [self.case]


@dataclass(frozen=True)
class LaunchWork(CallsWork):
    """`CALLS` causal forwards in a row, called or replayed; timed until the host is free, or until all are done."""

    how: Literal["called", "CUDA graph"]
    wait: bool

    def stopwatch(self, device: torch.device) -> Stopwatch:
        return HostStopwatch(device, wait=self.wait)

    def contestants(self, device: torch.device, functions: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        inputs = make_inputs(self.case, device, drawn_there=True)
        mask = masks.causal()  # made once, as users do

        def ours() -> Tensor:
            return attention(inputs.q, inputs.k, inputs.v, mask=mask)

        def torchs() -> Tensor:
            grouped = inputs.q.shape[1] != inputs.k.shape[1]
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=grouped)

        calls = {OWN: ours, "sdpa": torchs}
        return {name: functools.partial(self._prepare, call, inputs) for name, call in calls.items()}

    @torch.no_grad()
    def _prepare(self, call: Callable[[], Tensor], inputs: Inputs) -> Contestant:
        without_gradients = torch.no_grad()
        if self.how == "called":
            return Contestant(lambda: without_gradients(repeated(call)), call)
        if not inputs.q.is_cuda:
            raise NotImplementedError("device: got cpu, but CUDA graphs are of a GPU")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # one-time work of the first call cannot be captured
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replayed() -> Tensor:
            graph.replay()
            return out

        return Contestant(lambda: without_gradients(repeated(replayed)), replayed)


def repeated(call: Callable[[], object]) -> Timed:
    """A function that makes `CALLS` calls in a row."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    return calls
