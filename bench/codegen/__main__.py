"""Cross-compile every launch, without a GPU, and report on the machine code.

    python -m bench.codegen [--target sm_90] [--json] [--update]

Registers, spills and shared memory, programs per multiprocessor, tensor-core instructions and instructions of each
loop; compared with the baseline of the installed Triton version in bench/baselines. Kernels whose fingerprint the
baseline has are not compiled again, unless --afresh is given. The exit code is 1 if a kernel has a fault or is worse
than in the baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import triton

from bench.codegen import baseline, compilations, report, tables
from bench.codegen.launches import FEATURES, TARGETS

SHOWN = 3  # names per fault


def main(arguments: list[str] | None = None) -> int:
    """Print the reports and judge them."""
    options = _parser().parse_args(arguments)
    options.target = options.target or list(TARGETS)
    narrowed = options.quick or options.head_dim or options.features
    selected = [] if options.ones else compilations.cases(options)
    selected += compilations.cases_of_ones(options) if options.ones or not narrowed else []
    everything = not (narrowed or options.ones or options.dtype or options.kernel)
    complete = set(options.target) if everything else set()
    before = baseline.load(triton.__version__)
    known = before.fingerprints if before is not None and not options.afresh else frozenset()
    reports = compilations.compile_all(selected, options.jobs, known)
    if options.update:
        before = baseline.updated(reports, before, triton.__version__, complete, options.accept_faults)
        print(f"wrote {baseline.save(before)}", file=sys.stderr)
        tables.write()
    judgement = baseline.judge(reports, before, complete)
    if before is not None:
        reports = list(map(before.with_figures, reports))
    if options.json:
        print(json.dumps([r.as_object() | _verdict(r, judgement) for r in reports], indent=1))
    else:
        print("\n".join(report.lines(reports)))
    # With --json, all other text goes to stderr.
    out = sys.stderr if options.json else sys.stdout
    for title, found in (("known fault", judgement.known), ("FAULT", judgement.new)):
        for faults, keys in _by_fault(found).items():
            more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
            print(f"{title}: {', '.join(keys[:SHOWN])}{more}: {faults}", file=out)
    if before is None:
        print(f"no baseline for Triton {triton.__version__}: growth was not checked; --update makes one", file=out)
    n_compiled = sum(not report.is_known for report in reports)
    print(
        f"Triton {triton.__version__}: {len(reports)} kernels, {n_compiled} of them compiled, the others known; "
        f"{len(judgement.new)} with faults, {len(judgement.known)} with known faults",
        file=out,
    )
    return int(bool(judgement.new))


def _by_fault(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The keys of the reports that have the same faults."""
    grouped: dict[str, list[str]] = {}
    for key, faults in found.items():
        grouped.setdefault("; ".join(faults), []).append(key)
    return grouped


def _verdict(r: report.Report, judgement: baseline.Judgement) -> dict[str, list[str]]:
    return {"faults": judgement.new.get(r.key, []), "known_faults": judgement.known.get(r.key, [])}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.codegen", description=(__doc__ or "").splitlines()[0])
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--target", **many, choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", **many, help="by name, e.g. attention_fwd; default: all")
    parser.add_argument("--dtype", **many, choices=list(compilations.DTYPES), help="default: all")
    parser.add_argument("--head-dim", **many, type=int, help="default: 64, 128 and 256; fp16: only 128")
    parser.add_argument("--features", **many, choices=list(FEATURES), help="of the list, or any at each --head-dim")
    parser.add_argument("--quick", action="store_true", help="bf16 and fp32 with the last two features and gradients")
    parser.add_argument("--ones", action="store_true", help="only calls with sizes of 1, for sm_90 and gfx942")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes; default: 2")
    parser.add_argument("--afresh", action="store_true", help="compile kernels that the baseline has, too")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    parser.add_argument("--update", action="store_true", help="write the figures to this Triton's baseline and docs/")
    parser.add_argument("--accept-faults", action="store_true", help="with --update: list present faults as known")
    return parser


if __name__ == "__main__":
    sys.exit(main())
