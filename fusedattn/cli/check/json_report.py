"""The JSON of ``check``: every ratio of every function, and the worst of each feature and each tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

import torch

from fusedattn import testing
from fusedattn.cli import machine
from fusedattn.cli.check.comparison import OWN
from fusedattn.cli.check.outcome import Outcome
from fusedattn.support import Backend
from fusedattn.testing import Ratios

Row = dict[str, object]
NUMBERS = ("max", "mean", "row", "used")


def report(
    rounds: Sequence[dict[str, Outcome]], backend: Backend, device: torch.device, compiled: str | None = None
) -> dict[str, object]:
    """The whole report; ``results``, ``features``, ``tensors`` and ``ok`` belong to the fused kernels.

    A round has the outcome of each function for one case and dtype.
    """
    own = [outcomes[OWN] for outcomes in rounds]
    others = [name for name in rounds[0] if name != OWN]
    return {
        "device": machine.describe(device),
        "backend": backend,
        "how": machine.how_it_runs(backend, device, compiled),
        "versions": machine.versions(),
        "budget": {"max": testing.MAX_FACTOR, "mean": testing.MEAN_FACTOR, "row": testing.MAX_FACTOR},
        **_of_one(own),
        "against": [{"name": name, **_of_one([outcomes[name] for outcomes in rounds])} for name in others],
        "ok": all(outcome.ok for outcome in own),
    }


def dumps(report: dict[str, object]) -> str:
    """The report as text, one row per line."""
    text = json.dumps(report, indent=1, allow_nan=False)
    return re.sub(r"\{[^{}]*\}", lambda row: re.sub(r"\n\s*", " ", row[0]), text)


def _of_one(outcomes: list[Outcome]) -> dict[str, list[Row]]:
    """The rows of one function: the ratios of each tensor, the worst of each case, the worst of each tensor."""
    return {
        "results": [row for outcome in outcomes for row in _rows(outcome)],
        "features": [_worst_of_case(outcome) for outcome in outcomes],
        "tensors": list(_worst_of_tensors(outcomes)),
    }


def _rows(outcome: Outcome) -> Iterable[Row]:
    common = {"case": outcome.case, "dtype": outcome.dtype}
    for tensor, r in outcome.ratios.items():
        row = {**common, "tensor": tensor, **_numbers([r]), "ok": r.ok, "lse_gradient": outcome.lse_gradient}
        yield row | ({"note": outcome.notes[tensor]} if tensor in outcome.notes else {})
    for tensor, reason in outcome.missing.items():
        yield {**common, "tensor": tensor, **_numbers([]), "ok": None, "missing": reason}
    if outcome.error is not None:
        yield {**common, "tensor": None, **_numbers([]), "ok": False, "error": outcome.error}


def _worst_of_case(outcome: Outcome) -> Row:
    """The largest of each ratio over the tensors, and the tensor that uses most of its budget."""
    ratios = list(outcome.ratios.values())
    return {
        "case": outcome.case,
        "dtype": outcome.dtype,
        **_numbers(ratios),
        "tensor": outcome.worst[0] if ratios else None,
        "ok": outcome.ok if ratios or outcome.error is not None else None,
    }


def _worst_of_tensors(outcomes: list[Outcome]) -> Iterable[Row]:
    """The largest of each ratio over the cases, and the case that uses most of its budget."""
    for dtype in dict.fromkeys(outcome.dtype for outcome in outcomes):
        for tensor in dict.fromkeys((*testing.ALL_TENSORS, *(x for o in outcomes for x in o.ratios))):
            found = [(o.case, o.ratios[tensor]) for o in outcomes if o.dtype == dtype and tensor in o.ratios]
            if found:
                case, worst = max(found, key=lambda item: item[1].used)
                yield {
                    "tensor": tensor,
                    "dtype": dtype,
                    **_numbers([r for _, r in found]),
                    "case": case,
                    "ok": worst.ok,
                }


def _numbers(ratios: Iterable[Ratios]) -> Row:
    """The largest of each number, in four digits; None if there is none or it is not finite."""
    ratios = list(ratios)
    largest = {name: max((getattr(r, name) for r in ratios), default=math.inf) for name in NUMBERS}
    return {name: float(f"{x:.4g}") if math.isfinite(x) else None for name, x in largest.items()}
