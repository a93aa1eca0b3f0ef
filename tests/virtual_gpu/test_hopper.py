"""The kernels for Hopper, in Gluon, on the virtual GPU; each run is a process in which Triton compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import compiling


def test_their_calls(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("compiled_hopper.py")
    done = compiling.compiling("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", tests, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^26 passed in", done.stdout, re.M), done.stdout


def test_a_few_problems_in_random_orders(tmp_path: Path) -> None:
    done = compiling.compiling("-m", "tests.tools.compiled", "--quick", "--only", "hopper", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d passed, 0 failed", done.stdout, re.M), done.stdout


FIRST = """
from dataclasses import replace
from unittest.mock import patch
import torch
from bench.first import jobs, plan
from fusedattn.virtual_gpu.attention import compiled_attention
job = plan.HOPPER[0]
job = replace(job, case=replace(job.case, batch=1, nheads_q=2, nheads_kv=1, seqlen_q=130, seqlen_k=140))
with compiled_attention("sm_90") as gpu, patch.object(jobs, "is_hopper", lambda device: True):
    print(job.run(torch.device("cpu")).ok, set(job.name.split(", ")) <= set(gpu.counters))
"""


@pytest.mark.thorough
def test_the_first_questions_on_a_gpu_ask_for_them() -> None:
    assert compiling.output("-c", FIRST) == "True True\n"
