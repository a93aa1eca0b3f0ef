"""The most memory held during a step, beyond what was held before it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# mallopt: from this size on, memory comes from the system and goes back to it at once (glibc, malloc.h).
M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLD = 32 * 2**20


@dataclass
class Peak:
    """Filled in at the end of the block that is measured; None where it cannot be known."""

    bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the block: what torch allocates on a GPU; what the process holds on a CPU, on Linux with glibc."""
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
    """The C library, or None where the mark cannot be read or reset."""
    try:
        libc = ctypes.CDLL(None)
        # Freed memory that the process keeps would hide what is allocated in it, and raise the peak itself.
        libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
        libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except (OSError, AttributeError, TypeError):  # not Linux, not glibc, not permitted
        return None
    return libc


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (line,) = (line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
