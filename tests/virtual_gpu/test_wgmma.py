"""Products of matrices in shared memory (wgmma): their layouts, by PTX ISA's canonical layouts, and their rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu.errors import AsyncError, KernelError, MemoryAccessError, RaceError, UnknownPTXError
from tests.helpers.ptx_programs import ORDERS, fails, run, run_all

B_AT = 8192  # where B lies; A begins at 0
SHARED = 8192 + 32768
BASE = 1024  # the address of the first byte
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MODES = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of the swizzle


def _place(index: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The offset of a coordinate that runs over nested dimensions, the first fastest."""
    offset = 0
    for n, stride in zip(shape, strides, strict=True):
        offset += index % n * stride
        index //= n
    return offset


def _linear(mn: int, k: int, size: int, mode: int, mn_major: bool, lead: int, stride: int) -> int:
    """The byte of an element: PTX ISA, table "canonical layouts", in elements of 128 / bits = T to 16 bytes."""
    t, many = 16 // size, 1 << 20
    lead, stride, wide = lead // size, stride // size, MODES[mode] // 16
    if not mn_major:
        rows = _place(mn, (8, many), (wide * t, stride))
        return size * (rows + _place(k, (t, many), (1, lead if mode == 0 else t)))
    if mode == 0:
        return size * (_place(mn, (t, 1, many), (1, t, stride)) + _place(k, (8, many), (t, lead)))
    return size * (_place(mn, (t, wide, many), (1, t, lead)) + _place(k, (8, many), (wide * t, stride)))


def _swizzled(address: int, mode: int) -> int:
    """Swizzle<B, 4, 3> of CuTe: bits 7 and up to bits 4 and up."""
    bits = int(math.log2(MODES[mode] // 16))
    return address ^ (address >> 7 & (1 << bits) - 1) << 4


class Operand:
    """A matrix ``(rows, k)`` in shared memory, from `at` on, and the descriptor of its `step`-th `k` columns."""

    def __init__(self, bits: np.ndarray, at: int, mode: int, mn_major: bool = False, step: int = 0) -> None:
        rows, k = bits.shape
        size, span = bits.itemsize, MODES[mode]
        if mode == 0:
            lead, stride = (2048, 128) if mn_major else (4096, 128)
        else:
            lead, stride = (16 * span, 8 * span) if mn_major else (16, 8 * span)
        self.bytes: dict[int, int] = {}
        for mn, j in np.ndindex(rows, k):
            place = _swizzled(BASE + at + _linear(mn, step * k + j, size, mode, mn_major, lead, stride), mode)
            for i, byte in enumerate(bits[mn, j].tobytes()):
                assert place - BASE + i not in self.bytes
                self.bytes[place - BASE + i] = byte
        start = BASE + at + _linear(0, step * k, size, mode, mn_major, lead, stride)
        self.descriptor = start >> 4 | lead >> 4 << 16 | stride >> 4 << 32 | mode << 62


def _bits(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return x.astype("f2").view("u2")
    if kind in FLOAT8:
        return torch.from_numpy(x).to(FLOAT8[kind]).view(torch.uint8).numpy()
    wide = x.astype("f4").view("u4")
    return (wide >> 16).astype("u2") if kind == "bf16" else wide


def _matrix(rows: int, k: int, seed: int) -> np.ndarray:
    """Small whole numbers, of which every sum is exact."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, k)).astype("f4")


def _image(*operands: Operand, size: int = SHARED) -> torch.Tensor:
    """The bytes of shared memory; those of no operand are noise."""
    image = np.random.default_rng(9).integers(0, 255, size, dtype="u1")
    for operand in operands:
        image[list(operand.bytes)] = list(operand.bytes.values())
    storage = torch.zeros(size + 16, dtype=torch.uint8)
    x = storage[-storage.data_ptr() % 16 :][:size]
    x.copy_(torch.from_numpy(image))
    return x


def _fill(n_threads: int, size: int) -> str:
    """Copy the image to shared memory: each thread 16 bytes at a time."""
    lines = [
        "shl.b32 %r1, %t, 4;", "cvt.u64.u32 %rd1, %r1;", "add.s64 %rd1, %rd1, %image;", "add.u32 %r1, %r1, %s;",
    ]  # fmt: skip
    for at in range(0, size, 16 * n_threads):
        lines += [
            f"ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd1+{at}];",
            f"st.shared.v4.b32 [%r1+{at}], {{%r2, %r3, %r4, %r5}}; // fill",
        ]
    return "\n".join(lines)


DEPTHS = {"tf32": 8, "f16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32}
FENCE = "fence.proxy.async.shared::cta;"
BARRIER = "bar.sync 0;"
REGISTERS_FENCE = "wgmma.fence.sync.aligned;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"


def _accumulators(n: int, first: int = 100) -> list[str]:
    return [f"%r{first + i}" for i in range(n // 2)]


def _product(n: int, a: str = "%rd2", b: str = "%rd3", kind: str = "f16", keep: str = "%p5", signs: str = "1, 1",
             transposed: str = ", 0, 0", first: int = 100, mark: str = "product", right: str = "") -> str:  # fmt: skip
    k = DEPTHS.get(kind, 16)
    d = ", ".join(_accumulators(n, first))
    flags = signs + (transposed if k == 16 else "")
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{right or kind}"
    return f"{opcode} {{{d}}}, {a}, {b}, {keep}, {flags}; // {mark}"


def _begin(a: Operand | None, b: Operand, n: int, value: float = 0.0, keeps: int = 1, n_threads: int = 128,
           size: int = SHARED) -> str:  # fmt: skip
    """Memory, descriptors, accumulators; %p5 tells whether accumulators are kept."""
    word = int(np.float32(value).view("u4"))
    lines = [_fill(n_threads, size), *(f"mov.b32 {r}, {word};" for r in _accumulators(n))]
    if a is not None:
        lines.append(f"mov.b64 %rd2, {a.descriptor};")
    return "\n".join([*lines, f"mov.b64 %rd3, {b.descriptor};", f"mov.u32 %r9, {keeps};", "setp.ne.u32 %p5, %r9, 0;"])


def _store(n: int, first: int = 100) -> str:
    """Accumulators to %y, ``(threads, n / 2)``."""
    registers = _accumulators(n, first)
    lines = [f"mul.wide.u32 %rd4, %i, {2 * n};", "add.s64 %rd4, %rd4, %y;"]
    for j in range(0, len(registers), 4):
        lines.append(f"st.global.v4.b32 [%rd4+{4 * j}], {{{', '.join(registers[j : j + 4])}}};")
    return "\n".join(lines)


def _at_threads(d: np.ndarray) -> np.ndarray:
    """The elements ``(128, n / 2)`` of D ``(64, n)`` that each thread holds: PTX ISA, "wgmma ... fragment layout"."""
    n = d.shape[1]
    found = np.zeros((128, n // 2), dtype=d.dtype)
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            found[thread, i] = d[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2]
    return found


def _multiply(a: np.ndarray, b: np.ndarray, kind: str = "f16", modes: tuple[int, int] = (1, 1),
              mn_major: tuple[bool, bool] = (False, False), step: int = 0, value: float = 0.0, keeps: int = 1,
              signs: str = "1, 1", right_kind: str = "",
              order: dict[str, Any] | None = None) -> np.ndarray:  # fmt: skip
    """What the threads hold after one product."""
    n = len(b)
    left = Operand(_bits(a, kind), 0, modes[0], mn_major[0], step)
    right = Operand(_bits(b, right_kind or kind), B_AT, modes[1], mn_major[1], step)
    transposed = f", {int(mn_major[0])}, {int(mn_major[1])}"
    body = [_begin(left, right, n, value, keeps), FENCE, BARRIER, REGISTERS_FENCE]
    body += [_product(n, kind=kind, transposed=transposed, signs=signs, right=right_kind), COMMIT, WAIT, _store(n)]
    y = torch.zeros(128, n // 2)
    run(
        "\n".join(body),
        n_threads=128,
        shared_bytes=SHARED,
        tensors={"image": _image(left, right), "y": y},
        **(order or {}),
    )
    return y.numpy()


@pytest.mark.parametrize("mn_major", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_every_layout(mode: int, mn_major: tuple[bool, bool]) -> None:
    for kind, other, n in (("f16", mode, 64), ("bf16", (mode + 1) % 4, 24)):
        a, b = _matrix(64, 16, 1), _matrix(n, 16, 2)
        result = _multiply(a, b, kind, (mode, other), mn_major)
        np.testing.assert_array_equal(result, _at_threads(a @ b.T))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_tf32(mode: int) -> None:
    a, b = _matrix(64, 8, 1), _matrix(32, 8, 2)
    np.testing.assert_array_equal(_multiply(a, b, "tf32", (mode, mode)), _at_threads(a @ b.T))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize(("kind", "right"), [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_8_bits(kind: str, right: str, mode: int) -> None:
    a, b = _matrix(64, 32, 1), _matrix(48, 32, 2)
    for value, signs, sign in ((0.0, "1, 1", 1), (0.5, "-1, 1", -1)):
        result = _multiply(a, b, kind, (mode, (mode + 1) % 4), value=value, signs=signs, right_kind=right)
        np.testing.assert_array_equal(result, _at_threads(sign * (a @ b.T) + value))


def test_nan_of_8_bits() -> None:
    a, b = _matrix(64, 32, 1), _matrix(16, 32, 2)
    a[40, 31] = b[9, 0] = np.nan
    np.testing.assert_array_equal(_multiply(a, b, "e4m3"), _at_threads(a @ b.T))


@pytest.mark.parametrize(("mode", "step"), [(1, 1), (1, 2), (1, 3), (2, 1)])
def test_a_part_of_a_swizzled_row(mode: int, step: int) -> None:
    """The next columns lie 32 bytes on, in rows that the swizzle takes as one."""
    a, b = _matrix(64, 16, 3), _matrix(16, 16, 4)
    np.testing.assert_array_equal(_multiply(a, b, modes=(mode, mode), step=step), _at_threads(a @ b.T))
    a, b = _matrix(64, 32, 3), _matrix(16, 32, 4)
    np.testing.assert_array_equal(_multiply(a, b, "e4m3", modes=(mode, mode), step=step), _at_threads(a @ b.T))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    a, b = _matrix(64, 16, 5), _matrix(n, 16, 6)
    np.testing.assert_array_equal(_multiply(a, b, modes=(1, 1)), _at_threads(a @ b.T))


@pytest.mark.parametrize("n", [4, 12, 264])
def test_widths_that_do_not_exist(n: int) -> None:
    with pytest.raises(UnknownPTXError):
        _multiply(_matrix(64, 16, 5), _matrix(n, 16, 6), modes=(3, 3))


@pytest.mark.parametrize(("keeps", "signs", "sign"), [
    (1, "1, 1", 1), (0, "1, 1", 1), (1, "-1, 1", -1), (1, "1, -1", -1), (0, "-1, -1", 1),
])  # fmt: skip
def test_what_was_in_the_accumulators_and_signs(keeps: int, signs: str, sign: int) -> None:
    a, b = _matrix(64, 16, 7), _matrix(16, 16, 8)
    for order in ORDERS[:3]:
        result = _multiply(a, b, value=0.5, keeps=keeps, signs=signs, order=order)
        np.testing.assert_array_equal(result, _at_threads(sign * (a @ b.T) + 0.5 * keeps))


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_from_registers(kind: str) -> None:
    k, n = DEPTHS[kind], 40
    a, b = _matrix(64, k, 1), _matrix(n, k, 2)
    bits, per_word = _bits(a, kind), 4 // _bits(a, kind).itemsize
    words = np.zeros((128, 4), dtype="u4")
    for thread in range(128):
        row, group = 16 * (thread // 32) + thread % 32 // 4, thread % 4
        for i in range(4):
            column = group * per_word + i // 2 * (k // 2)
            part = bits[row + 8 * (i % 2), column : column + per_word]
            words[thread, i] = int.from_bytes(part.tobytes(), "little")
    right = Operand(_bits(b, kind), B_AT, 3)
    load = "mul.wide.u32 %rd5, %t, 16;\nadd.s64 %rd5, %rd5, %a4;\nld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd5];"
    product = _product(n, "{%r10, %r11, %r12, %r13}", kind=kind, transposed=", 0")
    body = [_begin(None, right, n), load, FENCE, BARRIER, REGISTERS_FENCE, product, COMMIT, WAIT, _store(n)]
    y = torch.zeros(128, n // 2)
    a4 = torch.zeros(128 * 4 + 4, dtype=torch.int32)
    a4 = a4[-a4.data_ptr() % 16 // 4 :][: 128 * 4].view(128, 4)
    a4.copy_(torch.from_numpy(words.view("i4")))
    run("\n".join(body), n_threads=128, shared_bytes=SHARED, tensors={"image": _image(right), "y": y, "a4": a4})
    np.testing.assert_array_equal(y.numpy(), _at_threads(a @ b.T))


SIZE, RIGHT_AT = 4096, 2048
A, B = _matrix(64, 16, 11), _matrix(16, 16, 12)
LEFT, RIGHT = Operand(_bits(A, "f16"), 0, 3), Operand(_bits(B, "f16"), RIGHT_AT, 3)
IMAGE = _image(LEFT, RIGHT, size=SIZE)
BEGIN = _begin(LEFT, RIGHT, 16, size=SIZE)
READY = [BEGIN, FENCE, BARRIER, REGISTERS_FENCE]


def _arguments(n_threads: int = 128) -> dict[str, Any]:
    return {"n_threads": n_threads, "shared_bytes": SIZE, "tensors": {"image": IMAGE, "y": torch.zeros(n_threads, 8)}}


def _passes(*lines: str, n_threads: int = 128) -> np.ndarray:
    """The threads' accumulators, the same in all orders."""
    arguments = _arguments(n_threads)
    run_all("\n".join(lines), **arguments)
    return arguments["tensors"]["y"].numpy()


def _fails(error: type[Exception], *lines: str, marks: tuple[str, ...], says: str = "", n_threads: int = 128) -> None:
    fails(error, "\n".join(lines), *marks, says=says, orders=ORDERS[:4], **_arguments(n_threads))


def test_a_chain_of_products_takes_effect_in_order() -> None:
    """The first product overwrites what the accumulators hold, even if it takes effect late."""
    first = _product(16, keep="0", mark="one")
    result = _passes(*READY, first, _product(16), _product(16), COMMIT, WAIT, _store(16))
    np.testing.assert_array_equal(result, _at_threads(3 * (A @ B.T)))


def test_groups_are_waited_for_in_turn() -> None:
    moves = "\n".join(f"mov.b32 {r}, 0;" for r in _accumulators(16, 200))
    two = [moves, *READY, _product(16), COMMIT, _product(16, first=200, mark="second"), COMMIT]
    one = "wgmma.wait_group.sync.aligned 1;"
    result = _passes(*two, one, _store(16), WAIT)
    np.testing.assert_array_equal(result, _at_threads(A @ B.T))
    _passes(*two, WAIT, _store(16, 200))
    _fails(AsyncError, *two, one, "mov.b32 %r50, %r200; // read", WAIT, marks=("read",), says="not complete")


@pytest.mark.parametrize("touch", [
    "mov.b32 %r50, %r100;", "mov.b32 %r107, 0;", "st.global.b32 [%o], %r103;", "add.f32 %r50, %r51, %r104;",
])  # fmt: skip
def test_accumulators_belong_to_the_product_until_the_wait(touch: str) -> None:
    for before in ([], [COMMIT], [COMMIT, BARRIER], [COMMIT, "wgmma.wait_group.sync.aligned 1;"], [WAIT]):
        _fails(
            AsyncError, *READY, _product(16), *before, touch + " // touch", WAIT, marks=("touch",), says="not complete"
        )
    _passes(*READY, _product(16), COMMIT, WAIT, touch, _store(16))


@pytest.mark.parametrize("touch", ["mov.b32 %r107, 0;", "st.global.b32 [%o], %r103;"])
def test_what_no_thread_executes_touches_no_accumulator(touch: str) -> None:
    product = [*READY, _product(16), COMMIT]
    for guard in ("setp.ne.u32 %p9, %t, %t;\n@%p9", "setp.eq.u32 %p9, %t, %t;\n@!%p9"):
        np.testing.assert_array_equal(
            _passes(*product, f"{guard} {touch}", WAIT, _store(16)), _passes(*product, WAIT, _store(16))
        )
    some = "setp.eq.u32 %p9, %t, 3;\n@%p9"
    _fails(AsyncError, *product, f"{some} {touch} // touch", WAIT, marks=("touch",), says="not complete")


def _from_registers(first: int = 10) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(4)) + "}"


def test_sources_in_registers_must_not_be_written_before_the_wait() -> None:
    moves = "\n".join(f"mov.b32 %r{i}, 0;" for i in range(10, 14))
    product = [moves, *READY, _product(16, _from_registers(), transposed=", 0"), COMMIT]
    _passes(*product, "mov.b32 %r50, %r11;", WAIT, "mov.b32 %r11, 1;", _store(16))
    _fails(AsyncError, *product, "mov.b32 %r11, 1; // write", WAIT, marks=("write",))
    # Another product's accumulators are these sources.
    _fails(AsyncError, *product, _product(8, first=10, mark="other"), COMMIT, WAIT, marks=("other",))
    # Accumulators in flight are the sources of another.
    other = _product(16, _from_registers(100), transposed=", 0", first=200, mark="other")
    _fails(AsyncError, *READY, _product(16), other, COMMIT, WAIT, marks=("other",))


def test_products_in_flight_share_all_accumulators_or_none() -> None:
    other = [REGISTERS_FENCE, _product(8, mark="other"), COMMIT, WAIT]
    _fails(AsyncError, *READY, _product(16), *other, marks=("other",), says="not complete")
    _passes(*READY, _product(16), COMMIT, WAIT, REGISTERS_FENCE, _product(8), COMMIT, WAIT)


def test_a_fence_of_registers() -> None:
    no_fence = [BEGIN, FENCE, BARRIER, _product(16), COMMIT, WAIT]
    _fails(AsyncError, *no_fence, marks=("product",), says="no wgmma.fence before it")
    late = [*READY, "mov.b32 %r100, 0;", _product(16), COMMIT, WAIT]
    _fails(AsyncError, *late, marks=("product",), says="no wgmma.fence after its registers were used")
    run("\n".join(late), strict=False, **_arguments())


NO_FENCE, WRITTEN = "no wgmma.fence before it", "no wgmma.fence after its registers were used"
SKIPPED = "setp.eq.u32 %p8, %t, 999;"  # no thread


@pytest.mark.parametrize(("lines", "says"), [
    (["bra SKIP;", REGISTERS_FENCE, "SKIP:"], NO_FENCE),
    ([SKIPPED, f"@%p8 {REGISTERS_FENCE}"], NO_FENCE),
    ([REGISTERS_FENCE, "mov.u32 %r90, 0;", "LP:"], WRITTEN),
])  # fmt: skip
def test_a_fence_that_is_not_executed(lines: list[str], says: str) -> None:
    """A loop of two rounds, each of which writes an accumulator after its product."""
    loop = ["mov.u32 %r90, 0;"] if "LP:" in lines else ["mov.u32 %r90, 1;"]
    end = ["mov.b32 %r100, 0;", "add.u32 %r90, %r90, 1;", "setp.lt.u32 %p7, %r90, 2;"]
    back = ["@%p7 bra LP;"] if "LP:" in lines else []
    body = [BEGIN, FENCE, BARRIER, *loop, *lines, _product(16), COMMIT, WAIT, *end, *back]
    _fails(AsyncError, *body, marks=("product",), says=says)
    for order in ({}, {"asynchronous": "early"}):  # not tolerated
        with pytest.raises(AsyncError, match=says):
            run("\n".join(body), **_arguments(), strict=False, **order)


def test_a_fence_in_another_block() -> None:
    """Writes of other registers need no fence, nor do accumulators that only products of one shape have written."""
    _passes(*READY, "bra NEXT;", "NEXT:", "mov.b32 %r90, 0;", _product(16), COMMIT, WAIT, _store(16))
    loop = ["mov.u32 %r90, 0;", *READY, "LP:", "add.u32 %r90, %r90, 1;", _product(16), COMMIT, WAIT]
    result = _passes(*loop, "setp.lt.u32 %p7, %r90, 3;", "@%p7 bra LP;", _store(16))
    np.testing.assert_array_equal(result, _at_threads(3 * (A @ B.T)))
    # A write that no thread executes is none.
    _passes(*READY, SKIPPED, "@%p8 mov.b32 %r100, 0;", _product(16), COMMIT, WAIT, _store(16))


def test_products_of_other_shapes_need_a_fence_between_them() -> None:
    _passes(*READY, _product(16), COMMIT, WAIT, REGISTERS_FENCE, _product(8), COMMIT, WAIT)
    _fails(AsyncError, *READY, _product(16), COMMIT, WAIT, _product(8, mark="other"), COMMIT, WAIT, marks=("other",),
           says=WRITTEN)  # fmt: skip
    a = [*READY, _product(16), COMMIT, WAIT, REGISTERS_FENCE]
    other = _product(16, _from_registers(100), transposed=", 0", first=200, mark="other")
    _passes("\n".join(f"mov.b32 {r}, 0;" for r in _accumulators(16, 200)), *a, other, COMMIT, WAIT)
    _fails(AsyncError, *a[:-1], other, COMMIT, WAIT, marks=("other",), says=WRITTEN)


def test_a_fence_of_one_group_of_warps_is_none_of_another() -> None:
    begin = [_begin(LEFT, RIGHT, 16, n_threads=256, size=SIZE), FENCE, BARRIER, SECOND, "@%p6 bra BOTH;"]
    body = [*begin, REGISTERS_FENCE, "BOTH:", _product(16), COMMIT, WAIT]
    _fails(AsyncError, *body, marks=("product",), says=NO_FENCE, n_threads=256)


def test_a_fence_of_proxies() -> None:
    end = [REGISTERS_FENCE, _product(16), COMMIT, WAIT, _store(16)]
    _passes(BEGIN, FENCE, BARRIER, *end)
    _passes(BEGIN, BARRIER, FENCE, *end)
    arguments = _arguments()
    for lines in ([BEGIN, BARRIER, *end], [FENCE, BEGIN, BARRIER, *end]):
        with pytest.raises(RaceError, match=r"product|no fence.proxy.async after st.shared.v4.b32 at body.ptx"):
            run("\n".join(lines), **arguments)
    with pytest.raises(RaceError, match=r"nothing orders it after st\.shared"):
        run("\n".join([BEGIN, FENCE, *end]), **arguments)


def test_a_fence_by_some_warps_is_not_enough() -> None:
    fence = f"setp.lt.u32 %p1, %t, 96;\n@%p1 {FENCE}"
    with pytest.raises(RaceError, match=r"no fence\.proxy\.async"):
        run("\n".join([BEGIN, fence, BARRIER, REGISTERS_FENCE, _product(16), COMMIT, WAIT]), **_arguments())


@pytest.mark.parametrize("write", [
    "st.shared.b32 [%s+{at}], %t;", "@%p4 cp.async.cg.shared.global [%s+{at}], [%image], 16;",
])  # fmt: skip
@pytest.mark.parametrize("at", [0, RIGHT_AT])
def test_memory_must_not_be_written_before_the_wait(write: str, at: int) -> None:
    write = "setp.eq.u32 %p4, %t, 0;\n" + write.format(at=at).replace("st.sh", "@%p4 st.sh") + " // write"
    end = "\ncp.async.commit_group;\ncp.async.wait_group 0;"
    for before in ([], [COMMIT], [COMMIT, BARRIER], [COMMIT, "wgmma.wait_group.sync.aligned 1;", BARRIER]):
        lines = [*READY, _product(16), *before, write + end, WAIT]
        _fails(RaceError, *lines, marks=("product", "write"), says="still reading")
    _passes(*READY, _product(16), COMMIT, WAIT, BARRIER, write + end)
    if at == RIGHT_AT:  # the other warps have waited, but nothing tells the first
        lines = [*READY, _product(16), COMMIT, WAIT, write]
        with pytest.raises(RaceError, match="nothing orders it after the read"):
            run("\n".join([*lines, end]), **_arguments())


def test_a_message_names_the_product_also_if_others_read_after_it() -> None:
    read = "ld.shared.b32 %r50, [%s];"
    write = "st.shared.b32 [%s], %c; // write"
    _fails(RaceError, *READY, _product(16), read, write, COMMIT, WAIT, marks=("product", "write"))


# Two groups of warps, of which each multiplies the same matrices.
SECOND = "setp.ge.u32 %p6, %t, 128;"


def test_groups_of_warps_wait_each_for_itself() -> None:
    """One waits and writes over what the other still reads."""
    begin = [
        _begin(LEFT, RIGHT, 16, n_threads=256, size=SIZE),
        FENCE,
        BARRIER,
        REGISTERS_FENCE,
        _product(16),
        COMMIT,
        SECOND,
    ]
    write = f"setp.eq.u32 %p7, %t, 0;\n@%p7 st.shared.b32 [%s+{RIGHT_AT}], %t; // write"
    body = "\n".join([*begin, "@%p6 bra LAST;", WAIT, write, "LAST:", WAIT])
    with pytest.raises(RaceError, match=r"overwrites what wgmma.*is still reading"):
        run(body, **_arguments(256))
    result = _passes(*begin, "@%p6 bra LAST;", WAIT, "LAST:", WAIT, BARRIER, write, _store(16), n_threads=256)
    np.testing.assert_array_equal(result, np.tile(_at_threads(A @ B.T), (2, 1)))


def test_reads_are_counted_when_groups_of_warps_wait_apart() -> None:
    """After two ends of one product, the next product's reads are seen all the same."""
    begin = [
        _begin(LEFT, RIGHT, 16, n_threads=256, size=SIZE),
        FENCE,
        BARRIER,
        REGISTERS_FENCE,
        _product(16, mark="one"),
        COMMIT,
    ]
    apart = [SECOND, "@%p6 bra LAST;", WAIT, "LAST:", WAIT, BARRIER, REGISTERS_FENCE]
    again = [
        _product(16),
        COMMIT,
        BARRIER,
        f"setp.eq.u32 %p7, %t, 0;\n@%p7 st.shared.b32 [%s+{RIGHT_AT}], %t; // write",
    ]
    _fails(RaceError, *begin, *apart, *again, WAIT, marks=("product", "write"), says="still reading", n_threads=256)


def test_groups_of_warps_with_products_of_their_own() -> None:
    begin = [
        _begin(LEFT, RIGHT, 16, n_threads=256, size=SIZE),
        FENCE,
        BARRIER,
        SECOND,
        "@%p6 bra SECOND;",
        REGISTERS_FENCE,
    ]
    first = [_product(16), COMMIT, WAIT, "bra END;", "SECOND:", "mov.b32 %r50, %r100;", REGISTERS_FENCE]
    second = [_product(16, signs="-1, 1"), _product(16, signs="-1, 1"), COMMIT, WAIT, "END:", _store(16)]
    result = _passes(*begin, *first, *second, n_threads=256)
    np.testing.assert_array_equal(result, np.concatenate([_at_threads(A @ B.T), _at_threads(-2 * (A @ B.T))]))


@pytest.mark.parametrize("what", ["wgmma.fence", "product", "wgmma.commit", "wgmma.wait"])
def test_only_a_part_of_a_group(what: str) -> None:
    lines = [*READY, _product(16), COMMIT, WAIT]
    part = "setp.lt.u32 %p6, %t, 96;"
    chosen = [
        "@%p6 " + line.split(" //")[0] + " // part" if line.startswith(what) or what in line.split("// ")[-1:] else line
        for line in lines
    ]
    assert chosen != lines
    _fails(KernelError, part, *chosen, marks=("part",), says="only a part of four warps")


def test_threads_with_different_operands() -> None:
    _fails(KernelError, *READY, "cvt.u64.u32 %rd6, %w;\nadd.s64 %rd3, %rd3, %rd6;\nwgmma.fence.sync.aligned;",
           _product(16), COMMIT, WAIT, marks=("product",), says="different descriptors")  # fmt: skip
    _fails(KernelError, "setp.lt.u32 %p5, %t, 5;", BEGIN.rsplit("\n", 1)[0], FENCE, BARRIER, REGISTERS_FENCE,
           _product(16), COMMIT, WAIT, marks=("product",), says="different predicates")  # fmt: skip


def test_descriptors_out_of_bounds_and_with_a_base_offset() -> None:
    def of(descriptor: int) -> list[str]:
        return [*READY, f"mov.b64 %rd3, {descriptor};", REGISTERS_FENCE, _product(16), COMMIT, WAIT]

    start = RIGHT.descriptor & 0x3FFF
    last = RIGHT.descriptor - start + (BASE + SIZE - 512 >> 4)
    _passes(*of(last))
    _fails(MemoryAccessError, *of(last + 1), marks=("product",), says="of shared memory, which has")
    _fails(MemoryAccessError, *of(RIGHT.descriptor - start), marks=("product",), says="of shared memory, which has")
    with pytest.raises(UnknownPTXError, match="got base offset 1; allowed is 0"):
        run("\n".join(of(RIGHT.descriptor | 1 << 49)), **_arguments())


def test_a_product_that_nobody_waits_for() -> None:
    for end in ([], [COMMIT], [WAIT], [COMMIT, "wgmma.wait_group.sync.aligned 1;"]):
        _fails(AsyncError, *READY, _product(16), *end, marks=("product",), says="nobody waited")


A8, B8 = _matrix(64, 32, 13), _matrix(16, 32, 14)
LEFT8, RIGHT8 = Operand(_bits(A8, "e4m3"), 0, 3), Operand(_bits(B8, "e4m3"), RIGHT_AT, 3)


def test_the_rules_of_products_of_8_bits() -> None:
    begin, product = _begin(LEFT8, RIGHT8, 16, size=SIZE), _product(16, kind="e4m3")
    y = torch.zeros(128, 8)
    tensors = {"image": _image(LEFT8, RIGHT8, size=SIZE), "y": y}
    given: dict[str, Any] = {"n_threads": 128, "shared_bytes": SIZE, "tensors": tensors}
    ready = [begin, FENCE, BARRIER, REGISTERS_FENCE]
    run_all("\n".join([*ready, product, product, COMMIT, WAIT, _store(16)]), **given)
    np.testing.assert_array_equal(y.numpy(), _at_threads(2 * (A8 @ B8.T)))
    registers = _product(16, _from_registers(), kind="e4m3")
    moves = "\n".join(f"mov.b32 %r{i}, 0;" for i in range(10, 14))
    touch = " // touch"
    for error, lines, marks, says in (
        (AsyncError, [begin, FENCE, BARRIER, product, COMMIT, WAIT], ("product",), NO_FENCE),
        (AsyncError, [*ready, f"mov.b32 %r100, 0;\n{product}", COMMIT, WAIT], ("product",), WRITTEN),
        (AsyncError, [*ready, product, _product(16, mark="other"), COMMIT, WAIT], ("other",), WRITTEN),
        (AsyncError, [*ready, product, COMMIT], ("product",), "nobody waited"),
        (AsyncError, [*ready, product, COMMIT, "mov.b32 %r50, %r103;" + touch, WAIT], ("touch",), "not complete"),
        (AsyncError, [moves, *ready, registers, COMMIT, "mov.b32 %r12, 1;" + touch, WAIT], ("touch",), ""),
        (RaceError, [*ready, product, COMMIT, "st.shared.b8 [%s], %t;" + touch, WAIT], ("product", "touch"), ""),
    ):
        fails(error, "\n".join(lines), *marks, says=says, orders=ORDERS[:4], **given)
    with pytest.raises(RaceError, match=r"no fence\.proxy\.async"):
        run("\n".join([begin, BARRIER, REGISTERS_FENCE, product, COMMIT, WAIT]), **given)


@pytest.mark.parametrize(("old", "new"), [
    ("k32", "k16"), ("e4m3.e4m3", "e4m3.f16"), ("e4m3.e4m3", "e2m1.e2m1"), (".f32", ".f16"), ("1, 1;", "1, 1, 0, 0;"),
])  # fmt: skip
def test_forms_of_8_bits_that_do_not_exist(old: str, new: str) -> None:
    product = _product(16, kind="e4m3")
    assert old in product
    with pytest.raises(UnknownPTXError):
        run("\n".join([*READY, product.replace(old, new), COMMIT, WAIT]), **_arguments())


def test_fewer_threads_than_a_group() -> None:
    with pytest.raises(UnknownPTXError):
        run("\n".join([*READY, _product(16), COMMIT, WAIT]), **{**_arguments(), "n_threads": 64})
