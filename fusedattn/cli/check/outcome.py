"""The result of ``check`` for one function, case and dtype, and the format of its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fusedattn.testing import Ratios

FAILED = Ratios(math.inf, math.inf, math.inf, math.inf)
LABELS = {
    "drelative": "drel.",
    "dslopes": "dslope",
    "dlearned": "dlearn",
}  # the other tensors have names of six characters at most


@dataclass(frozen=True)
class Outcome:
    """The ratios of each tensor, and the reasons for missing ones; or the error that ended the case."""

    case: str
    dtype: str
    ratios: dict[str, Ratios]
    error: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lse_gradient: bool = True  # whether gradients flow through lse too, rather than through out alone

    @property
    def ok(self) -> bool:
        """Whether every measured tensor is within the budget."""
        return self.error is None and all(r.ok for r in self.ratios.values())

    @property
    def worst(self) -> tuple[str, Ratios]:
        """The tensor that uses most of its budget."""
        if not self.ratios:
            return "-", FAILED
        return max(self.ratios.items(), key=lambda item: item[1].used)


def failed(case: str, dtype: str, error: Exception) -> Outcome:
    """The outcome of a function that raised."""
    return Outcome(case, dtype, {}, " ".join(f"{type(error).__name__}: {error}".split()))


def number(x: float) -> str:
    """A ratio, in four characters."""
    if x < 99:
        return f"{x:.2f}" if x < 9.99 else f"{x:.0f}"
    return f"{x:.0e}".replace("e+0", "e").replace("e+", "e")


def percent(used: float) -> str:
    """A share of the budget, in five characters."""
    return f"{100 * used:.0f}%" if used < 9.99 else ">999%"
