"""Faults in the PTX of this package's kernels: the virtual GPU, or the error budget, must notice each of them.

PTX differs from version to version of Triton, so planted.py counts the lines of one version.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton

from tests.helpers import quick
from tests.virtual_gpu import planted, planted_hopper
from tests.virtual_gpu.planted import DKDV, FWD, Fault
from tests.virtual_gpu.processes import Process, answering

pytestmark = pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the faults are those of Triton 3.7.1's PTX")

FAULTS = (*planted.FAULTS, *planted_hopper.FAULTS)
QUICK = {
    ("descriptors", FWD): (
        "a wait for copies removed",
        "an arrival with bytes removed",
        "the swizzle mode of a descriptor",
        "the operands of wgmma exchanged",
    ),
    ("ampere", DKDV): (
        "a wait for copies leaves one more group",
        "ldmatrix without .trans",
        "the sign of an exponent",
    ),
}


def _is_quick(fault: Fault) -> bool:
    return fault in planted_hopper.QUICK or fault.what in QUICK.get((fault.problem, fault.kernel), ())


@pytest.fixture(scope="module")
def planting() -> Iterator[Process]:
    with answering("tests.virtual_gpu.planting") as process:
        yield process


@quick.only(fault=_is_quick)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_is_noticed(planting: Process, fault: Fault) -> None:
    found = planting.ask(fault.name)
    assert found["lines"], f"{fault.problem}, {fault.kernel}: no line that is executed has {fault.old}"
    assert found["honest"] is None
    missed = [f"{n}: {line}" for n, line, noticed, excuse in found["lines"] if noticed is None and excuse is None]
    assert not missed
    assert not found["unused"], "a reason for a line that is not there"


def test_faults_do_not_stay(planting: Process) -> None:
    fault = next(fault for fault in FAULTS if _is_quick(fault))
    assert all(noticed for _, _, noticed, _ in planting.ask(fault.name)["lines"])
    assert not any(planting.ask(fault.problem))
