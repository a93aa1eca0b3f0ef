"""The machine that a command runs on: its device, its versions, and missing requirements."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import torch

from fusedattn import __version__, not_supported_reasons
from fusedattn.cli.errors import CommandError
from fusedattn.cli.interpreter import speed_up
from fusedattn.support import Backend, is_installed


def choose_device(name: str | None) -> torch.device:
    """The device of ``--device``; by default the current GPU, or the CPU if there is none."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if n_gpus else "cpu"))
    except RuntimeError:
        raise CommandError(f"--device: got {name!r}, allowed are cpu, cuda and cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device: got {name!r}, allowed are cpu, cuda and cuda:N")
    if device.type == "cuda" and (device.index or 0) >= n_gpus:
        raise CommandError(f"--device: got {name!r}, but torch {torch.__version__} sees {n_gpus} GPUs")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def choose_how_triton_runs(device: torch.device, compiled: str | None = None) -> None:
    """Make Triton interpret on a CPU and compile for a GPU, or for the architecture `compiled`; call this before the
    kernels are first imported."""
    interprets = device.type == "cpu" and compiled is None
    os.environ["TRITON_INTERPRET"] = "1" if interprets else "0"
    if interprets and all(importlib.util.find_spec(package) for package in ("triton", "numpy")):
        speed_up()


def triton_problems(device: torch.device) -> list[str]:
    """Reasons why no Triton kernel can run on ``device``; call :func:`choose_how_triton_runs` first."""
    x = torch.empty(1, 1, 1, 16, device=device)
    return not_supported_reasons(x, x, x, backend="triton")


def no_triton(problems: list[str]) -> str:
    """An error message with the problems, in one line."""
    return "the Triton kernels cannot run here: " + "; ".join(problems)


def versions() -> dict[str, str]:
    """The versions of Python and the packages in use; ``"not installed"`` for a missing one."""
    found = {"fusedattn": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "numpy"):
        found[package] = version_of(package) or "not installed"
    return found


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    if not is_installed(package):
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # built from source, or under another name
        return "installed, version unknown"


def describe(device: torch.device) -> str:
    """A description of the device in one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads = torch.get_num_threads()
    return f"CPU ({_cpu_name()}, {threads} thread{'s' if threads > 1 else ''})"


def how_it_runs(backend: Backend, device: torch.device, compiled: str | None = None) -> str:
    """A phrase that says how the backend runs."""
    if backend == "torch":
        return "backend torch"
    if compiled is not None:
        return f"Triton kernels, compiled for {compiled}; their PTX runs on the CPU"
    return "Triton kernels, compiled" if device.type == "cuda" else "Triton kernels, interpreted"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
