"""How many CPU threads a small model is trained with fastest: on a busy machine, often one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

STEPS = 4


def choose_threads(step: Callable[[], object]) -> int:
    """Try a few numbers of threads on ``step``, and leave torch at the fastest."""
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
