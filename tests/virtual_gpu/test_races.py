"""Accesses of shared memory by different warps: which are ordered, and by what."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fusedattn.virtual_gpu.errors import RaceError
from tests.helpers.ptx_programs import ORDERS, OUT, fails, run, run_all

# Warp w stores its threads' numbers; all read those of the warp after it, of two.
STORE = "st.shared.b32 [%a], %t; // first"
LOAD = "xor.b32 %r1, %a, 128;\nld.shared.b32 %r2, [%r1]; // second"
SWAPPED = np.arange(64) ^ 32


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 3;", "bar.sync 1, 64;"])
def test_a_barrier_orders_a_write_before_a_read(barrier: str) -> None:
    np.testing.assert_array_equal(run_all("\n".join([STORE, barrier, LOAD, OUT]))[0], SWAPPED)


@pytest.mark.parametrize("nothing", ["", "bar.warp.sync 0xffffffff;", "fence.proxy.async.shared::cta;"])
def test_nothing_else_orders_a_write_before_a_read(nothing: str) -> None:
    _race("\n".join([STORE, nothing, LOAD, OUT]), "first", "second")


def _one(warp: int, *lines: str) -> str:
    """Lines that only one warp executes."""
    label = f"AFTER_{next(_LABELS)}"
    return "\n".join([f"setp.ne.u32 %p9, %w, {warp};", f"@%p9 bra {label};", *lines, f"{label}:"])


_LABELS = itertools.count()


def _race(body: str, *marks: str, **arguments: Any) -> None:
    """A race between the marked lines, in all orders; all of memory was written before."""
    fails(RaceError, f"st.shared.b32 [%a], %t;\nbar.sync 0;\n{body}", *marks, **arguments)


def _raises(body: str, **arguments: Any) -> None:
    """A race in all orders, between lines that depend on the order."""
    for order in ORDERS:
        with pytest.raises(RaceError):
            run(f"st.shared.b32 [%a], %t;\nbar.sync 0;\n{body}", **arguments, **order)


READ_THEN_WRITE = [_one(1, "ld.shared.b32 %r2, [%s]; // first"), _one(0, "st.shared.b32 [%s], %c; // second")]


def test_a_read_before_a_write() -> None:
    begin = [_one(0, "st.shared.b32 [%s], %c;"), "bar.sync 0;"]
    run_all("\n".join([*begin, READ_THEN_WRITE[0], "bar.sync 0;", READ_THEN_WRITE[1]]))
    _race("\n".join([*begin, *READ_THEN_WRITE]), "first", "second")


def test_a_read_by_the_writer_does_not_hide_that_of_another_warp() -> None:
    body = [
        _one(0, "st.shared.b32 [%s], %c;"),
        "bar.sync 0;",
        _one(1, "ld.shared.b32 %r2, [%s]; // first"),
        _one(0, "ld.shared.b32 %r2, [%s];", "st.shared.b32 [%s], %c; // second"),
    ]
    _race("\n".join(body), "first", "second")


def test_a_write_before_a_write() -> None:
    one, two = _one(0, "st.shared.b32 [%s], %c; // first"), _one(1, "st.shared.b32 [%s], %w; // second")
    run_all("\n".join([one, "bar.sync 0;", two]))
    _race("\n".join([one, two]), "first", "second")


SAME = "mov.u32 %r7, 5;\nst.shared.b32 [%s], %r7; // same"


def test_several_warps_write_the_same_value() -> None:
    """By one instruction, that is no race; by two it is, as values may be equal by chance."""
    read = "bar.sync 0;\nld.shared.b32 %r2, [%s];\n" + OUT
    assert (run_all(f"{SAME}\n{read}", n_threads=96) == 5).all()
    for other in ("st.shared.b32 [%s], 5;", "st.shared.b16 [%s], 5;", "st.shared.v2.b32 [%s], {5, 6};"):
        _raises("\n".join([_one(0, SAME), _one(1, other)]))


@pytest.mark.parametrize("access", ["ld.shared.b32 %r2, [%s];", "st.shared.b32 [%s], 6;", "st.shared.b16 [%s+2], 1;"])
def test_an_access_must_be_ordered_after_every_write_of_the_same_value(access: str) -> None:
    access += " // access"
    for warp in (0, 1):
        _raises("\n".join([SAME, _one(warp, access)]))
        between = _one(warp, "bar.sync 2, 64;") + "\n" + _one(2, "bar.sync 2, 64;", access)
        by_two = "setp.lt.u32 %p7, %w, 2;\n" + SAME.replace("st.", "@%p7 st.")
        _raises("\n".join([by_two, between]), n_threads=96)
    run_all("\n".join([SAME, "bar.sync 0;", _one(1, access)]))


@pytest.mark.parametrize("wide_first", [False, True])
def test_accesses_that_share_one_byte(wide_first: bool) -> None:
    begin = ["st.shared.b32 [%a], %t;", "bar.sync 0;"]
    wide = _one(0, "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%s]; // a")
    narrow = _one(1, "st.shared.b8 [%s+15], %rs1; // b")
    body = [wide, narrow] if wide_first else [narrow, wide]
    _race("\n".join([*begin, *body]), "a", "b")
    apart = narrow.replace("15", "16")
    run_all("\n".join([*begin, wide, apart]))


def test_a_barrier_of_some_warps_orders_only_these() -> None:
    def body(last: int) -> str:
        return "\n".join(
            [
                _one(0, "st.shared.b32 [%s], %c; // first", "bar.sync 1, 64;"),
                _one(1, "bar.sync 1, 64;"),
                _one(last, "ld.shared.b32 %r2, [%s]; // second"),
            ]
        )

    run_all(body(1), n_threads=96)
    _race(body(2), "first", "second", n_threads=96)


def test_order_by_two_barriers_in_turn() -> None:
    def body(second: int) -> str:
        return "\n".join(
            [
                _one(0, "st.shared.b32 [%s], %c; // first", "bar.sync 1, 64;"),
                _one(1, "bar.sync 1, 64;", f"bar.sync {second}, 64;"),
                _one(2, f"bar.sync {second}, 64;", "ld.shared.b32 %r2, [%s]; // second"),
                _one(3, "bar.sync 4, 32;"),
            ]
        )

    run_all(body(2), n_threads=128)
    # The same barriers, the other way round: warp 1 meets warp 2 before warp 0.
    turned = body(2).replace("bar.sync 1, 64;\nbar.sync 2, 64;", "bar.sync 2, 64;\nbar.sync 1, 64;")
    _race(turned, "first", "second", n_threads=128)


def test_programs_do_not_race_with_each_other() -> None:
    body = "st.shared.b32 [%a], %t;\nbar.sync 0;\nxor.b32 %r1, %a, 128;\nld.shared.b32 %r2, [%r1];\n" + OUT
    np.testing.assert_array_equal(run_all(body, grid=(5, 1, 1), n_ctas=3), np.tile(SWAPPED, (5, 1)))


def test_a_race_in_one_of_several_programs() -> None:
    body = f"""
    {STORE}
    setp.eq.u32 %p1, %c, 2;
    @%p1 bra READ;
    bar.sync 0;
    READ:
    {LOAD}
    """
    _race(body, "first", "second", grid=(4, 1, 1))


# mbarriers: warp 0 arrives, another waits.
INIT = """setp.ne.u32 %p1, %t, 0;
@!%p1 mbarrier.init.shared::cta.b64 [%s+1024], 1; // init
bar.sync 0;"""
WAIT = """{
WAIT:
.reg .pred done;
mbarrier.try_wait.parity.shared::cta.b64 done, [%s+1024], 0;
@!done bra WAIT;
}"""
ARRIVE = "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%s+1024]; // arrive"


def test_an_mbarrier_orders_what_was_before_the_arrival() -> None:
    body = [INIT, _one(0, STORE, ARRIVE), _one(1, WAIT, LOAD, OUT)]
    np.testing.assert_array_equal(run_all("\n".join(body))[0, 32:], np.arange(32))
    body[1] = _one(0, ARRIVE, STORE)
    _race("\n".join(body), "first", "second")


def test_an_arrival_orders_only_what_its_warp_knows() -> None:
    wait = _one(2, WAIT, "ld.shared.b32 %r2, [%s+128]; // second")
    store = _one(1, STORE)
    _race("\n".join([INIT, store, _one(0, ARRIVE), wait]), "first", "second", n_threads=96)
    known = _one(0, "bar.sync 2, 64;", ARRIVE)
    run_all("\n".join([INIT, _one(1, STORE, "bar.sync 2, 64;"), known, wait]), n_threads=96)


def test_a_barrier_passes_on_what_a_wait_has_taught() -> None:
    wait = _one(1, WAIT, "bar.sync 2, 64;")
    read = _one(2, "bar.sync 2, 64;", "ld.shared.b32 %r2, [%s]; // second")
    run_all("\n".join([INIT, _one(0, STORE, ARRIVE), wait, read]), n_threads=96)


def test_a_later_phase_orders_what_was_before_it() -> None:
    again = WAIT.replace(", 0;", ", 1;")
    # The barrier between the phases keeps the first from being missed: its parity is that of the third.
    first = _one(0, ARRIVE, "bar.sync 2, 64;", STORE, ARRIVE)
    second = _one(1, WAIT.replace("WAIT", "OTHER"), "bar.sync 2, 64;", again, LOAD, OUT)
    np.testing.assert_array_equal(run_all("\n".join([INIT, first, second]))[0, 32:], np.arange(32))


def test_the_init_of_an_mbarrier_must_be_known_to_its_users() -> None:
    body = INIT.replace("bar.sync 0;", "") + "\n" + _one(1, "mbarrier.arrive.shared::cta.b64 _, [%s+1024]; // use")
    _race(body, "init", "use")
