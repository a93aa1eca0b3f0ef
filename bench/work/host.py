"""The host time of a call of the kernels, compared with launches of a kernel with four arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from bench.measuring.timing import HostStopwatch, Stopwatch
from bench.work.launch import CallsWork, repeated
from bench.work.stubbed_driver import launching_nothing
from bench.work.work import OWN, Contestant
from fusedattn import attention, masks
from fusedattn.testing.cases import make_inputs
from fusedattn.testing.peers import Peer

FOUR_ARGUMENTS = "a kernel of four arguments"


@triton.jit
def _copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@dataclass(frozen=True)
class HostWork(CallsWork):
    """`CALLS` calls in a row until the host is free; without a GPU over a driver that launches nothing."""

    backward: bool

    def surroundings(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext() if device.type == "cuda" else launching_nothing()

    def stopwatch(self, device: torch.device) -> Stopwatch:
        return HostStopwatch(device, wait=False)

    def contestants(self, device: torch.device, functions: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        inputs = make_inputs(self.case, device, drawn_there=True)
        q, k, v = (x.detach().requires_grad_(self.backward) for x in (inputs.q, inputs.k, inputs.v))
        mask, rope, dout = masks.causal(), inputs.rope, torch.zeros_like(q)
        x, out = torch.zeros(2, 1024, device=device)

        def ours() -> None:
            result = attention(q, k, v, mask=mask, rope=rope, backend="triton")
            if self.backward:
                torch.autograd.grad(result, (q, k, v), dout)

        def copy() -> None:
            _copy[(1,)](x, out, 1024, BLOCK=1024)

        # The same answer for all: nothing is computed.
        calls = {OWN: ours, FOUR_ARGUMENTS: copy}
        return {
            name: partial(Contestant, partial(repeated, call), torch.zeros(1).clone) for name, call in calls.items()
        }
