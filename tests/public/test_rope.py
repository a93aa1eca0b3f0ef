"""RoPE: tables, pairings, positions; the eager rotation and the kernel's, against independent formulas."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, apply_rope, attention, testing
from fusedattn.kernels.sequences import NOT_PACKED, Sequences, Shape
from fusedattn.testing import Case
from tests.conftest import BACKENDS, DEVICE, DTYPES, INTERPRETING, assert_budget, triton_attention
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

interleavings = pytest.mark.parametrize("interleaved", [False, True])
dtypes = pytest.mark.parametrize("dtype", [*DTYPES, *([torch.float64] if INTERPRETING else [])])


def complex_rotation(x: Tensor, positions: Tensor, rotary_dim: int, theta: float, interleaved: bool) -> Tensor:
    """``(a + ib) exp(i p theta^(-2j/d))`` in float64: the definition of Su et al. (2021), section 3.2."""
    x = x.double()
    half = rotary_dim // 2
    if interleaved:
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    else:
        first, second = x[..., :half], x[..., half:rotary_dim]
    frequencies = theta ** (-2 * torch.arange(half, dtype=torch.float64, device=x.device) / rotary_dim)
    angles = positions.double()[..., None] * frequencies  # (..., seqlen, half)
    if angles.dim() == 3:
        angles = angles[:, None]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    out = x.clone()
    if interleaved:
        out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half:rotary_dim] = turned.real, turned.imag
    return out


def rotate_half(x: Tensor) -> Tensor:
    """As in Hugging Face's Llama code."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    """As in the GPT-J code."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def textbook(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x cos + rotate(x) sin`` with tables as wide as the rotated features."""
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
        return x * cos + rotate_every_two(x) * sin
    cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    return x * cos + rotate_half(x) * sin


@interleavings
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 10.0])
@pytest.mark.parametrize("rotary_dim", [2, 6, 24, 32])
def test_apply_rope_is_the_complex_rotation(rotary_dim, theta, interleaved):
    x = torch.randn(2, 3, 5, 32, dtype=torch.float64)
    rope = Rope.from_theta(rotary_dim, 512, theta, interleaved=interleaved)
    for positions in (torch.arange(5), torch.tensor([511, 0, 3, 3, 100]), torch.randint(0, 512, (2, 5))):
        got = apply_rope(x, rope.cos, rope.sin, positions, interleaved=interleaved)
        torch.testing.assert_close(
            got, complex_rotation(x, positions, rotary_dim, theta, interleaved), rtol=0, atol=1e-6
        )
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@interleavings
@dtypes
def test_apply_rope_is_the_textbook_rotation_rounded_once(dtype, interleaved):
    x = torch.randn(2, 3, 7, 20).to(dtype)
    rope = Rope.from_theta(12, 64, interleaved=interleaved)
    positions = torch.tensor([5, 0, 63, 2, 2, 41, 1])
    compute = torch.promote_types(dtype, torch.float32)
    rotary = textbook(
        x[..., :12].to(compute), rope.cos[positions].to(compute), rope.sin[positions].to(compute), interleaved
    )
    expected = torch.cat((rotary.to(dtype), x[..., 12:]), dim=-1)
    got = apply_rope(x, rope.cos, rope.sin, positions, interleaved=interleaved)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


def test_tables_are_exact_far_out():
    """At a position of a million, an angle in float32 would be wrong by 0.03."""
    rope = Rope.from_theta(64, 10**6 + 1)
    exponents = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    angles = 10**6 * 10000.0**-exponents
    assert (rope.cos[10**6].double() - angles.cos()).abs().max() <= 2**-24
    assert (rope.sin[10**6].double() - angles.sin()).abs().max() <= 2**-24
    assert rope.cos[0].eq(1).all()
    assert rope.sin[0].eq(0).all()
    assert (rope.cos**2 + rope.sin**2 - 1).abs().max() < 3e-7


def test_from_theta():
    rope = Rope.from_theta(8, 5, 100.0, interleaved=True)
    assert (rope.rotary_dim, rope.n_positions, rope.interleaved) == (8, 5, True)
    assert rope.cos.shape == rope.sin.shape == (5, 4)
    assert rope.cos.dtype == torch.float32
    assert Rope.from_theta(8, 5, device="meta").cos.is_meta
    assert Rope.from_theta(2, 0).n_positions == 0


def test_a_rope_is_a_value():
    rope = Rope.from_theta(8, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope.interleaved = True  # type: ignore[misc]
    at = rope.at(torch.arange(2), torch.arange(3))
    assert rope.positions_q is None
    assert at.cos is rope.cos
    moved = at.to("meta")
    assert all(getattr(moved, n).is_meta for n in ("cos", "sin", "positions_q", "positions_k"))
    assert not moved.interleaved
    assert replace(at, interleaved=True).to("cpu").interleaved


@interleavings
@pytest.mark.parametrize("scaled", [False, True])
def test_the_backward_is_the_transpose(scaled, interleaved):
    """The transpose equals the inverse only if the tables are not scaled."""
    tables = Rope.from_theta(8, 16, interleaved=interleaved)
    factor = 1.7 if scaled else 1.0
    cos, sin = tables.cos.double().float() * factor, tables.sin * factor
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([3, 1, 15, 0])
    rotate = functools.partial(apply_rope, cos=cos, sin=sin, positions=positions, interleaved=interleaved)
    jacobian = torch.autograd.functional.jacobian(rotate, x).reshape(32, 32)
    dout = torch.randn(32, dtype=torch.float64)
    (dx,) = torch.autograd.grad(rotate(x), x, dout.view_as(x))
    torch.testing.assert_close(dx.flatten(), jacobian.T @ dout)
    back = rotate(x=dout.view_as(x), sin=-sin)
    torch.testing.assert_close(dx, back)
    again = rotate(x=rotate(x=dout.view_as(x)), sin=-sin)
    torch.testing.assert_close(again, factor**2 * dout.view_as(x), atol=1e-6, rtol=1e-6)
    assert torch.autograd.gradcheck(rotate, x)


@quick.covering()
@interleavings
@pytest.mark.parametrize("tables", ["shared", "one batch", "per batch"])
@pytest.mark.parametrize("at", ["(seqlen,)", "(1, seqlen)", "(batch, seqlen)"])
def test_tables_and_positions_per_batch(tables, at, interleaved):
    x = torch.randn(3, 2, 5, 12)
    rope = Rope.from_theta(8, 32)
    cos, sin = rope.cos, rope.sin
    if tables == "one batch":
        cos, sin = cos[None], sin[None]
    elif tables == "per batch":
        scale = torch.tensor([1.0, 0.5, 2.0])[:, None, None]
        cos, sin = cos * scale, sin * scale
    positions = torch.randint(0, 32, {"(seqlen,)": (5,), "(1, seqlen)": (1, 5), "(batch, seqlen)": (3, 5)}[at])
    got = apply_rope(x, cos, sin, positions, interleaved=interleaved)
    for b in range(3):
        rows = positions[b if len(positions) == 3 else 0] if positions.dim() == 2 else positions
        table = [t[b if len(t) == 3 else 0][rows] if t.dim() == 3 else t[rows] for t in (cos, sin)]
        expected = textbook(x[b, ..., :8], *table, interleaved)
        torch.testing.assert_close(got[b, ..., :8], expected)
    # attention() takes the same combinations.
    rope = Rope(cos, sin, interleaved, positions, positions.clone()).to(DEVICE)
    y = x.to(DEVICE)
    for backend in BACKENDS:
        rotated = apply_rope(y, rope.cos, rope.sin, positions.to(DEVICE), interleaved=interleaved)
        torch.testing.assert_close(
            attention(y, y, y, rope=rope, backend=backend), attention(rotated, rotated, y, backend=backend)
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (1, 9), (4, 9)])
def test_default_positions(seqlen_q, seqlen_k, backend):
    """Keys count from 0, and the last query has the position of the last key, as decoding with a cache needs."""
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE) for n in (seqlen_q, seqlen_k, seqlen_k))
    rope = Rope.from_theta(16, 16, device=DEVICE)
    at = torch.arange(seqlen_k, device=DEVICE)
    for dtype in (torch.int64, torch.int32):
        explicit = rope.at(at[seqlen_k - seqlen_q :].to(dtype), at.to(dtype))
        expected = attention(q, k, v, rope=explicit, backend=backend)
        assert torch.equal(attention(q, k, v, rope=rope, backend=backend), expected)
        # Either may be omitted.
        assert torch.equal(attention(q, k, v, rope=rope.at(None, explicit.positions_k), backend=backend), expected)
        assert torch.equal(attention(q, k, v, rope=rope.at(explicit.positions_q, None), backend=backend), expected)


def shape_of(x: Tensor, n_more: int = 0) -> Shape:
    """Shape of an attention whose queries (or keys) are ``x``, with `n_more` more keys than queries."""
    batch, nheads, seqlen, _ = x.shape
    return Shape(batch, nheads, nheads, seqlen, seqlen + n_more, seqlen, seqlen + n_more)


def rotated(x: Tensor, rotation: Any, sequences: Sequences, shape: Shape, *, of_queries: bool) -> Tensor:
    """A rotated copy of ``x`` by the kernel."""
    from fusedattn.kernels.prologue import Prologue

    longest = shape.max_seqlen_q if of_queries else shape.max_seqlen_k
    return Prologue(None, rotation, rotation.cos.shape[1], longest, of_queries, sequences, shape).prepared(x)


@quick.covering()
@interleavings
@dtypes
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (40, 24), (33, 2), (80, 80)])
def test_the_kernel_rotates_as_apply_rope_does(head_dim, rotary_dim, dtype, interleaved):
    """To the last bit in the interpreter, which rounds the same operations in the same order."""
    from fusedattn.kernels.rope import Rotation

    rope = Rope.from_theta(rotary_dim, 200, interleaved=interleaved, device=DEVICE)
    x = torch.randn(2, 70, 3, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
    positions = torch.randint(0, 200, (2, 70), device=DEVICE)
    for at, of_queries in ((None, False), (None, True), (positions[:1], True), (positions, False)):
        rotation = Rotation(rope.cos[None], rope.sin[None], at, interleaved)
        # Queries have the positions of the last keys; there are 7 more keys.
        offset = 7 if of_queries else 0
        rows = torch.arange(offset, offset + 70, device=DEVICE) if at is None else at
        expected = apply_rope(x, rope.cos, rope.sin, rows, interleaved=interleaved)
        got = rotated(x, rotation, NOT_PACKED, shape_of(x, offset), of_queries=of_queries)
        assert got.is_contiguous()
        assert got.dtype == dtype
        if INTERPRETING:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected)


@interleavings
@pytest.mark.parametrize("of_queries", [False, True])
def test_the_kernel_rotates_packed_sequences(of_queries, interleaved):
    """Each sequence counts from its own start; its queries have the positions of its last keys."""
    from fusedattn.kernels.rope import Rotation

    rope = Rope.from_theta(16, 100, interleaved=interleaved, device=DEVICE)
    lengths_q, lengths_k = (5, 0, 33, 70), (9, 3, 33, 71)
    stops_q, stops_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for lengths in (lengths_q, lengths_k)
    )
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    shape = Shape(4, 3, 3, total_q, total_k, max(lengths_q), max(lengths_k))
    x = torch.randn(1, 3, total_q if of_queries else total_k, 16, device=DEVICE)
    rotation = Rotation(rope.cos[None], rope.sin[None], None, interleaved)
    got = rotated(x, rotation, Sequences(stops_q, stops_k), shape, of_queries=of_queries)
    first = 0
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        n = n_q if of_queries else n_k
        rows = torch.arange(n_k - n, n_k, device=DEVICE)
        own = slice(first, first + n)
        expected = apply_rope(x[:, :, own], rope.cos, rope.sin, rows, interleaved=interleaved)
        torch.testing.assert_close(got[:, :, own], expected, rtol=0, atol=0 if INTERPRETING else 1e-6)
        first += n


@interleavings
def test_features_that_do_not_rotate_are_left_alone(interleaved):
    """A NaN in one of them reaches no other."""
    from fusedattn.kernels.rope import Rotation

    rope = Rope.from_theta(8, 6, device=DEVICE)
    x = torch.randn(1, 1, 6, 13, device=DEVICE)
    x[..., 9] = math.nan
    rotation = Rotation(rope.cos[None], rope.sin[None], None, interleaved)
    got = rotated(x, rotation, NOT_PACKED, shape_of(x), of_queries=False)
    assert got[..., 9].isnan().all()
    rest = [8, 10, 11, 12]
    assert torch.equal(got[..., rest], x[..., rest])
    assert got[..., :8].isfinite().all()


def test_the_kernel_marks_positions_outside_the_tables():
    from fusedattn.kernels.rope import Rotation

    rope = Rope.from_theta(8, 10, device=DEVICE)
    x = torch.randn(1, 1, 6, 12, device=DEVICE)
    at = torch.tensor([[0, -1, 9, 10, 2**31 - 1, 3]], device=DEVICE)
    rotation = Rotation(rope.cos[None], rope.sin[None], at, False)
    got = rotated(x, rotation, NOT_PACKED, shape_of(x), of_queries=False)
    assert got[0, 0].isnan().any(-1).tolist() == [False, True, False, True, True, False]
    assert torch.equal(got[..., 8:], x[..., 8:])
    got = rotated(x, replace(rotation, positions=None), NOT_PACKED, shape_of(x, -2), of_queries=True)
    assert got[0, 0].isnan().any(-1).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["positions_q", "positions_k"])
@pytest.mark.parametrize("bad", [-1, 16, 2**40])
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is not asked for the values of positions")
def test_positions_outside_the_tables_are_an_error_on_a_cpu(name, bad, backend):
    x = torch.randn(1, 1, 5, 16)
    at = {"positions_q": torch.arange(5), "positions_k": torch.arange(5)}
    at[name] = at[name].where(at[name] != 3, bad)
    rope = Rope.from_theta(16, 16).at(**at)
    with pytest.raises(ValueError, match=rf"rope\.{name}: got positions .*{bad}.*allowed are 0 \.\. 15"):
        attention(x, x, x, rope=rope, backend=backend)
    with pytest.raises(ValueError, match=rf"rope\.{name}"):
        rope.check_positions()


@interleavings
def test_budget_with_scaled_tables(interleaved):
    """YaRN and LongRoPE multiply both tables, so the transpose, not the inverse, must rotate the gradients back."""
    case = Case(nheads_q=2, nheads_kv=1, seqlen_q=33, seqlen_k=40, head_dim=24, causal="bottom_right", rope="half")
    inputs = testing.make_inputs(case, DEVICE)
    rope = Rope.from_theta(16, 80, interleaved=interleaved, device=DEVICE)
    inputs = replace(inputs, rope=replace(rope, cos=rope.cos * 1.37, sin=rope.sin * 1.37))
    assert_budget(triton_attention, inputs, case)


TABLE = torch.ones(8, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rope.from_theta(7, 8), ValueError, r"rotary_dim: got 7, allowed are positive even"),
        (lambda: Rope.from_theta(0, 8), ValueError, r"rotary_dim: got 0"),
        (lambda: Rope.from_theta(-2, 8), ValueError, r"rotary_dim: got -2"),
        (lambda: Rope.from_theta(8, -1), ValueError, r"max_seqlen: got -1"),
        (lambda: Rope.from_theta(8, 8, -3.0), ValueError, r"theta: got -3\.0"),
        (lambda: Rope.from_theta(8, 8, 0.0), ValueError, r"theta: got 0\.0"),
        (lambda: Rope.from_theta(8, 8, math.nan), ValueError, r"theta: got nan"),
        (lambda: Rope.from_theta(8, 8, math.inf), ValueError, r"theta: got inf"),
        (lambda: Rope(TABLE.double(), TABLE), TypeError, r"rope\.cos: got torch\.float64, allowed is a torch\.float32"),
        (lambda: Rope(TABLE, TABLE.bfloat16()), TypeError, r"rope\.sin: got torch\.bfloat16"),
        (lambda: Rope(TABLE.tolist(), TABLE), TypeError, r"rope\.cos: got list"),
        (lambda: Rope(TABLE, TABLE[:4]), ValueError, r"cos \(8, 4\) and sin \(4, 4\), allowed is one shape"),
        (lambda: Rope(TABLE[0], TABLE[0]), ValueError, r"cos \(4,\)"),
        (lambda: Rope(TABLE[None, None], TABLE[None, None]), ValueError, r"cos \(1, 1, 8, 4\)"),
        (lambda: Rope(TABLE, TABLE.to("meta")), ValueError, r"got cos on cpu and sin on meta"),
        (lambda: Rope(TABLE, TABLE, positions_q=torch.ones(3)), TypeError, r"rope\.positions_q: got torch\.float32"),
        (lambda: Rope(TABLE, TABLE, positions_k=[0, 1]), TypeError, r"rope\.positions_k: got list"),
        (
            lambda: Rope(TABLE, TABLE, positions_k=torch.zeros(3, dtype=torch.int16)),
            TypeError,
            r"rope\.positions_k: got torch\.int16, allowed is an int32 or int64",
        ),
        (
            lambda: Rope(TABLE, TABLE, positions_q=torch.zeros(1, 1, 3, dtype=torch.int64)),
            ValueError,
            r"rope\.positions_q: got shape \(1, 1, 3\), allowed are \(seqlen,\) and \(batch, seqlen\)",
        ),
        (
            lambda: Rope(TABLE.clone().requires_grad_(), TABLE),
            NotImplementedError,
            r"rope\.cos: got requires_grad=True",
        ),
    ],
)
def test_errors_of_the_constructor(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("rope", "sizes", "message"),
    [
        (Rope.from_theta(8, 16), (2, 5, 5, 6), r"rotary_dim 8, allowed are 2 \.\. head_dim = 6"),
        (Rope.from_theta(8, 4), (2, 3, 5, 8), r"got tables of 4 rows, allowed are 5 and more, for keys"),
        (
            Rope.from_theta(8, 16),
            (2, 6, 5, 8),
            r"positions_q: got None, allowed are tensors if seqlen_q = 6 > seqlen_k = 5",
        ),
        (
            Rope.from_theta(8, 4).at(None, torch.zeros(5, dtype=torch.int64)),
            (2, 3, 5, 8),
            r"got tables of 4 rows, allowed are 5 and more, for queries",
        ),
        (Rope.from_theta(8, 16).at(torch.arange(4), None), (2, 5, 5, 8), r"positions_q: got shape \(4,\).*\(5,\)"),
        (
            Rope.from_theta(8, 16).at(None, torch.zeros(3, 5, dtype=torch.int64)),
            (2, 5, 5, 8),
            r"positions_k: got shape \(3, 5\), allowed are \(5,\) and \(2, 5\)",
        ),
        (Rope(torch.ones(3, 9, 4), torch.ones(3, 9, 4)), (2, 5, 5, 8), r"tables for batch 3, allowed are 1 and batch"),
        (Rope(torch.ones(9, 0), torch.ones(9, 0)), (2, 5, 5, 8), r"rotary_dim 0"),
    ],
)
def test_errors_of_check(rope, sizes, message):
    with pytest.raises(ValueError, match=message):
        rope.check(*sizes)
    batch, seqlen_q, seqlen_k, head_dim = sizes
    q, k = torch.randn(batch, 1, seqlen_q, head_dim), torch.randn(batch, 1, seqlen_k, head_dim)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=message):
            attention(q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), rope=rope.to(DEVICE), backend=backend)


def test_tables_that_want_a_gradient_after_all():
    """Tables get no gradient; asking for one must be an error."""
    rope = Rope.from_theta(16, 16, device=DEVICE)
    rope.cos.requires_grad_()
    x = torch.randn(1, 1, 5, 16, device=DEVICE)
    for backend in BACKENDS:
        with pytest.raises(NotImplementedError, match=r"rope\.cos: got requires_grad"):
            attention(x, x, x, rope=rope, backend=backend)
