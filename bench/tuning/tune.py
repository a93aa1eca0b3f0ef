"""``python -m bench tune``: look for better configs of the table, on this machine's GPU."""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import torch

from bench.measuring import environment
from bench.measuring.timing import Budget, DeviceStopwatch, Stopwatch
from bench.report import results, terminal
from bench.report.terminal import Console, print_table
from bench.tuning import candidates, trial
from bench.tuning.slots import Part, Slot
from bench.tuning.trial import Timing
from fusedattn.cli import machine
from fusedattn.cli.errors import CommandError
from fusedattn.cli.tables import Column
from fusedattn.kernels import configs, devices
from fusedattn.support import interpreting

FORMAT = "fusedattn tuning 1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHOWN = 8  # candidates per slot


def slots(options: argparse.Namespace) -> list[Slot]:
    """The requested slots; by default those of most calls, in bfloat16."""
    return [
        Slot(cast(Part, part), cast(configs.Work, work), DTYPES[dtype], head_dim)
        for dtype, head_dim, work, part in itertools.product(
            options.dtype or ["bfloat16"],
            options.head_dim or [128, 64],
            options.work or ["streamed"],
            options.part or get_args(Part),
        )
        if part in ("fwd", "dkdv", "dq") or work == "streamed"
    ]


def run(options: argparse.Namespace) -> int:
    """Return exit status 0, or 1 if the table's own config is not correct."""
    if interpreting():
        raise CommandError("TRITON_INTERPRET: got 1, but the interpreter compiles nothing")
    console = terminal.console()
    if options.compile:
        return _compile(slots(options), options, console)
    device = machine.choose_device(options.device)
    if device.type != "cuda":
        raise CommandError(f"--device: got {device.type}, but timing needs a GPU; --compile needs none")
    return tune(slots(options), device, DeviceStopwatch, options, console)


def _compile(chosen: list[Slot], options: argparse.Namespace, console: Console) -> int:
    """Find candidates and keep them, slot by slot."""
    arch: configs.Arch = options.compile
    target = candidates.path(arch, options.candidates)
    for slot in chosen:
        grid = list(candidates.grid(slot, arch))
        with terminal.progress(console) as progress:
            task = progress.add_task(slot.name, total=len(grid))
            found = candidates.clean(slot, arch, grid, options.jobs, partial(progress.advance, task))
        candidates.save(target, {slot.name: found})
        doubtful = sum(x.in_flight for x in found)
        text = f"{slot.name}: {len(found) - doubtful} of {len(grid)} tiles have no fault"
        console.print(f"{text}, {doubtful} touch registers in flight" if doubtful else text, markup=False)
    console.print(f"written to {target}", markup=False, soft_wrap=True)
    return 0


def tune(
    chosen: list[Slot],
    device: torch.device,
    stopwatch: Callable[[torch.device], Stopwatch],
    options: argparse.Namespace,
    console: Console,
) -> int:
    """Check and time slot by slot; write the file after each."""
    arch = devices.arch_of(device)
    source = candidates.path(arch, options.candidates)
    loaded = {slot: candidates.load(source, slot) for slot in chosen}
    found = {slot: x for slot, x in loaded.items() if x is not None}
    missing = ", ".join(slot.name for slot in chosen if slot not in found)
    if missing:
        console.print(f"left out, because {source} does not have them: {missing}", markup=False, soft_wrap=True)
    if not found:
        raise CommandError(f"{source}: no candidates; python -m bench tune --compile {arch} finds them")
    budget = Budget(options.budget)
    report: dict[str, Any] = {
        "format": FORMAT,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment.describe(device, options.commit),
        "state_before": environment.state(device),
        "slots": {},
    }
    target = results.new_path(options.out, device, options.commit, "-tune")
    status = 0
    try:
        for slot in found:
            if budget.is_spent:
                console.print("the budget is spent")
                break
            own, *_ = names = candidates.to_time(slot, arch, found[slot], options.keep)
            wrong = trial.wrong(slot, names, device, options.jobs, budget)
            correct = {name: candidate for name, candidate in names.items() if name not in wrong}
            times = trial.timed(slot, correct, device, stopwatch, budget)
            timings = {name: times[name] if name in times else Timing({}, wrong[name]) for name in names}
            in_flight = candidates.in_flight(names, found[slot])
            report["slots"][slot.name] = _as_object(own, timings) | {"in_flight": in_flight}
            report["state_after"] = environment.state(device)
            results.write(target, report)
            _print(console, slot, own, timings)
            if in_flight:
                console.print(f"touch registers in flight: {', '.join(in_flight)}", markup=False, style="dim")
            status |= own in wrong
    except KeyboardInterrupt:
        console.print("interrupted")
    summary = f"{len(report['slots'])} of {len(chosen)} slots, written to {target}"
    console.print(summary, markup=False, soft_wrap=True)
    return status


def _as_object(own: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """The result for JSON: the ranking, then all measurements."""
    return {
        "table": own,
        "base": trial.base(timings),
        "gain": {name: round(mean, 4) for name, mean in trial.ranked(timings)},
        "candidates": {name: timing.as_object() for name, timing in timings.items()},
    }


def _print(console: Console, slot: Slot, own: str, timings: dict[str, Timing]) -> None:
    """Print the best and the table's own, with speeds relative to the latter, or to the first correct one."""
    console.print(slot.name, style="bold", markup=False)
    gains, ranked = trial.gains(timings), trial.ranked(timings)
    problems = list(dict.fromkeys(problem for found in gains.values() for problem in found))
    names = ("gain", *problems, "beyond noise")
    columns = [Column("config", no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in names)]
    rows = []
    for i, (name, mean) in enumerate(ranked):
        if i < SHOWN or name == own:
            cells = (f"{gains[name][x]:.3f}" if x in gains[name] else "" for x in problems)
            noise = "the table's" if name == own else "yes" if trial.is_faster(timings, name) else ""
            rows.append((name, f"{mean:.3f}", *cells, noise))
    print_table(console, columns, rows)
    for name, timing in timings.items():
        if timing.reason:
            console.print(f"{name}: {timing.reason}", markup=False, style="dim")
