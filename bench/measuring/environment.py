"""The environment of a measurement: commit, versions, clocks and power limits."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from fusedattn.cli import machine

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "tilelang", "liger-kernel")
NVIDIA_SMI = (
    "name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw",
    "power.limit", "power.max_limit", "temperature.gpu", "clocks_event_reasons.active",
)  # fmt: skip


def describe(device: torch.device, commit: str | None) -> dict[str, Any]:
    """The environment as JSON; `commit` is for a tree without git."""
    return {
        "device": machine.describe(device),
        "is_gpu": device.type == "cuda",
        "commit": commit or _git("rev-parse", "HEAD") or "unknown",
        "dirty": _is_dirty(),
        "versions": machine.versions() | _versions(),
    }


def state(device: torch.device) -> dict[str, str]:
    """Current clocks, power and temperature from nvidia-smi; empty without nvidia-smi."""
    if device.type != "cuda":
        return {}
    uuid = torch.cuda.get_device_properties(device).uuid  # torch may number GPUs differently
    found: dict[str, str] = {}
    for field in NVIDIA_SMI:  # one by one: an old nvidia-smi refuses a list with an unknown field
        line = _run("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={field}", "--format=csv,noheader")
        if line:
            found[field] = line
    return found


def folder(device: torch.device) -> str:
    return slug(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


def is_hopper(device: torch.device) -> bool:
    """Whether the kernels for Hopper run on it, if chosen."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def slug(text: str) -> str:
    """A text as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_dirty() -> bool | None:
    """Whether files other than results differ from the commit; None without git."""
    if not _git("rev-parse", "HEAD"):
        return None
    return bool(_git("status", "--porcelain", "--", ".", ":(exclude)bench/results"))


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(ROOT), *arguments)


def _run(*command: str) -> str:
    """The output of a command; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
