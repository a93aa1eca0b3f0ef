"""Targets for machines that others do not have: the commands that they run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.compiling import make

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def ran(tmp_path: Path, *arguments: str, without: str = "nothing") -> list[str]:
    """The commands given to a Python that does nothing and lacks the module `without`."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s " "$@" >> "{log}"; echo >> "{log}"\n[ "$2" != "import {without}" ]\n')
    python.chmod(0o755)
    make(f"PYTHON={python}", *arguments)
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
