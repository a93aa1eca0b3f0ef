"""``python -m bench run``: measure, show, and write a result file."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

import torch

from bench import goals
from bench.measuring import ceilings, environment
from bench.measuring.gate import Gate
from bench.measuring.measure import measure
from bench.measuring.timing import Budget, OutOfTimeError, Rounds
from bench.report import results, terminal
from bench.report.results import Report
from bench.report.terminal import Console
from bench.work import functions, suites
from bench.work.work import Work
from fusedattn.cli import machine
from fusedattn.cli.errors import CommandError
from fusedattn.support import interpreting
from fusedattn.testing.peers import FLEX_COMPILATIONS, Peer

QUICK = Rounds(least=3, most=5, seconds=0.2)


def run(options: argparse.Namespace) -> int:
    """Return exit status 0, or 1 if something is not correct."""
    device = machine.choose_device(options.device)
    if interpreting():
        raise CommandError("TRITON_INTERPRET: got 1, but the interpreter's times say nothing")
    if options.quick and device.type == "cpu":
        torch.set_num_threads(1)  # for such small work, waiting for threads costs more than they save
    scale = suites.scale_for(device, quick=options.quick)
    every = suites.works(options.suite or list(suites.SUITES), scale)
    if options.goals:
        if scale is not suites.GPU:
            raise CommandError("--goals: got a CPU, or --quick, but the goals are for a GPU and full-size work")
        every = [work for work in every if goals.concerned(work.place)]
    chosen = [work for work in every if _matches(work, options.filter)]
    if not chosen:
        raise CommandError(f"--filter: got {options.filter!r}, which is in no name of the work; --list shows them")
    if options.list:
        print("\n".join(f"{work.priority} {work.name}" for work in chosen))
        return 0
    budget = Budget(options.budget)
    console = terminal.console()
    path = results.new_path(options.out, device, options.commit)
    report = _measure_all(chosen, device, _functions(options.against), options, budget, console, path)
    terminal.print_results(console, report)
    verdict = report["correctness"]
    console.print(
        f"{len(report['results'])} of {len(chosen)} measured, written to {path}", markup=False, soft_wrap=True
    )
    for name, text in verdict["failures"].items():
        console.print(f"not correct: {name}: {text}", markup=False, style="red")
    return 0 if not verdict["failures"] else 1


def _matches(work: Work, text: str) -> bool:
    return text.lower() in work.name.lower()


def _functions(names: list[str]) -> dict[str, Peer]:
    try:
        return functions.choose(names)
    except Exception as error:  # importing a user's module can raise anything
        raise CommandError(f"--against: {error}") from error


def _measure_all(
    chosen: list[Work],
    device: torch.device,
    peers: dict[str, Peer],
    options: argparse.Namespace,
    budget: Budget,
    console: Console,
    path: Path,
) -> Report:
    """The report, written after every piece of work; incomplete if the time runs out."""
    allow_compilations()
    began, gate = time.monotonic(), Gate(device)
    rounds = QUICK if options.quick else Rounds()
    report = new_report(device, options)
    with terminal.progress(console) as progress:
        task = progress.add_task("ceilings", total=len(chosen))
        try:
            dtypes = [work.dtype for work in chosen if work.unit == "TFLOP/s"]
            report["ceilings"] = ceilings.measure(device, dtypes, rounds, budget)
            for work in chosen:
                progress.update(task, description=work.name)
                report["results"].append(measure(work, device, peers, gate, report["ceilings"], rounds, budget))
                progress.advance(task)
                _write(path, report, gate, chosen, began)
        except OutOfTimeError:
            console.print("the budget is spent")
        except KeyboardInterrupt:
            console.print("interrupted")
    report["state_after"] = environment.state(device)
    _write(path, report, gate, chosen, began)
    return report


def allow_compilations() -> None:
    """Raise Dynamo's limits so that it compiles every contestant: beyond them it silently runs functions eagerly."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = FLEX_COMPILATIONS


def new_report(device: torch.device, options: argparse.Namespace) -> Report:
    return {
        "format": results.FORMAT,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: x for name, x in vars(options).items() if isinstance(x, str | int | float | list)},
        "environment": environment.describe(device, options.commit),
        "state_before": environment.state(device),
        "ceilings": {},
        "not_installed": functions.missing(),
        "results": [],
    }


def _write(path: Path, report: Report, gate: Gate, chosen: list[Work], began: float) -> None:
    done = {row["name"] for row in report["results"]}
    report["correctness"] = gate.report()
    report["not_measured"] = [work.name for work in chosen if work.name not in done]
    report["seconds"] = round(time.monotonic() - began, 1)
    results.write(path, report)
