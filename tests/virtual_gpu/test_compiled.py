"""The compiled kernels keep the error budget on the virtual GPU; each run is a process in which Triton compiles."""

from __future__ import annotations

import json

import pytest

from tests.helpers.compiling import compiling


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


def test_the_quick_problems(cache):
    done = compiling("-m", "tests.tools.compiled", "--quick", "--jobs", "1", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed = (int(word.split()[0]) for word in done.stdout.splitlines()[-1].split(", "))
    assert passed >= 8
    assert failed == 0


def test_check_runs_the_compiled_kernels(cache):
    options = ("--compiled", "sm_80", "--feature", "full attention", "--dtype", "float16", "--json")
    done = compiling("-m", "fusedattn", "check", *options, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["how"] == "Triton kernels, compiled for sm_80; their PTX runs on the CPU"
    assert report["ok"]
    assert len(report["results"]) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compiled", "sm_100"), "argument --compiled: invalid choice: 'sm_100'"),
        (("--compiled", "sm_90", "--backend", "torch"), "--compiled: got --backend torch, allowed is triton"),
        (("--compiled", "sm_90", "--device", "cuda"), "--compiled: got --device cuda, allowed is cpu"),
    ],
)
def test_check_refuses_what_contradicts_it(cache, options, message):
    done = compiling("-m", "fusedattn", "check", *options, cache=cache)
    assert done.returncode == 2
    assert message in done.stderr
