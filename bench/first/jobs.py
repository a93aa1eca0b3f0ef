"""The tests of each kernel and feature: independent jobs that any process can run."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch

from bench.measuring.environment import is_hopper
from bench.measuring.gate import Gate
from bench.tuning.slots import Slot, holding_one_pass
from bench.work import functions
from bench.work.work import HOPPER, ONE_PASS, OWN, Work
from fusedattn import attention, testing
from fusedattn.cli.check import command
from fusedattn.kernels import devices, hopper
from fusedattn.kernels.configs import Style, TileConfig
from fusedattn.testing import FP8Case, LinearCase, Ratios, Results, fp8, linear
from fusedattn.testing.cases import Case, Inputs, make_inputs
from fusedattn.testing.linear_cases import make_linear_inputs

STYLES: tuple[Style, ...] = ("pipelined", "descriptors")


@dataclass(frozen=True)
class Answer:
    """The result of a job; `text` describes a failure or the figures."""

    ok: bool
    text: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job(ABC):
    """One test; `name` is unique in its part."""

    name: str

    @property
    @abstractmethod
    def part(self) -> str:
        """The part it belongs to; all jobs of a part run before those of the next."""

    @abstractmethod
    def run(self, device: torch.device) -> Answer:
        """Run the test; an exception is a failure too."""


@dataclass(frozen=True)
class Smoke(Job):
    """A call, forward and (except of a cache) backward, that launches for the first time the kernels in its name.

    The call is repeated, and must give the same bits, because launches may be recorded and replayed.
    """

    part: ClassVar[str] = "smoke"
    case: Case
    deterministic: bool = True
    CALLS: ClassVar[int] = 3  # the second may be recorded, the third replayed

    def run(self, device: torch.device) -> Answer:
        call, compare = self._prepare(device)
        first, *others = (call() for _ in range(self.CALLS))
        answer = within_budget(compare(first))
        # Sums in any order differ from run to run.
        repeated = [{name: x for name, x in found.items() if self.deterministic or name != "dq"} for found in others]
        wrong = [text for found in repeated for text in _differences(found, first, "the first call")]
        return replace(answer, ok=answer.ok and not wrong, text="; ".join([*filter(None, [answer.text]), *wrong]))

    def _prepare(self, device: torch.device) -> tuple[Callable[[], Results], Callable[[Results], dict[str, Ratios]]]:
        """The call, and the comparison of its results with the truth."""
        inputs = make_inputs(self.case, device)

        def compare(found: Results) -> dict[str, Ratios]:
            truth, eager, terms = testing.golden(inputs), testing.baseline(inputs), testing.bias_terms(inputs)
            return testing.compare_results(found, truth, eager, inputs.q.dtype, terms)

        return functools.partial(self._results, inputs), compare

    def _results(self, inputs: Inputs) -> Results:
        if inputs.cache is not None:
            return testing.run_cached(inputs, "triton")
        call: Any = functools.partial(attention, backend="triton", deterministic=self.deterministic)
        with nullcontext() if self.deterministic else holding_one_pass():
            return testing.run(call, inputs)


@dataclass(frozen=True)
class LinearSmoke(Smoke):
    """A call of linear attention."""

    case: LinearCase  # type: ignore[assignment]  # another kind of call

    def _prepare(self, device: torch.device) -> tuple[Callable[[], Results], Callable[[Results], dict[str, Ratios]]]:
        inputs = make_linear_inputs(self.case, device)
        call = functools.partial(linear.run_linear, linear.linear_on("triton"), self.case, inputs)
        return call, functools.partial(linear.compare_linear, self.case, inputs)


@dataclass(frozen=True)
class FP8Smoke(Smoke):
    """A call in 8 bits, which has no backward; left out where a GPU has no such products."""

    case: FP8Case

    def run(self, device: torch.device) -> Answer:
        reasons = fp8.fp8_reasons(self.case, "triton", device)
        return Answer(True, reasons[0]) if reasons else super().run(device)

    def _prepare(self, device: torch.device) -> tuple[Callable[[], Results], Callable[[Results], dict[str, Ratios]]]:
        inputs = make_inputs(self.case, device)
        call = functools.partial(fp8.run_fp8, self.case, inputs, "triton")
        return call, functools.partial(fp8.compare_fp8, self.case, inputs)


@dataclass(frozen=True)
class HopperSmoke(Smoke):
    """A call by the kernels for Hopper; left out on other GPUs."""

    def run(self, device: torch.device) -> Answer:
        if not is_hopper(device):
            return Answer(True, "these kernels are for compute capability 9.0")
        with hopper.choosing("all"):
            return super().run(device)


@dataclass(frozen=True)
class Styles(Job):
    """The forward in both styles, with the tile of the table: each within budget, and both with the same bits."""

    part: ClassVar[str] = "styles"
    case: Case
    REPEATS: ClassVar[int] = 3  # a race may not show at once

    def run(self, device: torch.device) -> Answer:
        inputs = make_inputs(self.case, device)
        slot = Slot("fwd", "streamed", self.case.dtype, self.case.head_dim)
        tile = cast(TileConfig, slot.config(devices.arch_of(device)))
        truth, eager = testing.golden(inputs), testing.baseline(inputs)
        wrong: list[str] = []
        used: dict[str, float] = {}
        first: Results | None = None
        for style in STYLES:
            for _ in range(self.REPEATS):
                with slot.holding(replace(tile, style=style)):
                    found = _both_forwards(inputs)
                first = first or found
                wrong += [f"{style}: {text}" for text in _differences(found, first, STYLES[0])]
            of = {name: name.partition(" ")[0] for name in found}
            of_style = within_budget({name: testing.compare(found[name], truth[x], eager[x]) for name, x in of.items()})
            used |= {f"{style}, {name}": x for name, x in of_style.figures.items()}
            wrong += [f"{style}: {text}" for text in [of_style.text] if text]
        return Answer(not wrong, "; ".join(dict.fromkeys(wrong)), used)


def _both_forwards(inputs: Inputs) -> Results:
    """out and lse as computed in a training step, and as computed without gradients."""
    leaves = inputs.with_leaves({name: x.detach().requires_grad_() for name, x in inputs.leaves.items()})
    out, lse = attention(leaves.q, leaves.k, leaves.v, backend="triton", return_lse=True, **leaves.options)
    with torch.no_grad():
        alone = attention(inputs.q, inputs.k, inputs.v, backend="triton", return_lse=True, **inputs.options)
    names = ("out", "lse", "out without gradients", "lse without gradients")
    return dict(zip(names, (out.detach(), lse.detach(), *alone), strict=True))


def _differences(found: Results, first: Results, of: str) -> list[str]:
    """Sentences about results whose bits differ from the first."""
    return [
        f"{name} has {int((x != first[name]).sum())} of {x.numel()} elements of other bits than {of}, "
        f"by {(x.double() - first[name].double()).abs().max():.2g} at most"
        for name, x in found.items()
        if not torch.equal(x, first[name])
    ]


@dataclass(frozen=True)
class Check(Job):
    """The error budget of one feature in one dtype."""

    case: Case | LinearCase

    @property
    def part(self) -> str:
        return f"check {str(self.case.dtype).removeprefix('torch.')}"

    def run(self, device: torch.device) -> Answer:
        return within_budget(command.measure(self.case, "triton", device))


@dataclass(frozen=True)
class Before(Job):
    """Preparation for a timing: the checks of its kind, and compilation of its kernels."""

    part: ClassVar[str] = "goals' kernels"
    work: Work

    def run(self, device: torch.device) -> Answer:
        gate = Gate(device)
        ok = gate.passes(self.work.cases())
        for name, prepare in self.work.contestants(device, functions.choose([])).items():
            if name in (OWN, ONE_PASS, HOPPER):
                prepare().set_up()()
        most = gate.report()["most_used"]
        text = "; ".join(f"{name}: {reason}" for name, reason in gate.failures.items())
        return Answer(ok, text, {} if most is None else {"used": most})


def within_budget(ratios: dict[str, Ratios]) -> Answer:
    """The answer whether every tensor is within the budget, with the share that each uses."""
    wrong = [f"{name} uses {r.used:.0%} of the error budget" for name, r in ratios.items() if not r.ok]
    return Answer(not wrong, ", ".join(wrong), {name: r.used for name, r in ratios.items()})
