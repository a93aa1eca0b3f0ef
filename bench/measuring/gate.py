"""The check before a timing: the error budget, on small problems of the kind that is timed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from bench.measuring.environment import is_hopper
from fusedattn import attention, testing
from fusedattn.cli.check import command
from fusedattn.support import Backend, default_backend
from fusedattn.testing import Ratios
from fusedattn.testing.cases import Case, Inputs, make_inputs

# The budget is made for kernels. torch's own function on a CPU uses several times as much, most in float32; wrong
# results use thousands of times as much.
LIMITS: dict[Backend, float] = {"triton": 1.0, "torch": 10.0}


@dataclass
class Gate:
    """Checks each case once, on the device and with the backend that is timed there, and keeps the verdict."""

    device: torch.device
    used: dict[Case, float] = field(default_factory=dict)  # the largest share of the budget that a tensor uses
    failures: dict[str, str] = field(default_factory=dict)  # by case or work

    @property
    def backend(self) -> Backend:
        return default_backend(self.device)

    @property
    def limit(self) -> float:
        """The share of the budget that may be used."""
        return LIMITS[self.backend]

    def passes(self, cases: Iterable[Case]) -> bool:
        """Whether out, lse and all gradients of these cases are within the limit; a cache has no gradients."""
        return all(self._passes(case) for case in cases)

    def _passes(self, case: Case) -> bool:
        if case not in self.used:
            try:
                ratios = command.measure(case, self.backend, self.device)
                ratios["out without gradients"] = without_gradients(make_inputs(case, self.device), self.backend)
                if self.backend == "triton" and case.cache is None:
                    ratios |= self._of_out_alone(case)
                if is_hopper(self.device):
                    ratios |= self._by_hopper(case)
            except Exception as error:  # a kernel that fails is not correct either
                self.failures[_described(case)] = f"{type(error).__name__}: {error}"
                self.used[case] = float("inf")
            else:
                self.used[case] = max(ratio.used for ratio in ratios.values())
                wrong = [f"{name} uses {r.used:.0%}" for name, r in ratios.items() if not r.used <= self.limit]
                if wrong:
                    self.failures[_described(case)] = f"of the error budget {', '.join(wrong)}"
        return self.used[case] <= self.limit

    def _of_out_alone(self, case: Case) -> dict[str, Ratios]:
        """Ratios of gradients summed in any order, through out alone, as they are timed."""
        function = functools.partial(_without_lse, backend=self.backend, deterministic=False)
        found = testing.measure(function, make_inputs(case, self.device)).ratios
        return {f"{name} in one pass": found[name] for name in ("dq", "dk", "dv")}

    def _by_hopper(self, case: Case) -> dict[str, Ratios]:
        """Ratios of the same by the kernels for Hopper, where these take the case."""
        from fusedattn.kernels import hopper

        with hopper.choosing("all"):
            found = command.measure(case, self.backend, self.device)
        return {f"{name} by the kernels for Hopper": ratios for name, ratios in found.items()}

    def report(self) -> dict[str, Any]:
        """The verdict as JSON; green if something was checked and nothing failed."""
        finite = [used for used in self.used.values() if used != float("inf")]
        return {
            "ok": bool(self.used) and not self.failures,
            "cases": len(self.used),
            "backend": self.backend,
            "limit": self.limit,
            "most_used": max(finite, default=None),
            "failures": self.failures,
        }


def _without_lse(*tensors: torch.Tensor, return_lse: bool, **options: Any) -> torch.Tensor:
    """Attention that returns no lse."""
    if return_lse:
        raise NotImplementedError("return_lse: the gradients that are timed are those of out alone")
    return attention(*tensors, **options)


def without_gradients(inputs: Inputs, backend: Backend) -> Ratios:
    """Ratios of out alone, computed without gradients, as the forward is timed; this may be another kernel."""
    if inputs.cache is not None:
        out = testing.run_cached(inputs, backend, return_lse=False)["out"]
    else:
        with torch.no_grad():
            out = attention(inputs.q, inputs.k, inputs.v, backend=backend, **inputs.options)
    return testing.compare(out, testing.golden(inputs)["out"], testing.baseline(inputs)["out"])


def _described(case: Case) -> str:
    """The fields of a case that differ from the defaults."""
    usual = Case()
    parts = {f.name: getattr(case, f.name) for f in fields(case)}
    return ", ".join(f"{name}={x}" for name, x in parts.items() if x != getattr(usual, name))
