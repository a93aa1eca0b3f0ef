"""Do the tests bite? Plant each fault of the lists beside this file, and see whether the tests notice.

    python -m tests.mutation [--only TEXT] [--survivors] [--named] [--jobs 2] [--list]
    python -m tests.mutation --make-test [--sample N] [--named]

Each fault is planted in a copy of the tree. The tests that probably see it run first, then the other tests of the
operation, then all. A fault that none sees has survived: it needs a test, or the proof that it changes nothing. In the
end the tests that failed must pass without a fault, else their failures would mean nothing. Writes
docs/results/mutants.json; exit status 1 where a fault survived.

``--make-test`` asks how many faults the quick tests notice, which are those of ``make test``. A fault counts as killed
without a run if the test that killed it last, in either file of results, is a quick one. Writes
docs/results/mutants_make_test.json.

General-purpose tools (mutmut, cosmic-ray) were not used: what they put in a function's place, Triton cannot compile, and
most of what they change in a kernel changes its speed only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.mutation import (
    cache_kernels,
    caches,
    decode,
    fp8,
    hopper,
    hopper_barriers,
    integrations,
    kernels,
    launches,
    learned,
    linear,
    low_precision,
    masking,
    one_pass,
    operation,
    package,
    qk_norm,
    scores,
    sequences,
    shards,
    sparse,
    trees,
)  # fmt: skip
from tests.mutation.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results/mutants.json"
RESULTS_OF_MAKE_TEST = ROOT / "docs/results/mutants_make_test.json"
QUICK = ("-m", "not thorough", "--ignore=tests/integrations")  # the tests of make test
SUBJECTS = (
    kernels, masking, scores, learned, sequences, decode, one_pass, launches, operation, package, trees, sparse, caches,
    cache_kernels, hopper, hopper_barriers, shards, linear, qk_norm, low_precision, fp8,
    integrations,
)  # fmt: skip
FAULTS: tuple[Fault, ...] = tuple(fault for subject in SUBJECTS for fault in subject.FAULTS)
TREE = ("bench", "docs", "fusedattn", "kernels", "tests", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile",
        "README.md", "constraints.txt", "pyproject.toml")  # fmt: skip
# Where a fault in the operation would show, the quickest first.
OPERATION_TESTS = tuple(
    f"tests/{'kernels' if name in ('blocks', 'one_pass') else 'public'}/test_{name}.py"
    for name in (
        "attention", "strides", "masking", "blocks", "rope", "dropout", "float64", "properties", "memory",
        "determinism", "learned", "fuzz", "fuzz_cached", "large_tensors", "varlen", "second_order", "gradcheck",
        "one_pass",
    )
)  # fmt: skip
PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
TIMEOUT = 1800  # seconds of one run of tests: a fault may make a loop endless


@dataclass(frozen=True)
class Verdict:
    """What became of one fault."""

    what: str
    path: str
    killed_by: str | None
    seconds: int


def copy_tree(to: Path) -> None:
    """What the tests need, without caches; `fusedattn/kernels` stays a link."""
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)


def run_tests(tree: Path, arguments: Sequence[str]) -> str | None:
    """The first test that fails, or None.

    Raises:
        RuntimeError: pytest found no tests, or could not be asked.
    """
    # A stale .pyc would hide a fault that was planted within the same second.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [*PYTEST, "-x", *arguments]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "no test ended in time"
    if done.returncode == 0 or (done.returncode == 5 and set(QUICK) <= set(arguments)):  # 5: no quick test among them
        return None
    if done.returncode < 0:  # by a signal: what is written out of bounds may be anything
        return f"the tests crash with signal {-done.returncode}"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (1, 2) or not failed:
        raise RuntimeError(f"pytest {arguments}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr}")
    return failed[0].split(" - ")[0].split(" ", 1)[1]


def judge(fault: Fault, tree: Path, *, named: bool = False, chosen: Sequence[str] = ()) -> Verdict:
    """Plant one fault in `tree`, test, and take it out again.

    Args:
        fault, tree: what is planted, and where.
        named: run no tests but those that are named for the fault.
        chosen: arguments of pytest that narrow every run of tests.
    """
    start = time.perf_counter()
    file = tree / fault.path
    before = file.read_text(encoding="utf-8")
    fault.plant(tree)
    try:
        killer = run_tests(tree, [*pytest_arguments(fault.tests), *chosen])
        if killer is None and fault.equivalent is None and not named:
            killer = run_tests(tree, [*OPERATION_TESTS, *chosen]) or run_tests(tree, ["tests", *chosen])
    finally:
        file.write_text(before, encoding="utf-8")
    return Verdict(fault.what, fault.path, killer, round(time.perf_counter() - start))


def pytest_arguments(tests: str) -> list[str]:
    """``"FILE -k EXPRESSION"`` in parts."""
    file, _, expression = tests.partition(" -k ")
    return [file, "-k", expression.strip("'")] if expression else [file]


def judge_all(faults: Sequence[Fault], jobs: int, *, named: bool, chosen: Sequence[str] = ()) -> list[Verdict]:
    """Each job has a tree of its own; prints as it goes. See :func:`judge` for `named` and `chosen`.

    Raises:
        RuntimeError: a test that saw a fault fails without it too.
    """
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            tree = Path(folder, str(number))
            tree.mkdir()
            copy_tree(tree)
            trees.put(tree)

        def work(fault: Fault) -> Verdict:
            tree = trees.get()
            try:
                verdict = judge(fault, tree, named=named, chosen=chosen)
            finally:
                trees.put(tree)
            fate = verdict.killed_by or ("equivalent" if fault.equivalent else "SURVIVED")
            print(f"{verdict.seconds:5} s  {fault.what:60}  {fate}", flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(work, faults))
        killers = sorted({v.killed_by for v in verdicts if v.killed_by and "::" in v.killed_by})
        if killers and (failed := run_tests(trees.get(), killers)) is not None:
            raise RuntimeError(f"{failed} fails without a fault; nothing can be judged by it")
        print(f"the {len(killers)} tests that saw them pass without a fault", flush=True)
        return verdicts


def report(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The figures, and every verdict."""
    equivalent = {fault.what: fault.equivalent for fault in FAULTS if fault.equivalent}
    survived = [v.what for v in verdicts if v.killed_by is None and v.what not in equivalent]
    killed = sum(v.killed_by is not None for v in verdicts)
    return {
        "versions": versions(),
        "planted": len(verdicts),
        "killed": killed,
        "equivalent": equivalent,
        "survived": survived,
        "share_killed": round(killed / max(1, killed + len(survived)), 4),
        "verdicts": [asdict(v) for v in verdicts],
    }


def last_verdicts() -> list[Verdict]:
    """The last verdict on each fault of the lists, from both files of results; a kill counts for more than none."""
    faults, found = {fault.what for fault in FAULTS}, {}
    for path in (RESULTS, RESULTS_OF_MAKE_TEST):
        for v in json.loads(path.read_text())["verdicts"] if path.exists() else ():
            if v["what"] in faults and (v["killed_by"] or v["what"] not in found):
                found[v["what"]] = Verdict(v["what"], v["path"], v["killed_by"], v["seconds"])
    return list(found.values())


def judge_by_make_test(faults: Sequence[Fault], jobs: int, *, named: bool, sample: int | None) -> dict[str, Any]:
    """How many faults the quick tests kill, of those that the last results record and of others.

    Args:
        faults: those to judge; one whose named tests lie in tests/integrations is left out.
        jobs, named: those of :func:`judge_all`.
        sample: how many of the faults without a record are judged, drawn by chance; None: all.
    """
    faults = [f for f in faults if not f.tests.startswith("tests/integrations") and f.equivalent is None]
    recorded = {v.what: v.killed_by for v in last_verdicts()}
    others = [f for f in faults if f.what not in recorded]
    if sample is not None:
        others = random.Random(0).sample(others, min(sample, len(others)))
    command = [*PYTEST, "--collect-only", "tests", *QUICK]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tests = {line for line in collected if "::" in line}
    by_record = [f for f in faults if recorded.get(f.what) in tests]
    to_run = [f for f in faults if f.what in recorded and f not in by_record] + others
    found = [Verdict(f.what, f.path, recorded[f.what], 0) for f in by_record]
    ran = judge_all(to_run, jobs, named=named, chosen=QUICK)
    killed = sum(v.killed_by is not None for v in ran)
    of_record = [v for v in (*found, *ran) if v.what in recorded]
    return {
        "versions": versions(),
        "quick_tests": len(tests),
        "faults": len(faults),
        "judged": len(found) + len(ran),
        "killed": len(found) + killed,
        "killed_by_record": len(found),
        "killed_by_run": killed,
        "share_killed": round((len(found) + killed) / max(1, len(found) + len(ran)), 4),
        "share_killed_of_record": round(sum(v.killed_by is not None for v in of_record) / max(1, len(of_record)), 4),
        "survived": [v.what for v in ran if v.killed_by is None],
        "verdicts": [{**asdict(v), "how": how} for how, group in (("record", found), ("run", ran)) for v in group],
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "triton")}}


def main(arguments: list[str] | None = None) -> int:
    """Print every verdict, and write them all where all faults were judged."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="faults with this in their name or path")
    parser.add_argument(
        "--survivors", action="store_true", help="judge those that no file of results calls killed, and keep the others"
    )
    parser.add_argument("--named", action="store_true", help="only by the tests that are named for each fault")
    parser.add_argument("--make-test", action="store_true", help="only by the tests that make test runs")
    parser.add_argument("--sample", type=int, metavar="N", help="with --make-test: N of the faults without a record")
    parser.add_argument("--jobs", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="list the faults and plant nothing")
    options = parser.parse_args(arguments)
    faults = [f for f in FAULTS if options.only in f.what or options.only in f.path]
    known: list[Verdict] = []
    if options.survivors:
        equivalent = {f.what for f in FAULTS if f.equivalent}
        known = [v for v in last_verdicts() if v.killed_by or v.what in equivalent]
        judged = {v.what for v in known}
        faults = [f for f in faults if f.what not in judged]
    if options.list:
        print("\n".join(f"{f.path:28} {f.what}" for f in faults))
        return 0
    if options.make_test:
        result = judge_by_make_test(faults, options.jobs, named=options.named, sample=options.sample)
        if not options.only:
            RESULTS_OF_MAKE_TEST.write_text(json.dumps(result, indent=1) + "\n")
        print(f"make test kills {result['killed']} of {result['judged']} faults")
        print("\n".join(f"survived: {what}" for what in result["survived"]))
        return int(bool(result["survived"]))
    verdicts = {v.what: v for v in (*known, *judge_all(faults, options.jobs, named=options.named))}
    result = report([verdicts[f.what] for f in FAULTS if f.what in verdicts])
    if len(verdicts) == len(FAULTS):
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['killed']} of {result['planted']} faults killed, {len(result['equivalent'])} equivalent")
    print("\n".join(f"survived: {what}" for what in result["survived"]))
    return int(bool(result["survived"]))


if __name__ == "__main__":
    sys.exit(main())
