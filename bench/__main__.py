"""``python -m bench``: time the package and others, plot and tabulate the results, compare two result files."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedattn.cli.errors import CommandError

RESULTS, CANDIDATES = Path("bench/results"), Path("bench/candidates")

_RUN = """\
Measure work of named suites, the most important first, and write a JSON file to
DIR/<device>/<date>-<commit>.json, even if the time runs out before the end.

Before anything is timed, small problems of its kind must be within the error
budget, and the others must agree with fusedattn on the problem itself. If
fusedattn is wrong, the exit status is 1, and plot and table refuse the results.
"""


_TUNE = """\
Time other launch configs for attention() together with those of
kernels/configs.py, and write DIR/<device>/<date>-<commit>-tune.json. The table
is not changed: that is for a person to decide.

--compile ARCH finds the candidates, without a GPU: tiles whose machine code has
no spill and no other fault, the best by the model first. On a GPU each is
checked in a separate process, and timed if it keeps the error budget. Some
candidates touch registers of matrix products in flight; they are listed apart.
"""

_FIRST = """\
On a machine with a GPU, in order of importance: versions; every kernel once;
the forward in both styles; the error budget of every feature in bfloat16,
float16 and float32; the timings of the goals. Each result is written into
FOLDER at once. A second call with the same FOLDER continues the first.

Failures are kept, and not repeated without --again. The exit status is 1 if
anything failed. Without a GPU a small part of all this runs through Triton's
interpreter, with a stopwatch that always reads the same time.
"""

_PREBUILT = """\
Compile, without a GPU, every kernel that "first" launches on one, and pack them
into FOLDER/triton-<version>-<arch>.tar.xz, which "first" unpacks into Triton's
cache. Triton finds them there if it and its assembler are the same files; for
another version of Python, name the libtriton.so of that build.
"""

# The same names as in bench.tuning and the table of configs, which need Triton; a test compares them.
PARTS = ("fwd", "dkdv", "dq", "one_pass", "few")
WORK = ("streamed", "pairwise", "biased", "scored", "combined")
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")

# The package that a command requires.
NEEDED = {
    "plot": "matplotlib",
    "dashboard": "matplotlib",
    "scaling": "matplotlib",
    "tune": "triton",
    "first": "triton",
    "prebuilt": "triton",
}

# Other commands are modules of bench with the name of the command.
MODULES = {
    "prebuilt": "bench.first.archive",
    "scaling": "bench.scaling.page",
    "tune": "bench.tuning.tune",
    **{name: f"bench.report.{name}" for name in ("plot", "table", "dashboard", "compare")},
}

_TOGETHER = "several must be of one commit on one machine"


def build_parser() -> argparse.ArgumentParser:
    from bench.work.suites import SUITES

    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition(": ")[2])
    commands = parser.add_subparsers(dest="command", title="commands", required=True)

    run = commands.add_parser("run", help="measure", description=_RUN)
    run.add_argument("--suite", action="append", choices=SUITES, help="may be repeated (default: all)")
    run.add_argument("--filter", metavar="SUBSTRING", default="", help="only work with this in its name")
    run.add_argument("--goals", action="store_true", help="only the work that the goals of docs/performance.md need")
    run.add_argument("--list", action="store_true", help="print priorities and names of the work, and measure nothing")
    run.add_argument("--budget", metavar="SECONDS", type=_seconds, help="stop after this time, keep the results so far")
    run.add_argument("--quick", action="store_true", help="a little of everything, in sizes for a CPU")
    run.add_argument(
        "--against", metavar="FUNCTION", action="append", default=[],
        help="only these others: torch.sdpa-flash, flex, ..., or package.module:function; may be repeated",
    )  # fmt: skip
    run.add_argument("--device", help="cuda, cuda:1, ... or cpu (default: a GPU if there is one)")
    run.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="default: %(default)s")
    _add_commit(run, "measured")

    first = commands.add_parser("first", help="the first tests on a new GPU", description=_FIRST)
    first.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="one for each machine and sources")
    first.add_argument("--budget", metavar="SECONDS", type=_seconds, help="stop after this time, keep the results")
    # Two cores are left for the process that distributes the work and for other processes.
    most_cores = max(1, (os.cpu_count() or 1) - 2)
    first.add_argument("--jobs", metavar="N", type=_count, default=most_cores, help="processes (default: %(default)s)")
    first.add_argument(
        "--silence", metavar="SECONDS", type=_seconds, default=120.0,
        help="a process that compiles and answers nothing for this time hangs (default: %(default)g)",
    )  # fmt: skip
    first.add_argument("--again", action="store_true", help="repeat what failed")
    first.add_argument("--device", help="cuda, cuda:1, ... or cpu (default: a GPU if there is one)")
    _add_commit(first, "tested")

    prebuilt = commands.add_parser("prebuilt", help="compile for a GPU without having one", description=_PREBUILT)
    prebuilt.add_argument("--arch", choices=ARCHS, default="sm_90", help="default: %(default)s")
    prebuilt.add_argument("--libtriton", metavar="FILE", type=Path, help="that of the Triton that will launch them")
    prebuilt.add_argument("--jobs", metavar="N", type=_count, default=_cores(), help="processes (default: %(default)s)")
    prebuilt.add_argument("--out", metavar="FOLDER", type=Path, default=Path("prebuilt"), help="default: %(default)s")

    plot = commands.add_parser("plot", help="draw result files: one SVG for each suite and page")
    plot.add_argument("results", metavar="FILE", type=Path, nargs="+", help=_TOGETHER)
    plot.add_argument("--out", metavar="DIR", type=Path, help="default: a folder beside the first")

    tune = commands.add_parser("tune", help="compare configs of the table with others", description=_TUNE)
    many: dict[str, Any] = {"action": "append", "default": []}
    tune.add_argument("--part", **many, choices=PARTS, help="may be repeated (default: all)")
    tune.add_argument("--work", **many, choices=WORK, help="the work for each pair (default: streamed)")
    tune.add_argument("--head-dim", **many, type=int, choices=(64, 128, 256, 512), help="default: 128 and 64")
    tune.add_argument("--dtype", **many, choices=("bfloat16", "float16", "float32"), help="default: bfloat16")
    tune.add_argument("--compile", metavar="ARCH", choices=ARCHS, help="find candidates for ARCH, time nothing")
    tune.add_argument("--candidates", metavar="DIR", type=Path, default=CANDIDATES, help="default: %(default)s")
    tune.add_argument("--keep", metavar="N", type=int, default=12, help="number timed per slot (default: %(default)s)")
    tune.add_argument("--jobs", metavar="N", type=int, default=_cores(), help="processes (default: %(default)s)")
    tune.add_argument("--budget", metavar="SECONDS", type=_seconds, help="stop after this time, keep the results")
    tune.add_argument("--device", help="cuda, cuda:1, ... (default: the first)")
    tune.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="default: %(default)s")
    _add_commit(tune, "measured")

    compare = commands.add_parser("compare", help="compare two result files, case by case")
    compare.add_argument("a", metavar="A", type=Path)
    compare.add_argument("b", metavar="B", type=Path)

    table = commands.add_parser("table", help="write results into docs/performance.md and README.md")
    table.add_argument("results", metavar="FILE", type=Path, nargs="+", help=_TOGETHER)

    commands.add_parser("dashboard", help="write docs/dashboard.md and its plots from all results of GPUs")
    commands.add_parser("scaling", help="predict many GPUs: write the figures of docs/scaling.md")

    for command in commands.choices.values():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _run(options: argparse.Namespace) -> int:
    """Load the command's module, with its imports, and run it."""
    name = options.command
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        raise CommandError(f"{NEEDED[name]}: not installed; pip install 'fusedattn[bench]'")
    return importlib.import_module(MODULES.get(name, f"bench.{name}")).run(options)


def _cores() -> int:
    """The number of usable cores, at most 14, because each checking process has a context on the GPU."""
    return min(14, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are whole numbers from 1 on")
    return number


def _add_commit(command: argparse.ArgumentParser, done: str) -> None:
    command.add_argument("--commit", metavar="HASH", help=f"the commit that is {done}, for a tree without git")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are positive numbers")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except CommandError as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
