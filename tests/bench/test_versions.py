"""Inference compiles under the installed Triton; ``make test-triton`` asks the oldest and the newest too.

Triton 3.6 refuses kernels that later versions compile, and no interpreter does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.compiling import compiling

KERNELS = {"attention_fwd", "attention_combine", "cache_append", "quantize_fp8", "largest_of_all"}
FEATURES = ("few queries", "decode", "cache", "cache, rotated on reading", "cache of int8", "cache of int4")
FEATURES += ("cache, chunk", "cache of e4m3, chunk", "fp8", "fp8, tensor", "fp8, packed", "fp8, scores")


@pytest.mark.thorough
def test_inference_compiles(tmp_path: Path) -> None:
    chosen = [f"--kernel={kernel}" for kernel in sorted(KERNELS)] + [f"--features={name}" for name in FEATURES]
    done = compiling(
        "-m", "bench.codegen", "--json", "--jobs=1", "--target=sm_90", "--dtype=bf16", "--head-dim=64", *chosen,
        cache=tmp_path,
    )  # fmt: skip
    reports = json.loads(done.stdout)
    assert {r["kernel"]: r["error"] for r in reports if r["error"]} == {}
    assert {r["kernel"] for r in reports} == KERNELS
    forwards = [r for r in reports if r["kernel"] == "attention_fwd"]
    assert len(forwards) == len(FEATURES) - 1  # "fp8" and "fp8, tensor" have the same
    # Copies of a few rows need no fence, so no version may lose their pipeline.
    assert all(r["config"]["num_stages"] > 1 for r in forwards if r["config"]["BLOCK_M"] < 64)
