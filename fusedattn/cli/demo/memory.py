"""The peak memory of a step, beyond the memory held before it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# mallopt: blocks of at least this size come from the system and return to it at once (glibc, malloc.h).
M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLD = 32 * 2**20


@dataclass
class Peak:
    """The measured peak, set at the end of the block; None if it cannot be known."""

    bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure a block: torch's allocations on a GPU; the memory of the process on a CPU, on Linux with glibc."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    libc = _reset_high_water_mark()
    before = _status("VmRSS") if libc is not None else 0
    yield peak
    if libc is not None:
        peak.bytes = max(_status("VmHWM") - before, 0)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)


def _reset_high_water_mark() -> ctypes.CDLL | None:
    """Reset the peak of the process; returns the C library, or None if the peak cannot be read or reset."""
    try:
        libc = ctypes.CDLL(None)
        # Freed memory that the process keeps would hide allocations made in it, and would itself raise the peak.
        libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
        libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except (OSError, AttributeError, TypeError):  # not Linux, not glibc, not permitted
        return None
    return libc


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (line,) = (line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
