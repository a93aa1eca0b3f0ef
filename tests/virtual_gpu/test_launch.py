"""Launches of Triton kernels on the virtual GPU, in a process that compiles; here the kernels may be interpreted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton

from fusedattn.virtual_gpu.attention import compiled_attention
from fusedattn.virtual_gpu.driver import virtual_gpu
from tests.helpers import compiling


def test_launches(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("compiled_launches.py")
    done = compiling.compiling("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", tests, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed in", done.stdout, re.M), done.stdout


def test_interpreted_kernels_are_refused() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for gpu in (virtual_gpu(90), compiled_attention("sm_90")):
            with pytest.raises(RuntimeError, match="TRITON_INTERPRET: got 1, allowed is unset"), gpu:
                pass
