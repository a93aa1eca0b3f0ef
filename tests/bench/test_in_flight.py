"""Registers of a wgmma that may still run: which instructions of hand-written machine code touch them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.codegen.disassembly import Instruction
from bench.codegen.in_flight import Touch, touches
from bench.codegen.registers import product_of, read, written
from tests.helpers.sass import disassembly

# A product with its left operand in R100 to R103 and its sum in R24 to R55; one with both operands in shared memory.
FROM_REGISTERS = "HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR4].tnspB, R24"
FROM_MEMORY = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
OTHER = FROM_REGISTERS.replace("R100", "R108")
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE = "MOV R100, R2"
# The same products, each the last of its group.
RUNNING, RUNNING_SUM = f"{FROM_REGISTERS}, gsb0", f"{FROM_MEMORY}, gsb0"


def found(*lines: str) -> list[tuple[int, str]]:
    """(line, kind) of each touch; the code ends behind the lines."""
    return [(touch.address // 16, touch.what) for touch in touches(disassembly(*lines, "EXIT"))]


def test_a_touch() -> None:
    (touch,) = touches(disassembly(RUNNING, "MOV R101, R2", WAIT, "MOV R102, R2", "EXIT"))
    assert touch == Touch(16, "MOV", "operand written", registers=(101,), products=(0,), later=0)


@pytest.mark.parametrize(
    "lines",
    [
        (RUNNING, WAIT, WRITE),
        (RUNNING, "MOV R99, R100", "MOV R104, R103", "LDS.128 R96, [R100]", WAIT),  # neighbours
        (RUNNING_SUM, WRITE, WAIT, "FADD R24, R24, R25"),
        (RUNNING, "@P0 EXIT", "@!P0 BRA 0x40", "NOP", WAIT, WRITE),  # a wait on both paths
        (RUNNING, "EXIT", WRITE),  # unreachable
        (RUNNING, "BRA 0x30", WRITE, WAIT),  # jumped over
        # A product without gsb0 belongs to the group of the next product with it.
        (FROM_REGISTERS, f"{OTHER}, gsb0", WAIT, WRITE),
        # The second product adds to the sum of the first, and needs no wait.
        (FROM_MEMORY, RUNNING, WAIT, "FADD R24, R24, R25"),
        # Other registers than those of the sum.
        (RUNNING_SUM, "FADD R2, R56, R3", "MOV R23, RZ", "STS.128 [R2], R20"),
        # The wait is in the loop: the branch goes to its address.
        (WAIT, WRITE, RUNNING, "@P0 BRA 0x0", WAIT),
        # A function that waits for the product of its caller.
        (RUNNING, "CALL.REL.NOINC 0x40", WRITE, "EXIT", WAIT, "RET.REL.NODEC R20 0x0"),
        # BSYNC of a barrier that was used before does not lead back.
        ("BSSY B0, 0x20", "BSYNC B0", WRITE, RUNNING, "BSSY B0, 0x60", "BSYNC B0", WAIT),
    ],
)
def test_clean(lines: tuple[str, ...]) -> None:
    assert found(*lines) == []


@pytest.mark.parametrize(
    ("at", "lines"),
    [
        (2, (FROM_REGISTERS, WAIT, WRITE)),  # no group has ended
        # A wait on one path is none on the other: after the paths meet, the product may still run.
        (3, (RUNNING, "@P0 BRA 0x30", WAIT, WRITE)),
        (2, (RUNNING, f"@P0 {WAIT}", WRITE)),
        (3, (RUNNING, "BRA.U UP0, 0x30", WAIT, WRITE)),  # a branch with its condition among its operands
        (2, (RUNNING, "BRA.U UP0, 0x30", WRITE, WAIT)),
        (5, (RUNNING, "BSSY B0, 0x50", "@P0 BRA 0x40", WAIT, "BSYNC B0", WRITE)),
        (4, (RUNNING, "BSSY B0, 0x40", "BSYNC B0", WAIT, WRITE)),  # perhaps BSYNC leads to the place of the BSSY
        (0, (WRITE, RUNNING, "@P0 BRA 0x0", WAIT)),  # a loop leaves the product running in its next turn
        (2, (RUNNING, "CALL.REL.NOINC 0x40", WRITE, "EXIT", "NOP", "RET.REL.NODEC R20 0x0")),
        # Instructions with a predicate may run or not.
        (1, (RUNNING, "@!P1 MOV R100, R2", WAIT)),
        (2, (RUNNING, "@P0 EXIT", WRITE, WAIT)),
        # A group that may not exist is not counted: the wait for all but one may leave the first running.
        (3, (RUNNING, f"@P0 {OTHER}, gsb0", WAIT_FOR_ALL_BUT_ONE, WRITE, WAIT)),
        (1, (RUNNING, "HGMMA.64x8x16.F32.BF16 R100, gdesc[UR4], RZ, !UPT, gsb0", WAIT)),
    ],
)
def test_an_operand_is_written(at: int, lines: tuple[str, ...]) -> None:
    assert found(*lines) == [(at, "operand written")]


def test_a_wait_leaves_the_newest_groups() -> None:
    products = [f"{FROM_REGISTERS.replace('R100', name)}, gsb0" for name in ("R100", "R108", "R112")]
    writes = WRITE, "MOV R108, R2", "MOV R112, R2", "EXIT"
    for pending, registers in enumerate(([], [112], [108, 112], [100, 108, 112])):
        code = disassembly(*products, WAIT.replace("0x0", f"{pending:#x}"), *writes)
        assert [touch.registers for touch in touches(code)] == [(x,) for x in registers]


def test_ages_count_around_loops() -> None:
    """Two products alternate between two operands, and one stays in flight: each write follows the wait for the product
    before last. With the operands swapped, it does not."""

    def loop(first: str, second: str) -> list[tuple[int, str]]:
        turns = (f"MOV {first}, R2", RUNNING, WAIT_FOR_ALL_BUT_ONE)
        turns += (f"MOV {second}, R2", f"{OTHER}, gsb0", WAIT_FOR_ALL_BUT_ONE)
        return found(*turns, "@P0 BRA 0x0", WAIT)

    assert loop("R100", "R108") == []
    assert loop("R108", "R100") == [(0, "operand written"), (3, "operand written")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("FADD R2, R55, R3", "MOV R24, RZ"), [(1, "sum read"), (2, "sum written")]),
        (("STG.E.128 desc[UR4][R2.64], R52", "STS [R24], R3"), [(1, "sum read"), (2, "sum read")]),
        # Other products may not read a sum either, nor write it, unless theirs has the same registers.
        (("HGMMA.64x8x16.F32.BF16 R60, R52, gdesc[UR4], RZ, !UPT, gsb0", WAIT), [(1, "sum read")]),
        (("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0", WAIT), [(1, "sum written")]),
    ],
)
def test_sums(lines: tuple[str, ...], expected: list[tuple[int, str]]) -> None:
    assert found(RUNNING_SUM, *lines) == expected


def test_products_since_are_counted_by_the_shortest_path() -> None:
    straight = disassembly(FROM_REGISTERS, OTHER, f"{OTHER}, gsb0", WRITE, WAIT, "EXIT")
    assert [touch.later for touch in touches(straight)] == [2]
    shorter = disassembly(FROM_REGISTERS, "@P0 BRA 0x40", OTHER, f"{OTHER}, gsb0", WRITE, WAIT, "EXIT")
    assert [touch.later for touch in touches(shorter)] == [0]


def with_order(instruction: Instruction, *, operands: int = 7, needs: tuple[int, ...] = ()) -> Instruction:
    """Encode a scoreboard for its operands and the scoreboards that it waits for; 7 means none."""
    bits = 1 | 7 << 5 | operands << 8 | sum(1 << 11 + i for i in needs)
    return replace(instruction, encoding=bits << 105)


@pytest.mark.parametrize(
    ("scoreboard", "needs", "is_ordered"),
    [(3, (3,), True), (3, (1, 2), False), (7, (0, 1, 2, 3, 4, 5), False), (3, (), False)],
)
def test_a_scoreboard_may_order_the_write(scoreboard: int, needs: tuple[int, ...], is_ordered: bool) -> None:
    """On the write itself, or on an instruction before it on every path. It is reported as not covered by the wait."""
    for waiting in ((), ("NOP",)):
        product, waits, *rest = disassembly(RUNNING, *waiting, WRITE, WAIT, "EXIT")
        (touch,) = touches([with_order(product, operands=scoreboard), with_order(waits, needs=needs), *rest])
        assert touch.is_ordered == is_ordered


def test_a_scoreboard_must_order_every_path() -> None:
    code = disassembly(RUNNING, "@P0 BRA 0x30", "NOP", WRITE, WAIT, "EXIT")
    code[0], code[2] = with_order(code[0], operands=3), with_order(code[2], needs=(3,))
    assert [touch.is_ordered for touch in touches(code)] == [False]
    code[1] = with_order(code[1], needs=(3,))
    assert [touch.is_ordered for touch in touches(code)] == [True]
    code[0] = with_order(code[0])
    assert [touch.is_ordered for touch in touches(code)] == [False]


def test_code_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="BRX at 0x10"):
        touches(disassembly(FROM_REGISTERS, "BRX R2 -0x10", "EXIT"))
    with pytest.raises(NotImplementedError, match="several"):
        touches(disassembly(FROM_REGISTERS, "EXIT") * 2)
    assert touches(disassembly("BRX R2 -0x10", "EXIT")) == []  # without products there is nothing to follow


def test_a_branch_by_a_table_leads_to_each_of_its_targets() -> None:
    lines = (RUNNING, "BRX R2 -0x20", WAIT, WRITE, "EXIT", WRITE, "EXIT")
    for table, found_at in (((0x20,), []), ((0x20, 0x50), [0x50])):
        assert [touch.address for touch in touches(disassembly(*lines, tables={0x10: table}))] == found_at
    elsewhere = (RUNNING, "BRX R2 -0x20", WRITE, "EXIT", WAIT, "EXIT")  # and to no other place
    assert not touches(disassembly(*elsewhere, tables={0x10: (0x40,)}))


@pytest.mark.parametrize(
    ("code", "results", "sources"),
    [
        ("MOV R1, R2", [1], [2]),
        ("FFMA R30, R26, UR48, -R141.reuse", [30], [26, 141]),
        ("IADD3 R4, P0, R2, 0x10, RZ", [4], [2]),
        ("LOP3.LUT P0, RZ, R2, 0xf, RZ, 0xc0, !PT", [], [2]),
        ("LOP3.LUT P0, R7, R2, 0xf, RZ, 0xc0, !PT", [7], [2]),
        ("SHFL.BFLY PT, R23, R88, 0x2, 0x1f", [23], [88]),
        ("ISETP.GE.AND P1, PT, R12, R3, PT", [], [12, 3]),
        ("FSETP.NAN.AND P0, PT, |R24|, |R24|, PT", [], [24]),
        ("HSETP2.BF16_V2.NE.AND P0, PT, R3.H0_H0, R4.H1_H1, PT", [], [3, 4]),
        ("FCHK P0, R2, R3", [], [2, 3]),
        ("R2P PR, R4, 0x7f", [], [4]),
        ("P2R R5, PR, RZ, 0x1", [5], []),
        ("R2UR UR5, R133", [], [133]),
        ("REDUX.MAX.S32 UR6, R12", [], [12]),
        ("VOTEU.ANY UP1, P0", [], []),
        ("VOTE.ANY R6, PT, P0", [6], []),
        ("IMAD.WIDE R4, R8, 0x4, R6", [4, 5], [8, 6, 7]),
        ("IMAD.HI.U32 R4, R8, R9, RZ", [4], [8, 9]),
        ("IMAD.MOV.U32 R4, RZ, RZ, R9", [4], [9]),
        ("CS2R R32, SRZ", [32, 33], []),
        ("CS2R.32 R32, SR_CLOCKLO", [32], []),
        ("LDC.64 R12, c[0x0][0x4b0]", [12, 13], []),
        ("LDG.E.128 R8, desc[UR4][R2.64+0x10]", [8, 9, 10, 11], [2, 3]),
        ("LDG.E.U16 R8, desc[UR4][R2.64]", [8], [2, 3]),
        ("LDS.64 R8, [R40+UR23]", [8, 9], [40]),
        ("LDL R8, [R1+0x4]", [8], [1]),
        ("LDSM.16.M88.4 R24, [R40+UR23]", [24, 25, 26, 27], [40]),
        ("LDSM.16.MT88.2 R24, [R40]", [24, 25], [40]),
        ("LDSM.16.M88 R24, [R40]", [24], [40]),
        ("STSM.16.M88.4 [R33], R24", [], [33, 24, 25, 26, 27]),
        ("STS.128 [R33+0x10], R24", [], [33, 24, 25, 26, 27]),
        ("STG.E desc[UR4][R2.64], R24", [], [2, 3, 24]),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R24", [], [2, 3, 24]),
        ("ATOMG.E.ADD.F32 PT, R9, desc[UR4][R2.64], R24", [9], [2, 3, 24]),
        ("LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]", [], [5, 2, 3]),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", [4, 5, 6, 7], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        ("HMMA.16816.F16 R4, R8, R12, RZ", [4, 5], [8, 9, 10, 11, 12, 13]),
        ("F2FP.BF16.F32.PACK_AB R151, R30, R151", [151], [30, 151]),
        ("F2F.F64.F32 R4, R8", [4, 5], [8]),
        ("F2F.F32.F64 R4, R8", [4], [8, 9]),
        ("F2F.BF16.F32 R4, R8", [4], [8]),
        ("I2F.F64.U32 R4, R8", [4, 5], [8]),
        ("I2F.RP R4, R8", [4], [8]),
        ("F2I.S64.TRUNC R4, R8", [4, 5], [8]),
        ("F2I.FTZ.U32.TRUNC.NTZ R4, R8", [4], [8]),
        ("DFMA R4, R6, R8, R10", [4, 5], [6, 7, 8, 9, 10, 11]),
        ("MUFU.RCP64H R5, R7", [5], [7]),
        ("LEPC R20", [20, 21], []),
        ("BAR.SYNC.DEFER_BLOCKING R2, 0x80", [], [2]),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR33+0x30000], R23", [], [23]),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R204", [], [5, 204]),
        ("UTMALDG.4D [UR16], [UR4], desc[UR6]", [], []),
        ("SEL R2, R3, R4, !P0", [2], [3, 4]),
        ("MOV R2, c[0x0][R3]", [2], [3]),
    ],
)
def test_registers_of_an_instruction(code: str, results: list[int], sources: list[int]) -> None:
    (instruction,) = disassembly(code)
    assert written(instruction) == set(results)
    assert read(instruction) == set(sources)


@pytest.mark.parametrize(
    ("opcode", "of_sum"),
    [
        ("HGMMA.64x64x16.F32.BF16", 32),
        ("HGMMA.64x256x16.F32", 128),
        ("HGMMA.64x8x16.F32", 4),
        ("HGMMA.64x128x8.F32.TF32", 64),
        ("HGMMA.64x64x16.F16", 16),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", 32),
        ("IGMMA.64x64x32.S8.S8", 32),
    ],
)
def test_registers_of_a_product(opcode: str, of_sum: int) -> None:
    """64 rows and 128 threads; an instruction multiplies 32 bytes of each row."""
    (instruction,) = disassembly(f"{opcode} R24, R152, gdesc[UR4], R24, gsb0")
    registers = set(range(24, 24 + of_sum)), set(range(152, 156))
    assert product_of(instruction) == (written(instruction), read(instruction)) == registers
    (instruction,) = disassembly(f"{opcode} R24, gdesc[UR4], RZ, !UPT")
    assert product_of(instruction) == (registers[0], set())


def test_all_products_must_have_told() -> None:
    """A scoreboard only orders a write after the products that set it."""
    code = disassembly(FROM_REGISTERS, RUNNING, WRITE, WAIT, "EXIT")
    code[0], code[1], code[2] = with_order(code[0], operands=3), with_order(code[1]), with_order(code[2], needs=(3,))
    assert [touch.is_ordered for touch in touches(code)] == [False]
