"""Targets for machines that others do not have: the commands that they run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def ran(tmp_path: Path, *arguments: str, without: str = "nothing") -> list[str]:
    """The commands given to a Python that does nothing and lacks the module `without`."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s " "$@" >> "{log}"; echo >> "{log}"\n[ "$2" != "import {without}" ]\n')
    python.chmod(0o755)
    # A surrounding make would pass on its own arguments.
    env = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")}
    subprocess.run(["make", f"PYTHON={python}", *arguments], cwd=ROOT, env=env, check=True, capture_output=True)
    return [line.strip() for line in log.read_text().splitlines() if line.startswith("-m ")]


def test_gpu_runs_the_tests_then_the_timings(tmp_path: Path) -> None:
    tests = "-m pytest -n 3 --maxfail=0 --durations=10 tests"
    assert ran(tmp_path, "gpu", "WORKERS=3", "ARGS=--goals") == [tests, "-m bench run --goals"]


def test_first(tmp_path: Path) -> None:
    assert ran(tmp_path, "first", "ARGS=--budget 540") == ["-m bench first --out first --budget 540"]


def test_gpu_does_without_xdist(tmp_path: Path) -> None:
    assert ran(tmp_path, "gpu", without="xdist")[0] == "-m pytest --maxfail=0 --durations=10 tests"


def test_sanitize(tmp_path: Path) -> None:
    assert ran(tmp_path, "sanitize") == ["-m tests.tools.sanitize"]
