"""The machine code of kernels in Gluon, whose warps have different tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.compiling import ROOT, output
from tests.helpers.quick import only


@only(registers=(240, 40))
@pytest.mark.parametrize(
    ("registers", "most", "faults"),
    [
        ((240, 24), 168, []),
        ((240, 40), 168, ["multiplies with 224 registers, planned are 240"]),
        ((240, 24), 160, ["multiplies with 216 registers, planned are 240"]),
    ],
)
def test_registers_that_warps_cannot_have_are_found(
    registers: tuple[int, int], most: int, faults: list[str], tmp_path: Path
) -> None:
    """Triton gives the first group what the others leave, without a message."""
    script = f"""
from unittest.mock import patch
from bench.codegen import compilations
from fusedattn.kernels import hopper_bwd
case = compilations.Case("sm_90", "bf16", 128, ("hopper",), ("hopper_bwd_dq",), inference=())
with patch.multiple(hopper_bwd, REGISTERS={registers}, MOST_REGISTERS={most}):
    [report] = compilations.compile_case(case)
assert report.plan == (12, *{registers})
assert report.registers == {most}
assert sum(bool(x.products) for x in report.stretches) == 2
assert sum(bool(x.requests) for x in report.stretches) == 1
assert report.tile == "128x64 w12 s3"
assert report.loops[0].counts["wgmma"] == 20 and len(report.loops) == 2
print(report.faults)
"""
    assert output("-c", script, TRITON_CACHE_DIR=str(tmp_path)) == f"{faults}\n"


@pytest.mark.thorough
def test_fingerprints_of_kernels_in_gluon(tmp_path: Path) -> None:
    """Their functions are not inlined before the first pass, and a name of one changes nothing; warps of all tasks."""
    script = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from bench.codegen import fingerprint, launches

triton.runtime.driver.set_active(launches.NoDevice(GPUTarget("cuda", 90, 32)))

@gluon.jit
def NAME(x_ptr, value):
    gl.store(x_ptr, value)

@gluon.jit
def other(x_ptr, value):
    NAME(x_ptr + 1, value)

@gluon.jit
def kernel(x_ptr, n, STEP: gl.constexpr):
    gl.warp_specialize([(NAME, (x_ptr, n + STEP)), (other, (x_ptr, n)), (other, (x_ptr, n))], [4, 1], [64, 24])

def found(step, known=()):
    source = GluonASTSource(kernel, {"x_ptr": "*i32", "n": "i32", "STEP": "constexpr"}, {(2,): step})
    with triton.knobs.compilation.scope(), fingerprint.watching(known) as seen:
        triton.knobs.compilation.always_compile = True
        try:
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 64})
        except fingerprint.Known:
            print("known")
    return seen

first = found(1)
assert found(2).fingerprint != first.fingerprint
assert found(1, known=(first.fingerprint,)) == first
print(first.fingerprint, first.options["num_warps"])
"""
    shown = []
    for name in ("_store", "_renamed"):
        path = tmp_path / "script.py"  # Triton reads a kernel's source from its file
        path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{script.replace('NAME', name)}")
        shown.append(output(path, TRITON_CACHE_DIR=str(tmp_path)).split())
    assert shown[0] == shown[1]
    assert shown[0][0] == "known"
    assert shown[0][2] == "12"
