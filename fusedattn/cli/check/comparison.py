"""The part of ``check`` that measures other functions beside the fused kernels: ``--against``."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from fusedattn import testing
from fusedattn.cli.check.outcome import LABELS, Outcome, failed, number, percent
from fusedattn.cli.columns import line
from fusedattn.cli.errors import CommandError
from fusedattn.testing import Inputs, peers
from fusedattn.testing.peers import Peer

OWN = "fusedattn"
CLOSE = 1.05  # mean errors within this ratio count as equal
LABEL, CELL = 8, 17  # widths; a table of three peers has 80 columns at most

EXPLANATION = f"""\
Error against float64 relative to that of eager PyTorch in the same dtype: the
largest, the mean, and the share of the budget that is used, which includes the
worst row. Allowed are max {testing.MAX_FACTOR}, mean {testing.MEAN_FACTOR} and worst row {testing.MAX_FACTOR},
and always one unit in the last place.
  *  the most accurate: the smallest mean error, and all within {CLOSE - 1:.0%} of it
  !  beyond the budget
Only {OWN} decides the exit status; the others are measured for comparison.
If one of them has no gradient through lse, the gradients of all are those of
out alone.
"""


def find(names: Iterable[str]) -> dict[str, Peer]:
    """The functions of ``--against``, by their full names."""
    found = {}
    for name in names:
        try:
            full_name, function = peers.find(name)
        except Exception as error:  # importing a user's module can raise anything
            what = str(error) if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
            what = what if repr(name) in what else f"got {name!r}: {what}"
            raise CommandError(f"--against: {what}") from error
        found[full_name] = function
    return found


def measure(functions: dict[str, Peer], inputs: Inputs, case: str, dtype: str) -> tuple[dict[str, Outcome], Inputs]:
    """Outcomes of the functions on one problem, and the problem: without a gradient of lse if one function has none."""
    outcomes = {name: _measure(function, inputs, case, dtype) for name, function in functions.items()}
    if any("dq" in outcome.ratios and not outcome.lse_gradient for outcome in outcomes.values()):
        inputs = testing.without_lse_gradient(inputs)
        for name, outcome in outcomes.items():
            if "dq" in outcome.ratios and outcome.lse_gradient:
                outcomes[name] = _measure(functions[name], inputs, case, dtype)
    return outcomes, inputs


def _measure(function: Peer, inputs: Inputs, case: str, dtype: str) -> Outcome:
    try:
        found = testing.measure(function, inputs)
    except Exception as error:  # a failure is a result too
        return failed(case, dtype, error)
    lse_gradient = bool(found.inputs.dlse.any())
    return Outcome(case, dtype, found.ratios, None, found.missing, found.notes, lse_gradient)


class Table:
    """The printed table: a block for each case and dtype, a line for each tensor, a column for each function."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [OWN, *names]
        self.labels = [name.removeprefix("torch.")[-CELL:] for name in self.names]
        self.reasons: dict[str, int] = {}
        self.done: list[dict[str, Outcome]] = []

    def print_head(self) -> None:
        """Print the names of the functions, and below them the names of the numbers."""
        print(self._line("", self.labels))
        print(self._line("", [self._cell("max", "mean", "used")] * len(self.names)))

    def print_block(self, outcomes: dict[str, Outcome]) -> None:
        """Print one case in one dtype; a reason is printed in full the first time."""
        own = outcomes[OWN]
        print(f"{own.case}, {own.dtype}")
        new: list[str] = []
        for tensor in _tensors([outcomes]):
            best = min((o.ratios[tensor].mean for o in outcomes.values() if tensor in o.ratios), default=0.0)
            print(
                self._line(
                    _label(tensor), [self._tensor(name, outcomes[name], tensor, best, new) for name in self.names]
                )
            )
        new += [f"{name}, {tensor}: {note}" for name, o in outcomes.items() for tensor, note in o.notes.items()]
        for text in new:
            print(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="      "))
        print(flush=True)
        self.done.append(outcomes)

    def _tensor(self, name: str, outcome: Outcome, tensor: str, best: float, new: list[str]) -> str:
        if tensor in outcome.ratios:
            r = outcome.ratios[tensor]
            near = round(r.mean, 2) <= CLOSE * round(best, 2)  # as they are shown
            marks = ("!" if not r.ok else "") + ("*" if near else "")
            return self._cell(number(r.max), number(r.mean), percent(r.used)) + marks
        if outcome.error is None and tensor not in outcome.missing:
            return "  -"
        reason = f"{name}: {outcome.error or outcome.missing[tensor]}"
        if reason not in self.reasons:
            self.reasons[reason] = len(self.reasons) + 1
            new.append(f"[{self.reasons[reason]}] {reason}")
        return f"  {'error' if outcome.error else 'none'} [{self.reasons[reason]}]"

    def print_summary(self) -> None:
        """Print the median mean error of each tensor, and the number of cases within the budget."""
        print("median over the cases of the mean error (eager PyTorch = 1)")
        print(self._line("", self.labels))
        for tensor in _tensors(self.done):
            cells = []
            for name in self.names:
                means = [
                    outcomes[name].ratios[tensor].mean for outcomes in self.done if tensor in outcomes[name].ratios
                ]
                cells.append(f"{number(statistics.median(means)):>9}" if means else "        -")
            print(self._line(_label(tensor), cells))
        print()
        for name in self.names:
            text = f"{name}: {_kept([outcomes[name] for outcomes in self.done])}"
            print(textwrap.fill(text, 80, subsequent_indent="    "))

    def _line(self, label: str, cells: Sequence[str]) -> str:
        return line([label, *cells], (LABEL, *(CELL for _ in cells)))

    def _cell(self, largest: str, mean: str, used: str) -> str:
        return f"{largest:>4} {mean:>4} {used:>5}"


def _tensors(rounds: Iterable[dict[str, Outcome]]) -> list[str]:
    """The tensors of every problem, and the further ones of these problems."""
    there = {tensor for outcomes in rounds for o in outcomes.values() for tensor in (*o.ratios, *o.missing)}
    return [tensor for tensor in testing.ALL_TENSORS if tensor in there or tensor in testing.TENSORS]


def _label(tensor: str) -> str:
    return f"  {LABELS.get(tensor, tensor)}"


def _kept(outcomes: list[Outcome]) -> str:
    """The number of cases within the budget; incomplete cases and errors are counted separately."""
    parts = [f"{sum(bool(o.ratios) and o.ok for o in outcomes)} of {len(outcomes)} within the budget"]
    for what, n in (
        ("beyond it", sum(bool(o.ratios) and not o.ok for o in outcomes)),
        ("NaN or Inf", sum(bool(o.notes) for o in outcomes)),
        ("not run", sum(not o.ratios and o.error is None for o in outcomes)),
        ("ended with an error", sum(o.error is not None for o in outcomes)),
    ):
        parts += [f"{n} {what}"] if n else []
    if absent := sorted({t for o in outcomes if o.ratios for t in o.missing}, key=testing.ALL_TENSORS.index):
        parts.append(f"without {', '.join(absent)}")
    return ", ".join(parts)
