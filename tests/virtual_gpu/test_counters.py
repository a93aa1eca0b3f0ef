"""The counts of the virtual GPU: PTX by hand, beside figures that follow from the PTX ISA."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from fusedattn.virtual_gpu.counters import Counters, Traffic
from fusedattn.virtual_gpu.instructions import builders
from fusedattn.virtual_gpu.kinds import KINDS, kind_of
from tests.helpers import counted_ptx
from tests.helpers.counted_ptx import SHARED, aligned, kernel_of


def counted(
    body: str, offsets: list[int] | None = None, n_threads: int = 32, *, fills: bool = False, **others: Any
) -> Counters:
    """The counts of a kernel of this body."""
    return counted_ptx.counted(kernel_of(body, n_threads, fills=fills), offsets, **others)


def at(counters: Counters, opcode: str) -> dict[str, tuple[int, int, int, int]]:
    """(requests, bytes, needed, ideal) of the instructions of an opcode, by space and direction."""
    found: dict[str, Traffic] = {}
    for e in counters.executed.values():
        if e.x.opcode == opcode:
            for where, t in e.traffic.items():
                found.setdefault(where, Traffic()).add(t.requests, t.bytes, t.needed, t.ideal)
    return {where: (t.requests, t.bytes, t.needed, t.ideal) for where, t in found.items()}


ACCESSES = {  # bytes of a lane -> type and registers
    1: ("b8", "%rs0"),
    2: ("b16", "%rs0"),
    4: ("b32", "%r20"),
    8: ("v2.b32", "{%r20, %r21}"),
    16: ("v4.b32", "{%r20, %r21, %r22, %r23}"),
}


def load(size: int) -> tuple[str, str]:
    kind, registers = ACCESSES[size]
    return f"ld.shared.{kind}", f"ld.shared.{kind} {registers}, [%r3];"


def store(size: int) -> tuple[str, str]:
    kind, registers = ACCESSES[size]
    return f"st.shared.{kind}", f"st.shared.{kind} [%r3], {registers};"


@pytest.mark.parametrize(
    ("size", "stride", "passes"),
    [
        (1, 1, 1),  # four lanes share a word
        (2, 2, 1),
        (4, 4, 1),
        (4, 8, 2),  # lanes 16 apart meet in a bank
        (4, 16, 4),
        (4, 128, 32),
        (4, 132, 1),  # one word of padding per row
        (4, 0, 1),  # broadcast
        (2, 128, 32),
        (8, 8, 2),  # half a warp fills the banks
        (8, 16, 4),
        (8, 128, 32),  # 16 lanes of a half in two banks
        (8, 136, 2),
        (8, 0, 2),
        (16, 16, 4),  # a quarter of a warp fills the banks
        (16, 32, 8),
        (16, 128, 32),
        (16, 144, 4),
        (16, 0, 4),
    ],
)
def test_conflicts_of_a_stride(size: int, stride: int, passes: int) -> None:
    ideal = max(size // 4, 1)
    opcode, body = load(size)
    offsets = [stride * lane for lane in range(32)]
    found = at(counted(body, offsets, fills=True), opcode)
    assert found == {"shared read": (1, 32 * size, passes, ideal)}
    if stride:
        opcode, body = store(size)
        assert at(counted(body, offsets), opcode) == {"shared write": (1, 32 * size, passes, ideal)}


def passes_by_hand(offsets: list[int], active: list[bool], size: int) -> tuple[int, int]:
    """The passes that an access takes, and without conflicts: word by word."""
    together = 32 // max(size // 4, 1)
    words: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by group and bank
    for lane, (offset, is_active) in enumerate(zip(offsets, active, strict=True)):
        if is_active:
            for byte in range(offset, offset + size):
                words[lane // together][byte // 4 % 32].add(byte // 4)
    return sum(max(len(x) for x in banks.values()) for banks in words.values()), len(words)


@pytest.mark.parametrize("size", ACCESSES)
@pytest.mark.parametrize("seed", range(3))
def test_conflicts_of_any_lanes(size: int, seed: int) -> None:
    """Two warps of two programs, some lanes of which have a false predicate."""
    chance = random.Random(seed)
    offsets = [chance.randrange(SHARED // size) * size for _ in range(64)]
    active = [chance.random() < 0.4 for _ in range(64)]
    kind, registers = ACCESSES[size]
    # The sign of the offset says whether the lane takes part.
    given = [offset if is_active else offset - 2**30 for offset, is_active in zip(offsets, active, strict=True)]
    body = f"setp.ge.s32 %p0, %r1, 0;\n@%p0 ld.shared.{kind} {registers}, [%r3];"
    found = at(counted(body, given, n_threads=64, n_programs=2, fills=True), f"ld.shared.{kind}")
    by_warp = [passes_by_hand(offsets[i : i + 32], active[i : i + 32], size) for i in (0, 32)]
    needed, ideal = (2 * sum(x[i] for x in by_warp) for i in (0, 1))
    assert found == {"shared read": (4, 2 * sum(active) * size, needed, ideal)}


@pytest.mark.parametrize(("stride", "passes"), [(16, 1), (32, 2), (64, 4), (128, 8), (144, 1), (272, 1), (0, 1)])
def test_matrices(stride: int, passes: int) -> None:
    """Eight rows of 16 bytes are a pass, if they lie in different banks."""
    offsets = [stride * lane for lane in range(32)]
    body = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r3];"
    found = counted(body, offsets, fills=True)
    assert at(found, body.split(" ")[0]) == {"shared read": (1, 512, 4 * passes, 4)}
    if stride:
        body = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r20, %r21};"
        assert at(counted(body, offsets), body.split(" ")[0]) == {"shared write": (1, 256, 2 * passes, 2)}


@pytest.mark.parametrize(
    ("opcode", "registers", "offsets", "expected"),
    [
        ("ld.global.b32", "%r20", [4 * i for i in range(32)], (1, 128, 4, 4)),
        ("ld.global.v4.b32", "{%r20, %r21, %r22, %r23}", [16 * i for i in range(32)], (1, 512, 16, 16)),
        ("ld.global.b32", "%r20", [4 * i + 4 for i in range(32)], (1, 128, 5, 4)),  # not aligned to a sector
        ("ld.global.b32", "%r20", [8 * i for i in range(32)], (1, 128, 8, 4)),
        ("ld.global.b32", "%r20", [256 * i for i in range(32)], (1, 128, 32, 4)),
        ("ld.global.b32", "%r20", [0] * 32, (1, 128, 1, 1)),  # the same four bytes
        ("ld.global.v2.b32", "{%r20, %r21}", [8 * (i // 2) for i in range(32)], (1, 256, 4, 4)),
        ("ld.global.b32", "%r20", [4 * i for i in range(64)], (2, 256, 8, 8)),
    ],
)
def test_sectors_of_a_load(opcode: str, registers: str, offsets: list[int], expected: tuple[int, ...]) -> None:
    found = counted(f"{opcode} {registers}, [%rd5];", offsets, n_threads=len(offsets))
    assert at(found, opcode) == {"global read": expected}


def test_sectors_of_a_masked_store() -> None:
    """Eight lanes in a row store in one warp, one in the next, and none in the last."""
    body = """
        setp.lt.u32 %p0, %t, 8;
        setp.eq.or.s32 %p1, %t, 40, %p0;
        @%p1 st.global.b32 [%rd5], %t;
    """
    found = counted(body, [4 * i for i in range(96)], n_threads=96)
    assert at(found, "st.global.b32") == {"global write": (2, 36, 2, 2)}
    assert found.by_opcode["st.global.b32"] == 3  # issued, whatever the predicates


def test_atomics() -> None:
    """All lanes add to two numbers, in different sectors."""
    body = "red.global.gpu.relaxed.add.u32 [%rd5], %t;"
    found = counted(body, [128 * (i % 2) for i in range(32)], n_programs=3)
    assert at(found, body.split(" ")[0]) == {"global atomic": (3, 3 * 128, 3 * 2, 3 * 1)}


def test_copies_of_threads() -> None:
    """cp.async of 16 bytes: lanes with a source size of zero read nothing, and write zeros."""
    body = """
        setp.ge.u32 %p0, %t, 32;
        selp.b32 %r20, 16, 0, %p0;
        cp.async.cg.shared.global [%r5], [%rd5], 16, %r20;
        cp.async.wait_all;
    """
    found = counted(body, [32 * (i % 32) for i in range(64)], n_threads=64)
    traffic = at(found, "cp.async.cg.shared.global")
    # Every second half sector is used.
    assert traffic == {"global read": (1, 512, 32, 16), "shared write": (2, 1024, 8, 8)}


def test_a_copy_belongs_to_the_warp_that_reads() -> None:
    """One lane of each warp copies from the same sector: two requests, of one sector each."""
    body = """
        and.b32 %r20, %t, 31;
        setp.eq.s32 %p0, %r20, 3;
        @%p0 cp.async.ca.shared.global [%r5], [%x], 4;
        cp.async.wait_all;
    """
    found = counted(body, n_threads=64)
    assert at(found, "cp.async.ca.shared.global") == {"global read": (2, 8, 2, 2), "shared write": (2, 8, 2, 2)}


BOX = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
COPY_BOX = """
    add.s32 %r20, %s, 8192;
    setp.eq.s32 %p0, %t, 0;
    mov.b32 %r21, {column};
    mov.b32 %r22, {row};
    @%p0 mbarrier.init.shared::cta.b64 [%r20], 1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
    @%p0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%s], [%map, {{%r21, %r22}}], [%r20];
    mov.b32 %r23, 0;
wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], %r23;
    @!%p1 bra wait;
"""


@pytest.mark.parametrize(
    ("column", "row", "n_bytes", "sectors"),
    [
        (0, 0, 256, 8),  # four rows of 64 bytes, 128 bytes apart
        (4, 1, 256, 12),  # rows that begin in the middle of a sector
        (24, 0, 128, 4),  # half of the columns exist
        (16, 6, 128, 4),  # half of the rows exist
        (-16, 0, 0, 0),
    ],
)
def test_copies_of_tensors(column: int, row: int, n_bytes: int, sectors: int) -> None:
    """Only elements that exist are read; all of the box is written. One thread of each program copies."""
    body = COPY_BOX.format(column=column, row=row)
    found = counted(body, n_threads=64, n_programs=2, tensor=aligned(256), box=(4, 16))
    assert at(found, BOX) == {
        "global read": (2, 2 * n_bytes, 2 * sectors, 2 * n_bytes // 32),
        "shared write": (2, 2 * 256, 2 * 2, 2 * 2),
    }


def test_a_box_that_is_added() -> None:
    body = """
        setp.eq.s32 %p0, %t, 0;
        mov.b32 %r21, 0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%map, {%r21, %r21}], [%s];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    """
    found = counted(body, n_threads=64, fills=True, tensor=aligned(256), box=(4, 16))
    [traffic] = [at(found, e.x.opcode) for e in found.executed.values() if e.x.opcode.startswith("cp.reduce")]
    assert traffic == {"global atomic": (1, 256, 8, 8), "shared read": (1, 256, 2, 2)}


@pytest.mark.parametrize(
    ("shape", "kind", "operands", "multiply_adds"),
    [
        ("m16n8k16", "bf16", "{%r20, %r21, %r22, %r23}, {%r24, %r25}", 16 * 8 * 16),
        ("m16n8k16", "f16", "{%r20, %r21, %r22, %r23}, {%r24, %r25}", 16 * 8 * 16),
        ("m16n8k8", "tf32", "{%r20, %r21, %r22, %r23}, {%r24, %r25}", 16 * 8 * 8),
        ("m16n8k32", "e4m3", "{%r20, %r21, %r22, %r23}, {%r24, %r25}", 16 * 8 * 32),
    ],
)
def test_products_of_warps(shape: str, kind: str, operands: str, multiply_adds: int) -> None:
    """Two of the three warps of each program multiply."""
    result = "{%r30, %r31, %r32, %r33}"
    body = f"""
        setp.ge.u32 %p0, %t, 64;
        @%p0 bra past;
        mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {result}, {operands}, {result};
    past:
    """
    found = counted(body, n_threads=96, n_programs=3)
    assert found.multiply_adds == 3 * 2 * multiply_adds
    assert found.by_kind["products"] == 3 * 2


@pytest.mark.parametrize(("kind", "k", "flags"), [("bf16", 16, (", 0, 0", ", 0")), ("e4m3", 32, ("", ""))])
def test_products_of_warp_groups(kind: str, k: int, flags: tuple[str, str]) -> None:
    """wgmma of 64 rows, 16 columns: 32 bytes of each row and column, read once by four warps."""
    total = ", ".join(f"%r{100 + i}" for i in range(8))
    from_registers = "{%r20, %r21, %r22, %r23}"
    opcode = f"wgmma.mma_async.sync.aligned.m64n16k{k}.f32.{kind}.{kind}"
    body = f"""
        shr.u32 %r40, %s, 4;
        or.b32 %r40, %r40, {8 << 16};
        mov.b32 %r41, 16;
        mov.b64 %rd8, {{%r40, %r41}};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        wgmma.fence.sync.aligned;
        {opcode} {{{total}}}, %rd8, %rd8, 0, 1, 1{flags[0]};
        {opcode} {{{total}}}, {from_registers}, %rd8, 1, 1, 1{flags[1]};
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
    """
    found = counted(body, n_threads=256, fills=True)
    assert found.multiply_adds == 2 * 2 * 64 * 16 * k
    assert found.by_kind["products"] == 2 * 8
    n_bytes = 32 * (64 + 16) + 32 * 16
    assert at(found, opcode) == {"shared read": (4, 2 * n_bytes, 2 * n_bytes // 128, 2 * n_bytes // 128)}


def test_instructions_of_each_warp() -> None:
    """A warp that branches past an instruction does not issue it; one that takes both paths issues both."""
    body = """
        setp.ge.u32 %p0, %t, 32;
        @%p0 bra late;
        setp.ge.u32 %p1, %t, 16;
        @%p1 bra past;
        ex2.approx.ftz.f32 %r20, %r21;
        bra past;
    late:
        @!%p0 add.f32 %r20, %r20, %r21;
        add.f32 %r20, %r20, %r21;
    past:
        popc.b32 %r22, %r23;
    """
    found = counted(body, n_threads=96, n_programs=2)
    issued: dict[str, list[list[int]]] = defaultdict(list)
    for e in found.executed.values():
        issued[e.x.opcode].append(e.issued.tolist())
    assert issued["ex2.approx.ftz.f32"] == [[2, 0, 0]]
    assert issued["add.f32"] == [[0, 2, 2]] * 2
    assert issued["popc.b32"] == [[2, 2, 2]]
    assert found.by_opcode["popc.b32"] == 6
    # 29 before the body, 1 after; setp, bra, setp, bra, ex2, bra, popc; setp, bra, add, add, popc.
    assert found.by_warp == [2 * (30 + 7), 2 * (30 + 5), 2 * (30 + 5)]
    assert found.by_kind["exponentials"] == 2
    assert found.by_kind["float"] == 2 * 2 * 2


def test_a_loop() -> None:
    """Each warp goes round as often as its number says."""
    body = """
        shr.u32 %r20, %t, 5;
    again:
        add.s32 %r20, %r20, -1;
        setp.ge.s32 %p0, %r20, 0;
        @%p0 bra again;
    """
    found = counted(body, n_threads=128)
    [branch] = [e for e in found.executed.values() if e.x.opcode == "bra"]
    assert branch.issued.tolist() == [1, 2, 3, 4]


def test_barriers() -> None:
    """Two of all 128 threads; one of 64 for each half of the warps."""
    body = """
        bar.sync 0;
        setp.ge.u32 %p0, %t, 64;
        @%p0 bra second;
        bar.sync 1, 64;
        bra together;
    second:
        bar.sync 2, 64;
    together:
        bar.sync 0;
    """
    found = counted(body, n_threads=128, n_programs=3)
    assert found.barriers == {128: 3 * 2, 64: 3 * 2}
    assert found.by_opcode["bar.sync"] == 3 * (4 + 2 + 2 + 4)
    assert found.programs == 3


def test_places_and_totals() -> None:
    """By line of the source, and in all."""
    body = """
        st.shared.b32 [%r3], %t;
        st.shared.b32 [%r3+4096], %t; ld.shared.b32 %r20, [%r3];
    """
    found = counted(body, [8 * i for i in range(32)])
    of_line = found.by_place
    assert of_line["shared write", "body.ptx:2"] == Traffic(1, 128, 2, 1)
    assert of_line["shared write", "body.ptx:3"] == Traffic(1, 128, 2, 1)
    assert of_line["shared read", "body.ptx:3"] == Traffic(1, 128, 2, 1)
    assert found.traffic["shared write"] == Traffic(2, 256, 4, 2)


def test_nothing_is_counted_unless_it_is_asked_for() -> None:
    found = counted("st.shared.b32 [%r3], 7;\nbar.sync 0;", counting=False)
    assert found.executed == {}
    assert found.programs == 1
    assert found.barriers == {32: 1}


def test_every_instruction_has_a_kind() -> None:
    """Of those that the virtual GPU carries out, by the first word of the ISA's sections."""
    expected: dict[str, Any] = {
        "ex2": "exponentials",
        "mma.sync.aligned": "products",
        "wgmma.mma_async": "products",
        "wgmma.fence.sync.aligned": "synchronisation",
        "cp.async.commit_group": "synchronisation",
        "cp.async.ca.shared.global": "global",
        "cp.async.bulk.wait_group.read": "synchronisation",
        "ld.param": "moves",
        "ld.shared": "shared",
        "stmatrix": "shared",
        "red.global": "global",
        "elect.sync": "shuffles",
        "mbarrier.arrive": "synchronisation",
        "bar.warp.sync": "synchronisation",
        "div.full.f32": "float",
        "popc.b32": "integer",
    }
    assert {name: kind_of(name) for name in expected} == expected
    opcodes = {"cvt.rn.bf16x2.f32": "float", "cvt.u64.u32": "integer", "setp.lt.f32": "float", "selp.b32": "integer"}
    opcodes |= {"fma.rn.f32": "float", "add.s32": "integer", "bra.uni": "control", "abs.bf16x2": "float"}
    assert {opcode: kind_of(opcode) for opcode in opcodes} == opcodes
    assert {name.removesuffix(".f32") for name in expected} <= set(builders._BUILDERS)
    assert {kind_of(name) for name in builders._BUILDERS} | {"control"} == set(KINDS)
