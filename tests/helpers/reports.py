"""A result file of ``python -m bench run`` on a GPU, without results."""

from __future__ import annotations

from typing import Any

from bench.report import results

REPORT: dict[str, Any] = {
    "format": results.FORMAT,
    "started": "2026-01-02T03:04:05+00:00",
    "arguments": {"quick": False},
    "environment": {
        "device": "GPU X", "is_gpu": True, "commit": "a" * 40, "dirty": False,
        "versions": {"torch": "2.11", "triton": "3.6"},
    },
    "ceilings": {"matmul": {"bfloat16": 600.0}, "copy": 4000.0},
    "correctness": {"ok": True, "cases": 4, "backend": "triton", "limit": 1.0, "most_used": 0.7, "failures": {}},
    "results": [],
}  # fmt: skip
