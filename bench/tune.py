"""``python -m bench tune``: which config of the table could be another, on the GPU that is there."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Console
from rich.table import Table

from bench import environment, terminal
from bench.timing import Budget, DeviceStopwatch, OutOfTimeError, Stopwatch
from bench.tuning import candidates, trial
from bench.tuning.slots import Candidate, Part, Slot
from bench.tuning.trial import Timing
from fusedattn.cli import machine
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import configs, devices
from fusedattn.support import interpreting

FORMAT = "fusedattn tuning 1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHOWN = 8  # of the candidates of a slot


def slots(options: argparse.Namespace) -> list[Slot]:
    """What is asked for; by default what most calls launch, in bfloat16."""
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
    """Exit status 0, or 1 where the table's own config is not correct."""
    if interpreting():
        raise CommandError("TRITON_INTERPRET: got 1, but the interpreter compiles nothing")
    console = terminal.console()
    if options.compile:
        return _compile(slots(options), options, console)
    device = machine.choose_device(options.device)
    if device.type != "cuda":
        raise CommandError(f"--device: got {device.type}, but what is fast is asked of a GPU; --compile needs none")
    return tune(slots(options), device, DeviceStopwatch(device), options, console)


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
        console.print(f"{slot.name}: {len(found)} of {len(grid)} tiles have no fault", markup=False)
    console.print(f"written to {target}", markup=False, soft_wrap=True)
    return 0


def tune(
    chosen: list[Slot], device: torch.device, stopwatch: Stopwatch, options: argparse.Namespace, console: Console
) -> int:
    """Check and time, slot by slot, the file written after each."""
    arch = devices.arch_of(device)
    source = candidates.path(arch, options.candidates)
    loaded = {slot: candidates.load(source, slot) for slot in chosen}
    found = {slot: x for slot, x in loaded.items() if x is not None}
    missing = ", ".join(slot.name for slot in chosen if slot not in found)
    if missing:
        console.print(f"left out, because {source} does not have them: {missing}", markup=False, soft_wrap=True)
    if not found:
        raise CommandError(f"{source}: no candidates; python -m bench tune --compile {arch} finds them")
    budget, shuffle = Budget(options.budget), random.Random(options.seed)
    report: dict[str, Any] = {
        "format": FORMAT,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment.describe(device, options.commit),
        "state_before": environment.state(device),
        "slots": {},
    }
    target = _path(options.out, device, options.commit)
    status = 0
    try:
        for slot in found:
            budget.check()
            own, *_ = names = candidates.to_time(slot, arch, found[slot], options.keep)
            timings = _tried(slot, names, device, stopwatch, shuffle, budget, options.jobs)
            report["slots"][slot.name] = _as_object(own, timings)
            report["state_after"] = environment.state(device)
            _write(target, report)
            _print(console, slot, own, timings)
            status |= bool(timings[own].reason)
    except OutOfTimeError:
        console.print("the budget is spent")
    except KeyboardInterrupt:
        console.print("interrupted")
    console.print(f"{len(report['slots'])} of {len(chosen)} slots, written to {target}", markup=False, soft_wrap=True)
    return status


def _tried(
    slot: Slot,
    named: dict[str, Candidate],
    device: torch.device,
    stopwatch: Stopwatch,
    shuffle: random.Random,
    budget: Budget,
    jobs: int,
) -> dict[str, Timing]:
    """What is correct timed, and why the rest is not."""
    wrong = trial.wrong(slot, named, device, jobs)
    correct = {name: candidate for name, candidate in named.items() if name not in wrong}
    timings = trial.timed(slot, correct, device, stopwatch, shuffle, budget)
    return {name: timings[name] if name in timings else Timing({}, wrong[name]) for name in named}


def _as_object(own: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """For JSON: the ranking, then all that was measured."""
    return {
        "table": own,
        "gain": {name: round(mean, 4) for name, mean in trial.ranked(timings, own)},
        "candidates": {name: timing.as_object() for name, timing in timings.items()},
    }


def _write(target: Path, report: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_suffix(".json.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(target)


def _path(out: Path, device: torch.device, commit: str | None) -> Path:
    """Of a new file; a second one of a day and commit gets a number."""
    found = environment.describe(device, commit)["commit"][:10]
    stem = f"{datetime.date.today().isoformat()}-{found}-tune"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
    return next(
        path for name in names if not (path := out / environment.folder(device) / f"{name}.json").exists()
    )  # fmt: skip


def _print(console: Console, slot: Slot, own: str, timings: dict[str, Timing]) -> None:
    """The table's config, and the best of the others, as many times as fast as it."""
    console.print(slot.name, style="bold", markup=False)
    gains, ranked = trial.gains(timings, own), trial.ranked(timings, own)
    problems = list(gains.get(own, {}))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("config", no_wrap=True)
    for name in ("gain", *problems, "beyond noise"):
        table.add_column(name, justify="right")
    shown = [pair for pair in ranked[:SHOWN] if pair[0] != own] + [pair for pair in ranked if pair[0] == own]
    for name, mean in shown:
        cells = [f"{gains[name].get(problem, float('nan')):.3f}" for problem in problems]
        noise = "the table's" if name == own else "yes" if trial.is_faster(timings, own, name) else ""
        table.add_row(name, f"{mean:.3f}", *cells, noise)
    console.print(table)
    for name, timing in timings.items():
        if timing.reason:
            console.print(f"{name}: {timing.reason}", markup=False, style="dim")
