"""Every kernel timed on a GPU has been checked: the same kernels, as Triton distinguishes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_every_kernel_that_is_timed_is_in_the_check_ahead_of_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.timed_kernels"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["unchecked"] == {}
    assert found["works"] > 100
    assert found["timed"] > 50
