"""``python -m tests.tools.sanitize`` without a GPU, with a stand-in for compute-sanitizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.compiling import ROOT, run
from tests.tools import sanitize

CLEAN = 'echo "========= ERROR SUMMARY: 0 errors"'
FAULT = 'case "$*" in *fault) echo "========= ERROR SUMMARY: 4095 errors"; exit 99;; esac'


def stand_in(folder: Path, *lines: str) -> Path:
    """Write a script that takes the place of compute-sanitizer."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compute-sanitizer"
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


@pytest.mark.thorough
def test_without_a_gpu():
    """One line names the missing device, and the exit status is 2."""
    result = run("-m", "tests.tools.sanitize", CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no CUDA device for the torch ")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_tool(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sanitize, "candidates", lambda: iter([Path("/nowhere/compute-sanitizer"), ROOT]))
    assert sanitize.main([]) == 2
    assert "no compute-sanitizer on PATH" in capsys.readouterr().err


def test_where_the_tool_is_looked_for(monkeypatch, tmp_path):
    """PATH, then the toolkits, then wheels; files that cannot be executed are skipped."""
    places = ("path", "toolkit/bin", "packages/nvidia/cu13/bin")
    on_path, in_toolkit, in_wheel = (stand_in(tmp_path / place) for place in places)
    for name in ("CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sanitize.site, "getsitepackages", lambda: [str(tmp_path / "packages")])
    found = [path for path in sanitize.candidates() if path.is_relative_to(tmp_path) and path.exists()]
    assert found == [on_path, in_toolkit, in_wheel]
    assert sanitize.find_sanitizer() == on_path
    on_path.chmod(0o644)
    assert sanitize.find_sanitizer() == in_toolkit


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_command(tool):
    command = sanitize.command(Path("/opt/compute-sanitizer"), tool, "suite")
    assert command[0] == "/opt/compute-sanitizer"
    assert command[-4:] == [sys.executable, "-m", "tests.tools.sanitize", "suite"]
    options = dict(zip(command[1:-4:2], command[2:-4:2], strict=True))
    assert options["--tool"] == tool
    assert options["--error-exitcode"] == str(sanitize.FOUND)
    assert ("--racecheck-report" in options) == (tool == "racecheck")


def test_environment(monkeypatch, tmp_path):
    """Kernels are compiled, and each tensor gets its own cudaMalloc."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sanitizer = stand_in(tmp_path, 'echo "${TRITON_INTERPRET-unset} $PYTORCH_NO_CUDA_MEMORY_CACHING"')
    assert sanitize.run_tool(sanitizer, "memcheck", "suite").output == "unset 1\n"


def test_clean(tmp_path, capsys):
    racecheck = 'echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"'
    assert sanitize.check(stand_in(tmp_path, FAULT, f'case "$2" in racecheck) {racecheck};; *) {CLEAN};; esac')) == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[:2] for line in table] == [[tool, "clean"] for tool in sanitize.TOOLS]
    assert "0 hazards displayed" in table[1]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('echo "========= ERROR SUMMARY: 3 errors"; exit 99', "ERRORS"),
        ('echo "Traceback ..."; exit 1', "failed (1)"),
        ('echo "========= Error: Target application terminated before first instrumented API call"', "failed (0)"),
    ],
    ids=["found", "crashed", "not run"],
)
def test_errors(answer, verdict, tmp_path, capsys):
    """A finding, a failing suite, and a tool without output all count."""
    sanitizer = stand_in(tmp_path, FAULT, f'case "$2" in initcheck) {answer};; *) {CLEAN};; esac')
    assert sanitize.check(sanitizer) == 1
    table = capsys.readouterr().out.splitlines()[-4:]
    assert ["clean" in line for line in table] == [True, True, False, True]
    assert verdict in table[2]


def test_blind_tool(tmp_path, capsys):
    """A memcheck that misses the planted fault proves nothing."""
    assert sanitize.check(stand_in(tmp_path, CLEAN)) == 1
    assert "does not find a planted fault" in capsys.readouterr().out
