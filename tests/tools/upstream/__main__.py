"""Run the tests of PyTorch and FlashAttention with the attention of this package in place of theirs, on the CPU.

    python -m tests.tools.upstream --pytorch PATH --flash-attention PATH [--sample 24] [--only NAME]

The paths are checkouts, which are not part of this repository. PyTorch's tests run twice, without and with the
replacement; tests that fail without it do not count. A test that passes but makes no call that this package served
counts as not reached. From FlashAttention, `--sample` cases of each test run, with sequences of up to 256 tokens. Its
tests import einops; PyTorch's import expecttest.

Writes docs/results/upstream.json; exit status 1 if a suite could not be collected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fusedattn.cli.machine import versions
from tests.tools.upstream.flash_attn_on_cpu import write_for_cpu
from tests.tools.upstream.suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs/results/upstream.json"
LIMIT = 3600  # seconds for one run of one file
Results = dict[str, dict[str, Any]]


def run(suite: Suite, checkout: Path, replacement: str, sample: int) -> Results:
    """Run one process of pytest; the outcomes by test, empty if no test could be collected."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.jsonl"
        tests = checkout / suite.path
        if suite.project == "flash-attention":
            tests = Path(folder) / Path(suite.path).name
            write_for_cpu(checkout / suite.path, tests)
        environment = os.environ | {
            "UPSTREAM_REPLACEMENT": replacement,
            "UPSTREAM_OUT": str(out),
            "UPSTREAM_CHECKOUT": str(checkout),
            "UPSTREAM_SAMPLE": str(sample),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT), str(checkout / "test"), os.environ.get("PYTHONPATH")))
            ),
        }
        shutil.copy(os.devnull, Path(folder) / "pytest.ini")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-W", "ignore", "-p", "tests.tools.upstream.plugin"]
        command += ["-p", "no:cacheprovider", "--noconftest", "-c", f"{folder}/pytest.ini"]
        command += ["--rootdir", str(tests.parent), str(tests)]
        command += ["-k", suite.keywords] if suite.keywords else []
        done = subprocess.run(command, env=environment, cwd=folder, timeout=LIMIT, capture_output=True, text=True)
        if not out.exists():
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
            return {}
        return {result.pop("test"): result for result in map(json.loads, out.read_text().splitlines())}


def compared(results: Results, baseline: Results) -> dict[str, Any]:
    """The counts of a suite, and each test that passes only without the replacement."""
    count: Counter[str] = Counter()
    differs: list[dict[str, Any]] = []
    fails_without: list[str] = []
    for test, result in results.items():
        outcome = result["outcome"]
        if outcome == "passed" and not result["served"]:
            outcome = "not reached"
        elif outcome in ("failed", "refused") and baseline.get(test, {}).get("outcome") == "failed":
            outcome = "fails without, too"
            fails_without.append(f"{test}: {baseline[test]['error']}: {baseline[test]['message']}")
        elif outcome in ("failed", "refused"):
            differs.append({"test": test, **result})
        count[outcome] += 1
    counts = {name: count[name] for name in ("passed", "refused", "failed", "skipped", "not reached")}
    calls = sum(result["served"] for result in results.values())
    counts |= {"fails without, too": count["fails without, too"], "calls served": calls}
    return counts | {"differs": differs, "failures without": fails_without}


def version_of(checkout: Path) -> str:
    """The version that the checkout names."""
    file = checkout / "version.txt"
    if file.exists():
        return file.read_text().strip()
    for line in (checkout / "flash_attn/__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    return "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each suite, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch, of the version of the installed torch")
    parser.add_argument("--flash-attention", type=Path, help="a checkout of FlashAttention 2.8")
    parser.add_argument("--sample", type=int, default=24, help="cases of each test of FlashAttention, 0 for all")
    parser.add_argument("--only", default="", help="run only suites with this in their name")
    options = parser.parse_args(arguments)
    checkouts = {"pytorch": options.pytorch, "flash-attention": options.flash_attention}
    suites, uncollected = [], 0
    for suite in SUITES:
        checkout = checkouts[suite.project]
        if checkout is None or options.only not in str(suite):
            continue
        checkout = checkout.resolve()
        start = time.monotonic()
        baseline = run(suite, checkout, "nothing", 0) if suite.project == "pytorch" else {}
        results = run(suite, checkout, suite.replacement, options.sample)
        uncollected += not results
        figures = compared(results, baseline)
        about = {"suite": suite.path, "replacement": suite.replacement, "version": version_of(checkout)}
        suites.append(about | figures | {"seconds": round(time.monotonic() - start)})
        print(f"{suite}:", {name: n for name, n in figures.items() if not isinstance(n, list)}, flush=True)
        sample = options.sample if options.flash_attention else None
        written = {"versions": versions(), "cases of each test of FlashAttention": sample, "suites": suites}
        RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    return int(bool(uncollected))


if __name__ == "__main__":
    sys.exit(main())
