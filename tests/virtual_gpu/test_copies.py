"""cp.async: copies of threads from global to shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu.errors import AsyncError, MemoryAccessError, RaceError, UnknownPTXError
from tests.helpers.ptx_programs import ADD_X, OUT, STORE_X, body_of, fails, run, run_all

# Thread t copies word t of %x to its own word.
ADDRESS = """shl.b32 %r1, %t, 2;
cvt.u64.u32 %rd1, %r1;
add.s64 %rd1, %rd1, %x;"""
COPY = "cp.async.ca.shared.global [%a+0], [%rd1+0], 4; // copy"
COMMIT = "cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
LOAD = "ld.shared.b32 %r2, [%a]; // load"
LOAD_OTHER = "xor.b32 %r3, %a, 128;\nld.shared.b32 %r2, [%r3]; // load"


def _words(n: int = 64) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(1000, 1000 + n, dtype=torch.int32)}


def test_a_copy_after_the_wait() -> None:
    body = body_of(ADDRESS, COPY, COMMIT, WAIT, LOAD, OUT)
    np.testing.assert_array_equal(run_all(body, tensors=_words())[0], np.arange(1000, 1064))
    body = body_of(ADDRESS, COPY, COMMIT, WAIT, "bar.sync 0;", LOAD_OTHER, OUT)
    np.testing.assert_array_equal(run_all(body, tensors=_words())[0], 1000 + (np.arange(64) ^ 32))
    run_all(body_of(ADDRESS, COPY, "cp.async.wait_all;", LOAD, OUT), tensors=_words())


@pytest.mark.parametrize("between", ["", COMMIT, "bar.sync 0;", WAIT, COMMIT + "cp.async.wait_group 1;"])
@pytest.mark.parametrize("access", ["ld.shared.b32 %r2, [%a];", "st.shared.b32 [%a], %t;", COPY.split(" //")[0]])
def test_an_access_before_the_wait(between: str, access: str) -> None:
    body = body_of(ADDRESS, COPY, between, access + " // access")
    fails(RaceError, body, "copy", "access", tensors=_words(), says="has not finished writing")


def test_another_warp_needs_a_barrier_after_the_wait() -> None:
    fill = body_of("st.shared.b32 [%a], %t;", "bar.sync 0;")
    fails(RaceError, body_of(fill, ADDRESS, COPY, COMMIT, WAIT, LOAD_OTHER), "copy", "load", tensors=_words())
    body = body_of(fill, ADDRESS, COPY, COMMIT, "bar.sync 0;", WAIT, LOAD_OTHER)
    fails(RaceError, body, "copy", "load", tensors=_words())


def test_a_copy_over_what_another_warp_reads() -> None:
    begin = body_of(ADDRESS, "st.shared.b32 [%a], %t;", "bar.sync 0;", LOAD_OTHER)
    fails(RaceError, body_of(begin, COPY, COMMIT, WAIT), "copy", "load", tensors=_words())
    run_all(body_of(begin, "bar.sync 0;", COPY, COMMIT, WAIT), tensors=_words())


def test_groups_are_waited_for_in_turn() -> None:
    """Of three groups, at most `pending` may be in flight after a wait."""
    copies = [
        body_of(f"cp.async.ca.shared.global [%a+{256 * i}], [%rd1+{256 * i}], 4; // copy {i}", COMMIT) for i in range(3)
    ]
    for pending in range(4):
        for i in range(3):
            load = f"ld.shared.b32 %r2, [%a+{256 * i}]; // load"
            body = body_of(ADDRESS, *copies, f"cp.async.wait_group {pending};", load, OUT, WAIT)
            if i < 3 - pending:
                assert (run_all(body, tensors=_words(256))[0] == 1000 + 64 * i + np.arange(64)).all()
            else:
                fails(RaceError, body, f"copy {i}", "load", tensors=_words(256))


def test_groups_are_those_of_a_thread() -> None:
    """Each half of a warp commits one group, and may leave one in flight."""
    half = body_of(COPY.replace("copy", "{0}"), COMMIT)
    body = body_of(
        ADDRESS,
        "setp.lt.u32 %p1, %l, 16;",
        "@%p1 bra LOW;",
        half.format("high"),
        "bra MEET;",
        "LOW:",
        half.format("low"),
        "MEET:",
        "cp.async.wait_group 1;",
        "@%p1 ld.shared.b32 %r2, [%a]; // load",
    )
    fails(RaceError, body, "low", "load", tensors=_words())
    waiting = body.replace("cp.async.wait_group 1;", "@!%p1 cp.async.wait_group 0;")
    fails(RaceError, waiting, "low", "load", tensors=_words())
    run_all(body.replace("cp.async.wait_group 1;", "@%p1 cp.async.wait_group 0;") + "\n" + WAIT, tensors=_words())


def test_a_copy_that_nobody_waits_for() -> None:
    for end in ("", COMMIT, WAIT, COMMIT + "cp.async.wait_group 1;"):
        fails(AsyncError, body_of(ADDRESS, COPY, end), "copy", tensors=_words(), says="nobody waited")


def test_threads_of_a_warp_that_copy_to_one_place() -> None:
    """PTX does not say which word stays, but if it is the same."""
    one = body_of("setp.lt.u32 %p1, %t, 32;", "{0}", "@%p1 " + COPY.replace("%a", "%s"), COMMIT, WAIT)
    fails(RaceError, body_of(ADDRESS, one.format("")), "copy", tensors=_words(), says="different values")
    run(body_of(ADDRESS, one.format("")), tensors=_words(), strict=False)
    same = one.format("mov.b64 %rd1, %x;")
    assert (run_all(body_of(same, "bar.sync 0;", "ld.shared.b32 %r2, [%s];", OUT), tensors=_words()) == 1000).all()
    # One of them writes zeros.
    zeros = same.replace(", 4;", ", 4, %r4;")
    zeros = body_of("setp.ne.u32 %p2, %l, 7;", "selp.b32 %r4, 4, 0, %p2;", zeros)
    fails(RaceError, zeros, "copy", tensors=_words(), says="different values")


def test_two_warps_that_copy_to_one_place() -> None:
    fails(RaceError, body_of(ADDRESS, COPY.replace("%a", "%s"), COMMIT, WAIT), "copy", tensors=_words(), orders=[{}])


@pytest.mark.parametrize(("cache", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@pytest.mark.parametrize("zeros", [False, True])
def test_sizes_of_copies(cache: str, size: int, zeros: bool) -> None:
    n = size // 4
    body = f"""
    mul.lo.u32 %r1, %t, {size};
    cvt.u64.u32 %rd1, %r1;
    add.s64 %rd1, %rd1, %x;
    add.u32 %r3, %r1, %s;
    setp.lt.u32 %p1, %l, 7;
    selp.b32 %r4, {size}, 0, %p1;
    cp.async.{cache}.shared.global [%r3+0], [%rd1+0], {size}{", %r4" if zeros else ""};
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.b32 %r2, [%r3+{size - 4}];
    {OUT}
    """
    expected = 1000 + n * np.arange(64) + n - 1
    if zeros:
        expected[np.arange(64) % 32 >= 7] = 0
    np.testing.assert_array_equal(run_all(body, tensors=_words(64 * n))[0], expected)


@pytest.mark.parametrize("form", ["cg.shared.global [%a], [%rd1], 4", "ca.shared.global [%a], [%rd1], 2"])
def test_sizes_that_do_not_exist(form: str) -> None:
    with pytest.raises(UnknownPTXError):
        run(f"{ADDRESS}\ncp.async.{form};", tensors=_words())


@pytest.mark.parametrize("ignored", [range(0), range(7), range(64)])
def test_copies_whose_source_is_ignored(ignored: range) -> None:
    """A predicate as the last operand: zeros are written where it is true, and nothing is read."""
    begin = f"setp.lt.u32 %p1, %t, {len(ignored)};"
    body = body_of(
        ADDRESS, begin, "st.shared.b32 [%a], %t;", COPY.replace(", 4;", ", 4, %p1;"), COMMIT, WAIT, LOAD, OUT
    )
    expected = [0 if t in ignored else 1000 + t for t in range(64)]
    np.testing.assert_array_equal(run_all(body, tensors=_words())[0], expected)
    if len(ignored) == 64:
        run_all(body.replace("%rd1, %rd1, %x", "%rd1, %rd1, 4"), tensors=_words())


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("ca.shared.global [%a], [%rd1], 3", "got 3 bytes; allowed are 4, 8, 16"),
        ("cg.shared.global [%a], [%rd1], 8", "got 8 bytes; allowed are 16"),
        ("ca.shared.global [%a], [%rd1], 4, 2", "got 2 bytes of the source; allowed are 0 and 4"),
        ("ca.shared.global [%a], [%rd1], 4, 8", "got 8 bytes of the source; allowed are 0 and 4"),
        ("ca.shared.global [%a], [%rd1], 4, %rd2", "got %rd2 of 64 bits"),
        ("ca.shared.global [%a], [%rd1], 4, 4, %rd2", "got 5 operands"),
        ("ca.shared.global.L2::cache_hint [%a], [%rd1], 4, %rd2", "modifier .L2::cache_hint"),
        ("ca.shared.global.L2::128B [%a], [%rd1], 4", "modifier .L2::128B"),
    ],
)
def test_copies_that_are_not_known(form: str, says: str) -> None:
    fails(UnknownPTXError, body_of(ADDRESS, f"cp.async.{form}; // copy"), "copy", says=says, tensors=_words())


def test_a_copy_out_of_bounds() -> None:
    fails(MemoryAccessError, body_of(ADDRESS, COPY), "copy", tensors=_words(63), says="that has 252")
    masked = body_of(ADDRESS, "setp.lt.u32 %p1, %t, 63;", "@%p1 " + COPY, COMMIT, WAIT)
    run_all(masked, tensors=_words(63))
    empty = body_of(ADDRESS, "setp.lt.u32 %p1, %t, 63;", "selp.b32 %r4, 4, 0, %p1;", COPY.replace(", 4;", ", 4, %r4;"))
    run_all(body_of(empty, COMMIT, WAIT), tensors=_words(63))
    fails(MemoryAccessError, body_of(ADDRESS, COPY.replace("+0]", "+2]", 1)), "copy", tensors=_words())
    fails(MemoryAccessError, body_of(ADDRESS, COPY.replace("[%rd1+0]", "[%rd1+2]")), "copy", tensors=_words())


@pytest.mark.parametrize("write", [STORE_X, ADD_X])
def test_the_source_of_a_copy_must_not_be_written_before_the_wait(write: str) -> None:
    guard = "setp.eq.u32 %p2, %t, 40;"
    own = write.format(at=160)
    for between in ([], [COMMIT], [COMMIT, "cp.async.wait_group 1;"]):
        body = body_of(guard, ADDRESS, COPY, *between, own, WAIT)
        fails(RaceError, body, "copy", "write", tensors=_words(), says="is still reading")
    run_all(body_of(guard, ADDRESS, COPY, COMMIT, WAIT, own, LOAD, OUT), tensors=_words())
    run_all(body_of(guard, ADDRESS, COPY, write.format(at=256), COMMIT, WAIT, LOAD, OUT), tensors=_words(65))
    empty = body_of("setp.ne.u32 %p3, %t, 40;", "selp.b32 %r4, 4, 0, %p3;", COPY.replace(", 4;", ", 4, %r4;"))
    run_all(body_of(guard, ADDRESS, empty, own, COMMIT, WAIT, LOAD, OUT), tensors=_words())
