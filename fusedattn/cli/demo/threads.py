"""Choose the number of CPU threads that trains a small model fastest: on a busy machine, often one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

STEPS = 4


def choose_threads(step: Callable[[], object]) -> int:
    """Time ``step`` with a few numbers of threads, and set torch to the fastest."""
    available = torch.get_num_threads()
    seconds = {n: _seconds(step, n) for n in sorted({1, min(4, available), available})}
    fastest = min(seconds, key=lambda n: seconds[n])
    torch.set_num_threads(fastest)
    return fastest


def _seconds(step: Callable[[], object], n_threads: int) -> float:
    torch.set_num_threads(n_threads)
    step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start
