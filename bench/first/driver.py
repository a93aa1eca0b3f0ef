"""Run the parts in order, and write each result at once; existing results are not computed again."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from bench import goals
from bench.first import plan, prebuilt, timings
from bench.first.plan import TIMINGS
from bench.first.pool import Kernels, run_jobs
from bench.first.records import Record, Records, read_json, wrong
from bench.measuring import environment
from bench.measuring.timing import Budget
from bench.report import results, terminal
from bench.run import new_report
from fusedattn.cli.check.outcome import percent
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import devices

MACHINE, RESULTS, REPORT, SUMMARY = "machine.json", "results.jsonl", "timings.json", "summary.txt"
LEFT_FOR_TIMINGS = 20.0  # seconds; with less time left, no timing is started


@dataclass
class First:
    """One call."""

    options: argparse.Namespace
    device: torch.device
    budget: Budget
    kernels: Kernels
    facts: dict[str, Any]
    records: Records
    total: dict[str, int]  # the number of jobs of each part, in order


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Return exit status 0, or 1 if a record has failed."""
    budget, began, folder = Budget(options.budget), time.monotonic(), options.out
    folder.mkdir(parents=True, exist_ok=True)
    options.quick = device.type == "cpu"
    jobs, works = plan.jobs(device.type), plan.works(device.type)
    total: dict[str, int] = {}
    for part in (*(job.part for job in jobs), *(TIMINGS for _ in works)):
        total[part] = total.get(part, 0) + 1
    facts = _facts(options, device)
    call = First(options, device, budget, Kernels(), facts, Records(folder / RESULTS), total)
    results.write(folder / MACHINE, facts)
    print("\n".join(_headline(facts)), flush=True)
    _unpack(call)
    status = "done"
    try:
        due = [job for job in jobs if _is_due(call, job.part, job.name)]
        for record in run_jobs(due, device, options.jobs, options.silence, budget, call.kernels):
            _add(call, record)
        if all(_n_done(call, part) == n for part, n in total.items() if part != TIMINGS):
            _time(call, [work for work in works if _is_due(call, TIMINGS, work.name)])
    except KeyboardInterrupt:
        status = "interrupted"
    facts["calls"][-1] |= {
        "seconds": round(time.monotonic() - began, 1),
        "compiled": len(call.kernels.compiled),
        "found": len(call.kernels.found),
    }
    results.write(folder / MACHINE, facts)
    print(_summarise(call), flush=True)
    if any(_n_done(call, part) < n for part, n in total.items()):
        print(f"{status}: call it again with --out {folder} for the rest", flush=True)
    return 1 if wrong(call.records.by_key.values()) else 0


def _facts(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The options, sources, versions and machine, and earlier calls.

    Raises:
        CommandError: the folder belongs to other kernels, or to another machine.
    """
    path = options.out / MACHINE
    described = environment.describe(device, options.commit)
    same = {
        "device": described["device"],
        "versions": described["versions"],
        "compiler": _compiler(device),
        "sources": _sources(),
    }
    before = read_json(path)
    differ = [name for name, x in same.items() if before.get(name, x) != x]
    if differ:
        raise CommandError(f"--out: got {options.out}, whose results differ in {', '.join(differ)}")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        **same,
        "commit": described["commit"],
        "cores": os.cpu_count(),
        "C compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "state": environment.state(device),
        "calls": [*before.get("calls", []), {"started": now, "processes": options.jobs, "budget": options.budget}],
    }


def _compiler(device: torch.device) -> dict[str, str]:
    """The assembler that compiles the kernels, or would if they were not interpreted."""
    if device.type == "cpu":
        return {"triton": triton.__version__}
    return prebuilt.identity(triton.runtime.driver.active.get_current_target())


def _sources() -> str:
    """A hash of all tested sources, for a tree without git."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for path in sorted((*(root / "kernels").glob("*.py"), *(root / "fusedattn").rglob("*.py"))):
        if "kernels" not in path.relative_to(root).parts[1:]:  # behind the symlink
            found.update(path.read_bytes())
    return found.hexdigest()


def _headline(facts: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {x}" for name, x in facts["versions"].items())
    assembler = re.search(r"V\d[\d.]*", facts["compiler"].get("assembler", ""))
    more = [f"assembler {assembler[0]}"] if assembler else []
    more += [f"{facts['cores']} cores", f"commit {facts['commit'][:10]}", f"sources {facts['sources'][:10]}"]
    return [f"{facts['device']}; {versions}", "; ".join(more)]


def _unpack(call: First) -> None:
    """Unpack kernels that were compiled beforehand, if there are any for this GPU."""
    if call.device.type == "cpu":
        return
    path = prebuilt.path_of(devices.arch_of(call.device))
    if not path.exists():
        text = f"{path.name}: not there, so that every kernel is compiled here"
    else:
        _, text = prebuilt.unpack(path, call.facts["compiler"], Path(triton.knobs.cache.dir))
    call.facts["calls"][-1]["prebuilt"] = text
    results.write(call.options.out / MACHINE, call.facts)
    print(text, flush=True)


def _is_due(call: First, part: str, name: str) -> bool:
    record = call.records.by_key.get((part, name))
    return record is None or (call.options.again and not record.ok)


def _n_done(call: First, part: str) -> int:
    return len(call.records.of(part))


def _add(call: First, record: Record) -> None:
    """Keep a record; print a failure at once, and print when a part is done."""
    call.records.add(record)
    if not record.ok:
        print(f"WRONG {record.part}: {record.name}: {record.text}", flush=True)
    if _n_done(call, record.part) == call.total[record.part]:
        print(_line(call, record.part), flush=True)
        _summarise(call)


def _time(call: First, due: list[Any]) -> None:
    """Time the works in one process, after all others have ended."""
    if not due or call.budget.left <= LEFT_FOR_TIMINGS:
        return
    path = call.options.out / REPORT
    report = read_json(path)
    if not report:
        report = new_report(call.device, call.options) | {"correctness": timings.NOTHING}
        if call.device.type == "cpu":
            report["format"] = "stubbed"  # no other command takes this for a measurement
    for work, text in timings.timed(due, report, call.device, call.options.silence, call.budget, call.kernels):
        report["state_after"] = environment.state(call.device)
        report["not_measured"] = [x.name for x in due if x.name not in {row["name"] for row in report["results"]}]
        results.write(path, report)
        _add(call, Record(TIMINGS, work.name, ok=not text, text=text))


def _summarise(call: First) -> str:
    """Write the results so far; return them."""
    kernels = call.kernels
    lines = [*_headline(call.facts), *(_line(call, part) for part in call.total)]
    lines.append(
        f"kernels in this call: {len(kernels.compiled)} compiled, {len(kernels.found)} found in Triton's cache"
    )
    report = read_json(call.options.out / REPORT)
    for verdict in goals.verdicts(report) if report else ():
        if verdict.n_found:
            lines.append("goal " + ", ".join(terminal.goal_cells(verdict)))
    lines += [f"WRONG {x.part}: {x.name}: {x.text}" for x in wrong(call.records.by_key.values())]
    lines += [f"note  {x.part}: {x.name}: {x.text}" for x in call.records.by_key.values() if x.ok and x.text]
    results.replace(call.options.out / SUMMARY, "\n".join([*lines, ""]))
    return "\n".join(lines)


def _line(call: First, part: str) -> str:
    """The progress of a part, and the largest share of the budget used."""
    records = call.records.of(part)
    n_wrong = len(wrong(records))
    text = (
        f"{part:<15} {len(records):>3} of {call.total[part]:>3} done, {f'{n_wrong} WRONG' if n_wrong else 'none wrong'}"
    )
    used = [(x, name, record.name) for record in records for name, x in record.figures.items() if x is not None]
    if used:
        x, tensor, name = max(used)
        text += f"; at most {percent(x)} of the error budget, by {tensor} of '{name}'"
    return text
