"""Uniform registers that a path has not written: which instructions of hand-written machine code read them."""

from __future__ import annotations

import pytest

from bench.codegen.undefined import undefined, uniform_read, uniform_written
from tests.helpers.sass import disassembly

# A loop that steps a descriptor: the copy into UR30 stands only at its end, as ptxas 12.8 left it.
LOOP = ("UIADD3 UR18, UP0, UR30, 0x20, URZ", "UMOV UR30, UR8", "@P0 BRA 0x{loop:x}", "EXIT")


def found(*lines: str) -> list[tuple[int, tuple[int, ...]]]:
    """(line, registers) of each read."""
    return [(x.address // 16, x.registers) for x in undefined(disassembly(*lines))]


def test_a_copy_matters_only_where_its_result_is_read() -> None:
    copied = "UMOV UR7, UR45"
    assert found(copied, "UMOV UR7, 0x4", "MOV R2, UR7", "EXIT") == []
    assert found("UMOV UR7, 0x4", copied, "MOV R2, UR7", "EXIT") == [(2, (7,))]
    assert found("UMOV UR45, 0x4", copied, "MOV R2, UR7", "EXIT") == []


def loop_behind(*lines: str) -> tuple[str, ...]:
    return (*lines, *(line.format(loop=16 * len(lines)) for line in LOOP))


def test_a_lost_copy_before_a_loop() -> None:
    assert found(*loop_behind("UMOV UR8, 0x4")) == [(1, (30,))]
    assert not found(*loop_behind("UMOV UR8, 0x4", "UMOV UR30, UR8"))


@pytest.mark.parametrize(
    "lines",
    [
        ("@!P0 BRA 0x30", "UMOV UR4, 0x1", "BRA 0x40", "UMOV UR4, 0x2", "MOV R2, UR4", "EXIT"),  # on both paths
        ("@P0 UMOV UR4, 0x1", "MOV R2, UR4", "EXIT"),  # behind the same predicate, probably
        ("UMOV UR4, 0x1", "CALL.REL.NOINC 0x40", "MOV R2, UR4", "EXIT", "RET.REL.NODEC R20 0x0"),
        ("BRA 0x20", "MOV R2, UR4", "EXIT"),  # unreachable
    ],
)
def test_written_on_every_path(lines: tuple[str, ...]) -> None:
    assert not found(*lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("@!P0 BRA 0x20", "UMOV UR4, 0x1", "MOV R2, UR4", "EXIT"),
        ("MOV R2, UR4", "UMOV UR4, 0x1", "EXIT"),
        ("BSSY B0, 0x40", "@!P0 BRA 0x30", "UMOV UR4, 0x1", "BSYNC B0", "MOV R2, UR4", "EXIT"),
    ],
)
def test_not_written_on_some_path(lines: tuple[str, ...]) -> None:
    assert [registers for _, registers in found(*lines)] == [(4,)]


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("UIADD3 UR18, UP0, UR30, 0x20, URZ", {30}, {18}),
        ("UIADD3.64 UR22, UR18, 0x20, URZ", {18, 19}, {22, 23}),
        ("UIMAD.WIDE.U32 UR8, UR36, UR39, UR4", {36, 39, 4, 5}, {8, 9}),
        ("ULDC.64 UR8, c[0x0][0x210]", set(), {8, 9}),
        ("UISETP.GE.AND UP0, UPT, UR31, 0x1, UPT", {31}, set()),
        ("R2UR UR7, R16", set(), {7}),
        ("REDUX.MAX.S32 UR7, R16", set(), {7}),
        ("CREDUX.MAX.S32 UR7, R16", set(), {7}),
        ("S2UR UR7, SR_CgaCtaId", set(), {7}),
        ("STS.128 [R2+UR24], R16", {24}, set()),
        ("LDG.E R2, desc[UR4][R2.64]", {4, 5}, set()),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24, gsb0", {28, 29, 30, 31}, set()),
        ("HGMMA.64x16x16.F32.BF16 R96, R104, gdesc[UR16].tnspB, R96", {18, 19}, set()),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R88, gdesc[UR12], R88, gsb0", {12, 13, 14, 15}, set()),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, R88, gdesc[UR4], R24, gsb0", {6, 7}, set()),
        (
            "UTCHMMA gdesc[UR28], gdesc[UR22], tmem[UR11], tmem[UR14], idesc[UR15], UPT",
            {11, 14, 15, 22, 23, 28, 29},
            set(),
        ),
        ("UTCHMMA tmem[UR8], gdesc[UR22], tmem[UR11], tmem[UR14], idesc[UR15], UPT", {8, 11, 14, 15, 22, 23}, set()),
        ("UTCBAR [UR6], URZ", {6}, set()),
        ("UTMALDG.4D [UR8], [UR16]", {8, 9, 10, 11, 12, 13, 16, 17}, set()),
        ("SYNCS.EXCH.64 URZ, [UR24+0x8800], UR8", {24, 8, 9}, set()),
    ],
)
def test_registers_of_an_instruction(line: str, read: set[int], written: set[int]) -> None:
    (instruction,) = disassembly(line)
    assert (uniform_read(instruction), uniform_written(instruction)) == (read, written)
