"""What loops execute, by PTX whose loops are known, and the tables of docs/codegen.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.codegen import executed_tables, tables
from bench.codegen.disassembly import sass_instructions
from bench.codegen.executed_loops import iteration, product_loops
from bench.codegen.loops import Loop, Step, loop_of
from bench.codegen.predictions import fetched_bytes
from bench.codegen.report import Report
from tests.helpers.counted_ptx import aligned, counted, kernel_of

MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r30, %r31, %r32, %r33}, {%r20, %r21, %r22, %r23}, "
    "{%r24, %r25}, {%r30, %r31, %r32, %r33};"
)
# A loop around one of three iterations with two products, and one without products before it.
NESTED = f"""
    mov.b32 %r40, 5;
before:
    add.s32 %r40, %r40, -1;
    setp.gt.s32 %p0, %r40, 0;
    @%p0 bra before;
    mov.b32 %r41, 2;
outer:
    mov.b32 %r42, 3;
inner:
    {MMA}
    ex2.approx.ftz.f32 %r43, %r44;
    setp.gt.s32 %p2, %r42, 1;
    @%p2 cp.async.ca.shared.global [%r5], [%rd5], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.v4.b32 {{%r45, %r46, %r47, %r48}}, [%r5];
    {MMA}
    bar.sync 1, 64;
    add.s32 %r42, %r42, -1;
    setp.gt.s32 %p0, %r42, 0;
    @%p0 bra inner;
    add.s32 %r41, %r41, -1;
    setp.gt.s32 %p1, %r41, 0;
    @%p1 bra outer;
"""


def test_the_innermost_loop_with_products() -> None:
    [loop] = product_loops(kernel_of(NESTED))
    assert loop[0].opcode.startswith("mma")
    assert loop[-1].opcode == "bra"
    assert len(loop) == 13


def test_float32_products_are_chains() -> None:
    def loops(n: int) -> int:
        body = "again:\n" + "fma.rn.f32 %r20, %r21, %r22, %r20;\n" * n + "setp.gt.s32 %p0, %t, 99;\n@%p0 bra again;"
        return len(product_loops(kernel_of(body)))

    assert (loops(15), loops(16)) == (0, 1)


def test_an_iteration() -> None:
    """Two programs of two warps, with two times three iterations. The last of each three fetches nothing."""
    kernel = kernel_of(NESTED, 64)
    counters = counted(kernel, [16 * i for i in range(64)], n_programs=2, tensor=aligned(256))
    [loop] = product_loops(kernel)
    found = iteration(loop, counters, 2)
    assert found is not None
    assert found.iterations == 2 * 2 * 3
    assert found.issued == {
        "products": 2,
        "exponentials": 1,
        "integer": 3,
        "global": 1,
        "shared": 1,
        "synchronisation": 4,
        "control": 1,
    }
    assert found.multiply_adds == 2 * 16 * 8 * 16
    assert found.barriers == 1  # the other one holds 64 threads
    assert found.traffic["global read"].bytes == 2 * 2 * 2 * 1024
    assert found.memory_bytes == 1024
    assert found.shared_bytes == 1024 + 1024  # copied and loaded


def test_bytes_of_warps_that_fetch() -> None:
    """Only the second of two warps loads, and in the first of two iterations; a copy never runs."""
    body = f"""
        mov.b32 %r40, 2;
        setp.ge.u32 %p3, %t, 32;
        setp.ge.u32 %p4, %t, 64;
    again:
        {MMA}
        setp.gt.and.s32 %p0, %r40, 1, %p3;
        @%p0 ld.global.b32 %r41, [%rd5];
        {{COPY}}
        add.s32 %r40, %r40, -1;
        setp.gt.s32 %p1, %r40, 0;
        @%p1 bra again;
        cp.async.wait_all;
    """
    offsets = [4 * i for i in range(64)]
    for copy, expected in (("", (128, 0)), ("@%p4 cp.async.ca.shared.global [%r5], [%rd5], 4;", (None, None))):
        kernel = kernel_of(body.replace("{COPY}", copy), 64)
        found = iteration(product_loops(kernel)[0], counted(kernel, offsets, n_programs=2), 2)
        assert found is not None
        assert (found.memory_bytes, found.shared_bytes) == expected


def test_a_loop_that_does_not_run() -> None:
    kernel = kernel_of(f"setp.eq.s32 %p0, %t, %t;\n@%p0 bra past;\nagain:\n{MMA}\n@%p0 bra again;\npast:")
    [loop] = product_loops(kernel)
    assert iteration(loop, counted(kernel), 1) is None


@pytest.mark.parametrize(
    ("steps", "name", "n_bytes"),
    [
        ([], "full", 0),
        (["tma"], "full", 64 * 128 * 2 * 2),
        (["tma"], "boundary", 32 * 128 * 2 * 2),
        (["tma", "tma add"], "full", 64 * 128 * (2 * 2 + 4)),
        (["tma add"], "boundary", 32 * 128 * 4),  # its tiles are loaded by pointers
    ],
)
def test_bytes_that_the_accelerator_moves(steps: list[str], name: str, n_bytes: int) -> None:
    """Rows of q and dout in bfloat16, and of dq in float32."""
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "BOUNDARY": 32, "num_warps": 4, "num_stages": 2}
    report = Report("attention_bwd_dkdv", "sm_90", 128, "bf16", "one-pass", config, has_products=True)
    loop = Loop(tuple(Step(kind) for kind in steps))  # type: ignore[arg-type]
    assert fetched_bytes(report, loop, name) == n_bytes
    assert fetched_bytes(replace(report, dtype="fp32"), Loop((Step("tma"),)), "full") == 64 * 128 * 2 * 4


def test_additions_of_the_accelerator_are_found() -> None:
    loop = loop_of(sass_instructions("/*0000*/ UTMAREDG.4D.ADD [UR4], [UR8] ;"))
    assert loop.steps == (Step("tma add"),)
    assert not loop.copies  # it fetches nothing


ENTRIES = {
    "attention_fwd sm_90 bf16 64 causal": {
        "call": "causal",
        "tile": "64x32 w4 s2",
        "loops": {
            "boundary": {},
            "full": {
                "issued": {"products": 8, "exponentials": 18},
                "multiply_adds": 73728,
                "barriers": 4,
                "memory_bytes": 8192,
                "shared_bytes": 4096,
                "traffic": {
                    "global read": [1, 8192, 300, 256],
                    "shared read": [4, 2048, 30, 16],
                    "shared write": [1, 1, 10, 4],
                },
                "model": {"instructions": 401, "multiply_adds": 73728, "mufu": 18, "barriers": 4}
                | {"memory_bytes": 16384, "shared_bytes": 8192},
            },
        },
        "offenders": [["global read", "a.py:1", 300, 100, 0.5], ["shared write", "a.py:2", 32, 4, 0.25]],
    },
    "attention_fwd sm_90 fp32 64 causal": {
        "call": "causal",
        "tile": "16x16 w4 s1",
        "offenders": [["global read", "a.py:1", 300, 100, 0.75]],
    },
}


def test_a_row_of_the_table() -> None:
    head, row = executed_tables.rows(ENTRIES)
    cells = dict(zip(map(str, head), row, strict=True))
    expected = {"products": "8", "float": "0", "instructions in SASS": "401", "exponentials of MUFU": "18 of 18"}
    expected |= {"KiB of global memory": "8 of 16", "1000 multiply-adds": "73.73 of 73.73"}
    expected |= {"sectors, ideal": "300, 256", "passes, ideal": "40, 20"}
    assert {name: cells[name] for name in expected} == expected


def test_the_worst_places_come_first() -> None:
    """By the share of a kernel's accesses that is avoidable; each place in its worst call."""
    _, *rows = executed_tables.offenders(ENTRIES)
    assert [list(row)[2:] for row in rows] == [
        ["fp32", "64", "causal", "global read", "a.py:1", "3.0", "75%"],
        ["bf16", "64", "causal", "shared write", "a.py:2", "8.0", "25%"],
    ]


def test_tables_are_those_of_the_committed_counts() -> None:
    """`python -m bench.codegen.executed_tables` rewrites them."""
    text = tables.DOCUMENT.read_text()
    assert executed_tables.document(text) == text
