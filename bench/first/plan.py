"""The list of jobs, in order of importance: for a GPU, and a few smaller ones for the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from bench import goals
from bench.first.jobs import Before, Check, FP8Smoke, HopperSmoke, Job, LinearSmoke, Smoke, Styles
from bench.work import suites
from bench.work.work import Work
from fusedattn import FP8
from fusedattn.testing import FP8_CASES, LINEAR_CASES, FP8Case, LinearCase
from fusedattn.testing.cases import CACHED_CASES, CASES, Case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TIMINGS = "timings"  # the last part

# Calls, by the kernels that each launches and the calls before it do not. Lengths are several tiles, the last of them
# partial.
_USUAL: dict[str, Any] = {"nheads_q": 8, "seqlen_q": 200, "seqlen_k": 200, "head_dim": 64, "dtype": torch.bfloat16}
_CAUSAL: dict[str, Any] = {**_USUAL, "causal": "bottom_right"}
_CALLS: dict[str, dict[str, Any]] = {
    "attention_fwd, attention_bwd_rows, attention_bwd_dkdv, attention_bwd_dq": {"case": Case(**_CAUSAL)},
    "qk_prologue": {"case": Case(**_CAUSAL, rope="half")},
    "qk_prologue_bwd": {"case": Case(**_CAUSAL, rope="half", qk_norm="per_head")},
    "qk_norm_rows": {"case": Case(**_CAUSAL, qk_norm="across_heads")},
    "_key_range": {"case": Case(**_CAUSAL, padding="right")},
    "attention_combine": {"case": Case(**{**_USUAL, "seqlen_q": 1, "seqlen_k": 1100})},
    "attention_bwd_exact_rows": {"case": Case(**{**_CAUSAL, "dtype": torch.float32})},
    "attention_bwd_dbias": {"case": Case(**_CAUSAL, bias="per_head")},
    "attention_bwd_drelative": {"case": Case(**_CAUSAL, relative="per_head")},
    "attention_bwd_learned": {"case": Case(**_CAUSAL, score_mod=True)},
    "attention_bwd_dq_sum": {"case": Case(**_CAUSAL), "deterministic": False},
    "cache_append": {"case": Case(**_CAUSAL, cache="paged", rope="half")},
}
_LINEAR = LinearCase(nheads_q=8, nheads_kv=4, seqlen_q=200, head_dim=64, dtype=torch.bfloat16, initial_state=True)
SMOKE = [
    *(Smoke(name, **fields) for name, fields in _CALLS.items()),
    LinearSmoke("linear_states, linear_outputs, linear_features", _LINEAR),
    FP8Smoke("quantize_fp8, largest_of_all", FP8Case(**_CAUSAL, precision=FP8("tensor"))),
]

_LONG: dict[str, Any] = {**_CAUSAL, "nheads_kv": 4, "seqlen_q": 1000, "seqlen_k": 1100, "head_dim": 128}
HOPPER = [
    HopperSmoke("hopper_fwd, hopper_bwd_dkdv, hopper_bwd_dq", Case(**_LONG)),
    HopperSmoke("the same, without a mask", Case(**{**_LONG, "causal": None})),
    HopperSmoke(
        "the same, with a window, padding and RoPE", Case(**_LONG, window=(300, 0), padding="uneven", rope="half")
    ),
    HopperSmoke("the same, head_dim 64", Case(**{**_LONG, "head_dim": 64, "dtype": torch.float16})),
    HopperSmoke("hopper_fwd, head_dim 256", Case(**{**_LONG, "head_dim": 256})),
]

_STYLED: dict[str, Any] = {"nheads_q": 4, "nheads_kv": 2, "dtype": torch.bfloat16}
STYLES = [
    Styles(
        name=f"head_dim {head_dim}, {'causal' if causal else 'not causal'}, seqlen {seqlen}",
        case=Case(**_STYLED | causal, head_dim=head_dim, seqlen_q=seqlen, seqlen_k=seqlen),
    )
    for head_dim, seqlen, causal in itertools.product((64, 128, 256), (1024, 777), ({"causal": "bottom_right"}, {}))
]


def jobs(device_type: str) -> list[Job]:
    """All jobs except the timings."""
    small = device_type == "cpu"
    found: list[Job] = [*map(smaller, SMOKE[:2]), smaller(STYLES[0])] if small else [*SMOKE, *HOPPER, *STYLES]
    for dtype in DTYPES:
        cases = CASES[:1] if small else (*CASES, *CACHED_CASES, *LINEAR_CASES, *FP8_CASES)
        found += [Check(case.name, replace(case, dtype=dtype)) for case in cases]
    return found + [Before(work.name, work) for work in works(device_type)]


def works(device_type: str) -> list[Work]:
    """The works to time: all that the goals need, in their order."""
    if device_type == "cpu":
        return suites.works(["decode"], suites.QUICK)[:1]
    every = suites.works(list(suites.SUITES), suites.GPU)
    return sorted((x for x in every if goals.concerned(x.place)), key=lambda x: goals.concerned(x.place)[0])


def smaller(job: Any) -> Any:
    """The job with a few small tiles, for the interpreter."""
    case = job.case
    most = {"seqlen_q": 37, "seqlen_k": 70}
    lengths = {name: min(getattr(case, name), n) for name, n in most.items() if getattr(case, name) is not None}
    return replace(job, case=replace(case, batch=1, nheads_q=2, nheads_kv=1, head_dim=16, **lengths))
