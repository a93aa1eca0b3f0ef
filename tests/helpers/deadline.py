"""Tests that would begin after ``TESTS_UNTIL``, in seconds since 1970, are skipped: for a machine that must end.

Each run then starts at another test, so that it is not always the same ones that are left out.
"""

from __future__ import annotations

import os
import random
import time

import pytest

# Processes that a test starts do not have the deadline, but those of pytest-xdist do.
_read = os.environ.pop if "PYTEST_XDIST_WORKER" in os.environ else os.environ.get
_UNTIL = _read("TESTS_UNTIL", None)


def rotate(items: list[pytest.Item]) -> None:
    """Start at another test; at the same one in all processes of a run, which have the same deadline."""
    if _UNTIL and items:
        start = random.Random(_UNTIL).randrange(len(items))
        items[:] = items[start:] + items[:start]


def skip_if_over() -> None:
    if _UNTIL and time.time() > float(_UNTIL):
        pytest.skip("TESTS_UNTIL is over")
