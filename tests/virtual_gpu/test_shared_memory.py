"""Shared memory: what a program finds there, and which addresses it may use."""

from __future__ import annotations

import numpy as np
import pytest

from fusedattn.virtual_gpu.errors import MemoryAccessError, RaceError
from tests.helpers.ptx_programs import fails, run, run_all

THREADS = np.arange(64)


def test_each_program_has_its_own_memory() -> None:
    body = """
    shl.b32 %r1, %c, 8;
    add.u32 %r1, %r1, %t;
    st.shared.b32 [%a], %r1;
    bar.sync 0;
    xor.b32 %r2, %a, 128;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%o], %r3;
    """
    result = run_all(body, grid=(3, 1, 1))
    np.testing.assert_array_equal(result, np.arange(3)[:, None] * 256 + (THREADS ^ 32))


def test_a_read_of_bytes_that_nobody_wrote() -> None:
    fails(MemoryAccessError, "ld.shared.b32 %r1, [%a]; // read", "read", says="nobody has written")


def test_a_read_of_bytes_of_which_one_was_not_written() -> None:
    body = """
    shl.b32 %r1, %t, 3;
    add.u32 %r1, %r1, %s;
    st.shared.b16 [%r1], %rs0;
    st.shared.b8 [%r1+2], %rs0;
    ld.shared.b8 %rs1, [%r1+2];
    ld.shared.b32 %r2, [%r1]; // read
    """
    fails(MemoryAccessError, body, "read", says="nobody has written")


def test_memory_is_forgotten_between_programs() -> None:
    body = """
    mov.u32 %r9, 0;
    setp.ne.u32 %p1, %c, 0;
    @%p1 bra READ;
    st.shared.b32 [%a], %r9;
    READ:
    ld.shared.b32 %r1, [%a]; // read
    """
    run(body, grid=(1, 1, 1))
    fails(MemoryAccessError, body, "read", grid=(2, 1, 1), n_ctas=1, orders=[{}])
    fails(MemoryAccessError, body, "read", grid=(2, 1, 1), orders=[{}])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_elements_of_every_size(size: int) -> None:
    register = {1: "rs", 2: "rs", 4: "r", 8: "rd"}[size]
    widen = {
        1: "cvt.u32.u16 %r3, %rs1;",
        2: "cvt.u32.u16 %r3, %rs1;",
        4: "mov.u32 %r3, %r1;",
        8: "cvt.u32.u64 %r3, %rd1;",
    }[size]
    narrow = {1: "cvt.u16.u32 %rs0, %t;", 2: "cvt.u16.u32 %rs0, %t;", 4: "mov.u32 %r0, %t;", 8: "cvt.u64.u32 %rd0, %t;"}
    body = f"""
    mul.lo.u32 %r2, %t, {size};
    add.u32 %r2, %r2, %s;
    {narrow[size]}
    st.shared.b{8 * size} [%r2], %{register}0;
    ld.shared.b{8 * size} %{register}1, [%r2];
    {widen}
    st.global.b32 [%o], %r3;
    """
    np.testing.assert_array_equal(run_all(body)[0], THREADS)


def test_vectors() -> None:
    body = """
    shl.b32 %r9, %t, 4;
    add.u32 %r9, %r9, %s;
    add.u32 %r1, %t, 1;
    add.u32 %r2, %t, 2;
    add.u32 %r3, %t, 3;
    st.shared.v4.b32 [%r9], {%t, %r1, %r2, %r3};
    bar.sync 0;
    shl.b32 %r8, %t, 3;
    add.u32 %r8, %r8, %s;
    ld.shared.v2.b32 {%r4, %r5}, [%r8+0];
    shl.b32 %r5, %r5, 16;
    or.b32 %r6, %r4, %r5;
    st.global.b32 [%o], %r6;
    """
    words = (THREADS[:, None] + np.arange(4)).reshape(-1)[:128].reshape(64, 2)
    np.testing.assert_array_equal(run_all(body)[0], words[:, 0] | words[:, 1] << 16)


@pytest.mark.parametrize(("offset", "passes"), [(0, True), (4096 - 256, True), (4096 - 252, False), (-4, False)])
def test_bounds_to_the_byte(offset: int, passes: bool) -> None:
    body = f"add.u32 %r1, %a, {offset & 2**32 - 1};\nst.shared.b32 [%r1], %t; // store"
    if passes:
        run_all(body)
    else:
        fails(MemoryAccessError, body, "store", says="of shared memory, which has 4096")


def test_the_last_bytes_are_not_rounded_up() -> None:
    run("st.shared.b32 [%a], %t;", shared_bytes=256)
    fails(MemoryAccessError, "st.shared.b32 [%a], %t; // store", "store", shared_bytes=255)
    fails(MemoryAccessError, "mov.u32 %r1, 0;\nst.shared.b32 [%r1], %t; // store", "store")


@pytest.mark.parametrize("access", ["b16", "b32", "v2.b32", "v4.b32", "b64"])
def test_alignment(access: str) -> None:
    size = {"b16": 2, "b32": 4, "v2.b32": 8, "v4.b32": 16, "b64": 8}[access]
    target = {"b16": "%rs1", "v2.b32": "{%r1, %r2}", "v4.b32": "{%r1, %r2, %r3, %r4}", "b64": "%rd1"}.get(access, "%r1")
    body = f"ld.shared.{access} {target}, [%s+{size // 2}]; // load"
    fails(MemoryAccessError, body, "load", says=f"is not a multiple of {size}")


def test_threads_that_store_different_values_to_one_place() -> None:
    """PTX does not say which value stays; threads of several warps race besides."""
    of_a_warp = "setp.lt.u32 %p1, %t, 32;\n@%p1 st.shared.b32 [%s], %t; // store"
    run_all("mov.u32 %r1, 5;\nsetp.lt.u32 %p1, %t, 32;\n@%p1 st.shared.b32 [%s], %r1;")
    fails(RaceError, of_a_warp, "store", says="different values")
    run_all(of_a_warp, strict=False)
    fails(RaceError, "st.shared.b32 [%s], %t; // store", "store", says="different values", orders=[{}], strict=False)


@pytest.mark.parametrize("form", ["x1", "x1.trans", "x2", "x4"])
def test_matrices_whose_rows_lie_in_one_place(form: str) -> None:
    """Eight rows of a warp, or rows of two warps; equal rows may."""
    n = int(form[1])
    registers = ", ".join([f"%r{4 + i}" for i in range(n)])
    store = f"stmatrix.sync.aligned.m8n8.{form}.shared.b16 [%r1], {{{registers}}}; // store"
    values = "\n".join(f"add.u32 %r{4 + i}, %t, {32 * i};" for i in range(n))
    of_a_warp = f"{values}\nshl.b32 %r1, %w, 4;\nadd.u32 %r1, %r1, %s;\n{store}"
    fails(RaceError, of_a_warp, "store", says="different values")
    run_all(of_a_warp, strict=False)
    of_warps = f"{values}\nshl.b32 %r1, %l, 4;\nadd.u32 %r1, %r1, %s;\n{store}"
    fails(RaceError, of_warps, "store", orders=[{}, {"asynchronous": "early"}], says="different values", strict=False)
    fails(RaceError, of_warps, "store", orders=[{"schedule": "random", "seed": 1}], strict=False)
    equal = "\n".join(f"mov.b32 %r{4 + i}, 0x70007;" for i in range(n))
    run_all(f"{equal}\nmov.b32 %r1, %s;\n{store}\nbar.sync 0;\nld.shared.b32 %r2, [%s+12];\nst.global.b32 [%o], %r2;")


def _matrices(transposed: bool) -> str:
    trans = ".trans" if transposed else ""
    return f"""
    shl.b32 %r1, %l, 4;
    shl.b32 %r2, %w, 9;
    add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %s;
    shl.b32 %r3, %t, 1;
    or.b32 %r4, %r3, 65536;
    add.u32 %r5, %r4, 0x01000100;
    add.u32 %r6, %r5, 0x01000100;
    add.u32 %r7, %r6, 0x01000100;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {{%r4, %r5, %r6, %r7}};
    ld.shared.b32 %r8, [%r1+4];
    st.global.b32 [%o], %r8;
    """


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_puts_each_element_where_the_isa_says(transposed: bool) -> None:
    memory = np.zeros((2, 4, 8, 8), dtype="u4")  # warp, matrix, row, column
    for warp in range(2):
        for lane in range(32):
            low = 2 * (32 * warp + lane) | 65536
            for matrix in range(4):
                word = low + 0x01000100 * matrix
                for half in range(2):
                    row, column = lane // 4, lane % 4 * 2 + half
                    at = (column, row) if transposed else (row, column)
                    memory[warp, matrix][at] = word >> 16 * half & 0xFFFF
    rows = memory.reshape(64, 8)  # each thread reads elements 2 and 3 of the row whose address it gave
    np.testing.assert_array_equal(run_all(_matrices(transposed))[0], rows[:, 2] | rows[:, 3] << 16)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_takes_each_element_where_the_isa_says(transposed: bool) -> None:
    trans = ".trans" if transposed else ""
    body = f"""
    shl.b32 %r1, %l, 4;
    shl.b32 %r2, %w, 9;
    add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %s;
    shl.b32 %r3, %t, 3;
    or.b32 %r4, %r3, 0x00010000;
    add.u32 %r5, %r4, 0x00020002;
    add.u32 %r6, %r4, 0x00040004;
    add.u32 %r7, %r4, 0x00060006;
    st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r1];
    st.global.b32 [%o], %r7;
    """
    words = np.array([[8 * t | 0x10000 for _ in range(4)] for t in range(64)]) + 0x20002 * np.arange(4)
    halves = np.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(64, 8)
    expected = []
    for thread in range(64):
        warp, lane = divmod(thread, 32)
        matrix = halves[32 * warp + 24 : 32 * warp + 32]  # the fourth
        row, column = lane // 4, lane % 4 * 2
        pair = [matrix[column + i, row] if transposed else matrix[row, column + i] for i in (0, 1)]
        expected.append(int(pair[0]) | int(pair[1]) << 16)
    np.testing.assert_array_equal(run_all(body)[0], np.array(expected))
