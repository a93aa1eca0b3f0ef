"""Boxes of tensors that the tensor memory accelerator (TMA) loads, stores and adds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu.errors import AsyncError, DeadlockError, MemoryAccessError, RaceError, UnknownPTXError
from fusedattn.virtual_gpu.tensor_map import TensorMap
from tests.helpers.ptx_programs import ADD_X, OUT, STORE_X, body_of, fails, run, run_all

LOAD = "ld.shared.b32 %r2, [%a]; // load"
LOAD_OTHER = "xor.b32 %r3, %a, 128;\nld.shared.b32 %r2, [%r3]; // load"

# Boxes. %s is at 1024; the box lies there, the mbarrier behind it.
MBARRIER = 3072
FENCE = "fence.proxy.async.shared::cta;"


def _init(count: int = 1, at: int = MBARRIER) -> str:
    init = f"@%p1 mbarrier.init.shared::cta.b64 [%s+{at}], {count}; // init"
    return body_of("setp.eq.u32 %p1, %t, 0;", init, FENCE, "bar.sync 0;")


def _expect(n_bytes: int, at: int = MBARRIER) -> str:
    return f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s+{at}], {n_bytes};"


def _load_box(*first: int, to: int = 0, at: int = MBARRIER, mark: str = "box") -> str:
    names = ", ".join(f"%r{40 + i}" for i in range(len(first)))
    moves = [f"mov.b32 %r{40 + i}, {c & 2**32 - 1};" for i, c in enumerate(first)]
    form = f"cp.async.bulk.tensor.{len(first)}d.shared::cta.global.mbarrier::complete_tx::bytes"
    return body_of(*moves, f"@%p1 {form} [%s+{to}], [%m, {{{names}}}], [%s+{at}]; // {mark}")


def _wait_for(parity: int = 0, at: int = MBARRIER) -> str:
    return f"""{{
    .reg .pred done;
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 done, [%s+{at}], {parity}; // wait
    @!done bra AGAIN;
    }}"""


def _aligned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor of ones, twos and so on, at a multiple of 16 bytes."""
    n = int(np.prod(shape))
    storage = torch.zeros(n + 16, dtype=dtype)
    skip = -storage.data_ptr() % 16 // storage.itemsize
    x = storage[skip : skip + n].view(shape)
    x.copy_(torch.arange(1, n + 1).view(shape))
    return x


def _map(x: torch.Tensor, box: tuple[int, ...], swizzle: int = 0, **changes: object) -> TensorMap:
    given = {
        "address": x.data_ptr(),
        "shape": tuple(x.shape),
        "strides": tuple(s * x.itemsize for s in x.stride()),
        "box": box,
        "element": x.itemsize,
        "swizzle": swizzle,
        "is_float": x.is_floating_point(),
    }
    return TensorMap(**{**given, **changes})


def _box_of(x: np.ndarray, first: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """Zeros where the box is outside of the tensor."""
    found = np.zeros(box, dtype=x.dtype)
    for index in np.ndindex(*box):
        at = tuple(a + b for a, b in zip(first, index, strict=True))
        if all(0 <= a < n for a, n in zip(at, x.shape, strict=True)):
            found[index] = x[at]
    return found


@pytest.mark.parametrize("swizzle", [0, 1, 3, 7])
@pytest.mark.parametrize("first", [(0, 0), (3, 4), (-3, 0), (0, -5), (14, 27), (16, 0), (0, 32), (-8, 0), (100, -100)])
def test_boxes_inside_and_outside_of_a_tensor(swizzle: int, first: tuple[int, int]) -> None:
    span = {0: 64, 1: 32, 3: 64, 7: 128}[swizzle]
    box = (8, span // 4)
    x = _aligned(16, 32)
    body = body_of(_init(), _expect(8 * span), _load_box(first[1], first[0]), _wait_for(), LOAD, OUT)
    expected = _box_of(x.numpy(), first, box)
    # Chunks of 16 bytes trade places by the bits of the shared address above them; BASE is 1024.
    memory = np.zeros(8 * span // 16, dtype="O")
    for row in range(8):
        for chunk in range(span // 16):
            linear = row * (span // 16) + chunk
            memory[linear ^ (linear >> 3 & swizzle)] = expected[row, 4 * chunk : 4 * chunk + 4]
    words = np.concatenate(list(memory))
    result = run_all(body, n_threads=8 * span // 4, tensors={"x": x}, maps={"m": _map(x, box, swizzle)})
    np.testing.assert_array_equal(result[0], words)


def test_a_box_of_four_dimensions_of_several_programs() -> None:
    x = _aligned(2, 3, 10, 8)
    body = body_of(_init(), _expect(128), _load_box(4, 3, 2, 1).replace("mov.b32 %r43, 1;", "mov.b32 %r43, %c;"),
                  _wait_for(), "ld.shared.b32 %r2, [%a];", OUT)  # fmt: skip
    result = run_all(body, n_threads=32, grid=(2, 1, 1), tensors={"x": x}, maps={"m": _map(x, (1, 1, 8, 4))})
    np.testing.assert_array_equal(
        result, [_box_of(x.numpy(), (i, 2, 3, 4), (1, 1, 8, 4)).reshape(-1) for i in range(2)]
    )


def test_boxes_of_one_dimension() -> None:
    x = _aligned(40)
    body = body_of(_init(), _expect(128), _load_box(16), _wait_for(), LOAD, OUT)
    result = run_all(body, n_threads=32, tensors={"x": x}, maps={"m": _map(x, (32,))})
    np.testing.assert_array_equal(result[0], [*range(17, 41), *[0] * 8])
    body = body_of(_init(), _expect(128), _load_box(18), _wait_for())
    fails(MemoryAccessError, body, "box", tensors={"x": x}, maps={"m": _map(x, (32,))}, says="not a multiple of 16")


BOX = (8, 16)
N = 8 * 16 * 4


def _boxed(*lines: str) -> dict[str, object]:
    x = _aligned(16, 32)
    return {"body": body_of(_init(), *lines), "tensors": {"x": x}, "maps": {"m": _map(x, BOX)}}


def test_a_box_that_is_read_before_it_arrives() -> None:
    arguments = _boxed(_expect(N), _load_box(0, 0), "bar.sync 0;", LOAD, _wait_for())
    # Nothing but the wait tells a warp that the box is there, even if it arrives at once.
    for order in ({"asynchronous": "late"}, {"asynchronous": "early"}):
        with pytest.raises(RaceError, match=r"has not finished writing|nothing orders it after"):
            run(**arguments, **order)


def test_a_warp_that_neither_waits_nor_passes_a_barrier() -> None:
    body = [
        _expect(N),
        _load_box(0, 0),
        "setp.lt.u32 %p2, %t, 32;",
        "@!%p2 bra READ;",
        _wait_for(),
        "{barrier}",
        "READ:",
        "{other}",
        LOAD,
    ]

    def filled(barrier: str, other: str) -> dict[str, object]:
        return _boxed(*(line.replace("{barrier}", barrier).replace("{other}", other) for line in body))

    arguments = filled("", "")
    fails(RaceError, arguments.pop("body"), "box", "load", **arguments, orders=[{"asynchronous": "early"}, {}])
    run_all(**filled("", "bar.sync 0;"))


def test_a_wait_for_one_mbarrier_tells_nothing_of_another() -> None:
    second = MBARRIER + 8
    lines = [
        _init(at=second),
        _expect(N),
        _load_box(0, 0, mark="first"),
        _expect(N, second),
        _load_box(0, 8, to=1024, at=second, mark="second"),
        _wait_for(at=second),
        "bar.sync 0;",
        "ld.shared.b32 %r2, [%a]; // load",
        _wait_for(),
    ]
    for order in ({"asynchronous": "late"}, {"asynchronous": "early"}):
        with pytest.raises(RaceError, match=r"has not finished writing|nothing orders it after"):
            run(**_boxed(*lines), **order)
    lines[5], lines[8] = lines[8], lines[5]
    run_all(**_boxed(*lines))


def test_a_box_over_what_another_warp_reads() -> None:
    begin = ["st.shared.b32 [%a], %t;", "fence.proxy.async.shared::cta;", "bar.sync 0;", LOAD_OTHER]
    box = [_expect(N), _load_box(0, 0), _wait_for()]
    arguments = _boxed(*begin, *box)
    fails(RaceError, arguments.pop("body"), "box", "load", **arguments)
    run_all(**_boxed(*begin, "bar.sync 0;", *box))


def test_a_box_over_what_the_generic_proxy_wrote() -> None:
    box = [_expect(N), _load_box(0, 0), _wait_for()]
    store = "st.shared.b32 [%a], %t; // store"
    fence = "fence.proxy.async.shared::cta;"
    arguments = _boxed(store, "bar.sync 0;", *box)
    fails(RaceError, arguments.pop("body"), "box", "store", **arguments, says="no fence.proxy.async")
    run_all(**_boxed(store, fence, "bar.sync 0;", *box))
    run_all(**_boxed(store, "bar.sync 0;", fence, *box))
    run_all(**_boxed(store, "fence.proxy.async.shared::cluster;", "bar.sync 0;", *box))
    run_all(**_boxed(store, "fence.proxy.async;", "bar.sync 0;", *box))
    arguments = _boxed(store, "fence.proxy.async.global;", "bar.sync 0;", *box)
    fails(RaceError, arguments.pop("body"), "box", "store", **arguments, says="no fence.proxy.async")
    for modifier in ("foo", "shared", "shared::cta.foo", "global.foo"):
        arguments = _boxed(f"fence.proxy.async.{modifier}; // fence")
        fails(UnknownPTXError, arguments.pop("body"), "fence", **arguments, says=f"fence.proxy.async.{modifier}")


@pytest.mark.parametrize("end", ["", ".multicast::cluster", ".L2::cache_hint", ".no_such_modifier", ".cta_group::1"])
@pytest.mark.parametrize("operand", ["", ", %rs1", ", %rd1"])
def test_boxes_of_other_forms(end: str, operand: str) -> None:
    """Modifiers after those that are known, and operands that they bring, or that nothing brings."""
    load = _load_box(0, 0).replace("complete_tx::bytes", f"complete_tx::bytes{end}").replace("]; //", f"]{operand}; //")
    arguments = _boxed(_expect(N), load, _wait_for())
    if end or operand:
        says = f"modifier {end}" if end else f"no use is known of {operand[2:]}"
        fails(UnknownPTXError, arguments.pop("body"), "box", **arguments, says=says)
    else:
        run_all(**arguments)


def test_what_an_address_of_a_box_may_have() -> None:
    for change in ("{%r40, %r41}, %r44", "%r40"):
        body = _load_box(0, 0).replace("{%r40, %r41}", change)
        with pytest.raises(UnknownPTXError, match=r"operand \[%m, "):
            run(**_boxed(_expect(N), body, _wait_for()))


def test_a_waiter_may_write_over_a_box_that_another_warp_loaded() -> None:
    """What the accelerator writes is not a read by the warp that asked for it."""
    lines = [
        _expect(N),
        _load_box(0, 0),
        "setp.lt.u32 %p2, %t, 32;",
        "@%p2 bra END;",
        _wait_for(),
        "ld.shared.b32 %r2, [%a];",
        "st.shared.b32 [%a], %t;",
        OUT,
        "END:",
        _wait_for().replace("AGAIN", "LAST"),
    ]
    np.testing.assert_array_equal(run_all(**_boxed(*lines))[0, 32:], _aligned(16, 32)[2:4, :16].reshape(-1))


def test_two_boxes_to_one_place() -> None:
    lines = [_expect(2 * N), _load_box(0, 0, mark="first"), _load_box(0, 0, mark="second"), _wait_for()]
    arguments = _boxed(*lines)
    fails(RaceError, arguments.pop("body"), "first", "second", **arguments, orders=[{"asynchronous": "late"}])


def test_a_phase_ends_when_all_bytes_are_there() -> None:
    two = [_load_box(0, 0), _load_box(0, 8, to=1024, mark="second"), _wait_for(), "ld.shared.b32 %r2, [%a+1024];", OUT]
    expected = _aligned(16, 32)[8:12, :16].reshape(-1)
    np.testing.assert_array_equal(run_all(**_boxed(_expect(2 * N), *two))[0], expected)
    for order in ({"asynchronous": "early"}, {"asynchronous": "late"}):
        with pytest.raises((RaceError, AsyncError)):
            run(**_boxed(_expect(N), *two), **order)
    arguments = _boxed(_expect(3 * N), *two)
    fails(DeadlockError, arguments.pop("body"), "wait", **arguments)


def test_a_box_that_nobody_waits_for() -> None:
    arguments = _boxed(_expect(N), _load_box(0, 0))
    fails(AsyncError, arguments.pop("body"), "box", **arguments, says="nobody waited")
    run_all(**_boxed(_expect(N), _load_box(0, 0), _wait_for()))
    arguments = _boxed(_load_box(0, 0))
    fails(AsyncError, arguments.pop("body"), **arguments, orders=[{"asynchronous": "early"}], says="nobody expected")


def test_a_box_that_nobody_waits_for_while_others_are_waited_for() -> None:
    """By the same mbarrier in an earlier phase, by another mbarrier, or in another program."""
    other = MBARRIER + 8
    first = [_expect(N), _load_box(0, 0, mark="first"), _wait_for()]
    again = [_expect(N), _load_box(0, 8, to=1024)]
    arguments = _boxed(*first, "bar.sync 0;", *again)
    fails(AsyncError, arguments.pop("body"), "box", **arguments, says="nobody waited")
    run_all(**_boxed(*first, "bar.sync 0;", *again, _wait_for(1).replace("AGAIN", "NEXT")))
    second = [_init(at=other), _expect(N, at=other), _load_box(0, 8, to=1024, at=other)]
    arguments = _boxed(_expect(N), _load_box(0, 0, mark="first"), *second, _wait_for())
    fails(AsyncError, arguments.pop("body"), "box", **arguments, says="nobody waited")
    in_one = ["setp.eq.u32 %p4, %c, 0;", "@%p4 bra END;", _wait_for(), "END:"]
    arguments = _boxed(_expect(N), _load_box(0, 0), *in_one)
    fails(AsyncError, arguments.pop("body"), "box", **arguments, grid=(2, 1, 1), says="nobody waited")


def test_one_warp_that_waits_for_a_box_is_enough() -> None:
    run_all(**_boxed(_expect(N), _load_box(0, 0), "setp.lt.u32 %p2, %t, 32;", "@%p2 bra END;", _wait_for(), "END:"))


def test_a_box_of_an_mbarrier_that_is_none() -> None:
    arguments = _boxed(_load_box(0, 0, at=MBARRIER + 8))
    fails(AsyncError, arguments.pop("body"), "box", **arguments, says="no mbarrier")


@pytest.mark.parametrize(("swizzle", "to", "passes"), [
    (0, 128, True), (0, 64, False), (1, 256, True), (1, 128, False), (3, 512, True), (3, 256, False),
    (7, 1024, True), (7, 512, False), (0, 4096 - 512, False), (0, 2560, True), (0, 2688, False),
])  # fmt: skip
def test_where_a_box_may_lie(swizzle: int, to: int, passes: bool) -> None:
    x = _aligned(16, 32)
    box = {0: (8, 16), 1: (16, 8), 3: (8, 16), 7: (4, 32)}[swizzle]
    body = body_of(_init(), _expect(512), _load_box(0, 0, to=to), _wait_for())
    arguments = {"tensors": {"x": x}, "maps": {"m": _map(x, box, swizzle)}}
    if passes:
        run_all(body, **arguments)
    elif to == 2688:  # it would overwrite the mbarrier
        with pytest.raises(AsyncError, match="touches the mbarrier"):
            run(body, **arguments)
    elif to == 4096 - 512:
        fails(MemoryAccessError, body, "box", **arguments, shared_bytes=4095)
    else:
        fails(MemoryAccessError, body, "box", **arguments, says="is not a multiple of")


@pytest.mark.parametrize("changes", [
    {"box": (257, 16)}, {"box": (8, 3)}, {"box": (8, 0)}, {"strides": (120, 4)}, {"strides": (128, 8)},
    {"shape": (0, 32)}, {"swizzle": 1}, {"swizzle": 7},
])  # fmt: skip
def test_tensor_maps_that_the_driver_refuses(changes: dict[str, object]) -> None:
    x = _aligned(16, 32)
    _map(x, BOX)
    with pytest.raises(MemoryAccessError):
        _map(x, **{"box": BOX, **changes})
    with pytest.raises(MemoryAccessError):
        _map(x, BOX, address=x.data_ptr() + 4)


def test_a_tensor_map_that_says_more_than_the_tensor_has() -> None:
    x = _aligned(16, 32)
    body = body_of(_init(), _expect(N), _load_box(0, 9), _wait_for())
    run_all(body, tensors={"x": x}, maps={"m": _map(x, BOX)})
    fails(MemoryAccessError, body, "box", tensors={"x": x}, maps={"m": _map(x, BOX, shape=(17, 32))})


# Boxes that are added to a tensor, or stored there.
ADDED = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group"
STORED = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"


def _add(*first: int, mark: str = "add", form: str = ADDED) -> str:
    return body_of(
        "setp.eq.u32 %p1, %t, 0;",
        f"mov.b32 %r40, {first[1] & 2**32 - 1};",
        f"mov.b32 %r41, {first[0] & 2**32 - 1};",
        f"@%p1 {form} [%m, {{%r40, %r41}}], [%s]; // {mark}",
    )


STORE = "cvt.rn.f32.u32 %r1, %t;\nst.shared.b32 [%a], %r1; // store"
BULK_COMMIT, BULK_WAIT = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"


def _sum(*lines: str) -> dict[str, object]:
    x = _aligned(8, 16, dtype=torch.float32)
    return {"body": body_of(*lines), "tensors": {"x": x}, "maps": {"m": _map(x, (4, 16))}}


@pytest.mark.parametrize("first", [(-1, 0), (6, 0), (8, 0), (0, -2), (4, 3)])
def test_a_box_that_is_added_must_lie_in_the_tensor(first: tuple[int, int]) -> None:
    arguments = _sum(STORE, FENCE, "bar.sync 0;", _add(*first), BULK_COMMIT, BULK_WAIT)
    fails(MemoryAccessError, arguments.pop("body"), "add", **arguments, says="ends outside of the tensor")


@pytest.mark.parametrize("first", [(0, 0), (4, 0)])
def test_a_box_is_added(first: tuple[int, int]) -> None:
    arguments = _sum(STORE, FENCE, "bar.sync 0;", _add(*first), BULK_COMMIT, BULK_WAIT)
    run_all(**arguments, grid=(3, 1, 1), n_ctas=2)
    expected = _aligned(8, 16, dtype=torch.float32).numpy().copy()
    expected[first[0] : first[0] + 4] += 3 * np.arange(64).reshape(4, 16)
    run(**(arguments := _sum(*arguments["body"].splitlines())), grid=(3, 1, 1), n_ctas=2)
    np.testing.assert_array_equal(arguments["tensors"]["x"].numpy(), expected)


@pytest.mark.parametrize("swizzle", [0, 1, 3, 7])
@pytest.mark.parametrize("first", [(0, 0), (2, 8), (-1, 0), (6, 0), (8, 0), (0, -2), (4, 9), (50, 50)])
def test_a_box_is_stored_as_far_as_it_lies_in_the_tensor(first: tuple[int, int], swizzle: int) -> None:
    columns = {0: 16, 1: 8, 3: 16, 7: 32}[swizzle]
    box, x = (64 // columns, columns), _aligned(8, 16, dtype=torch.float32)
    body = body_of(STORE, FENCE, "bar.sync 0;", _add(*first, form=STORED), BULK_COMMIT, BULK_WAIT)
    run_all(body, tensors={"x": x}, maps={"m": _map(x, box, swizzle)})
    expected = _aligned(8, 16, dtype=torch.float32).numpy()
    for row, column in np.ndindex(*box):
        chunk = (row * columns + column) // 4
        value = 4 * (chunk ^ (chunk >> 3 & swizzle)) + column % 4
        at = first[0] + row, first[1] + column
        if 0 <= at[0] < 8 and 0 <= at[1] < 16:
            expected[at] = value
    np.testing.assert_array_equal(x.numpy(), expected)


def test_programs_store_boxes_apart_from_each_other() -> None:
    box = _add(0, 0, form=STORED).replace("mov.b32 %r41, 0;", "mul.lo.u32 %r41, %c, {rows};")
    lines = [STORE, FENCE, "bar.sync 0;", box, BULK_COMMIT, BULK_WAIT]
    run_all(**_sum(*(line.replace("{rows}", "4") for line in lines)), grid=(2, 1, 1), n_ctas=2)
    arguments = _sum(*(line.replace("{rows}", "2") for line in lines))
    for n_ctas, says in ((1, "another value than program"), (2, "has not finished writing to")):
        with pytest.raises(RaceError, match=says):
            run(**arguments, grid=(2, 1, 1), n_ctas=n_ctas)


@pytest.mark.parametrize("form", [ADDED, STORED])
def test_what_is_written_must_be_fenced_and_known(form: str) -> None:
    add = [_add(0, 0, form=form), BULK_COMMIT, BULK_WAIT]
    for lines, says in (
        ([STORE, "bar.sync 0;", *add], "no fence.proxy.async"),
        ([FENCE, STORE, "bar.sync 0;", *add], "no fence.proxy.async"),
    ):
        arguments = _sum(*lines)
        fails(RaceError, arguments.pop("body"), "store", "add", **arguments, says=says)
    arguments = _sum(STORE, FENCE, *add)
    with pytest.raises(RaceError, match="nothing orders it after"):
        run(**arguments)
    run_all(**_sum(STORE, "bar.sync 0;", FENCE, *add))


@pytest.mark.parametrize("form", [ADDED, STORED])
def test_what_is_written_must_not_be_overwritten(form: str) -> None:
    begin = [STORE, FENCE, "bar.sync 0;", _add(0, 0, form=form)]
    again = "st.shared.b32 [%a], %t; // again"
    for between in ([], [BULK_COMMIT], [BULK_COMMIT, "bar.sync 0;"], [BULK_WAIT, "bar.sync 0;"]):
        arguments = _sum(*begin, *between, again)
        with pytest.raises(RaceError, match="is still reading"):
            run(**arguments)
        fails(RaceError, arguments.pop("body"), "add", "again", **arguments, orders=[{}, {"asynchronous": "early"}])
    # Another warp than the one that waited writes.
    arguments = _sum(*begin, BULK_COMMIT, BULK_WAIT, again)
    with pytest.raises(RaceError, match="nothing orders it after the read"):
        run(**arguments)
    run_all(**_sum(*begin, BULK_COMMIT, BULK_WAIT, "bar.sync 0;", again))
    run_all(**_sum(*begin, "ld.shared.b32 %r2, [%a];", BULK_COMMIT, BULK_WAIT))


@pytest.mark.parametrize("form", [ADDED, STORED])
def test_only_the_thread_that_writes_can_wait(form: str) -> None:
    begin = [STORE, FENCE, "bar.sync 0;", _add(0, 0, form=form)]
    arguments = _sum(*begin, BULK_COMMIT, "@!%p1 " + BULK_WAIT)
    fails(AsyncError, arguments.pop("body"), "add", **arguments, says="nobody waited")
    arguments = _sum(*begin, "@!%p1 " + BULK_COMMIT, BULK_WAIT)
    fails(AsyncError, arguments.pop("body"), "add", **arguments, says="nobody waited")


def test_the_accelerator_must_see_that_an_mbarrier_is_initialised() -> None:
    lines = [_expect(N), _load_box(0, 0), _wait_for()]
    arguments = _boxed(*lines)
    body = str(arguments.pop("body"))
    fails(RaceError, body.replace(FENCE, ""), "box", **arguments, says="no fence.proxy.async after")
    run(body.replace(FENCE, ""), **arguments, strict=False)  # counted, as Triton writes no fence in some versions
    run_all(body.replace(FENCE, "").replace("bar.sync 0;", f"bar.sync 0;\n@%p1 {FENCE}"), **arguments)
    of_others = body.replace(FENCE, f"setp.ge.u32 %p2, %t, 32;\n@%p2 {FENCE}")
    fails(RaceError, of_others, "box", **arguments, says="no fence.proxy.async after")


def test_a_box_of_an_mbarrier_whose_init_its_warp_does_not_know() -> None:
    init = f"setp.eq.u32 %p3, %t, 32;\n@%p3 mbarrier.init.shared::cta.b64 [%s+{MBARRIER}], 1; // init"
    x = _aligned(16, 32)
    arguments = {"tensors": {"x": x}, "maps": {"m": _map(x, BOX)}, "orders": [{}]}
    body = body_of("setp.eq.u32 %p1, %t, 0;", init, _load_box(0, 0))
    fails(RaceError, body, "init", "box", **arguments, says="nothing orders it after")


@pytest.mark.parametrize("write", [STORE_X, ADD_X])
def test_the_source_of_a_box_must_not_be_written_before_the_wait(write: str) -> None:
    guard = body_of("setp.eq.u32 %p2, %t, 40;", "setp.ge.u32 %p3, %t, 32;")
    load, wait = [_expect(N), _load_box(16, 4)], _wait_for()
    inside, outside = 4 * (32 * 4 + 16), 4 * (32 * 5 + 15)
    for between in ([], ["bar.sync 0;"], ["@%p3 bra WRITE;", wait, "WRITE:"]):
        arguments = _boxed(guard, *load, *between, write.format(at=inside), wait.replace("AGAIN", "LAST"))
        fails(RaceError, arguments.pop("body"), "box", "write", **arguments, says="is still reading")
    run_all(**_boxed(guard, *load, wait, write.format(at=inside)))
    first = ["@%p3 bra JOIN;", wait, "JOIN:", "bar.sync 0;"]
    run_all(**_boxed(guard, *load, *first, write.format(at=inside)))
    run_all(**_boxed(guard, *load, write.format(at=outside), wait))


BULK_WAIT_ALL = BULK_WAIT.replace(".read", "")


@pytest.mark.parametrize("access", [
    "@%p1 ld.global.b32 %r2, [%x+64]; // access", "@%p1 st.global.b16 [%x+66], 1; // access",
    "@%p1 cp.async.ca.shared.global [%s+1024], [%x+64], 4; // access\ncp.async.wait_all;",
])  # fmt: skip
@pytest.mark.parametrize("form", [ADDED, STORED])
def test_what_a_box_is_written_to_must_not_be_touched_before_the_wait(form: str, access: str) -> None:
    begin = [STORE, FENCE, "bar.sync 0;", _add(1, 0, form=form), BULK_COMMIT]
    for wait in ([], ["bar.sync 0;"], [BULK_WAIT], ["cp.async.bulk.wait_group 1;"]):
        arguments = _sum(*begin, *wait, access, BULK_WAIT_ALL)
        fails(RaceError, arguments.pop("body"), "add", "access", **arguments, says="has not finished writing to")
    run_all(**_sum(*begin, BULK_WAIT_ALL, access))
    run_all(**_sum(*begin, access.replace("64]", "60]").replace("66]", "62]"), BULK_WAIT))
    # Additions may go on at the same time.
    if form == ADDED:
        run_all(
            **_sum(
                *begin, _add(0, 0), "@%p1 red.global.gpu.relaxed.add.f32 [%x+64], 0f3F800000;", BULK_COMMIT, BULK_WAIT
            )
        )


def test_a_box_of_what_another_box_is_added_to() -> None:
    begin = [_init(), _expect(256), STORE, FENCE, "bar.sync 0;", _add(1, 0), BULK_COMMIT]
    load = [_load_box(0, 4, to=1024), _wait_for()]
    arguments = _sum(*begin, *load, BULK_WAIT_ALL)
    fails(RaceError, arguments.pop("body"), "add", "box", **arguments, says="has not finished writing to")
    run_all(**_sum(*begin, BULK_WAIT_ALL, *load))


def test_a_store_of_one_program_where_another_adds_a_box() -> None:
    add = ["setp.eq.u32 %p4, %c, 0;", "@%p4 bra ADD;", "@%p1 st.global.b32 [%x+64], 1; // put", "ret;", "ADD:"]
    begin = ["setp.eq.u32 %p1, %t, 0;", STORE, FENCE, "bar.sync 0;", *add]
    arguments = _sum(*begin, _add(0, 0), BULK_COMMIT, BULK_WAIT)
    fails(RaceError, arguments.pop("body"), "add", "put", **arguments, grid=(2, 1, 1), n_ctas=1)
