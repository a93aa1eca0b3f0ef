"""The timings of the goals: in one process on the GPU, which is replaced if a kernel breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.first.pool import Kernels, prepared
from bench.measuring import ceilings
from bench.measuring.gate import Gate
from bench.measuring.measure import measure
from bench.measuring.processes import Child, ProcessError
from bench.measuring.timing import Budget, OutOfTimeError, Rounds, Timed, still_works
from bench.report.results import Report, one_verdict
from bench.run import QUICK, allow_compilations
from bench.work import functions
from bench.work.work import OWN, Work

PATIENCE = 2.5  # times the silence of other processes: torch.compile of a model sends no messages


def stubbed(timed: Timed) -> float:
    """A stopwatch without a clock, for a machine whose times mean nothing: always one millisecond."""
    return 1.0


class ReportingBudget(Budget):
    """A budget that sends a message at each check: before each contestant is prepared, and while it is timed."""

    def __init__(self, seconds: float, tell: Callable[[], None]) -> None:
        super().__init__(seconds)
        self.tell = tell

    def check(self) -> None:
        self.tell()
        super().check()


def timed(
    works: list[Work], report: Report, device: torch.device, silence: float, budget: Budget, kernels: Kernels
) -> Iterator[tuple[Work, str]]:
    """Yield each finished work, in order, and its failure; its row and the failure also go into the report."""
    left = list(works)
    while left and not budget.is_spent:
        before = report["correctness"]
        child = Child(measure_all, left, str(device), report["ceilings"], budget.left)
        try:
            while left:
                what, value = child.receive(min(child.limit(PATIENCE * silence), budget.left))
                if what == "kernel":
                    kernels.add(*value)
                elif what == "ceilings":
                    report["ceilings"] = value
                elif what == "row":
                    row, verdict = value
                    report["results"] = [x for x in report["results"] if x["name"] != row["name"]] + [row]
                    report["correctness"] = one_verdict([before, verdict])
                    own = row["contestants"].get(OWN, {}).get("reason", "")
                    yield left.pop(0), own or verdict["failures"].get(row["name"], "")
                elif what == "end":
                    return
                elif what == "broken":
                    break
        except ProcessError as error:
            if budget.is_spent:
                return
            work, text = left.pop(0), f"while it was timed, {error}"
            failures = report["correctness"]["failures"] | {work.name: text}
            report["correctness"] |= {"ok": False, "failures": failures}
            yield work, text
        finally:
            child.kill()


NOTHING: Report = {"ok": False, "cases": 0, "most_used": None, "failures": {}}


def measure_all(
    connection: Connection, works: list[Work], device_name: str, measured: dict[str, Any], seconds: float
) -> None:
    """Send the ceilings, unless they are known, and a row and the gate's verdict for each work."""
    device = prepared(device_name, lambda *kernel: connection.send(("kernel", kernel)))
    allow_compilations()
    budget = ReportingBudget(seconds, lambda: connection.send(("alive", None)))
    gate, peers = Gate(device), functions.choose([])
    is_gpu = device.type == "cuda"
    rounds = Rounds() if is_gpu else QUICK
    try:
        if not measured:
            dtypes = [work.dtype for work in works if work.unit == "TFLOP/s"]
            measured = ceilings.measure(device, dtypes, rounds, budget)
            connection.send(("ceilings", measured))
        for work in works:
            row = measure(work, device, peers, gate, measured, rounds, budget, None if is_gpu else stubbed)
            connection.send(("row", (row, gate.report())))
            if not still_works(device):
                connection.send(("broken", None))
                return
    except OutOfTimeError:
        pass
    connection.send(("end", None))
