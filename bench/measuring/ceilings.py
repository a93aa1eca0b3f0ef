"""The ceilings of the machine, measured in the same run: a large matrix product per dtype, and a large copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bench.measuring.timing import Budget, DeviceStopwatch, HostStopwatch, Rounds, interleaved, spread

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns
COPIED = {"cuda": 2**31, "cpu": 2**27}  # bytes


def measure(device: torch.device, dtypes: Iterable[torch.dtype], rounds: Rounds, budget: Budget) -> dict[str, Any]:
    """``{"matmul": {dtype: TFLOP/s}, "copy": GB/s}``, from medians; bytes read and written both count.

    Raises:
        OutOfTimeError: the budget is spent.
    """
    n = MATRIX[device.type]
    stopwatch = DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch(device)
    source = torch.randint(-128, 127, (COPIED[device.type],), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    runs = {"copy": lambda: lambda: target.copy_(source)}
    for dtype in dict.fromkeys(dtypes):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))  # zeros would multiply faster
        runs[str(dtype).removeprefix("torch.")] = lambda a=a, b=b: lambda: a @ b  # type: ignore[misc]
    for run in runs.values():
        run()()
    samples, _ = interleaved(runs, stopwatch, rounds, budget)
    seconds = {name: spread(found).median / 1e3 for name, found in samples.items()}
    copied = 2 * COPIED[device.type] / seconds.pop("copy") / 1e9
    return {"matmul": {name: 2 * n**3 / found / 1e12 for name, found in seconds.items()}, "copy": copied}


def ceiling(ceilings: dict[str, Any], unit: str, dtype: str) -> float | None:
    """The ceiling of a rate: TFLOP/s of the matrix product, GB/s of the copy; else None."""
    if unit == "TFLOP/s":
        return ceilings.get("matmul", {}).get(dtype)
    return ceilings.get("copy") if unit == "GB/s" else None
