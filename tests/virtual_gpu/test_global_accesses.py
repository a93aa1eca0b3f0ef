"""Loads, stores and atomic operations of global memory."""

from __future__ import annotations

import struct

import pytest
import torch

from fusedattn.virtual_gpu.errors import MemoryAccessError, UnknownPTXError
from tests.helpers.float_bits import F32, hostile
from tests.helpers.ptx_kernels import ADDRESSES, REGISTER, random_bytes, run


@pytest.mark.parametrize(("n", "bits"), [(n, bits) for n in (1, 2, 4) for bits in (8, 16, 32, 64) if n * bits <= 128])
def test_vectors(n: int, bits: int) -> None:
    """Each element arrives at its place, and nothing else changes."""
    source, target = random_bytes(128), torch.zeros(128, 16, dtype=torch.uint8)
    registers = "{" + ", ".join(f"{REGISTER[bits]}{10 + i}" for i in range(n)) + "}"
    kind = f"v{n}.b{bits}" if n > 1 else f"b{bits}"
    run(
        f"{ADDRESSES} ld.global.{kind} {registers}, [%rd2]; st.global.{kind} [ %rd4 + 0 ], {registers};", source, target
    )
    n_bytes = n * bits // 8
    assert torch.equal(target[:, :n_bytes], source[:, :n_bytes])
    assert not target[:, n_bytes:].any()


@pytest.mark.parametrize("kind", ["b8", "u8", "s8", "b16", "s16", "u16", "b32", "s32", "u32"])
def test_loads_are_extended_to_the_register(kind: str) -> None:
    source, target = random_bytes(64), torch.zeros(64, 2, dtype=torch.int64)
    run(f"{ADDRESSES} ld.global.{kind} %rd10, [%rd2+8]; st.global.b64 [%rd4], %rd10;", source, target, n_threads=64)
    n_bytes = int(kind[1:]) // 8
    wanted = [int.from_bytes(bytes(row[8 : 8 + n_bytes].tolist()), "little", signed=kind[0] == "s") for row in source]
    assert target[:, 0].tolist() == wanted


def test_stores_take_the_low_part_of_a_register() -> None:
    target = torch.zeros(64, 2, dtype=torch.int64)
    run(f"{ADDRESSES} mov.b64 %rd9, 0x1122334455667788; st.global.b8 [%rd4], %rd9; st.global.b16 [%rd4+8], %rd9;"
        "st.global.b32 [%rd4+12], -1;", target, target, n_threads=64)  # fmt: skip
    assert target.tolist() == [[0x88, 0x7788 - 2**32]] * 64


def test_a_load_may_replace_its_address() -> None:
    source = torch.arange(128).reshape(64, 2)
    target = torch.zeros_like(source)
    body = "ld.global.v2.b64 {%rd2, %rd7}, [%rd2]; st.global.v2.b64 [%rd4], {%rd2, %rd7};"
    run(ADDRESSES + body, source, target, n_threads=64)
    assert torch.equal(source, target)


def test_what_is_loaded_for_an_underscore_is_not_kept() -> None:
    source, target = random_bytes(64), torch.zeros(64, 16, dtype=torch.uint8)
    body = "ld.global.v4.b32 {_, %r11, _, %r13}, [%rd2]; st.global.v2.b32 [%rd4], {%r13, %r11};"
    run(f"{ADDRESSES} {body}", source, target, n_threads=64)
    assert torch.equal(target[:, :4], source[:, 12:])
    assert torch.equal(target[:, 4:8], source[:, 4:8])


def test_guarded_threads_access_nothing() -> None:
    """Their addresses may be anything; their registers stay."""
    source, target = torch.arange(20, dtype=torch.int32).reshape(5, 4), torch.zeros(5, 4, dtype=torch.int32)
    body = """
    setp.lt.u32 %p1, %r1, 5; mov.b32 %r5, 9; @!%p1 mov.b64 %rd2, 12345;
    @%p1 ld.global.b32 %r5, [%rd2]; setp.ne.s32 %p2, %r1, 3; and.pred %p1, %p1, %p2;
    @%p1 st.global.v2.b32 [%rd4], {%r5, 7}; setp.gt.u32 %p3, %r1, 500; @%p3 st.global.b32 [%rd2], 1;
    """
    run(ADDRESSES + body, source, target)
    assert target[:, :2].tolist() == [[0, 7], [4, 7], [8, 7], [0, 0], [16, 7]]
    assert not target[:, 2:].any()


@pytest.mark.parametrize(
    "modifiers",
    [
        "nc",
        "ca",
        "cg",
        "L1::evict_last",
        "L1::evict_first.L2::cache_hint",
        "L1::no_allocate.L2::128B",
        "nc.L1::evict_normal",
    ],
)
def test_advice_to_caches_changes_nothing(modifiers: str) -> None:
    source, target = random_bytes(64), torch.zeros(64, 16, dtype=torch.uint8)
    policy = ", %rd3" if "cache_hint" in modifiers else ""
    body = f"ld.global.{modifiers}.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd2]{policy};"
    run(f"{ADDRESSES} {body} st.global.v4.b32 [%rd4], {{%r5, %r6, %r7, %r8}};", source, target, n_threads=64)
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r5, [%rd2+1024];", "4 bytes at byte 1024 of a tensor of the launch that has 1024"),
        ("ld.global.b64 %rd6, [%rd1+-8];", "8 bytes at 8 bytes before a tensor"),
        ("st.global.v4.b32 [%rd1+1016], {%r1, %r1, %r1, %r1};", "not a multiple of 16"),
        ("st.global.b16 [%rd1+3], %rs1;", "not a multiple of 2"),
        ("ld.global.b32 %r5, [%rd7];", "of a tensor|before a tensor|is not a multiple"),  # a register that nobody wrote
        ("mov.b64 %rd7, 0; ld.global.b32 %r5, [%rd7];", "before a tensor"),
        ("mov.b64 %rd7, -4; ld.global.b32 %r5, [%rd7];", "before a tensor"),
    ],
)
def test_accesses_outside_of_tensors(body: str, message: str) -> None:
    tensors = torch.zeros(256), torch.zeros(256)
    with pytest.raises(MemoryAccessError, match=message):
        run(ADDRESSES + body, *tensors, n_threads=64)


def test_the_last_elements_may_be_used() -> None:
    x = torch.zeros(256)
    run(f"{ADDRESSES} st.global.v4.b32 [%rd1+1008], {{1, 2, 3, 4}};", x, x, n_threads=32)
    assert x.view(torch.int32)[-5:].tolist() == [0, 1, 2, 3, 4]


def test_elements_between_rows_are_no_ones() -> None:
    whole = torch.zeros(4, 16)
    part = whole[:, 4:8]
    run(f"{ADDRESSES} st.global.v4.b32 [%rd1+64], {{1, 2, 3, 4}};", part, part, n_threads=32)
    assert whole.view(torch.int32)[1].tolist() == [0] * 4 + [1, 2, 3, 4] + [0] * 8
    for offset in (16, 48, 60):
        with pytest.raises(MemoryAccessError, match=f"4 bytes at byte {offset} of a tensor are not elements"):
            run(f"{ADDRESSES} ld.global.b32 %r5, [%rd1+{offset}];", part, part, n_threads=32)


def test_without_tensors_there_is_no_memory() -> None:
    with pytest.raises(MemoryAccessError, match="the launch has no tensor"):
        run("mov.b64 %rd1, 4096; ld.global.b32 %r1, [%rd1];")


@pytest.mark.parametrize(
    "instruction",
    ["ld.global.v3.b32 {%r5, %r6, %r7}, [%rd2];", "ld.global.acquire.gpu.b32 %r5, [%rd2];",
     "ld.global.b64 %r5, [%rd2];", "ld.global.L2::foo.b32 %r5, [%rd2];", "ld.global.L2::128B.b32 %r5, [%rd2], %rd3;",
     "ld.global.L2::cache_hint.b32 %r5, [%rd2];", "ld.global.L2::cache_hint.b32 %r5, [%rd2], %r3;",
     "st.global.L1::evict_last.b32 [%rd2], %r5, %rd3;",
     "ld.global.v2.b32 %r5, [%rd2];", "ld.global.b32 %r5, %rd2;", "ld.global.b128 %rd5, [%rd2];",
     "st.global.v2.b32 [%rd2], {%r5, %r6, %r7};", "st.global.b64 [%rd2], %r5;", "st.global.mmio.b32 [%rd2], %r5;",
     "atom.global.gpu.relaxed.cas.b32 %r5, [%rd2], %r6, %r7;", "atom.global.add.f16 %rs5, [%rd2], %rs6;",
     "atom.global.and.f32 %r5, [%rd2], %r6;", "atom.global.add.s64 %rd5, [%rd2], %rd6;",
     "atom.global.add.v2.f32 %r5, [%rd2], {%r6, %r7};", "red.global.inc.u32 [%rd2], %r6;",
     "red.global.add.v2.u32 [%rd2], {%r6, %r7};", "atom.shared.add.u32 %r5, [%r2], %r6;"],
)  # fmt: skip
def test_unknown_accesses(instruction: str) -> None:
    with pytest.raises(UnknownPTXError, match=instruction.split()[0].split(".v")[0]):
        run(ADDRESSES + instruction, torch.zeros(256), torch.zeros(256), n_threads=32)


def single(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


@pytest.mark.parametrize("modifiers", ["gpu.relaxed.", "sys.acq_rel.", ""])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_atomic_sums_of_one_address_follow_each_other(seed: int | None, modifiers: str) -> None:
    """Each addition gets the value that another left; together they have seen every value once."""
    total = torch.zeros(1, dtype=torch.int32)
    seen = torch.zeros(64, 4, dtype=torch.int32)
    body = (
        f"add.s32 %r2, %r1, 1; atom.global.{modifiers}add.u32 %r3, [%rd1], %r2; st.global.v2.b32 [%rd4], {{%r3, %r2}};"
    )
    run(ADDRESSES + body, total, seen, n_threads=64, seed=seed)
    assert total.item() == 64 * 65 // 2
    steps = sorted(seen[:, :2].tolist())
    assert [before + by for before, by in steps] == [before for before, _ in steps[1:]] + [64 * 65 // 2]
    in_order = [by for _, by in steps] == list(range(1, 65))
    assert in_order == (seed is None)


def test_atomic_sums_of_floats_are_rounded_one_by_one() -> None:
    total = torch.tensor([1e8])
    run(f"{ADDRESSES} red.global.gpu.relaxed.add.f32 [%rd1], 0f40A00000;", total, total, n_threads=32)
    wanted = 1e8
    for _ in range(32):
        wanted = single(wanted + 5.0)
    assert total.item() == wanted != 1e8 + 160


def test_atomic_sums_of_float32_have_no_denormal_numbers() -> None:
    bits = hostile(F32)
    pairs = [(a, b) for a in bits for b in bits]
    pairs += [(0, 0)] * (-len(pairs) % 32)
    x = torch.tensor([[p[0] - 2**32 if p[0] >> 31 else p[0]] * 4 for p in pairs], dtype=torch.int32)
    y = torch.tensor([[p[1] - 2**32 if p[1] >> 31 else p[1]] * 4 for p in pairs], dtype=torch.int32)
    run(f"{ADDRESSES} ld.global.b32 %r2, [%rd4]; red.global.add.f32 [%rd2], %r2;", x, y, n_threads=len(pairs))
    for (a, b), got in zip(pairs, x[:, 0].tolist(), strict=True):
        wanted = F32.flushed(F32.rounded(lambda u, v: u + v, F32.flushed(a), F32.flushed(b)))
        assert F32.same(got % 2**32, wanted), (hex(a), hex(b))


@pytest.mark.parametrize("returns", [True, False])
def test_atomic_vectors(returns: bool) -> None:
    """Pairs of threads add to one place; what they read for "_" is not kept."""
    total, old = torch.arange(128.0).reshape(32, 4), torch.zeros(64, 4)
    operation = "atom" if returns else "red"
    targets = "{_, %r11, %r12, %r13}, " if returns else ""
    body = f"""
    shr.u32 %r2, %r1, 1; mul.wide.u32 %rd5, %r2, 16; add.s64 %rd2, %rd1, %rd5; mov.b32 %r11, 0;
    cvt.rn.f32.u32 %r3, %r1; {operation}.global.gpu.relaxed.add.v4.f32 {targets}[%rd2], {{%r3, 0f3F800000, %r3, %r3}};
    st.global.b32 [%rd4+4], %r11;
    """
    before = total.clone()
    run(ADDRESSES + body, total, old, n_threads=64)
    for i in range(32):
        sums = [4 * i + 4 * i + 1, 4 * i + 3, 8 * i + 3, 8 * i + 4]
        assert total[i].tolist() == [float(s) for s in sums]
    if returns:
        assert old[::2, 1].tolist() == before[:, 1].tolist()
        assert old[1::2, 1].tolist() == (before[:, 1] + 1).tolist()


@pytest.mark.parametrize(
    ("operation", "wanted"),
    [("min.s32", -7), ("max.s32", 31), ("min.u32", 0), ("max.u32", -1), ("and.b32", 0), ("or.b32", -1), ("xor.b32", -7),
     ("add.s32", 489)],
)  # fmt: skip
def test_other_atomic_operations(operation: str, wanted: int) -> None:
    """Of -7 in memory and 0 to 31, of the threads."""
    x = torch.tensor([-7], dtype=torch.int32)
    run(f"{ADDRESSES} atom.global.gpu.relaxed.{operation} %r2, [%rd1], %r1;", x, x, n_threads=32)
    if operation in ("max.u32", "or.b32"):
        wanted = -7 % 2**32 | (0 if operation == "max.u32" else 31)
        wanted -= 2**32
    assert x.item() == wanted


def test_atomic_sums_of_float32_return_what_was_there() -> None:
    x, out = torch.tensor([0.5]), torch.zeros(32, 4)
    body = "atom.global.gpu.relaxed.add.f32 %r2, [ %rd1 + 0 ], 0f3F800000; st.global.b32 [%rd4], %r2;"
    run(ADDRESSES + body, x, out, n_threads=32)
    assert out[:, 0].tolist() == [i + 0.5 for i in range(32)]
    assert x.item() == 32.5


def test_long_sums_that_nobody_reads() -> None:
    x = torch.tensor([2**40 - 1])
    run(f"{ADDRESSES} cvt.u64.u32 %rd7, %r1; red.global.gpu.relaxed.add.u64 [ %rd1 + 0 ], %rd7;", x, x, n_threads=32)
    assert x.item() == 2**40 - 1 + 31 * 16


def test_atomic_exchanges_and_long_sums() -> None:
    x, out = torch.tensor([100, 2**40]), torch.zeros(32, 2, dtype=torch.int64)
    body = """
    cvt.u64.u32 %rd7, %r1; atom.global.gpu.relaxed.exch.b64 %rd8, [%rd1], %rd7;
    atom.global.gpu.relaxed.add.u64 %rd9, [%rd1+8], %rd7; st.global.v2.b64 [%rd4], {%rd8, %rd9};
    """
    run(ADDRESSES + body, x, out, n_threads=32)
    assert out[:, 0].tolist() == [100, *range(31)]
    assert x.tolist() == [31, 2**40 + 496]
    assert out[:, 1].tolist() == [2**40 + i * (i - 1) // 2 for i in range(32)]
