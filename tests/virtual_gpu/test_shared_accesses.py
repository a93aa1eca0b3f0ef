"""Loads and stores of shared memory: the widths, vectors and addresses of one thread."""

from __future__ import annotations

import pytest
import torch

from fusedattn.virtual_gpu.errors import MemoryAccessError, UnknownPTXError
from tests.helpers.ptx_kernels import ADDRESSES, REGISTER, random_bytes, run

SHARED = "mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r1, 16, %r2;"
THREADS = 64
N_BYTES = 16 * THREADS


@pytest.mark.parametrize(("n", "bits"), [(n, bits) for n in (1, 2, 4) for bits in (8, 16, 32, 64) if n * bits <= 128])
def test_vectors(n: int, bits: int) -> None:
    """Each element arrives at its place, and nothing else changes."""
    source, target = random_bytes(THREADS), torch.zeros(THREADS, 16, dtype=torch.uint8)
    registers = "{" + ", ".join(f"{REGISTER[bits]}{10 + i}" for i in range(n)) + "}"
    others = "{" + ", ".join(f"{REGISTER[bits]}{20 + i}" for i in range(n)) + "}"
    kind = f"v{n}.b{bits}" if n > 1 else f"b{bits}"
    body = f"""
    {ADDRESSES} {SHARED} ld.global.{kind} {registers}, [%rd2];
    st.shared.v4.b32 [%r3], {{9, 9, 9, 9}}; st.shared.{kind} [ %r3 + 0 ], {registers};
    ld.shared.{kind} {others}, [%r3]; st.global.{kind} [%rd4], {others};
    """
    run(body, source, target, n_threads=THREADS, shared_bytes=N_BYTES)
    n_bytes = n * bits // 8
    assert torch.equal(target[:, :n_bytes], source[:, :n_bytes])
    whole = "ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r3]; st.global.v4.b32 [%rd4], {%r30, %r31, %r32, %r33};"
    run(body + whole, source, target, n_threads=THREADS, shared_bytes=N_BYTES)
    assert torch.equal(target[:, :n_bytes], source[:, :n_bytes])
    assert target[:, n_bytes:].tolist() == [[9 * (i % 4 == 0) for i in range(n_bytes, 16)]] * THREADS


@pytest.mark.parametrize("kind", ["b8", "s8", "u16", "s16", "b32"])
def test_loads_are_extended_to_the_register(kind: str) -> None:
    source, target = random_bytes(THREADS), torch.zeros(THREADS, 2, dtype=torch.int64)
    body = f"""
    {ADDRESSES} {SHARED} ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2];
    st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}};
    ld.shared.{kind} %rd10, [%r3+4]; st.global.b64 [%rd4], %rd10;
    """
    run(body, source, target, n_threads=THREADS, shared_bytes=N_BYTES)
    n_bytes = int(kind[1:]) // 8
    wanted = [int.from_bytes(bytes(row[4 : 4 + n_bytes].tolist()), "little", signed=kind[0] == "s") for row in source]
    assert target[:, 0].tolist() == wanted


def test_addresses() -> None:
    """A name, with an offset or without; a register, with one of either sign."""
    target = torch.zeros(32, 2, dtype=torch.int64)
    body = f"""
    {ADDRESSES} mov.b32 %r2, global_smem; add.s32 %r3, %r2, 24; setp.eq.u32 %p1, %r1, 0;
    @%p1 st.shared.b32 [global_smem], 5; @%p1 st.shared.b32 [global_smem+20], 6;
    ld.shared.b32 %r5, [%r3+-4]; ld.shared.b32 %r6, [%r2]; st.global.v2.b32 [%rd4], {{%r5, %r6}};
    """
    run(body, target, target, n_threads=32, shared_bytes=32)
    assert target[:, 0].tolist() == [5 << 32 | 6] * 32


def test_programs_have_memories_of_their_own() -> None:
    target = torch.zeros(3, 2, dtype=torch.int64)
    body = """
    mov.u32 %r1, %ctaid.x; ld.param.b64 %rd1, [p0]; mad.wide.u32 %rd1, %r1, 16, %rd1;
    st.shared.b32 [global_smem+4], %r1; ld.shared.b32 %r2, [global_smem+4]; st.global.b32 [%rd1], %r2;
    """
    run(body, target, n_threads=32, shared_bytes=16, grid=(3, 1, 1))
    assert target[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.shared.b32 %r5, [%r3+1024];", "4 bytes at 1024 of shared memory, which has 1024"),
        ("st.shared.b32 [%r3+-4], 0;", "4 bytes at -4 of shared memory"),
        ("st.shared.v4.b32 [%r3+8], {0, 0, 0, 0};", "not a multiple of 16"),
        ("mov.b32 %r4, 0; ld.shared.b32 %r5, [%r4];", "of shared memory"),
        ("ld.shared.b32 %r5, [%r6];", "not a multiple|of shared memory"),  # a register that nobody wrote
        ("ld.shared.b32 %r5, [%r3];", "nobody has written"),
    ],
)
def test_accesses_outside(body: str, message: str) -> None:
    with pytest.raises(MemoryAccessError, match=message):
        run(ADDRESSES + SHARED + body, torch.zeros(4), torch.zeros(4), n_threads=32, shared_bytes=1024)


@pytest.mark.parametrize(
    "instruction",
    ["ld.shared.v4.b32 {%r5, %r6}, [%r3];", "ld.shared::cluster.b32 %r5, [%r3];", "st.shared.v2.b32 [%r3], %r5;",
     "ld.shared.volatile.b32 %r5, [%r3];", "ld.shared.b64 %r5, [%r3];", "st.shared.bf16 [%r3], %rs5;"],
)  # fmt: skip
def test_unknown_accesses(instruction: str) -> None:
    with pytest.raises(UnknownPTXError, match=instruction.split()[0]):
        run(ADDRESSES + SHARED + instruction, torch.zeros(4), torch.zeros(4), n_threads=32, shared_bytes=1024)
