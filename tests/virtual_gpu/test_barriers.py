"""Barriers of threads and mbarriers: how many arrive, which threads wait, and what is an error."""

from __future__ import annotations

import numpy as np
import pytest

from fusedattn.virtual_gpu.errors import AsyncError, DeadlockError, KernelError, MemoryAccessError, RaceError
from tests.helpers.ptx_programs import OUT, body_of, fails, run, run_all


def _wait(parity: int, at: str = "%s") -> str:
    return f"""{{
    .reg .pred done;
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 done, [{at}], {parity}; // wait
    @!done bra AGAIN;
    }}"""


def _init(count: int) -> str:
    return f"""setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%s], {count}; // init
    bar.sync 0;"""


def test_warps_that_part_meet_at_one_barrier() -> None:
    body = """
    st.shared.b32 [%a], %t;
    setp.lt.u32 %p1, %t, 32;
    @%p1 bra LOW;
    bar.sync 0;
    bra READ;
    LOW:
    bar.sync 0;
    READ:
    xor.b32 %r1, %a, 128;
    ld.shared.b32 %r2, [%r1];
    st.global.b32 [%o], %r2;
    """
    np.testing.assert_array_equal(run_all(body)[0], np.arange(64) ^ 32)


def test_lanes_that_part_meet_again() -> None:
    body = """
    and.b32 %r1, %t, 3;
    mov.u32 %r2, 0;
    LOOP:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    add.u32 %r2, %r2, 1;
    bra LOOP;
    DONE:
    st.shared.b32 [%a], %r2;
    bar.sync 0;
    shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
    xor.b32 %r4, %a, 252;
    ld.shared.b32 %r5, [%r4];
    shl.b32 %r5, %r5, 8;
    or.b32 %r2, %r3, %r5;
    st.global.b32 [%o], %r2;
    """
    t = np.arange(64)
    np.testing.assert_array_equal(run_all(body)[0], ((t ^ 1) & 3) | ((t ^ 63) & 3) << 8)


@pytest.mark.parametrize(
    "instruction",
    ["bar.sync 0;", "bar.sync 1, 64;", "shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;", "barrier.sync.aligned 0;"],
)
def test_a_part_of_a_warp_at_an_aligned_instruction(instruction: str) -> None:
    body = f"setp.lt.u32 %p1, %l, 16;\n@%p1 bra END;\n{instruction} // part\nEND:"
    fails(KernelError, body, "part", says="only a part of a warp")


def test_a_lane_that_waits_for_an_mbarrier_holds_its_warp() -> None:
    body = f"""
    {_init(1)}
    setp.eq.u32 %p2, %t, 32;
    @!%p2 bra MEET;
    {_wait(0)}
    MEET:
    bar.warp.sync 0xffffffff;
    shfl.sync.idx.b32 %r2, %t, 5, 31, -1;
    setp.eq.u32 %p3, %t, 0;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%s];
    bar.sync 0;
    {OUT}
    """
    np.testing.assert_array_equal(run_all(body)[0], np.repeat([5, 37], 32))


def test_a_lane_may_wait_for_another_of_its_warp() -> None:
    body = f"""
    {_init(1)}
    setp.eq.u32 %p2, %t, 1;
    @!%p2 bra OTHERS;
    {_wait(0)}
    bra MEET;
    OTHERS:
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%s];
    MEET:
    mov.u32 %r2, 7;
    {OUT}
    """
    assert (run_all(body) == 7).all()


@pytest.mark.parametrize("polls", [1, 5])
def test_a_wait_may_time_out(polls: int) -> None:
    """The warps ask for some time; then one of them arrives itself."""
    body = f"""
    {_init(1)}
    mov.u32 %r2, 0;
    POLL:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%s], 0;
    @%p2 bra DONE;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, {polls};
    @%p3 bra POLL;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%s];
    {_wait(0)}
    DONE:
    mov.u32 %r2, 7;
    {OUT}
    """
    assert (run_all(body) == 7).all()


def test_waits_that_time_out_again_and_again() -> None:
    count = f"{_init(1)}\nmov.u32 %r2, 0;\n{_wait(0).replace('@!done', 'add.u32 %r2, %r2, 1;@!done')}"
    fails(DeadlockError, count, "wait", orders=[{}, {"schedule": "random", "seed": 1}])


@pytest.mark.parametrize("count", [16, 0, 96, 33])
def test_counts_of_threads_that_cannot_be(count: int) -> None:
    fails(KernelError, f"bar.sync 1, {count}; // barrier", "barrier", says=f"of {count} threads")


def test_more_threads_than_a_barrier_takes() -> None:
    fails(KernelError, "bar.sync 1, 32; // barrier", "barrier", orders=[{}], says="64 threads at a barrier of 32")


def test_different_counts_at_one_barrier() -> None:
    body = """
    setp.lt.u32 %p1, %t, 32;
    @%p1 bra LOW;
    bar.sync 1, 96;
    bra END;
    LOW:
    bar.sync 1, 64; // there
    END:
    """
    fails(KernelError, body, "there", n_threads=96, orders=[{}], says="64 threads, and others wait for 96")


def test_barriers_of_different_numbers_do_not_meet() -> None:
    body = """
    setp.lt.u32 %p1, %t, 32;
    @%p1 bra LOW;
    bar.sync 1; // one
    bra END;
    LOW:
    bar.sync 2; // two
    END:
    """
    fails(DeadlockError, body, "one", "two")


def test_a_barrier_that_a_warp_does_not_reach() -> None:
    body = "setp.lt.u32 %p1, %t, 32;\n@%p1 bra END;\nbar.sync 0; // barrier\nEND:"
    fails(DeadlockError, body, "barrier", says="32 threads have ended")


def test_phases_of_an_mbarrier() -> None:
    """Each of eight rounds ends when both warps have arrived; the parity alternates."""
    body = f"""
    {_init(2)}
    setp.eq.u32 %p2, %l, 0;
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
    LOOP:
    and.b32 %r4, %r3, 1;
    shl.b32 %r5, %r4, 8;
    add.u32 %r6, %a, %r5;
    add.u32 %r6, %r6, 1024;
    add.u32 %r7, %t, %r3;
    st.shared.b32 [%r6], %r7;
    @%p2 mbarrier.arrive.shared::cta.b64 _, [%s];
    {_wait(0).replace(", 0;", ", %r4;")}
    xor.b32 %r8, %r6, 128;
    ld.shared.b32 %r9, [%r8];
    add.u32 %r2, %r2, %r9;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p3, %r3, 8;
    @%p3 bra LOOP;
    {OUT}
    """
    np.testing.assert_array_equal(run_all(body)[0], 8 * (np.arange(64) ^ 32) + 28)


def test_the_phase_before_the_first_has_ended() -> None:
    run_all(f"{_init(1)}\n{_wait(1)}")
    fails(DeadlockError, f"{_init(1)}\n{_wait(0)}", "wait", says="64 threads for an mbarrier")


def test_an_arrival_is_missing() -> None:
    body = f"{_init(2)}\n@%p1 mbarrier.arrive.shared::cta.b64 _, [%s];\n{_wait(0)}"
    fails(DeadlockError, body, "wait")
    run_all(
        body.replace("@%p1 mbarrier.arrive", "@%p2 mbarrier.arrive").replace(
            "bar.sync 0;", "bar.sync 0;\nsetp.eq.u32 %p2, %l, 0;"
        )
    )


def test_bytes_are_missing() -> None:
    body = f"{_init(1)}\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 16;\n{_wait(0)}"
    fails(DeadlockError, body, "wait")


def test_an_arrival_too_many() -> None:
    arrive = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 16;"
    fails(AsyncError, f"{_init(1)}\n{arrive}\n{arrive} // again", "again", says="more arrivals than the 1")


def test_a_program_that_ends_with_bytes_expected() -> None:
    body = f"{_init(1)}\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 16;"
    fails(AsyncError, body, says="ends with 16 bytes expected that did not arrive")


def test_a_program_that_ends_in_the_middle_of_a_phase() -> None:
    """An arrival was lost; a barrier on which nobody arrives, or on which nobody waits, may end as it is."""
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%s];"
    fails(AsyncError, f"{_init(2)}\n{arrive}", says="ends with 1 of 2 arrivals of a phase")
    two = body_of(arrive, arrive)
    fails(AsyncError, f"{_init(2)}\n{two}\n{arrive}", says="ends with 1 of 2 arrivals of a phase")
    run_all(f"{_init(2)}\n{two}")
    run_all(_init(2))


@pytest.mark.parametrize("use", ["mbarrier.arrive.shared::cta.b64 _, [%s+8]", "mbarrier.inval.shared::cta.b64 [%s+8]"])
def test_a_barrier_that_was_not_initialised(use: str) -> None:
    fails(AsyncError, f"{_init(1)}\n@%p1 {use}; // use", "use", says="no mbarrier")


def test_a_barrier_after_its_end() -> None:
    ended = f"{_init(1)}\n@%p1 mbarrier.inval.shared::cta.b64 [%s];\nbar.sync 0;"
    fails(AsyncError, f"{ended}\n{_wait(1)}", "wait", says="no mbarrier")
    run_all(f"{ended}\n{_init(1)}\n{_wait(1)}")
    run_all(f"{ended}\nst.shared.b32 [%a], %t;")


def test_a_barrier_initialised_twice() -> None:
    again = "@%p1 mbarrier.init.shared::cta.b64 [%s], 1; // again"
    fails(AsyncError, f"{_init(1)}\n{again}", "init", "again", says="touches the mbarrier")


@pytest.mark.parametrize("access", ["st.shared.b32 [%a], %t;", "ld.shared.b32 %r1, [%s];", "ld.shared.b64 %rd1, [%s];"])
def test_an_ordinary_access_of_a_barrier(access: str) -> None:
    fails(AsyncError, f"{_init(1)}\n{access} // access", "init", "access", says="touches the mbarrier")


def test_the_end_of_a_barrier_that_another_warp_uses() -> None:
    use = "setp.eq.u32 %p2, %t, 32;\n@%p2 mbarrier.arrive.shared::cta.b64 _, [%s]; // use"
    end = "@%p1 mbarrier.inval.shared::cta.b64 [%s]; // end"
    fails(RaceError, f"{_init(1)}\n{use}\n{end}", "use", "end", orders=[{}])
    run_all(f"{_init(1)}\n{use}\nbar.sync 0;\n{end}")
    run_all(f"{_init(1)}\n{use}\n{_wait(0)}\nbar.sync 0;\n{end}")


@pytest.mark.parametrize("count", [0, 2**20])
def test_counts_of_arrivals_that_cannot_be(count: int) -> None:
    fails(AsyncError, _init(count), "init", orders=[{}], says=f"a count of {count}")


def test_a_barrier_that_is_not_aligned() -> None:
    fails(MemoryAccessError, _init(1).replace("[%s]", "[%s+4]"), "init", says="not a multiple of 8")


def test_a_store_over_a_barrier_in_another_program_is_none() -> None:
    body = f"{_init(1)}\nsetp.eq.u32 %p4, %c, 0;\n@%p4 bra END;\n{_wait(1)}\nEND:"
    run(body, grid=(2, 1, 1))
