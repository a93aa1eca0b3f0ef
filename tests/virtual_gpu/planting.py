"""Run attention on a virtual GPU with faults in the PTX of its kernels, and say whether they were noticed.

Kernels are interpreted in the process of the tests, and compiled in another one, which answers requests line by line.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.tuning.slots import ONE_PASS
from fusedattn import attention, testing
from fusedattn.kernels import configs, hopper
from fusedattn.kernels.configs import KernelConfigs, TileConfig
from fusedattn.testing import Case
from fusedattn.virtual_gpu.attention import compiled_attention, launches_for
from fusedattn.virtual_gpu.errors import KernelError
from fusedattn.virtual_gpu.instructions.copies import UNFENCED_MBARRIER
from fusedattn.virtual_gpu.launch import Launcher
from fusedattn.virtual_gpu.programs import Programs
from tests.virtual_gpu import planted, planted_hopper
from tests.virtual_gpu.planted import FWD, Fault, Of

PROBLEMS = {**planted.PROBLEMS, **planted_hopper.PROBLEMS}
FAULTS = (*planted.FAULTS, *planted_hopper.FAULTS)

_STATEMENT = re.compile(r"\s*(?:@!?[%\w]+\s+)?([a-z][\w.:]*)[\s;]")


@dataclass
class Honest:
    """A problem solved without a fault: the PTX of its kernels, and how often each instruction was executed."""

    noticed: str | None
    ptx: dict[str, list[str]]  # kernel -> lines
    executed: dict[str, Counter[tuple[str, int]]]  # kernel -> (opcode, its number among those of the opcode) -> warps


# The configs whose lines planted.py counts, for streamed calls of up to 64 features on sm_90.
COUNTED = KernelConfigs(
    fwd=TileConfig(64, 128, 4, 2, "descriptors"),
    dkdv=TileConfig(64, 64, 4, 3, "descriptors", 32),
    dq=TileConfig(128, 128, 8, 3, "descriptors"),
    one_pass=ONE_PASS,
)


@contextmanager
def _counted_configs() -> Iterator[None]:
    table = configs.lookup

    def lookup(arch: configs.Arch, head_dim: int, dtype: torch.dtype, work: configs.Work = "streamed") -> KernelConfigs:
        counted = arch == "sm_90" and head_dim <= 64 and work == "streamed"
        return COUNTED if counted else table(arch, head_dim, dtype, work)

    with patch.object(configs, "lookup", lookup):
        yield


@contextmanager
def _by_hopper(chosen: bool) -> Iterator[None]:
    """The kernels for Hopper, or not; one program walks over all tiles, if it walks over several."""
    one = launches_for("sm_90", multiprocessors=1) if chosen else nullcontext()
    with one, hopper.choosing("all" if chosen else None):
        yield


@contextmanager
def _without(kernels: Collection[str]) -> Iterator[None]:
    """Kernels that are not launched, to save time: their results are not looked at."""
    launch = Launcher.launch

    def launched(launcher: Launcher, *arguments: Any) -> None:
        if launcher.metadata.name not in kernels:
            launch(launcher, *arguments)

    with patch.object(Launcher, "launch", launched):
        yield


def _solve(
    problem: str, case: Case, rewrite: Callable[[str, str], str], kernel: str = "", *, counting: bool = False
) -> str | None:
    """What a run notices in one of the orders of the problem: see :func:`_solve_in_order`."""
    orders = PROBLEMS[problem].orders
    found = (_solve_in_order(problem, case, rewrite, kernel, counting=counting, **order) for order in orders)
    return next(filter(None, found), None)


def _solve_in_order(
    problem: str, case: Case, rewrite: Callable[[str, str], str], kernel: str, **settings: Any
) -> str | None:
    """What a run notices: an error, or the results that leave the error budget; None if it notices nothing.

    If only the forward has a fault, `kernel`, only the forward runs; and of the backward for Hopper only the kernel
    with the fault.
    """
    given = PROBLEMS[problem]
    function = functools.partial(attention, backend="triton", **given.options)
    inputs, truth, eager = _case(case)
    left_out = planted_hopper.BESIDE.get(kernel, ((), ()))
    try:
        with (
            compiled_attention(given.arch, **settings) as gpu,
            _counted_configs(),
            _by_hopper(given.by_hopper),
            _without(left_out[0]),
        ):
            gpu.rewrite = rewrite
            if kernel in (FWD, planted_hopper.FWD):
                leaves = [
                    x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
                ]  # for which it keeps rows
                results = function(*leaves, **inputs.options, return_lse=True)
                actual = {name: x.detach() for name, x in zip(("out", "lse"), results, strict=True)}
            else:
                actual = dict(testing.run(function, inputs))
                actual = {name: x for name, x in actual.items() if name not in left_out[1]}
    except KernelError as error:
        return f"{type(error).__name__}: {error}"
    if given.by_hopper:
        counters = (x for name, x in gpu.counters.items() if name.startswith("hopper"))
        broken = [rule for x in counters for rule in x.tolerated if rule.startswith(UNFENCED_MBARRIER)]
        if broken:
            return f"tolerated: {broken[0]}"
    wanted = [{name: x[name] for name in actual} for x in (truth, eager)]
    ratios = testing.compare_results(actual, *wanted, case.dtype)
    return "; ".join(f"{name} {x.used:.2g} of the budget" for name, x in ratios.items() if not x.ok) or None


@cache
def _case(case: Case) -> tuple[testing.Inputs, testing.Results, testing.Results]:
    """The inputs of a case, the truth, and what eager PyTorch computes."""
    inputs = testing.make_inputs(case)
    return inputs, testing.golden(inputs), testing.baseline(inputs)


@cache
def honest(problem: str) -> Honest:
    """Solve the cases of a problem with its kernels as they are, which are the same for each."""
    ptx: dict[str, list[str]] = {}
    executed: dict[str, Counter[tuple[str, int]]] = {}
    counted = Programs.count

    def count(programs: Programs) -> None:
        kernel = programs.machine.kernel
        of_kernel = executed.setdefault(kernel.name, Counter())
        seen: Counter[str] = Counter()
        for block in programs.blocks:
            for x in [*block.instructions, *([block.end] if block.end is not None else [])]:
                of_kernel[x.opcode, seen[x.opcode]] += int(np.sum(block.entered))
                seen[x.opcode] += 1
        counted(programs)

    def keep(name: str, text: str) -> str:
        assert ptx.setdefault(name, text.splitlines()) == text.splitlines(), f"{problem}: two kernels {name}"
        return text

    noticed = None
    with patch.object(Programs, "count", count):
        for case in PROBLEMS[problem].cases:
            noticed = noticed or _solve(problem, case, keep, PROBLEMS[problem].only, counting=True)
    gc.freeze()  # what is known by now stays: collections need not look at it
    return Honest(noticed, ptx, executed)


def places(fault: Fault) -> list[int]:
    """The lines of a kernel's PTX that a fault may change: those with its pattern that are executed."""
    known = honest(fault.problem)
    seen: Counter[str] = Counter()
    found = []
    for i, line in enumerate(known.ptx[fault.kernel]):
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        opcode = statement.group(1)
        if known.executed[fault.kernel][opcode, seen[opcode]] and re.search(fault.old, line):
            found.append(i)
        seen[opcode] += 1
    return found


@cache
def _files(problem: str, kernel: str) -> dict[str, list[str]]:
    """The lines of the files that the PTX of a kernel names, by their numbers there."""
    named = (re.match(r'\s*\.file\s+(\d+) "(.*)"', line) for line in honest(problem).ptx[kernel])
    return {x[1]: Path(x[2]).read_text(encoding="utf-8").splitlines() for x in named if x}


def _source(fault: Fault, i: int) -> str:
    """The line of Python that a line of PTX comes from."""
    for line in reversed(honest(fault.problem).ptx[fault.kernel][:i]):
        if found := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            return _files(fault.problem, fault.kernel)[found[1]][int(found[2]) - 1].strip()
    return ""


def _lines_at(at: int | Of, fault: Fault, found: list[int]) -> list[int]:
    """The lines, by their numbers among those found, that a place of `Fault.harmless` names."""
    if isinstance(at, int):
        return [at] if at < len(found) else []
    of_text = [n for n, i in enumerate(found) if at.text in _source(fault, i)]
    return of_text if at.nth is None else of_text[at.nth : at.nth + 1]


def plant(fault: Fault, *lines: int) -> str | None:
    """What is noticed of a fault in these lines."""

    def rewrite(name: str, text: str) -> str:
        if name != fault.kernel:
            return text
        parts = text.splitlines()
        assert parts == honest(fault.problem).ptx[name], f"{fault.problem}: two kernels {name}"
        for i in lines:
            changed = re.sub(fault.old, fault.new, parts[i])
            if changed == parts[i]:
                raise ValueError(f"{fault.name}: {changed!r} stays as it is")
            parts[i] = changed
        return "\n".join(parts)

    return next(
        filter(None, (_solve(fault.problem, case, rewrite, fault.kernel) for case in PROBLEMS[fault.problem].cases)),
        None,
    )


def _next_commit(fault: Fault, i: int) -> str | None:
    """Why nothing can notice that a commit is gone, if another one follows before any wait, and all wait for all."""
    kind, is_commit, _ = fault.old.partition("commit_group")
    lines = honest(fault.problem).ptx[fault.kernel]
    if not is_commit or any(re.search(kind + r"wait_group\S*\s+[^0\s]", line) for line in lines):
        return None
    for line in lines[i + 1 :]:
        if re.search(kind + "wait_group", line) or re.search(r"\bbra\b", line):
            return None
        if re.search(fault.old, line):
            return "the next commit takes its work, before any wait"
    return None


def _runs(numbers: list[int]) -> list[list[int]]:
    """Numbers in order, as runs of neighbours."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs


def _shared_task(
    fault: Fault, found: list[int], n: int, run: list[int], known: dict[frozenset[int], Any]
) -> str | None:
    """Why nothing can notice the fault at line `n` of a run of neighbours: others of them do the same.

    That is so if it is noticed at some of them together, but not at those without `n`.
    """

    def noticed(which: list[int]) -> str | None:
        key = frozenset(which)
        if key not in known:
            known[key] = plant(fault, *(found[i] for i in which))
        return known[key]

    for size in range(2, len(run) + 1):
        for window in (run[i : i + size] for i in range(len(run) - size + 1)):
            if n in window and (what := noticed(window)) and not noticed([i for i in window if i != n]):
                return f"it does what others of {window} do; without all of them: {what}"
    return None


def judge(fault: Fault) -> dict[str, Any]:
    """Plant a fault at its line, or at each of its lines in turn.

    Returns, under "lines", for each: its number, the line, what is noticed, and why nothing can be.
    """
    found = places(fault)
    chosen = range(len(found)) if fault.nth is None else [range(len(found))[fault.nth]] if found else []
    harmless = [(_lines_at(at, fault, found), reason) for at, reason in fault.harmless]
    known_reasons = {n: reason for numbers, reason in harmless for n in numbers}
    excuses: dict[int, str | None] = {n: known_reasons.get(n) or _next_commit(fault, found[n]) for n in chosen}
    noticed = {n: None if excuses[n] else plant(fault, found[n]) for n in chosen}
    known: dict[frozenset[int], Any] = {frozenset([n]): noticed[n] for n in chosen if not excuses[n]}
    for run in _runs([n for n in chosen if not noticed[n] and not excuses[n]]):
        excuses |= {n: _shared_task(fault, found, n, run, known) for n in run}
    lines = honest(fault.problem).ptx[fault.kernel]
    judged = [(n, lines[found[n]].strip(), noticed[n], excuses[n]) for n in chosen]
    unused = [reason for numbers, reason in harmless if not numbers]
    return {"lines": judged, "unused": unused, "honest": honest(fault.problem).noticed}


def main() -> None:
    torch.set_num_threads(1)
    by_name = {fault.name: fault for fault in FAULTS}
    for line in sys.stdin:
        request = json.loads(line)
        if request in PROBLEMS:  # once more, without a fault
            given = PROBLEMS[request]
            answer: Any = [_solve(request, case, lambda name, text: text, given.only) for case in given.cases]
        else:
            answer = judge(by_name[request])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
