"""The programs of a grid and their warps: in which order they run, and that none waits for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu import programs
from fusedattn.virtual_gpu.errors import DeadlockError, KernelError, RaceError, UnknownPTXError
from tests.helpers.ptx_programs import OUT, fails, run, run_all


@pytest.mark.parametrize("grid", [(7, 1, 1), (3, 4, 1), (2, 3, 4), (1, 1, 5)])
@pytest.mark.parametrize("n_ctas", [1, 2, 5, 32])
def test_grids_of_each_dimension(grid: tuple[int, int, int], n_ctas: int) -> None:
    body = f"""
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %ctaid.z;
    shl.b32 %r2, %r2, 8;
    shl.b32 %r3, %r3, 16;
    or.b32 %r2, %r2, %r1;
    or.b32 %r2, %r2, %r3;
    {OUT}
    """
    x, y, z = (a.reshape(-1) for a in np.meshgrid(*(np.arange(n) for n in grid), indexing="ij"))
    expected = np.zeros(grid[0] * grid[1] * grid[2], dtype="u4")
    expected[x + grid[0] * (y + grid[1] * z)] = x | y << 8 | z << 16
    result = run(body, grid=grid, n_ctas=n_ctas, n_threads=32)
    np.testing.assert_array_equal(result, np.repeat(expected[:, None], 32, axis=1))


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
@pytest.mark.parametrize("n_ctas", [1, 2, 5])
def test_programs_run_in_the_order_that_is_given(order: list[int], n_ctas: int) -> None:
    """Each takes a number; programs of one batch take theirs together, in their order."""
    body = f"""
    setp.eq.u32 %p1, %t, 0;
    mov.u32 %r1, 1;
    @%p1 atom.global.gpu.relaxed.add.u32 %r2, [%n], %r1;
    @%p1 {OUT}
    """
    n = torch.zeros(1, dtype=torch.int32)
    result = run(body, grid=(5, 1, 1), n_ctas=n_ctas, order=order, tensors={"n": n})
    assert [int(result[i, 0]) for i in order] == [0, 1, 2, 3, 4]
    assert n.item() == 5


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_atomics_of_one_instruction_follow_in_some_order(seed: int | None) -> None:
    body = f"atom.global.gpu.relaxed.add.u32 %r2, [%n], %t;\n{OUT}"
    n = torch.zeros(1, dtype=torch.int32)
    before = run(body, grid=(3, 1, 1), tensors={"n": n}, seed=seed)
    added = np.tile(np.arange(64), 3)
    turn = np.argsort(before.reshape(-1) * 1000 + added)  # a thread that adds nothing is before the one that adds
    np.testing.assert_array_equal(before.reshape(-1)[turn], np.cumsum(added[turn]) - added[turn])
    assert n.item() == added.sum()
    assert (turn == np.arange(192)).all() == (seed is None)


INDEXED = """
    {index}
    TARGETS: .branchtargets ONE, TWO, THREE;
    {guard} brx.idx %r1, TARGETS; // branch
    ONE:
    mov.u32 %r2, 1;
    bra.uni END;
    TWO:
    mov.u32 %r2, 2;
    bra.uni END;
    THREE:
    mov.u32 %r2, 3;
    END:
"""


@pytest.mark.parametrize("index", [
    "rem.u32 %r1, %w, 3;", "rem.u32 %r1, %t, 3;", "rem.u32 %r1, %c, 3;", "mov.u32 %r1, 2;",
])  # fmt: skip
def test_branches_by_an_index(index: str) -> None:
    body = INDEXED.format(index=index, guard="") + OUT
    result = run_all(body, n_threads=128, grid=(4, 1, 1), n_ctas=2)
    numbers = {"%w": np.arange(128) // 32, "%t": np.arange(128), "%c": np.arange(4)[:, None], "2;": 2}
    expected = next(value for name, value in numbers.items() if name in index)
    np.testing.assert_array_equal(result, np.broadcast_to(1 + expected % 3, (4, 128)))


def test_a_branch_by_an_index_of_some_threads() -> None:
    guarded = INDEXED.format(index="mov.u32 %r1, 2; setp.lt.u32 %p1, %t, 40; @!%p1 mov.u32 %r1, 9;", guard="@%p1") + OUT
    np.testing.assert_array_equal(run_all(guarded)[0], [3] * 40 + [1] * 24)


def test_an_index_that_has_no_target() -> None:
    fails(KernelError, INDEXED.format(index="shr.u32 %r1, %t, 4;", guard=""), "branch", says="got 3 for 3 targets")
    with pytest.raises(UnknownPTXError, match=r"there is no such \.branchtargets"):
        run("brx.idx %r1, NOWHERE;")
    with pytest.raises(UnknownPTXError, match=r"brx\.idx to NOWHERE"):
        run("TARGETS: .branchtargets NOWHERE;\nbrx.idx %r1, TARGETS;")


def test_a_way_that_stands_behind_where_it_leads() -> None:
    """The others of a warp wait for it where all exchange values."""
    body = f"""
    mov.u32 %r1, %l;
    setp.lt.u32 %p1, %l, 5;
    @%p1 bra APART;
    JOIN:
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
    {OUT}
    ret;
    APART:
    add.u32 %r1, %r1, 100;
    bra.uni JOIN;
    """
    values = np.arange(32) + 100 * (np.arange(32) < 5)
    np.testing.assert_array_equal(run_all(body)[0], np.tile(values[np.arange(32) ^ 1], 2))


def test_loops_of_different_lengths() -> None:
    """A thread counts as far as its program, warp and lane say, with a barrier after the loop."""
    body = f"""
    mul.lo.u32 %r1, %c, 5;
    mad.lo.u32 %r1, %w, 3, %r1;
    and.b32 %r3, %l, 1;
    add.u32 %r1, %r1, %r3;
    mov.u32 %r2, 0;
    LOOP:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    add.u32 %r2, %r2, 1;
    bra.uni LOOP;
    DONE:
    st.shared.b32 [%a], %r2;
    bar.sync 0;
    xor.b32 %r4, %a, 132;
    ld.shared.b32 %r2, [%r4];
    {OUT}
    """
    c, t = np.arange(5)[:, None], np.arange(96)[None] ^ 33
    result = run_all(body, grid=(5, 1, 1), n_ctas=2)
    np.testing.assert_array_equal(result, (5 * c + 3 * (t // 32) + t % 2)[:, :64])


def test_a_loop_with_a_barrier_in_each_round() -> None:
    """Programs need different numbers of rounds; each round passes words on to the other warp."""
    body = f"""
    add.u32 %r1, %c, 1;
    mov.u32 %r2, %t;
    xor.b32 %r5, %a, 128;
    LOOP:
    st.shared.b32 [%a], %r2;
    bar.sync 0;
    ld.shared.b32 %r2, [%r5];
    add.u32 %r2, %r2, 1;
    bar.sync 0;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
    {OUT}
    """
    expected = [(np.arange(64) ^ (32 * ((c + 1) % 2))) + c + 1 for c in range(4)]
    np.testing.assert_array_equal(run_all(body, grid=(4, 1, 1), n_ctas=3), expected)


def test_threads_that_end_early() -> None:
    body = f"""
    mov.u32 %r2, 1;
    {OUT}
    setp.eq.u32 %p1, %w, 1;
    @%p1 ret;
    setp.gt.u32 %p2, %l, 9;
    @%p2 exit;
    mov.u32 %r2, 2;
    {OUT}
    """
    expected = np.where(np.arange(64) < 10, 2, 1)
    np.testing.assert_array_equal(run_all(body, grid=(2, 1, 1))[1], expected)


def test_warps_that_have_ended_are_missed_at_a_barrier_of_all() -> None:
    end = "setp.eq.u32 %p1, %w, 1;\n@%p1 ret;\n"
    run_all(end + "bar.sync 0, 32;")
    fails(DeadlockError, end + "bar.sync 0; // barrier", "barrier", says="32 threads have ended")


def test_all_programs_end_at_once_or_none() -> None:
    assert (run("ret;\n" + OUT, grid=(3, 1, 1)) == 0).all()
    assert (run(f"mov.u32 %r2, 3;\n{OUT}\nexit;", grid=(3, 1, 1)) == 3).all()


def test_one_program_of_several_that_waits_for_ever() -> None:
    body = """
    setp.ne.u32 %p1, %c, 1;
    @%p1 ret;
    setp.lt.u32 %p2, %t, 32;
    @%p2 ret;
    bar.sync 0; // barrier
    """
    fails(DeadlockError, body, "barrier", grid=(3, 1, 1))
    run_all(body, grid=(1, 1, 1))


def test_a_loop_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_BLOCKS", 1000)
    fails(DeadlockError, "LOOP:\nadd.u32 %r1, %r1, 1;\nbra LOOP;", says="1000 blocks, and no end")


TICKETS = """
    mov.u32 %r1, 0;
    mov.u32 %r5, 1;
    mov.u32 %r2, 0;
    setp.eq.u32 %p1, %l, 0;
    LOOP:
    @%p1 atom.global.gpu.relaxed.add.u32 %r3, [%n], %r5;
    max.u32 %r2, %r2, %r3;
    {barrier}
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 20;
    @%p2 bra LOOP;
    @%p1 st.global.b32 [%o], %r2;
    """


def _last_tickets(barrier: str = "", **order: Any) -> list[int]:
    """The last ticket of each of four warps, which take 20 each."""
    body = TICKETS.replace("{barrier}", barrier)
    result = run(body, n_threads=128, tensors={"n": torch.zeros(1, dtype=torch.int32)}, **order)
    return [int(x) for x in result[0, ::32]]


def test_warps_drift_apart_with_a_random_schedule() -> None:
    assert _last_tickets() == [76, 77, 78, 79]
    drifts = [_last_tickets(schedule="random", seed=seed) for seed in range(5)]
    assert all(max(last) == 79 for last in drifts)
    assert min(min(last) for last in drifts) < 45  # one is through when others have hardly begun
    assert len({tuple(last) for last in drifts}) == 5
    assert _last_tickets(schedule="random", seed=3) == drifts[3]


def test_barriers_hold_warps_together_with_a_random_schedule() -> None:
    for seed in range(5):
        assert min(_last_tickets("bar.sync 0;", schedule="random", seed=seed)) >= 76


# What several programs store to one place.
STORE_ONE = "setp.eq.u32 %p1, %t, 0;\n@%p1 st.global.{kind} [%x+{at}], {value}; // {mark}"


def _store(value: str, kind: str = "b32", at: int = 0, mark: str = "store") -> str:
    return STORE_ONE.format(kind=kind, at=at, value=value, mark=mark)


@pytest.mark.parametrize("n_ctas", [1, 3])
def test_programs_that_store_different_values_to_one_place(n_ctas: int) -> None:
    arguments = {"grid": (3, 1, 1), "n_ctas": n_ctas, "tensors": {"x": torch.zeros(4, dtype=torch.int32)}}
    run_all("mov.u32 %r1, 5;\n" + _store("%r1"), **arguments)
    fails(RaceError, _store("%c"), "store", **arguments, says="another value than program")
    body = f"setp.eq.u32 %p2, %c, 0;\n@%p2 bra OTHER;\n{_store('%c', mark='first')}\nret;\nOTHER:\n{_store('%c')}"
    fails(RaceError, body, "first", "store", **arguments | {"grid": (2, 1, 1)})


def test_stores_that_share_one_byte() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    wide = _store("{%c, %c, %c, %c}", "v4.b32", mark="wide")
    narrow = "mov.u32 %r1, 1;\ncvt.u16.u32 %rs1, %r1;\n" + _store("%rs1", "b8", 13, mark="narrow")
    body = f"setp.eq.u32 %p2, %c, 0;\n@%p2 bra OTHER;\n{narrow}\nret;\nOTHER:\n{wide}"
    fails(RaceError, body, "wide", "narrow", grid=(2, 1, 1), tensors={"x": x})
    run_all(body.replace("mov.u32 %r1, 1;", "mov.u32 %r1, 0;"), grid=(2, 1, 1), tensors={"x": x})


def test_a_program_may_store_twice_and_atomics_need_no_order() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    run_all("mov.u32 %r1, 1;\nred.global.gpu.relaxed.add.u32 [%x], %r1;", grid=(3, 1, 1), tensors={"x": x})
    assert x[0].item() == 3 * 64
    twice = _store("%c") + "\nadd.u32 %r1, %c, 1;\n" + _store("%r1")
    run_all(twice, grid=(1, 1, 1), tensors={"x": x})


def test_launches_do_not_race_with_each_other() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    for value in (1, 2):
        run(f"mov.u32 %r1, {value};\n{_store('%r1')}", grid=(2, 1, 1), tensors={"x": x})
    assert x[0].item() == 2


def test_only_the_bytes_that_both_store_are_compared() -> None:
    """Program 0 stores one word of the four that program 1 stores."""
    four, one = _store("{%c, 7, %c, %c}", "v4.b32"), _store("7", at=4)
    body = f"setp.eq.u32 %p2, %c, 0;\n@%p2 bra ONE;\n{four}\nret;\nONE:\n{one}"
    run_all(body, grid=(2, 1, 1), tensors={"x": _aligned_words()})


def _aligned_words() -> torch.Tensor:
    x = torch.zeros(8, dtype=torch.int32)
    return x[-x.data_ptr() % 16 // 4 :][:4]


TICKET = "@%p1 atom.global.gpu.{order}.add.u32 %r2, [%x+4], 1;"


@pytest.mark.parametrize("n_ctas", [1, 3])
def test_an_atomic_operation_orders_what_was_before_a_release_and_after_an_acquire(n_ctas: int) -> None:
    arguments = {"grid": (3, 1, 1), "n_ctas": n_ctas}
    first = "setp.eq.u32 %p1, %t, 0;\nmov.u32 %r2, 0;"
    # Only program 0 stores before its release; the others store after they have acquired it.
    begin = f"{first}\nsetp.eq.u32 %p3, %c, 0;\n@!%p3 bra TICKET;\n{_store('5', mark='first')}\nTICKET:"
    last = "setp.eq.u32 %p4, %r2, 2;\n@!%p4 bra END;\n{again}\nEND:"
    body = f"{begin}\n{TICKET}\n{last.format(again=_store('6', mark='last'))}"
    x = torch.zeros(4, dtype=torch.int32)
    run(body.format(order="acq_rel"), tensors={"x": x}, **arguments)
    assert x.tolist() == [6, 3, 0, 0]
    for order in ("relaxed", "acquire", "release"):
        x.zero_()
        with pytest.raises(RaceError, match=r"another value than program 0 stores"):
            run(body.format(order=order), tensors={"x": x}, **arguments)
    # A store after the release is not ordered.
    late = f"{first}\n{TICKET.format(order='acq_rel')}\n{_store('%c', mark='late')}"
    fails(RaceError, late, "late", tensors={"x": x}, says="another value than program", **arguments)
    # Nor does a release at another address order anything.
    apart = body.format(order="acq_rel").replace("%x+4", "%rd9")
    apart = "mul.wide.u32 %rd9, %c, 4;\nadd.s64 %rd9, %rd9, %x;\nadd.s64 %rd9, %rd9, 4;\n" + apart
    apart = apart.replace("%p4, %r2, 2;", "%p4, %c, 2;")
    with pytest.raises(RaceError, match=r"another value than program 0 stores"):
        run(apart, tensors={"x": x}, **arguments)


@pytest.mark.parametrize("n_ctas", [1, 2])
@pytest.mark.parametrize("atomic", ["red.global.gpu.relaxed.add.u32 [%x], 5;", "atom.global.max.u32 %r3, [%x], 5;"])
def test_a_store_and_an_atomic_operation_of_another_program(atomic: str, n_ctas: int) -> None:
    arguments = {"grid": (2, 1, 1), "n_ctas": n_ctas, "tensors": {"x": torch.zeros(4, dtype=torch.int32)}}
    for one in (0, 1):
        body = f"setp.eq.u32 %p2, %c, {one};\n@%p2 {atomic} // atomic\n@!%p2 bra STORE;\nret;\nSTORE:\n{_store('0')}"
        fails(RaceError, body, "atomic", "store", **arguments, says="not ordered after what program")
    run_all(f"{atomic}\n{atomic}", **arguments)
    run_all(f"{_store('1')}\nbar.sync 0;\n{atomic}\nbar.sync 0;\n{_store('2')}", **arguments | {"grid": (1, 1, 1)})
    # The last of several programs stores what all have added to.
    last = f"""
    {atomic}
    setp.eq.u32 %p1, %t, 0;
    mov.u32 %r2, 0;
    bar.sync 0;
    @%p1 atom.global.gpu.{{order}}.add.u32 %r2, [%x+4], 1;
    setp.eq.u32 %p4, %r2, 1;
    @%p4 st.global.b32 [%x], 9; // store
    """
    arguments["tensors"]["x"].zero_()
    run(last.format(order="acq_rel"), **arguments)
    assert arguments["tensors"]["x"].tolist() == [9, 2, 0, 0]
    arguments["tensors"]["x"].zero_()
    with pytest.raises(RaceError, match="not ordered after what one of several programs"):
        run(last.format(order="relaxed"), **arguments)


def test_warps_that_store_different_values_to_one_place() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    by_warps = "and.b32 %r1, %t, 31;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.b32 [%x], {value}; // store"
    run_all(by_warps.format(value=5), tensors={"x": x})
    fails(RaceError, by_warps.format(value="%w"), "store", tensors={"x": x}, says="another value than warp")
    two = "setp.eq.u32 %p1, %t, 0;\nsetp.eq.u32 %p2, %t, 32;\n@%p1 st.global.b32 [%x], 1; // one\n{barrier}"
    two += "\n@%p2 st.global.b32 [%x], 2; // two"
    fails(RaceError, two.format(barrier=""), "one", "two", tensors={"x": x}, says="another value than warp")
    fails(RaceError, two.format(barrier="bar.warp.sync -1;"), "one", "two", tensors={"x": x})
    run_all(two.format(barrier="bar.sync 0;"), tensors={"x": x})
