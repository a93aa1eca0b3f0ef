"""Registers that groups of warps share out: what hand-written machine code gives to each, and names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.codegen.disassembly import branch_tables
from bench.codegen.register_budget import Plan, Stretch, faults_of, stretches
from bench.codegen.report import Report
from tests.helpers.sass import disassembly

PLAN = Plan(warps=12, multiplying=240, requesting=24)
AT_START = 168

# Four warps multiply, four more do so if the table sends them to the second task, and the others request tiles.
CODE = (
    "MOV R0, R1",
    "@P0 BRA 0xb0",
    "USETMAXREG.DEALLOC.CTAPOOL 0x78",
    "BRX R2 -0x40",
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
    "HGMMA.64x64x16.F32.BF16 R200, gdesc[UR4], RZ, !UPT, gsb0",
    "BRA 0x20",
    "USETMAXREG.DEALLOC.CTAPOOL 0x18",
    "UTMALDG.4D [UR8], [UR4]",
    "MOV R23, R3",
    "BRA 0x20",
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x100",
    "MOV R250, R2",
    "USETMAXREG.DEALLOC.CTAPOOL 0xf0",
    "HGMMA.64x64x16.F32.BF16 R24, R208, gdesc[UR4], R24, gsb0",
    "EXIT",
)
TABLE = {0x30: (0x40, 0x70, 0xF0)}


def found(changes: dict[int, str], at_start: int = AT_START) -> tuple[Stretch, ...]:
    """The stretches of the code with other instructions in some places."""
    return stretches(disassembly(*(changes.get(i, line) for i, line in enumerate(CODE)), tables=TABLE), at_start)


def test_the_tasks_are_found_by_control_flow() -> None:
    assert found({}) == (
        Stretch(168, used=2),
        Stretch(120, used=3),
        Stretch(240, used=232, products=1),
        Stretch(24, used=24, requests=1),
        Stretch(256, used=251),
        Stretch(240, used=212, products=1),
    )
    assert stretches(disassembly("MOV R0, R1", "EXIT"), AT_START) == ()


def test_a_change_that_may_not_happen_leaves_both_numbers() -> None:
    """The instruction behind it must fit into the smaller one."""
    code = disassembly("@P0 USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", "MOV R200, R1", "EXIT")
    assert [(x.allowed, x.used) for x in stretches(code, AT_START)] == [(168, 201), (240, 201)]


FOREVER = "waits forever: its warps ask for {} registers, it begins with {}"


@pytest.mark.parametrize(
    ("changes", "at_start", "faults"),
    [
        ({}, 168, []),
        ({4: CODE[4].replace("0xf0", "0xe8")}, 168, ["multiplies with 232 registers, planned are 240"]),
        ({13: CODE[13].replace("0xf0", "0xe8")}, 168, ["multiplies with 232 registers, planned are 240"]),
        ({7: CODE[7].replace("0x18", "0x10")}, 168, [
            "requests tiles with 16 registers, planned are 24", "uses 24 registers where a thread has 16",
        ]),
        ({7: CODE[7].replace("0x18", "0x20")}, 168, [
            "requests tiles with 32 registers, planned are 24", FOREVER.format(65536, 64512),
        ]),
        ({9: "MOV R24, R3"}, 168, ["uses 25 registers where a thread has 24"]),
        ({9: "MOV R3, R24"}, 168, ["uses 25 registers where a thread has 24"]),
        ({5: CODE[5].replace("R200", "R212")}, 168, ["uses 244 registers where a thread has 240"]),
        ({14: CODE[14].replace("R208", "R240")}, 168, ["uses 244 registers where a thread has 240"]),
        ({3: "MOV R120, R2"}, 168, ["uses 121 registers where a thread has 120"]),
        ({}, 160, [FOREVER.format(64512, 61440)]),
        ({}, 161, []),  # registers are allocated in steps of 8
        ({}, 176, ["begins with 67584 registers, a multiprocessor has 65536"]),
    ],
)  # fmt: skip
def test_what_a_plan_forbids(changes: dict[int, str], at_start: int, faults: list[str]) -> None:
    assert list(faults_of(found(changes, at_start), at_start, PLAN)) == faults


def test_a_report_has_these_faults() -> None:
    """A kernel in Gluon multiplies by wgmma, whatever its head_dim."""
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 12, "num_stages": 2}
    report = Report(
        "hopper_fwd", "sm_90", 256, "bf16", "causal", tile, has_products=True, registers=AT_START, hgmma=16,
        tensor_core=16, stretches=found({}), plan=PLAN,
    )  # fmt: skip
    assert not report.faults
    assert replace(report, stretches=found({9: "MOV R24, R3"})).faults == ["uses 25 registers where a thread has 24"]
    assert replace(report, stretches=()).faults == ["never changes its 168 registers, planned are 240 and 24"]
    assert replace(report, hgmma=0).faults == ["has no HGMMA"]
    assert not replace(report, hgmma=0, plan=None).faults


def test_tables_of_branches_are_read() -> None:
    elf = """
\tAttribute:\tEIATTR_INDIRECT_BRANCH_TARGETS
\tFormat:\tEIFMT_SVAL
\tValue:\t
\t\tOffset of Indirect Branch: 0x1e0\t Number of targets: 3
\t\tTargets: 0x1f0 0x6f10 0x10060\x20

\t<0x80>
\tAttribute:\tEIATTR_REQNTID
"""
    assert branch_tables(elf) == {0x1E0: (0x1F0, 0x6F10, 0x10060)}
