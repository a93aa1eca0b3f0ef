"""Exchange of values in a warp, against the pseudocode of the ISA."""

from __future__ import annotations

import functools
import operator
import random

import pytest

from fusedattn.virtual_gpu.errors import KernelError, UnknownPTXError
from tests.helpers.integer_bits import signed
from tests.helpers.ptx_values import evaluate

DRAW = random.Random(0)
VALUES = [DRAW.getrandbits(32) for _ in range(96)]
AMOUNTS = [DRAW.choice([0, 1, 2, 5, 16, 30, 31, 32, 33, 2**31 + 3, 2**32 - 1]) for _ in range(96)]


def shuffled(mode: str, values: list[int], amounts: list[int], clamp: int) -> list[tuple[int, int]]:
    """The value and the predicate of each thread."""
    found = []
    for thread, amount in enumerate(amounts):
        lane, by = thread % 32, amount & 31
        segment, highest = clamp >> 8 & 31, lane & clamp >> 8 & 31 | clamp & 31 & ~(clamp >> 8)
        if mode == "up":
            source, inside = lane - by, lane - by >= highest
        elif mode == "idx":
            source = lane & segment | by & ~segment
            inside = source <= highest
        else:
            source = lane + by if mode == "down" else lane ^ by
            inside = source <= highest
        found.append((values[thread - lane + (source if inside else lane)], int(inside)))
    return found


@pytest.mark.parametrize("mode", ["idx", "bfly", "up", "down"])
def test_shuffles(mode: str) -> None:
    clamp = 0 if mode == "up" else 31
    operands = {"a": (32, VALUES), "b": (32, AMOUNTS)}
    wanted = shuffled(mode, VALUES, AMOUNTS, clamp)
    assert evaluate(f"shfl.sync.{mode}.b32 %d|%e, %a, %b, {clamp}, -1;", (32, 1), **operands) == wanted
    assert evaluate(f"shfl.sync.{mode}.b32 %d, %a, %b, {clamp}, 0xffffffff;", 32, **operands) == [x for x, _ in wanted]
    for amount in (0, 1, 16, 31, 32, 35):
        wanted = shuffled(mode, VALUES, [amount] * 96, clamp)
        assert evaluate(f"shfl.sync.{mode}.b32 %d|%e, %a, {amount}, {clamp}, -1;", (32, 1), a=(32, VALUES)) == wanted


def test_a_shuffle_may_replace_its_operand() -> None:
    wanted = [x for x, _ in shuffled("bfly", VALUES, [4] * 96, 31)]
    assert evaluate("shfl.sync.bfly.b32 %a, %a, 4, 31, -1; mov.b32 %d, %a;", 32, a=(32, VALUES)) == wanted


def of_warps(function: object, values: list[int]) -> list[int]:
    """A reduction of each warp's values."""
    warps = [values[i : i + 32] for i in range(0, len(values), 32)]
    return [functools.reduce(function, warp) for warp in warps for _ in warp]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["add.s32", "add.u32", "min.s32", "min.u32", "max.s32", "max.u32"])
def test_reductions(kind: str) -> None:
    name, of = kind.split(".")
    function = {"add": operator.add, "min": min, "max": max}[name]
    values = [signed(x, 32) if of == "s32" else x for x in VALUES]
    got = evaluate(f"redux.sync.{kind} %d, %a, -1;", 32, a=(32, VALUES))
    assert got == [x % 2**32 for x in of_warps(function, values)]


@pytest.mark.parametrize("name", ["and_", "or_", "xor"])
def test_reductions_of_bits(name: str) -> None:
    values = [x | 1 if name == "and_" else x for x in VALUES]
    got = evaluate(f"redux.sync.{name.strip('_')}.b32 %d, %a, %b;", 32, a=(32, values), b=(32, [2**32 - 1] * 96))
    assert got == of_warps(getattr(operator, name), values)


def test_votes() -> None:
    votes = [0] * 32 + [1] * 32 + [x & 1 for x in VALUES[:32]]
    got = evaluate("vote.sync.ballot.b32 %d, %a, -1;", 32, a=(1, votes))
    assert got == [sum(votes[i - i % 32 + k] << k for k in range(32)) for i in range(96)]
    assert evaluate("vote.sync.any.pred %d, %a, -1;", 1, a=(1, votes)) == [0] * 32 + [1] * 64
    assert evaluate("vote.sync.all.pred %d, %a, -1;", 1, a=(1, votes)) == [0] * 32 + [1] * 32 + [0] * 32


def test_one_thread_of_each_warp_is_elected() -> None:
    got = evaluate("elect.sync %d|%e, -1;", (32, 1), a=(32, VALUES))
    leaders = [i for i, (_, elected) in enumerate(got) if elected]
    assert [i // 32 for i in leaders] == [0, 1, 2]
    assert all(leader == leaders[i // 32] % 32 for i, (leader, _) in enumerate(got))
    assert evaluate("elect.sync _|%d, -1;", 1, a=(32, VALUES)) == [elected for _, elected in got]


def test_numbers_of_registers() -> None:
    code = "setmaxnreg.dec.sync.aligned.u32 24; mov.b32 %d, %a; setmaxnreg.inc.sync.aligned.u32 240;"
    assert evaluate(code, 32, a=(32, VALUES)) == VALUES
    for number in (0, 16, 25, 264):
        with pytest.raises(UnknownPTXError, match=f"got {number} registers; allowed are multiples of 8 from 24 to 256"):
            evaluate(f"setmaxnreg.inc.sync.aligned.u32 {number}; mov.b32 %d, %a;", 32, a=(32, VALUES))


def test_whole_warps_take_part() -> None:
    """Some warps may do without; a part of a warp may not."""
    others = [i < 32 for i in range(96)]
    code = "mov.b32 %d, 7; @%p shfl.sync.bfly.b32 %d, %a, 1, 31, -1;"
    got = evaluate(code, 32, a=(32, VALUES), p=(1, others))
    assert got == [VALUES[i ^ 1] if i < 32 else 7 for i in range(96)]
    got = evaluate("mov.b32 %d, 7; @!%p redux.sync.max.u32 %d, %a, -1;", 32, a=(32, VALUES), p=(1, others))
    assert got == [7] * 32 + of_warps(max, VALUES)[32:]
    instructions = (
        "shfl.sync.idx.b32 %d, %a, 0, 31, -1;",
        "redux.sync.add.s32 %d, %a, -1;",
        "vote.sync.ballot.b32 %d, %p, -1;",
        "vote.sync.any.pred %p, %p, -1;",
        "elect.sync %d|%p, -1;",
        "activemask.b32 %d;",
        "bar.warp.sync -1;",
        "setmaxnreg.inc.sync.aligned.u32 240;",
    )
    for instruction in instructions:
        with pytest.raises(KernelError, match="only a part of a warp"):
            evaluate(f"@%p {instruction}", 32, a=(32, VALUES), p=(1, [i < 40 for i in range(96)]))


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %d, %a, 1, 31, %m;",
        "redux.sync.add.s32 %d, %a, %m;",
        "vote.sync.ballot.b32 %d, %p, %m;",
        "vote.sync.any.pred %p, %p, %m;",
        "elect.sync %d|%p, %m;",
        "bar.warp.sync %m;",
    ],
)
def test_member_masks_in_registers(instruction: str) -> None:
    """All threads of a warp, of those warps that execute it; other groups of threads are not known."""
    whole, operands = 2**32 - 1, {"a": (32, VALUES), "p": (1, [1] * 96)}
    halves = [0xFFFF if i % 32 < 16 else 0xFFFF0000 for i in range(96)]
    evaluate(instruction, 32, m=(32, [whole] * 96), **operands)
    for masks, got in ((halves, "0xffff"), ([whole] * 64 + [whole - 1] * 32, "0xfffffffe")):
        with pytest.raises(UnknownPTXError, match=rf"{instruction.split()[0]}.*got member mask {got}; allowed is 0xff"):
            evaluate(instruction, 32, m=(32, masks), **operands)
    executing = {"m": (32, [whole] * 64 + halves[:32]), "a": (32, VALUES), "p": (1, [1] * 64 + [0] * 32)}
    evaluate(f"@%p {instruction}", 32, **executing)


@pytest.mark.parametrize(
    "instruction",
    [
        "bar.warp.sync 0xffff;",
        "bar.warp.sync.aligned -1;",
        "shfl.sync.idx.b32 %d, %a, 0, 0x1c1f, -1;",  # segments
        "shfl.sync.up.b32 %d, %a, 1, 31, -1;",
        "shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffff;",
        "shfl.sync.bfly.b64 %d, %a, 1, 31, -1;",
        "redux.sync.add.f32 %d, %a, -1;",
        "redux.sync.max.s32 %d, %a, 255;",
        "vote.sync.uni.pred %p, %p, -1;",
        "match.any.sync.b32 %d, %a, -1;",
        "elect.sync.x %d|%p, -1;",
    ],
)
def test_unknown_exchanges(instruction: str) -> None:
    with pytest.raises(UnknownPTXError, match=instruction.split()[0]):
        evaluate(instruction, 32, a=(32, VALUES), p=(1, [1]))
