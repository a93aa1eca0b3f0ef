"""What the kernels execute, counted by the virtual GPU, beside what the static model reads in their machine code.

    python -m bench.codegen.executed [--target sm_90] [--dtype bf16] [--head-dim 128] [--features all] [--update]

compiles and runs the launches of the quick list on a small problem, on the CPU, and prints the counts of every loop
with products: instructions of a warp in one iteration, and bytes, sectors and passes of a program in one iteration.
--update writes them to docs/results/executed.json, and the tables of docs/codegen.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import torch
import triton

from bench.codegen import compilations, executed_tables, launches
from bench.codegen.executed_loops import Iteration, iteration, product_loops
from bench.codegen.executed_tables import RESULTS
from bench.codegen.loops import LOOPS, Loop
from bench.codegen.predictions import fetched_bytes
from bench.codegen.report import Report
from bench.report.page import table_of
from fusedattn.virtual_gpu.attention import compiled_attention, launches_for
from fusedattn.virtual_gpu.counters import Counters, Traffic
from fusedattn.virtual_gpu.launch import parsed

TARGETS = ("sm_80", "sm_90")
QUERIES, HEADS_Q, HEADS_KV = 128, 4, 2  # at most, unless the launch depends on them
OFFENDERS = 4  # places of a kernel


def sizes_of(features: frozenset[str]) -> launches.Sizes:
    """The usual sizes with fewer heads and queries, which take less time. Few queries share tiles with other heads."""
    sizes = launches.Sizes.of(features)
    if sizes.seqlen_q < QUERIES:
        return sizes
    return replace(sizes, nheads_q=HEADS_Q, nheads_kv=HEADS_KV, seqlen_q=QUERIES)


def cases(options: argparse.Namespace) -> Iterator[compilations.Case]:
    """The cases of the quick list, one for each set of features.

    Not those of the kernels for Hopper: counts are of a kernel's warps, which there have different tasks.
    """
    options.quick, options.kernel = True, []
    options.target = options.target or list(TARGETS)
    for case in compilations.cases(options):
        for name in case.features:
            if name not in compilations.HOPPER:
                yield replace(case, features=(name,))


def run_case(case: compilations.Case) -> dict[str, dict[str, Any]]:
    """The counts of every kernel of one call, by the key of its report."""
    torch.set_num_threads(1)
    [name] = case.features
    features, texts = launches.FEATURES[name], dict[str, list[str]]()

    def note(kernel: str, text: str) -> str:
        texts.setdefault(kernel, []).append(text)
        return text

    sizes = sizes_of(features)
    reports = compilations.compile_case(case, sizes)
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        compiled_attention(case.target, counting=True, asynchronous="early") as gpu,
        launches_for(case.target, multiprocessors=1),
    ):
        triton.knobs.cache.dir = folder
        gpu.rewrite = note
        launches.call(case.head_dim, compilations.DTYPES[case.dtype], features, sizes=sizes)
    found: dict[str, dict[str, Any]] = {}
    for kernel, counters in gpu.counters.items():
        of_kernel = [report for report in reports if report.kernel == kernel]
        found[of_kernel[0].key] = _entry(name, of_kernel[0], counters)
        if len(of_kernel) == len(texts[kernel]) == 1 and of_kernel[0].loops:
            found[of_kernel[0].key]["loops"] = dict(_loops(of_kernel[0], counters, texts[kernel][0]))
    return found


def _entry(name: str, report: Report, counters: Counters) -> dict[str, Any]:
    """The counts of all launches of a kernel."""
    n = counters.programs
    return {
        "call": name,
        "tile": report.tile,
        "programs": n,
        "issued": {kind: _short(x / n) for kind, x in counters.by_kind.items()},
        "traffic": {where: _of_traffic(t, n) for where, t in counters.traffic.items()},
        "barriers": _short(counters.barriers.total() / n),
        "offenders": _offenders(counters),
    }


def _offenders(counters: Counters) -> list[list[Any]]:
    """The places furthest above the ideal: (access, place, sectors or passes, the ideal, their share in the kernel)."""
    total = counters.traffic
    excess = sorted(counters.by_place.items(), key=lambda item: item[1].ideal - item[1].needed)
    return [
        [where, place, t.needed, t.ideal, _short(t.needed / total[where].needed)]
        for (where, place), t in excess[:OFFENDERS]
        if t.needed > t.ideal
    ]


def _loops(report: Report, counters: Counters, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The counts of each loop that ran, by its name, and what the model reads in its machine code."""
    ranges = product_loops(parsed(text))
    names: tuple[str, ...] = LOOPS.get(report.kernel, {}).get(len(ranges), ())
    names = names or tuple(str(i) for i in range(1, len(ranges) + 1))
    for i, (loop, name) in enumerate(zip(ranges, names, strict=True)):
        found = iteration(loop, counters, report.config["num_warps"])
        if found is not None:
            static = _static(report, report.loops[i], name) if len(ranges) == len(report.loops) else {}
            yield name, _of_iteration(found) | {"model": static}


def _static(report: Report, loop: Loop, name: str) -> dict[str, float]:
    """What the static model assumes of an iteration: instructions of a warp, bytes of a program."""
    warps, fetched = report.config["num_warps"], fetched_bytes(report, loop, name)
    return {
        "instructions": len(loop.steps),
        "multiply_adds": loop.macs,
        "mufu": loop.counts["mufu"],
        "barriers": loop.counts["barrier"],
        "memory_bytes": warps * sum(step.memory_bytes for step in loop.steps) + fetched,
        "shared_bytes": warps * sum(step.shared_bytes for step in loop.steps) + fetched,
    }


def _of_iteration(x: Iteration) -> dict[str, Any]:
    return {
        "iterations": x.iterations,
        "issued": {kind: _short(n) for kind, n in x.issued.items()},
        "multiply_adds": _short(x.multiply_adds),
        "barriers": _short(x.barriers),
        "memory_bytes": None if x.memory_bytes is None else _short(x.memory_bytes),
        "shared_bytes": None if x.shared_bytes is None else _short(x.shared_bytes),
        "traffic": {where: _of_traffic(t, x.iterations) for where, t in x.traffic.items()},
    }


def _of_traffic(t: Traffic, n: float) -> list[float]:
    return [_short(count / n) for count in (t.requests, t.bytes, t.needed, t.ideal)]


def _short(x: float) -> float:
    """Two decimals, none if they are zero."""
    return int(x) if x == int(x) else round(x, 2)


def save(entries: dict[str, dict[str, Any]]) -> None:
    """Write the committed results, one line for each kernel."""
    lines = [f"{json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries)]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Print or write the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.codegen.executed", description=(__doc__ or "").splitlines()[0]
    )
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--target", **many, choices=TARGETS, help="default: all")
    parser.add_argument("--dtype", **many, choices=list(compilations.QUICK), help="default: all")
    parser.add_argument("--head-dim", **many, type=int, help="default: 64, 128 and 256")
    parser.add_argument("--features", **many, choices=list(launches.FEATURES), help="default: those of --quick")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: 2")
    parser.add_argument("--update", action="store_true", help=f"write the counts to {RESULTS.name} and docs/")
    options = parser.parse_args(arguments)
    entries: dict[str, dict[str, Any]] = executed_tables.load() if options.update else {}
    for found in compilations.in_processes(run_case, cases(options), options.jobs):
        entries |= found
        print(", ".join(found), file=sys.stderr)
        if options.update:
            save(entries)
    if options.update:
        executed_tables.write()
    else:
        print(table_of(executed_tables.rows(entries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
