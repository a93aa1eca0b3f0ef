"""Products of matrices in registers, and 8 by 8 matrices between registers and shared memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from fusedattn.virtual_gpu.errors import KernelError, MemoryAccessError, UnknownPTXError
from tests.helpers.float_bits import BF16, E4M3, E5M2, F16, F32, Format, hostile
from tests.helpers.ptx_kernels import run

TF32 = Format(8, 10)  # in the high bits of 32
KINDS = {
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", F16, 16),
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", BF16, 16),
    "tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", TF32, 8),
    "e4m3": ("m16n8k32.row.col.f32.e4m3.e4m3.f32", E4M3, 32),
    "e5m2": ("m16n8k32.row.col.f32.e5m2.e5m2.f32", E5M2, 32),
}
Matrix = list[list[int]]  # of bits
WARPS = 3


def place_a(kind: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of a thread's A, as the ISA gives them."""
    group, thread = divmod(lane, 4)
    if kind == "tf32":
        return group + (8 if i in (1, 3) else 0), thread + (4 if i >= 2 else 0)
    if KINDS[kind][2] == 32:
        return group + (0 if i < 4 or 8 <= i < 12 else 8), thread * 4 + (i & 3) + (16 if i >= 8 else 0)
    row = group if i in (0, 1, 4, 5) else group + 8
    return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)


def place_b(kind: str, lane: int, i: int) -> tuple[int, int]:
    group, thread = divmod(lane, 4)
    if kind == "tf32":
        return thread + 4 * i, group
    if KINDS[kind][2] == 32:
        return thread * 4 + (i & 3) + (16 if i >= 4 else 0), group
    return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group


def place_c(lane: int, i: int) -> tuple[int, int]:
    group, thread = divmod(lane, 4)
    return group + (8 if i >= 2 else 0), thread * 2 + (i & 1)


def registers_of(kind: str, matrices: Sequence[Matrix], place: object, n: int) -> list[list[int]]:
    """The registers (n, lanes) of an operand of each warp."""
    per = 1 if kind == "f32" else KINDS[kind][2] // 8
    rows: list[list[int]] = [[] for _ in range(n)]
    for matrix in matrices:
        for lane in range(32):
            for j in range(n):
                word = 0
                for k in range(per):
                    row, column = place(lane, per * j + k)  # type: ignore[operator]
                    word |= matrix[row][column] << 32 // per * k
                rows[j].append(word << 13 if kind == "tf32" else word)
    return rows


def as_tensor(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([[x - 2**32 if x >> 31 else x for x in row] for row in rows], dtype=torch.int32)


def load_registers(tensor: int, n: int, first: int, n_threads: int) -> str:
    """PTX that loads registers %r`first` and so on from rows of a tensor."""
    loads = [f"ld.global.b32 %r{first + i}, [%rd1+{4 * n_threads * i}];" for i in range(n)]
    return f"ld.param.b64 %rd1, [p{tensor}]; mad.wide.u32 %rd1, %r1, 4, %rd1; {' '.join(loads)}"


def store_registers(tensor: int, registers: Sequence[int], n_threads: int) -> str:
    stores = [f"st.global.b32 [%rd1+{4 * n_threads * i}], %r{r};" for i, r in enumerate(registers)]
    return f"ld.param.b64 %rd1, [p{tensor}]; mad.wide.u32 %rd1, %r1, 4, %rd1; {' '.join(stores)}"


def multiplied(
    kind: str,
    a: Sequence[Matrix],
    b: Sequence[Matrix],
    c: Sequence[Matrix] | None,
    *,
    guard: str = "",
    truncating: bool = False,
    targets: Sequence[int] = (30, 31, 32, 33),
    low_bits: int = 0,
    shape: str = "",
) -> list[Matrix]:
    """The bits of A B + C for each warp; registers that are not written hold 7."""
    n_threads = 32 * len(a)
    inputs = [
        registers_of(kind, a, lambda lane, i: place_a(kind, lane, i), 4),
        registers_of(kind, b, lambda lane, i: place_b(kind, lane, i), 2),
        registers_of("f32", c or [[[0] * 8] * 16] * len(a), place_c, 4),
    ]
    if low_bits:
        inputs[:2] = [[[x | low_bits for x in row] for row in rows] for rows in inputs[:2]]
    out = torch.zeros(4, n_threads, dtype=torch.int32)
    zeros = ", ".join(["0f00000000"] * 4)
    d = ", ".join(f"%r{t}" for t in targets)
    body = "".join(
        [
            "mov.u32 %r1, %tid.x; ",
            *(load_registers(i, n, first, n_threads) for i, (n, first) in enumerate([(4, 10), (2, 20), (4, 24)])),
            *(f"mov.b32 %r{t}, 7;" for t in targets if t >= 30),
            f"setp.lt.u32 %p1, %r1, 32; {guard} mma.sync.aligned.{shape or KINDS[kind][0]} {{{d}}},",
            "{%r10, %r11, %r12, %r13}, {%r20, %r21},",
            f"{{{'%r24, %r25, %r26, %r27' if c else zeros}}};",
            store_registers(3, targets, n_threads),
        ]
    )
    run(body, *map(as_tensor, inputs), out, n_threads=n_threads, truncating=truncating)
    found = []
    for warp in range(len(a)):
        matrix = [[0] * 8 for _ in range(16)]
        for lane in range(32):
            for i in range(4):
                row, column = place_c(lane, i)
                matrix[row][column] = int(out[i, 32 * warp + lane]) % 2**32
        found.append(matrix)
    return found


def small(form: Format, rows: int, columns: int, draw: random.Random) -> Matrix:
    """Whole numbers from -8 to 8, of which every sum is exact."""
    values = [Fraction(n) for n in range(-8, 9)]
    return [[form.nearest(x) if (x := draw.choice(values)) else 0 for _ in range(columns)] for _ in range(rows)]


def whole_sums(form: Format, a: Matrix, b: Matrix, c: Matrix | None) -> list[list[Fraction]]:
    return [
        [
            sum((form.fraction(a[i][k]) * form.fraction(b[k][j]) for k in range(len(b))), Fraction(0))
            + (F32.fraction(c[i][j]) if c else 0)
            for j in range(8)
        ]
        for i in range(16)
    ]


@pytest.mark.parametrize("with_c", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_places_of_elements(kind: str, with_c: bool) -> None:
    _, form, k = KINDS[kind]
    draw = random.Random(0)
    a, b = ([small(form, *shape, draw) for _ in range(WARPS)] for shape in ((16, k), (k, 8)))
    c = [small(F32, 16, 8, draw) for _ in range(WARPS)] if with_c else None
    got = multiplied(kind, a, b, c)
    for warp in range(WARPS):
        wanted = whole_sums(form, a[warp], b[warp], c[warp] if c else None)
        assert [[F32.fraction(x) for x in row] for row in got[warp]] == wanted


def test_operands_of_two_formats() -> None:
    draw = random.Random(6)
    a, b = small(E4M3, 16, 32, draw), small(E5M2, 32, 8, draw)
    got = multiplied("e4m3", [a], [b], None, shape="m16n8k32.row.col.f32.e4m3.e5m2.f32")[0]
    b_of_f16 = [[x << 8 for x in row] for row in b]  # the same numbers
    a_of_f16 = [[F16.nearest(E4M3.fraction(x)) if x else 0 for x in row] for row in a]
    assert [[F32.fraction(x) for x in row] for row in got] == whole_sums(F16, a_of_f16, b_of_f16, None)


@pytest.mark.parametrize("targets", [(24, 25, 26, 27), (10, 11, 20, 21), (33, 13, 40, 12)])
def test_results_may_replace_operands(targets: tuple[int, ...]) -> None:
    draw = random.Random(1)
    a, b, c = [small(F16, 16, 16, draw)], [small(F16, 16, 8, draw)], [small(F32, 16, 8, draw)]
    got = multiplied("f16", a, b, c, targets=targets)
    assert [[F32.fraction(x) for x in row] for row in got[0]] == whole_sums(F16, a[0], b[0], c[0])


def test_warps_that_do_not_take_part_keep_their_registers() -> None:
    draw = random.Random(2)
    a, b, c = ([small(form, *shape, draw) for _ in range(2)] for form, shape in
               ((BF16, (16, 16)), (BF16, (16, 8)), (F32, (16, 8))))  # fmt: skip
    for guard, active in (("@%p1", 0), ("@!%p1", 1)):
        got = multiplied("bf16", a, b, c, guard=guard)
        wanted = whole_sums(BF16, a[active], b[active], c[active])
        assert [[F32.fraction(x) for x in row] for row in got[active]] == wanted
        assert got[1 - active] == [[7] * 8] * 16


def test_low_bits_of_tf32_are_ignored() -> None:
    draw = random.Random(3)
    a, b = [small(TF32, 16, 8, draw)], [small(TF32, 8, 8, draw)]
    assert multiplied("tf32", a, b, None, low_bits=0x1FFF) == multiplied("tf32", a, b, None)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_err_by_their_rounding(kind: str) -> None:
    """k + 1 terms, in any order: k roundings of at most half a unit of the sum of magnitudes."""
    _, form, k = KINDS[kind]
    draw = random.Random(4)
    one = form.infinity // 2 >> form.mantissa << form.mantissa

    def near_one(rows: int, columns: int) -> Matrix:
        span = 2 << form.mantissa
        return [
            [one + draw.randrange(-span, span) | draw.choice([0, form.sign]) for _ in range(columns)]
            for _ in range(rows)
        ]

    a, b = near_one(16, k), near_one(k, 8)
    c = [[F32.nearest(Fraction(draw.gauss(0, 9))) for _ in range(8)] for _ in range(16)]
    got = multiplied(kind, [a], [b], [c])[0]
    exact = whole_sums(form, a, b, c)
    for i in range(16):
        for j in range(8):
            terms = [abs(form.fraction(a[i][n]) * form.fraction(b[n][j])) for n in range(k)]
            magnitude = sum(terms) + abs(F32.fraction(c[i][j]))
            assert abs(F32.fraction(got[i][j]) - exact[i][j]) <= k * magnitude / 2**24


def test_truncated_sums() -> None:
    """The sum of all terms is cut off, towards zero."""
    draw = random.Random(5)
    a, b = small(BF16, 16, 16, draw), small(BF16, 16, 8, draw)
    c = [[draw.choice([0x4B800001, 0xCB800003, 0x4C000001, 0x3EAAAAAB]) for _ in range(8)] for _ in range(16)]
    b = [[x - (20 << BF16.mantissa) if BF16.magnitude(x) else 0 for x in row] for row in b]  # by 2^-20
    got = multiplied("bf16", [a], [b], [c], truncating=True)[0]
    exact = whole_sums(BF16, a, b, c)
    wanted = [[F32.nearest(x, "cut") for x in row] for row in exact]
    assert got == wanted
    assert wanted != [[F32.nearest(x) for x in row] for row in exact]


def test_infinities_and_nan_spread_along_rows() -> None:
    a = [[F16.nearest(Fraction(1))] * 16 for _ in range(16)]
    b = [[F16.nearest(Fraction(1))] * 8 for _ in range(16)]
    a[2][3], a[9][0], a[4][1], b[5][6] = F16.infinity, F16.infinity | 1, F16.infinity | F16.sign, 0
    b[3][1] = 0
    got = multiplied("f16", [a], [b], None)[0]
    for row in range(16):
        for column in range(8):
            x = got[row][column]
            if row == 9 or (row, column) == (2, 1):
                assert F32.is_nan(x)
            elif row in (2, 4):
                assert x == F32.infinity | (F32.sign if row == 4 else 0)
            else:
                assert F32.fraction(x) == 16 - (column in (1, 6))


@pytest.mark.parametrize(("kind", "nan"), [("e4m3", (0x7F, 0xFF)), ("e5m2", (0x7D, 0xFF))])
def test_nan_of_8_bits_spreads_along_rows_and_columns(kind: str, nan: tuple[int, int]) -> None:
    """Beside -0 and the largest number."""
    form = KINDS[kind][1]
    one, largest = form.nearest(Fraction(1)), form.infinity - 1
    a, b = [[one] * 32 for _ in range(16)], [[one] * 8 for _ in range(32)]
    (a[3][17], b[9][6]), a[5][2], b[2][1] = nan, largest, form.sign
    got = multiplied(kind, [a], [b], None)[0]
    for row in range(16):
        for column in range(8):
            if row == 3 or column == 6:
                assert F32.is_nan(got[row][column])
            else:
                at_2 = 0 if column == 1 else form.fraction(largest) if row == 5 else 1
                assert F32.fraction(got[row][column]) == 31 + at_2


def test_operands_of_every_size() -> None:
    """A column of hostile numbers, times one."""
    for kind, (_, form, k) in KINDS.items():
        codes = list(range(256)) if form.bits == 8 else hostile(form)
        numbers = [x for x in codes if form.magnitude(x) < form.infinity]
        for start in range(0, len(numbers), 16):
            a = [[x, *[0] * (k - 1)] for x in numbers[start : start + 16]]
            a += [[0] * k] * (16 - len(a))
            b = [[form.nearest(Fraction(1))] * 8] + [[0] * 8] * (k - 1)
            got = multiplied(kind, [a], [b], None)[0]
            assert [[F32.fraction(y) for y in row] for row in got] == [[form.fraction(row[0])] * 8 for row in a]


def test_a_part_of_a_warp() -> None:
    with pytest.raises(KernelError, match="only a part of a warp"):
        run("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 40; @%p1 mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%r2, %r3, %r4, %r5}, {%r6, %r7, %r8, %r9}, {%r6, %r7}, {%r2, %r3, %r4, %r5};")  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    ["m16n8k8.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f16.f16.f16.f16", "m16n8k16.row.col.f32.f16.bf16.f32",
     "m16n8k16.col.row.f32.f16.f16.f32", "m8n8k4.row.col.f64.f64.f64.f64",
     "m16n8k16.row.col.satfinite.f32.f16.f16.f32", "m16n8k16.row.col.f32.e4m3.e4m3.f32",
     "m16n8k32.row.col.f32.e4m3.f16.f32", "m16n8k32.row.col.f16.e4m3.e4m3.f16", "m16n8k32.row.col.f32.e2m1.e2m1.f32"],
)  # fmt: skip
def test_unknown_products(shape: str) -> None:
    with pytest.raises(UnknownPTXError, match=shape):
        run(
            f"mma.sync.aligned.{shape} {{%r2, %r3, %r4, %r5}}, {{%r6, %r7, %r8, %r9}}, {{%r6, %r7}},"
            "{%r2, %r3, %r4, %r5};"
        )


SHARED = 2 * 4 * 8 * 16  # bytes, of two warps with four matrices
THREADS = 64
FILL = """
mov.u32 %r1, %tid.x; mul.wide.u32 %rd5, %r1, 16; ld.param.b64 %rd1, [p0]; add.s64 %rd2, %rd1, %rd5;
mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r1, 16, %r2;
"""


def shuffled_rows(seed: int) -> tuple[list[int], torch.Tensor]:
    """The row of shared memory of each lane, each once; as a tensor of their addresses."""
    rows = list(range(THREADS))
    random.Random(seed).shuffle(rows)
    return rows, torch.tensor([[16 * row for row in rows]], dtype=torch.int32)


def elements(rows: torch.Tensor, row: int) -> list[int]:
    """The eight elements of a row of 16 bytes."""
    return [int(x) % 2**16 for x in rows[row].view(torch.int16)]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix(n: int, trans: str) -> None:
    """Thread 4 r + c gets elements 2 c and 2 c + 1 of row r; the rows of a matrix are at the addresses of 8 lanes."""
    memory = torch.randint(0, 256, (THREADS, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    rows, offsets = shuffled_rows(n)
    out = torch.zeros(n, THREADS, dtype=torch.int32)
    names = ", ".join(f"%r{10 + i}" for i in range(n))
    body = f"""
    {FILL} ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd2]; st.shared.v4.b32 [%r3], {{%r20, %r21, %r22, %r23}};
    bar.sync 0; {load_registers(1, 1, 5, THREADS)} add.s32 %r10, %r2, %r5;
    ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{names}}}, [%r10];
    {store_registers(2, range(10, 10 + n), THREADS)}
    """
    run(body, memory, offsets, out, n_threads=THREADS, shared_bytes=SHARED)
    for lane in range(THREADS):
        row, pair = divmod(lane % 32, 4)
        for i in range(n):
            matrix = [elements(memory, rows[lane // 32 * 32 + 8 * i + k]) for k in range(8)]
            if trans:
                low, high = matrix[2 * pair][row], matrix[2 * pair + 1][row]
            else:
                low, high = matrix[row][2 * pair], matrix[row][2 * pair + 1]
            assert int(out[i, lane]) % 2**32 == high << 16 | low


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_stmatrix(n: int, trans: str) -> None:
    """The opposite of ldmatrix; rows that no address names stay."""
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (n, THREADS), dtype=torch.int64, generator=generator).to(torch.int32)
    rows, offsets = shuffled_rows(n)
    out = torch.zeros(THREADS, 16, dtype=torch.uint8)
    names = ", ".join(f"%r{10 + 3 * i}" for i in range(n))
    loads = " ".join(f"ld.global.b32 %r{10 + 3 * i}, [%rd1+{4 * THREADS * i}];" for i in range(n))
    body = f"""
    {FILL} st.shared.v4.b32 [%r3], {{7, 7, 7, 7}}; bar.sync 0;
    {load_registers(1, 1, 5, THREADS)} add.s32 %r5, %r2, %r5;
    ld.param.b64 %rd1, [p2]; mad.wide.u32 %rd1, %r1, 4, %rd1; {loads}
    stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [%r5], {{{names}}};
    bar.sync 0; ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r3]; st.global.v4.b32 [%rd2], {{%r30, %r31, %r32, %r33}};
    """
    run(body, out, offsets, words, n_threads=THREADS, shared_bytes=SHARED)
    named = set()
    for warp in range(THREADS // 32):
        for i in range(n):
            for k in range(8):
                row = rows[32 * warp + 8 * i + k]
                named.add(row)
                for j in range(8):
                    r, c = (j, k) if trans else (k, j)
                    word = int(words[i, 32 * warp + 4 * r + c // 2]) % 2**32
                    assert elements(out, row)[j] == word >> 16 * (c % 2) & 0xFFFF
    for row in set(range(THREADS)) - named:
        assert elements(out, row) == [7, 0] * 4


def test_one_register_may_be_stored_several_times() -> None:
    out, offsets = torch.zeros(THREADS, 16, dtype=torch.uint8), torch.arange(THREADS, dtype=torch.int32)[None] * 16
    body = f"""
    {FILL} {load_registers(1, 1, 5, THREADS)} add.s32 %r5, %r2, %r5;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], {{%r1, %r1, %r1, %r1}};
    bar.sync 0; ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r3]; st.global.v4.b32 [%rd2], {{%r30, %r31, %r32, %r33}};
    """
    run(body, out, offsets, n_threads=THREADS, shared_bytes=SHARED)
    for row in range(THREADS):
        assert elements(out, row)[::2] == [row // 32 * 32 + 4 * (row % 8) + c for c in range(4)]


def test_one_warp_loads_matrices() -> None:
    """The other keeps its registers."""
    out = torch.zeros(2, THREADS, dtype=torch.int32)
    body = f"""
    {FILL} st.shared.v4.b32 [%r3], {{%r1, %r1, %r1, %r1}}; bar.sync 0; mov.b32 %r10, 5; mov.b32 %r12, 6;
    setp.ge.u32 %p1, %r1, 32; @%p1 ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r10, %r12}}, [%r3];
    {store_registers(0, (10, 12), THREADS)}
    """
    run(body, out, n_threads=THREADS, shared_bytes=SHARED)
    assert out[:, :32].tolist() == [[5] * 32, [6] * 32]
    assert out[0, 32:].tolist() == [32 + lane // 4 for lane in range(32)]
    assert out[1, 32:].tolist() == [40 + lane // 4 for lane in range(32)]


def test_one_warp_stores_matrices() -> None:
    """The second, from registers of its own."""
    out = torch.zeros(THREADS, 16, dtype=torch.uint8)
    body = f"""
    {FILL} st.shared.v4.b32 [%r3], {{7, 7, 7, 7}}; bar.sync 0; setp.ge.u32 %p1, %r1, 32;
    @%p1 stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {{%r1, %r1, %r1, %r1}};
    bar.sync 0; ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r3]; st.global.v4.b32 [%rd2], {{%r30, %r31, %r32, %r33}};
    """
    run(body, out, n_threads=THREADS, shared_bytes=SHARED)
    for row in range(THREADS):
        assert elements(out, row)[::2] == ([7] * 4 if row < 32 else [32 + 4 * (row % 8) + c for c in range(4)])


def test_rows_are_aligned_and_inside() -> None:
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r3+OFFSET];"
    with pytest.raises(MemoryAccessError, match="not a multiple of 16"):
        run(FILL + load.replace("OFFSET", "8"), torch.zeros(4), n_threads=THREADS, shared_bytes=SHARED)
    with pytest.raises(MemoryAccessError, match="of shared memory, which has 1024"):
        run(FILL + load.replace("OFFSET", "1024"), torch.zeros(4), n_threads=THREADS, shared_bytes=SHARED)


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11}, [%r3];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r10, %r11}, [%r3];",
        "ldmatrix.sync.aligned.m8n8.x1.b16 {%r10}, [%r3];",
        "stmatrix.sync.aligned.m8n8.x2.shared.b8 [%r3], {%r10, %r11};",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r10, %r11, %r12}, [%r3];",
        "ldmatrix.sync.aligned.m8n8.x1.trans.trans.shared.b16 {%r10}, [%r3];",
    ],
)
def test_unknown_matrices(instruction: str) -> None:
    with pytest.raises(UnknownPTXError, match=instruction.split()[0]):
        run(FILL + instruction, torch.zeros(4), n_threads=THREADS, shared_bytes=SHARED)
