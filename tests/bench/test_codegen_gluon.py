"""The machine code of kernels in Gluon, whose warps have different tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.codegen.loops import Loop, loop_of
from bench.codegen.register_budget import Plan, Stretch
from bench.codegen.report import Report
from tests.helpers.compiling import ROOT, output
from tests.helpers.quick import only
from tests.helpers.sass import disassembly

SCORES = ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
VALUES = "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR12].tnspB, R88, gsb0"
WAIT_FOR_SCORES, WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PLAN = Plan(warps=12, multiplying=240, requesting=24)
EXPONENTIALS = ("MUFU.EX2 R4, R4", "MUFU.EX2 R5, R5")


def loop(*lines: str) -> Loop:
    return loop_of(disassembly(*lines, "@P0 BRA 0x0"))


@pytest.mark.parametrize(
    ("lines", "idle"),
    [
        ((*SCORES, VALUES, WAIT_FOR_SCORES, *EXPONENTIALS, WAIT), 0),
        ((*SCORES, VALUES, WAIT_FOR_SCORES, WAIT, *EXPONENTIALS), 2),
        ((*SCORES, VALUES, WAIT_FOR_SCORES, EXPONENTIALS[0], WAIT, EXPONENTIALS[1]), 1),
        ((*SCORES, WAIT, *EXPONENTIALS, VALUES), 2),
        ((WAIT, SCORES[0], *EXPONENTIALS, SCORES[1]), 0),  # it runs before its group has ended
        ((EXPONENTIALS[0], *SCORES), 0),  # that of the iteration before
        (EXPONENTIALS, 2),
    ],
)
def test_exponentials_beside_products(lines: tuple[str, ...], idle: int) -> None:
    assert loop(*lines).idle_exponentials == idle


def test_idle_exponentials_are_a_fault_of_the_kernels_for_hopper() -> None:
    """They issue a product to run beside the softmax; the assembler may move the softmax behind the wait for it."""
    good = loop(*SCORES, VALUES, WAIT_FOR_SCORES, *EXPONENTIALS, WAIT)
    half = loop(*SCORES, VALUES, WAIT_FOR_SCORES, EXPONENTIALS[0], WAIT, EXPONENTIALS[1])
    bad = loop(*SCORES, VALUES, WAIT_FOR_SCORES, WAIT, *EXPONENTIALS)

    def faults(*loops: Loop, plan: Plan | None = PLAN) -> list[str]:
        tile = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 12, "num_stages": 2}
        report = Report(
            "hopper_fwd", "sm_90", 128, "bf16", "plain", tile, has_products=True, registers=168, hgmma=3, tensor_core=3,
            loops=loops, stretches=(Stretch(240, 238, products=3), Stretch(24, 20, requests=3)), plan=plan,
        )  # fmt: skip
        return report.faults

    assert not faults(good, half)
    assert faults(good, bad) == ["computes exponentials while none of its products runs, in its loops: 0 of 2, 2 of 2"]
    assert not faults(good, bad, plan=None)


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
print([fault for fault in report.faults if "multiplies" in fault])
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
