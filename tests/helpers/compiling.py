"""Python processes of a user, whose shell sets nothing for Triton, pytest or colours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    """The inherited variables without those settings, and `variables`."""
    left_out = ("TRITON_INTERPRET", "PYTEST_", "FORCE_COLOR")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return inherited | {"OMP_NUM_THREADS": "1"} | variables


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=environment(**variables), **options)


def output(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """The output of Python with these arguments; it must succeed."""
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiling(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with kernels compiled into this cache."""
    return run(*command, TRITON_CACHE_DIR=str(cache))


def make(*arguments: str) -> list[str]:
    """The lines that make prints; a surrounding make would pass on its own arguments."""
    inherited = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")}
    options: dict[str, Any] = {"cwd": ROOT, "env": inherited, "check": True, "capture_output": True, "text": True}
    return subprocess.run(["make", *arguments], **options).stdout.splitlines()
