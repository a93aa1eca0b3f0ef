"""Attention alone, forward, backward or both, by this package and by others, on the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.measuring.environment import is_hopper
from bench.measuring.timing import SetUp, Timed
from bench.work import counts, functions
from bench.work.counts import Direction
from bench.work.work import HOPPER, ONE_PASS, OWN, Contestant, Work
from fusedattn import attention, masks
from fusedattn.testing.cases import Case, Inputs, make_inputs
from fusedattn.testing.peers import Peer

# Small enough for a check in float64, in several tiles: a length that tiles divide, and one that none divides. As all
# timed lengths, both are too long for keys to be rotated in registers.
CHECKED_LENGTHS = (512, 461)
CHECKED_CACHE = 4133  # keys of a single query
CHECKED_WINDOW = 100


@dataclass(frozen=True)
class AttentionWork(Work):
    """Attention of one case; `padded` is the share of every sequence that is padding, on the right."""

    case: Case
    direction: Direction = "forward"
    padded: float = 0.0
    compiled: bool = True  # whether contestants that need torch.compile take part

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one query: then bytes count, not operations."""
        return self.case.seqlen_q == 1

    @property
    def unit(self) -> str:
        return "GB/s" if self.is_decode else "TFLOP/s"

    @property
    def amount(self) -> float:
        if self.is_decode:
            return counts.bytes_read_and_written(self.case) / 1e9
        return counts.flops(self.case, self.direction) / 1e12

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def cases(self) -> list[Case]:
        """The same problem with few heads and short sequences."""
        case = self.case
        ratio = case.nheads_q // case.nheads_kv
        small = replace(case, name="", batch=2, nheads_q=2 * ratio, nheads_kv=2)
        if self.padded:
            small = replace(small, padding="right")
        if case.window is not None:
            left, right = (None if x is None else min(x, CHECKED_WINDOW) for x in case.window)
            small = replace(small, window=(left, right))
        if self.is_decode:
            return [replace(small, seqlen_k=min(case.seqlen_k, CHECKED_CACHE))]
        lengths = dict.fromkeys(min(n, case.seqlen_q) for n in CHECKED_LENGTHS)
        return [replace(small, seqlen_q=n, seqlen_k=n) for n in lengths]

    def inputs(self, device: torch.device) -> Inputs:
        """Tensors in the memory layout of models: a cache by heads, all others by tokens, then heads."""
        found = as_models_have_them(make_inputs(self.case, device, drawn_there=True))
        if self.padded:
            n_real = round((1.0 - self.padded) * self.case.seqlen_k)
            real = torch.arange(self.case.seqlen_k, device=device) < n_real
            found = replace(found, mask=found.mask & masks.padding(real.expand(self.case.batch, -1).contiguous()))
        return found

    def contestants(self, device: torch.device, functions_: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        inputs = self.inputs(device)
        others = functions.for_case(self.case, functions_, compiled=self.compiled)
        every: dict[str, Peer] = {**own(self.direction, device), **others}
        found: dict[str, Callable[[], Contestant]] = {
            name: functools.partial(_prepare, function, inputs, self.direction) for name, function in every.items()
        }
        if is_hopper(device) and self.dtype.itemsize == 2 and not self.is_decode:
            found[HOPPER] = lambda: _by_hopper(found[OWN]())
        return found


def as_models_have_them(inputs: Inputs) -> Inputs:
    """The same problem laid out by tokens, then heads; for a single query, the cache by heads."""
    if inputs.q.shape[2] == 1:
        return inputs
    by_token = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.leaves.items() if n in "qkv"}
    dout = inputs.dout.transpose(1, 2).contiguous().transpose(1, 2)
    return replace(inputs.with_leaves(inputs.leaves | by_token), dout=dout)


def own(direction: Direction, device: torch.device) -> dict[str, Peer]:
    """The package's own contestants by name; a backward on a GPU also with sums in any order."""
    found: dict[str, Peer] = {OWN: attention}
    if direction != "forward" and device.type == "cuda":
        found[ONE_PASS] = functools.partial(attention, deterministic=False)
    return found


def _prepare(function: Peer, inputs: Inputs, direction: Direction) -> Contestant:
    return Contestant(_set_up(function, inputs, direction), lambda: _answer(function, inputs))


def _by_hopper(contestant: Contestant) -> Contestant:
    """The same calls by the kernels for Hopper, where these take them."""
    from fusedattn.kernels import hopper

    def set_up() -> Timed:
        with hopper.choosing("all"):
            timed = contestant.set_up()
        return hopper.choosing("all")(timed)

    return Contestant(set_up, hopper.choosing("all")(contestant.answer))


def _set_up(function: Peer, inputs: Inputs, direction: Direction) -> SetUp:
    if direction == "forward":
        return lambda: lambda: _forward(function, inputs)
    # ALiBi slopes are constants in practice; a bias is learned.
    x, wanted = differentiable(inputs, ("q", "k", "v", "bias", "relative"))

    def forward() -> Tensor:
        return function(x.q, x.k, x.v, **x.options)

    def both() -> object:
        return torch.autograd.grad(forward(), wanted, x.dout)

    def backward() -> Timed:
        out = forward()
        return lambda: torch.autograd.grad(out, wanted, x.dout)

    return backward if direction == "backward" else lambda: both


def differentiable(inputs: Inputs, names: Collection[str]) -> tuple[Inputs, list[Tensor]]:
    """The same problem in which the named leaves require grad; and these leaves."""
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in inputs.leaves.items()}
    return inputs.with_leaves(leaves), [x for x in leaves.values() if x.requires_grad]


@torch.no_grad()
def _forward(function: Peer, inputs: Inputs) -> Any:
    return function(inputs.q, inputs.k, inputs.v, **inputs.options)


def _answer(function: Peer, inputs: Inputs) -> Tensor:
    """The output, computed from copies of q and k, because a contestant may overwrite them."""
    copies = {name: inputs.leaves[name].clone(memory_format=torch.preserve_format) for name in ("q", "k")}
    return _forward(function, inputs.with_leaves(inputs.leaves | copies))
