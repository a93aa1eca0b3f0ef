"""What threads are: their numbers, registers, guards and paths."""

from __future__ import annotations

import pytest
import torch

from fusedattn.virtual_gpu.errors import UnknownPTXError
from tests.helpers.ptx_kernels import run
from tests.helpers.ptx_values import evaluate

GUARDS = ([1, 0, 0, 1] * 16, [0] * 64, [1] * 64, [0] * 32 + [1] * 32)


@pytest.mark.parametrize("guard", GUARDS, ids=["some", "none", "all", "one warp"])
@pytest.mark.parametrize(
    ("instruction", "result"),
    [
        ("add.s32 %d, %a, 3;", 8),
        ("mul.wide.u16 %d, 300, 400;", 120000),
        ("mov.b32 %d, %a;", 5),
        ("mov.b32 %d, {1, 2};", 0x20001),
        ("mov.b32 %d, 17;", 17),
        ("selp.b32 %d, 1, 2, %p;", 1),
        ("shl.b32 %d, %a, 2;", 20),
        ("shl.b32 %d, %a, %a;", 160),
        ("prmt.b32 %d, %a, 0, 0x0000;", 0x05050505),
        ("add.f32 %d, 0f3F800000, 0f3F800000;", 0x40000000),
        ("fma.rn.f32 %d, 0f3F800000, 0f3F800000, 0f00000000;", 0x3F800000),
        ("ex2.approx.ftz.f32 %d, 0f00000000;", 0x3F800000),
        ("cvt.rn.f32.s32 %d, %a;", 0x40A00000),
        ("cvt.rn.bf16x2.f32 %d, 0f3F800000, 0f40000000;", 0x3F804000),
        ("cvt.u32.u16 %d, 9;", 9),
    ],
)
def test_guards_leave_other_threads_alone(instruction: str, result: int, guard: list[int]) -> None:
    operands = {"d": (32, list(range(64))), "a": (32, [5] * 64), "p": (1, guard)}
    negated = [result if not p else i for i, p in enumerate(guard)]
    if "%p;" not in instruction:
        assert evaluate(f"@!%p {instruction}", 32, **operands) == negated
    assert evaluate(f"@%p {instruction}", 32, **operands) == [result if p else i for i, p in enumerate(guard)]


@pytest.mark.parametrize("guard", GUARDS, ids=["some", "none", "all", "one warp"])
def test_guards_of_predicates_and_of_two_results(guard: list[int]) -> None:
    before = [i % 3 == 0 for i in range(64)]
    operands = {"d": (1, before), "p": (1, guard)}
    for instruction, result in (
        ("setp.eq.s32 %d, 1, 1;", 1),
        ("setp.lt.f32 %d, 0f7FC00000, 0f00000000;", 0),
        ("not.pred %d, %d;", None),
    ):
        got = evaluate(f"@%p {instruction}", 1, **operands)
        assert got == [(1 - b if result is None else result) if p else b for p, b in zip(guard, before, strict=True)]
    got = evaluate(
        "@%p mov.b64 {%d, %e}, %a;",
        (32, 32),
        d=(32, [1] * 64),
        e=(32, [2] * 64),
        a=(64, [7 << 32 | 9] * 64),
        p=(1, guard),
    )
    assert got == [(9, 7) if p else (1, 2) for p in guard]


def test_an_instruction_may_change_its_guard() -> None:
    assert evaluate("@%d setp.eq.s32 %d, 1, 2;", 1, d=(1, [1, 0, 1])) == [0, 0, 0]
    assert evaluate("@!%d setp.eq.s32 %d, 1, 1;", 1, d=(1, [1, 0, 1])) == [1, 1, 1]
    assert evaluate("@%d not.pred %d, %d;", 1, d=(1, [1, 0, 1])) == [0, 0, 0]


def test_threads_part_and_meet_again() -> None:
    """Each thread counts down by itself; all of a warp are together afterwards."""
    code = """
    mov.b32 %d, 0; setp.eq.s32 %p, %a, 0; @%p bra out;
    again: add.s32 %d, %d, %a; sub.s32 %a, %a, 1; setp.gt.s32 %p, %a, 0; @%p bra again;
    out: shfl.sync.idx.b32 %e, %d, 5, 31, -1;
    """
    n = [i % 7 for i in range(64)]
    got = evaluate(code, (32, 32), a=(32, n), p=(1, [0] * 64))
    sums = [i * (i + 1) // 2 for i in n]
    assert got == [(total, sums[i - i % 32 + 5]) for i, total in enumerate(sums)]


def test_guards_on_a_path_that_some_threads_take() -> None:
    code = "mov.b32 %d, 1; @%q bra out; @%p mov.b32 %d, 2; @!%p mov.b32 %d, 3; out: add.s32 %d, %d, 10;"
    got = evaluate(code, 32, p=(1, [0, 0, 1, 1] * 16), q=(1, [0, 1] * 32))
    assert got == [13, 11, 12, 11] * 16


def test_some_threads_may_end_early() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    address = "ld.param.b64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;"
    run(f"{address} setp.lt.u32 %p1, %r1, 10; @%p1 ret; st.global.b32 [%rd1], 1; @!%p1 exit;", out, n_threads=64)
    assert out.tolist() == [0] * 10 + [1] * 54


def test_numbers_of_threads_and_programs() -> None:
    """Programs of a grid run side by side; x is the fastest of their numbers."""
    grid, names = (3, 2, 4), ("%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
    names += ("%tid.x", "%tid.y", "%ntid.x", "%ntid.z", "%laneid")
    out = torch.full((24, 64, len(names)), -1, dtype=torch.int32)
    body = (
        "ld.param.b64 %rd1, [p0]; mov.u32 %r2, %ctaid.y; mov.u32 %r1, %ctaid.z; mad.lo.s32 %r1, %r1, 2, %r2;"
        "mov.u32 %r2, %ctaid.x; mad.lo.s32 %r1, %r1, 3, %r2; mov.u32 %r2, %tid.x; mad.lo.s32 %r1, %r1, 64, %r2;"
        f"mul.wide.u32 %rd2, %r1, {4 * len(names)}; add.s64 %rd1, %rd1, %rd2;"
    )
    body += "".join(f"mov.u32 %r3, {name}; st.global.b32 [%rd1+{4 * i}], %r3;" for i, name in enumerate(names))
    run(body, out, n_threads=64, grid=grid)
    for program in range(24):
        for thread in (0, 1, 33, 63):
            numbers = [program % 3, program // 3 % 2, program // 6, *grid, thread, 0, 64, 1, thread % 32]
            assert out[program, thread].tolist() == numbers


def test_registers_start_poisoned() -> None:
    """As every float type they are NaN, so that what is computed from one is seen."""
    assert evaluate(".reg .b32 %x; mov.b32 %d, %x;", 32, a=(32, [0])) == [0xFFF9FFF9]
    assert evaluate(".reg .b16 %x; mov.b16 %d, %x;", 16, a=(32, [0])) == [0xFFF9]
    assert evaluate(".reg .b64 %x; mov.b64 %d, %x;", 64, a=(32, [0])) == [0xFFF9FFF9FFF9FFF9]
    for kind, bits in (("f16", 16), ("bf16", 16), ("f32", 32), ("f64", 64)):
        assert evaluate(f".reg .b{bits} %x; setp.nan.{kind} %d, %x, %x;", 1, a=(32, [0])) == [1]


def test_a_second_run_starts_poisoned_too() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = "ld.param.b64 %rd1, [p0]; st.global.b32 [%rd1], %r1; mov.b32 %r1, 5;"
    machine = run(body, out, n_threads=32)
    machine.begin([0], (1, 1, 1), {}, {}, machine.memory)
    assert set(machine.registers.row("%r1", "u4").tolist()) == {0xFFF9FFF9}


def test_unknown_instructions_in_code_that_does_not_run() -> None:
    with pytest.raises(UnknownPTXError, match=r"tcgen05\.ld"):
        run("bra out; tcgen05.ld %r1, [%r2]; out: mov.b32 %r1, 0;")
