"""``python -m tests.tools.compiled``: solve problems by the compiled kernels, run on a CPU, under the Triton installed.

The results go to docs/results/compiled.json, in place of those of the same Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton

from tests.helpers.compiled_caches import CacheProblem
from tests.helpers.compiled_problems import Problem, problems, quick_problems, solve

RESULTS = Path(__file__).resolve().parents[2] / "docs/results/compiled.json"


@dataclass
class Row:
    """What became of a problem."""

    problem: str
    group: str
    arch: str
    dtype: str
    used: float = float("inf")  # share of the budget, by the tensor that uses most
    tensor: str = ""
    error: str = ""
    programs: dict[str, int] = field(default_factory=dict)  # of each kernel
    instructions: int = 0  # executed, each once for the programs that run together
    tolerated: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and self.used <= 1.0


def row_of(problem: Problem | CacheProblem) -> Row:
    """Solve a problem; a fault is a result too."""
    torch.set_num_threads(1)
    row = Row(str(problem), problem.group, problem.arch, problem.dtype)
    start = time.process_time()
    try:
        solution = solve(problem)
    except Exception as error:
        row.error = " ".join(f"{type(error).__name__}: {error}".split())
    else:
        row.tensor, worst = max(solution.ratios.items(), key=lambda item: item[1].used)
        row.used = round(worst.used, 4)
        for name, counters in solution.counters.items():
            row.programs[name] = counters.programs
            row.instructions += counters.instructions
            for rule in counters.tolerated:
                kind = rule.partition(":")[0]
                row.tolerated[kind] = row.tolerated.get(kind, 0) + 1
    row.seconds = time.process_time() - start
    return row


def rows(chosen: Sequence[Problem | CacheProblem], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from map(row_of, chosen)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(row_of, chosen)


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """The results of one Triton: by architecture, group and dtype, and all that was not right."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.arch, row.group, row.dtype), []).append(row)
    tolerated: dict[str, Counter[str]] = {}
    for row in found:
        tolerated.setdefault(row.arch, Counter()).update(row.tolerated.keys())
    return {
        "torch": torch.__version__.partition("+")[0],
        "ok": all(row.ok for row in found),
        "groups": [
            {
                "arch": arch,
                "group": group,
                "dtype": dtype,
                "problems": len(members),
                "within": sum(row.ok for row in members),
                "used": max(row.used for row in members if not row.error)
                if not all(r.error for r in members)
                else None,
                "worst": max(members, key=lambda row: row.used).problem,
                "programs": sum(sum(row.programs.values()) for row in members),
                "instructions": sum(row.instructions for row in members),
            }
            for (arch, group, dtype), members in groups.items()
        ],
        "kernels": sorted({name for row in found for name in row.programs}),
        "tolerated": {arch: dict(counts) for arch, counts in tolerated.items() if counts},
        "failed": [
            {"problem": row.problem, "used": row.used, "tensor": row.tensor, "error": row.error}
            for row in found
            if not row.ok
        ],
    }


def save(result: dict[str, Any]) -> None:
    """Put the results of this Triton in place of older ones."""
    every = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    every[triton.__version__] = result
    text = json.dumps(dict(sorted(every.items())), indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="problems with this in their name; nothing is saved")
    parser.add_argument("--quick", action="store_true", help="a few problems; nothing is saved")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    chosen = [x for x in (quick_problems() if options.quick else problems()) if options.only in str(x)]
    if not chosen:
        parser.error(f"--only: got {options.only!r}, which is in no problem")
    print(f"Triton {triton.__version__}, {len(chosen)} problems", flush=True)
    found = []
    for row in rows(chosen, min(options.jobs, len(chosen))):
        found.append(row)
        verdict = "ok  " if row.ok else "FAIL"
        print(f"{verdict} {row.used:5.0%} {row.tensor:6} {row.seconds:5.1f} s  {row.problem} {row.error}", flush=True)
    bad = sum(not row.ok for row in found)
    print(f"{len(found) - bad} passed, {bad} failed")
    if not options.quick and not options.only:
        save(summary(found))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
