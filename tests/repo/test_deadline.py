"""``TESTS_UNTIL``: tests that would begin later are skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import itertools, os, time
import pytest
from tests.helpers import deadline

number = itertools.count()

@pytest.fixture(autouse=True, scope="session")
def _started(tmp_path_factory):
    assert deadline._UNTIL
    assert ("TESTS_UNTIL" in os.environ) == ("PYTEST_XDIST_WORKER" not in os.environ)  # for what a test starts

@pytest.mark.parametrize("i", range(40))
def test(i):
    if next(number) == 20:
        time.sleep(max(0.0, float(deadline._UNTIL) - time.time()))
"""
CONFTEST = """
from tests.helpers import deadline

def pytest_collection_modifyitems(items):
    deadline.rotate(items)

def pytest_runtest_setup():
    deadline.skip_if_over()
"""


def outcomes(folder: Path, until: float, *options: str) -> dict[str, int]:
    """Outcome -> number of tests, with that deadline."""
    (folder / "test_slow.py").write_text(TESTS)
    (folder / "conftest.py").write_text(CONFTEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "TESTS_UNTIL": str(until)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: int(n) for n, name in re.findall(r"(\d+) (passed|skipped|failed|error)", done.stdout)}


def test_a_deadline_that_is_over(tmp_path: Path) -> None:
    """Each process has it."""
    assert outcomes(tmp_path, time.time() - 1, "-n", "2") == {"skipped": 40}


def test_a_deadline_in_the_middle(tmp_path: Path) -> None:
    """Tests that begin before it run."""
    found = outcomes(tmp_path, time.time() + 3)
    assert sum(found.values()) == 40
    assert found["skipped"]
