"""``python -m fusedattn info``: each line, on machines with and without GPUs, packages and variables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedattn import support
from fusedattn.__main__ import main
from fusedattn.cli import environment

Info = Callable[[], dict[str, str]]
LINES = (
    "fusedattn", "python", "torch", "triton", "numpy", "optional", "GPU", "CPU tensors", "GPU tensors", "kernels",
    "configs", "variables", "limits",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(environment.PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def info(capsys: pytest.CaptureFixture[str]) -> Info:
    """Run the command for a CPU; the text of each line by its name, after a check that it fits a terminal."""

    def run() -> dict[str, str]:
        assert main(["info", "--device", "cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80
        found: dict[str, str] = {}
        for line in lines:
            name, text = line[:13].strip() or list(found)[-1], line[13:]
            found[name] = f"{found[name]} {text}" if name in found else text
        return found

    return run


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch see GPUs of these names and compute capabilities."""
    pytest.importorskip("triton")
    from fusedattn.kernels import devices

    def see(*gpus: tuple[str, tuple[int, int]]) -> None:
        class Properties:
            def __init__(self, index: int) -> None:
                self.major, self.minor = gpus[index][1]

        def index_of(device: Any) -> int:
            return torch.device(device).index or 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpus[index_of(device)][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[index_of(device)][1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
        monkeypatch.setattr(devices, "_gpu_arch", devices._gpu_arch.__wrapped__)  # without its memory of other GPUs

    return see


def test_without_a_gpu(info: Info) -> None:
    pytest.importorskip("triton")
    found = info()
    assert tuple(found) == LINES
    assert found["torch"] == torch.__version__
    assert found["GPU"] == "none"
    assert found["CPU tensors"] == "backend torch: kernels for a GPU cannot run on a CPU"
    assert found["GPU tensors"] == "none: torch sees no GPU"
    assert found["kernels"].startswith("not run here; TRITON_INTERPRET=1")
    assert found["configs"] == "no GPU to look up in the table"
    assert found["variables"] == "no FUSEDATTN_* or TRITON_* is set"


def test_a_gpu(info: Info, see_gpus: Callable[..., None]) -> None:
    see_gpus(("NVIDIA H200", (9, 0)))
    found = info()
    assert found["GPU"] == "NVIDIA H200 (compute capability 9.0)"
    assert found["CPU tensors"].startswith("backend torch")
    assert found["GPU tensors"] == "backend triton: the kernels are compiled for a GPU"
    assert found["kernels"] == "compiled at the first call"
    assert found["configs"] == "sm_90, in the table; nothing is tuned here"


def test_gpus_of_two_kinds(info: Info, see_gpus: Callable[..., None]) -> None:
    see_gpus(("A", (8, 0)), ("B", (8, 9)), ("A", (8, 0)))
    found = info()
    assert found["GPU"] == "2 x A (compute capability 8.0), B (compute capability 8.9)"
    assert found["configs"] == "sm_80, in the table; sm_86, in the table; nothing is tuned here"


def test_a_gpu_that_is_too_old(info: Info, see_gpus: Callable[..., None]) -> None:
    see_gpus(("Old", (7, 5)), ("New", (9, 0)))
    found = info()
    assert (
        "Old: backend triton, which refuses every call: device: got compute capability (7, 5)" in found["GPU tensors"]
    )
    assert "New: backend triton: the kernels are compiled" in found["GPU tensors"]
    assert "no entry in the table" in found["configs"]
    assert "sm_90, in the table" in found["configs"]


def test_the_interpreter(info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(support, "INTERPRETER_REASONS", [])
    found = info()
    assert found["CPU tensors"] == "backend triton, interpreted: TRITON_INTERPRET is set"
    assert found["kernels"] == "interpreted on the CPU, slowly"
    assert found["configs"] == "interpreter, in the table"
    assert found["variables"] == "TRITON_INTERPRET=1: kernels run in Triton's interpreter"


def test_an_interpreter_that_cannot_run(info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: {"triton": "3.6.0"}.get(package, "2.4.1"))
    reasons = support._interpreter_reasons()
    monkeypatch.setattr(support, "INTERPRETER_REASONS", reasons)
    expected = "numpy: got 2.4.1, allowed are versions before 2.4 in Triton 3.6.0's interpreter"
    assert info()["limits"] == f"in Triton's interpreter: {expected}"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert info()["CPU tensors"] == f"backend triton, which refuses every call: {expected}"


def test_missing_packages(info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("triton", *environment.OPTIONAL)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find(name, *a))
    monkeypatch.setattr(support, "HAS_TRITON", False)
    found = info()
    assert found["triton"] == "not installed"
    assert re.findall(r"(\w+) not installed", found["optional"]) == list(environment.OPTIONAL)
    assert found["kernels"] == "none: Triton is not installed"
    assert found["configs"] == "not loaded: the kernels cannot run"
    assert found["limits"] == "no kernels: only backend torch runs"


def test_missing_kernels(info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "HAS_TRITON", True)
    monkeypatch.setattr(support, "HAS_KERNELS", False)
    found = info()
    assert found["kernels"] == "none: the folder of kernels is missing"
    assert found["configs"] == "not loaded: the kernels cannot run"


@pytest.mark.parametrize(
    ("name", "value", "is_hopper", "effect"),
    [
        ("FUSEDATTN_HOPPER", "1", True, "kernels in Gluon run the calls that they made faster"),
        ("FUSEDATTN_HOPPER", "all", True, "kernels in Gluon run every call that they can run"),
        ("FUSEDATTN_HOPPER", "1", False, "none without compiled kernels on a GPU of compute capability 9.0"),
        ("FUSEDATTN_HOPPER", "yes", True, "none, allowed are 1 and all"),
        ("FUSEDATTN_HOPER", "1", True, "none, fusedattn does not read it"),
        ("TRITON_INTERPRET", "0", False, "none, kernels are compiled"),
        ("TRITON_CACHE_DIR", "/tmp/cache", False, "the folder of compiled kernels"),
        ("TRITON_OTHER", "1", False, "read by Triton only"),
    ],
)
def test_variables(
    info: Info, see_gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, is_hopper: bool, effect: str,
) -> None:  # fmt: skip
    if is_hopper:
        see_gpus(("NVIDIA H200", (9, 0)))
    monkeypatch.setenv(name, value)
    assert info()["variables"] == f"{name}={value}: {effect}"


def test_a_long_value_is_shortened(info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/" + "x" * 200)
    assert re.match(r"TRITON_CACHE_DIR=/x{26}\.\.\.: ", info()["variables"])
