"""The kernels for Hopper, in Gluon, on the virtual GPU; each run is a process in which Triton compiles."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers import compiling


def test_their_calls(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("compiled_hopper.py")
    done = compiling.compiling("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", tests, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^20 passed in", done.stdout, re.M), done.stdout


def test_a_few_problems_in_random_orders(tmp_path: Path) -> None:
    done = compiling.compiling("-m", "tests.tools.compiled", "--quick", "--only", "hopper", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d passed, 0 failed", done.stdout, re.M), done.stdout
