"""Biases as values, pair by pair from the definition of each; buckets and slopes as in their papers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import attention, biases, reference
from fusedattn.biases import Bias
from fusedattn.testing import Case, make_inputs
from tests.conftest import DEVICE, INTERPRETING, assert_budget

pytestmark = pytest.mark.usefixtures("_seed")

B, H = 2, 2
SHAPES = [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1), (0, 3), (3, 0)]

Added = Callable[[int, int, int, int], float]


def clipped(distance: int, limit: int) -> int:
    return max(-limit, min(limit, distance)) + limit


def kinds(n: int, m: int) -> dict[str, tuple[Bias, Added]]:
    """Every kind of bias for ``n`` queries and ``m`` keys, and its value for pair (i, j) of batch b and head h."""
    full, per_key = torch.randn(B, H, n, m, dtype=torch.float64), torch.randn(m).bfloat16()
    slopes, per_batch = torch.rand(H), torch.rand(B, H)
    table, wide, column = torch.randn(B, H, n, 5), torch.randn(H, 1, 9, dtype=torch.float64), torch.randn(B, 1, n, 1)

    return {
        "nothing": (Bias(), lambda b, h, i, j: 0.0),
        "tensor": (biases.tensor(full), lambda b, h, i, j: full[b, h, i, j].item()),
        "tensor, per key": (biases.tensor(per_key), lambda b, h, i, j: per_key[j].item()),
        "alibi": (biases.alibi(slopes), lambda b, h, i, j: -slopes[h].item() * abs(j - i - (m - n))),
        "alibi, per batch": (
            biases.alibi(per_batch),
            lambda b, h, i, j: -per_batch[b, h].item() * abs(j - i - (m - n)),
        ),
        "relative": (biases.relative(table), lambda b, h, i, j: table[b, h, i, clipped(j - i - (m - n), 2)].item()),
        "relative, wide": (biases.relative(wide), lambda b, h, i, j: wide[h, 0, clipped(j - i - (m - n), 4)].item()),
        "relative, one column": (biases.relative(column), lambda b, h, i, j: column[b, 0, i, 0].item()),
    }


def brute_force(added: Added, n: int, m: int) -> Tensor:
    dense = torch.empty(B, H, n, m, dtype=torch.float64)
    for b, h, i, j in itertools.product(range(B), range(H), range(n), range(m)):
        dense[b, h, i, j] = added(b, h, i, j)
    return dense


def dense(bias: Bias, n: int, m: int, **selection: Any) -> Tensor:
    bias.check(B, H, n, m)
    found = bias.dense(n, m, dtype=torch.float64, **selection)
    assert found.dtype == torch.float64
    return found.expand(B, H, *found.shape[2:])


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_dense_and_sums(n, m):
    some = {name: (bias, brute_force(added, n, m)) for name, (bias, added) in kinds(n, m).items()}
    for name, (bias, expected) in some.items():
        torch.testing.assert_close(dense(bias, n, m).expand_as(expected), expected, msg=lambda t, n=name: f"{n}: {t}")
    for (name, (a, first)), (other, (b, second)) in itertools.combinations_with_replacement(some.items(), 2):
        got = dense(a + b, n, m).expand_as(first)
        torch.testing.assert_close(got, first + second, atol=1e-6, rtol=1e-6, msg=lambda t: f"{name} + {other}: {t}")  # noqa: B023


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (slice(1, 3), slice(None)),
        (slice(None), slice(2, None, 3)),
        (torch.tensor([4, 0, 2, 2]), torch.tensor([6, 1, 1])),
        (None, torch.tensor([], dtype=torch.int64)),
        (slice(0, 0), None),
    ],
)
def test_a_part_is_that_of_the_whole(rows, keys):
    n, m = 5, 7
    for name, (bias, _) in kinds(n, m).items():
        whole = dense(bias, n, m).expand(B, H, n, m)
        expected = whole[:, :, slice(None) if rows is None else rows][..., slice(None) if keys is None else keys]
        assert torch.equal(dense(bias, n, m, rows=rows, keys=keys).expand_as(expected), expected), name


def test_gradients():
    """Gradients of the bias and of the tables, through sums of several biases."""
    slopes = torch.rand(H)
    full, table = torch.randn(1, H, 1, 7, dtype=torch.float64), torch.randn(B, 1, 4, 5, dtype=torch.float64)
    other, weight = torch.randn(H, 1, 9, dtype=torch.float64), torch.randn(8, H, dtype=torch.float64)
    q, shaw = torch.randn(B, H, 4, 3, dtype=torch.float64), torch.randn(H, 5, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (full, table, other, weight, q, shaw)]

    def call(full: Tensor, table: Tensor, other: Tensor, weight: Tensor, q: Tensor, shaw: Tensor) -> Tensor:
        bias = biases.tensor(full) + biases.relative(table) + biases.relative(other)
        bias = bias + biases.t5(weight, max_distance=6) + biases.shaw(q, shaw) + biases.alibi(slopes)
        return bias.dense(4, 7)

    assert call(*inputs).dtype == torch.float64
    assert torch.autograd.gradcheck(call, inputs)


def t5_bucket(distance: int, n_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Section 2.1 and the authors' code; the bounds of the wide buckets are found by comparing integers."""
    first = 0
    if bidirectional:
        n_buckets //= 2
        first = n_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n_buckets // 2
    if distance < exact:
        return first + distance
    wide = n_buckets - exact
    # The largest x with (max_distance / exact) ** (x / wide) <= distance / exact.
    x = 0
    while x + 1 < wide and max_distance ** (x + 1) * exact**wide <= distance**wide * exact ** (x + 1):
        x += 1
    return first + exact + x


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (32, 20), (8, 128), (64, 256), (6, 10), (4, 3)])
def test_t5(n_buckets, max_distance, bidirectional):
    weight = torch.randn(n_buckets, H)
    bias = biases.t5(weight, bidirectional=bidirectional, max_distance=max_distance)
    assert bias.relative.shape == (H, 1, 2 * max_distance + 1)
    n, m = 30, 2 * max_distance + 30
    got = bias.dense(n, m)[0]
    for i, j in itertools.product((0, 7, 29), range(m)):
        bucket = t5_bucket(j - i - (m - n), n_buckets, max_distance, bidirectional)
        assert torch.equal(got[:, i, j], weight[bucket]), (j - i - (m - n), bucket)
    got = bias.dense(m, n)[0]  # keys after the query
    for i, j in itertools.product((0, 7, m - 1), range(n)):
        assert torch.equal(got[:, i, j], weight[t5_bucket(j - i + m - n, n_buckets, max_distance, bidirectional)])


def test_t5_has_the_buckets_of_its_models():
    """32 buckets up to 128: each begins at the same distance as in the published models."""
    weight = torch.arange(32.0)[:, None]
    past = biases.t5(weight).relative[0, 0].flip(0)[128:].tolist()
    begins = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert past == [sum(d >= begin for begin in begins) - 1 for d in range(129)]
    ahead = biases.t5(weight).relative[0, 0][129:].tolist()
    assert ahead == [16 + bucket for bucket in past[1:]]
    decoder = biases.t5(weight, bidirectional=False).relative[0, 0]
    assert (decoder[128:] == 0).all()
    assert decoder[:128].flip(0)[:20].tolist() == [*range(1, 16), 16, 16, 16, 17, 17]
    assert decoder[0] == 31


def test_alibi_slopes():
    assert biases.alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    # The paper's code: the slopes of 8 heads, then every second slope of 16 heads.
    expected = [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
    torch.testing.assert_close(biases.alibi_slopes(12), torch.tensor(expected))
    for n in (1, 2, 3, 5, 16, 31, 32, 40):
        slopes = biases.alibi_slopes(n)
        assert slopes.shape == (n,)
        assert slopes.dtype == torch.float32
        assert len(set(slopes.tolist())) == n
        assert ((slopes > 0) & (slopes < 1)).all()


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_shaw(per_head, scale):
    n, m, limit, dim = 4, 6, 2, 3
    q = torch.randn(B, H, n, dim, dtype=torch.float64)
    table = torch.randn(*(H,) * per_head, 2 * limit + 1, dim, dtype=torch.float64)
    got = biases.shaw(q, table, scale=scale).dense(n, m)
    factor = 1 / math.sqrt(dim) if scale is None else scale
    for b, h, i, j in itertools.product(range(B), range(H), range(n), range(m)):
        a = (table[h] if per_head else table)[clipped(j - i - (m - n), limit)]
        torch.testing.assert_close(got[b, h, i, j], factor * sum(q[b, h, i, d] * a[d] for d in range(dim)))


def test_a_bias_is_a_value():
    x, slopes, table = torch.zeros(3, 4).bfloat16(), torch.zeros(2), torch.zeros(2, 1, 5).half()
    bias = biases.tensor(x) + biases.alibi(slopes) + biases.relative(table)
    with pytest.raises(dataclasses.FrozenInstanceError):
        bias.tensor = None  # type: ignore[misc]
    assert bias.tensor is x
    assert list(bias.tensors()) == ["tensor(x)", "alibi(slopes)", "relative(table)"]
    assert list(biases.alibi(slopes).tensors()) == ["alibi(slopes)"]
    assert bias.dense(3, 4).dtype == torch.float32
    moved = bias.to("meta")
    assert all(t.is_meta for t in moved.tensors().values())
    assert len(moved.tensors()) == 3
    assert biases.as_bias(None) is None
    assert biases.as_bias(bias) is bias
    assert biases.as_bias(x).tensor is x


def test_sums_are_not_rounded_to_16_bits():
    one, little = torch.ones(1).bfloat16(), torch.full((1,), 2.0**-10).bfloat16()
    assert (biases.tensor(one) + biases.tensor(little)).dense(1, 1).item() == 1.0 + 2.0**-10
    assert (biases.relative(one) + biases.relative(little)).dense(1, 1).item() == 1.0 + 2.0**-10


def test_biases_in_a_compiled_function():
    def call(x: Tensor, slopes: Tensor, table: Tensor, weight: Tensor, q: Tensor) -> Tensor:
        bias = biases.tensor(x) + biases.alibi(slopes) + biases.relative(table) + biases.t5(weight, max_distance=9)
        bias = bias + biases.shaw(q, table[0])
        n, m = q.shape[2], x.shape[-1]
        bias.check(B, H, n, m)
        return bias.dense(n, m) * biases.alibi_slopes(H)[:, None, None]

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for n, m in ((4, 7), (6, 5), (9, 12)):
        arguments = (torch.randn(m), torch.rand(H), torch.randn(H, 1, 5), torch.randn(8, H), torch.randn(B, H, n, 5))
        torch.testing.assert_close(compiled(*arguments), call(*arguments))


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: biases.tensor(X).check(2, 2, 2, 1), ValueError, r"bias: got shape \(2, 3\), .*\(2, 2, 2, 1\)"),
        (
            lambda: biases.alibi(X[0].half()),
            TypeError,
            r"slopes: got torch.float16, allowed is a tensor of torch.float",
        ),
        (lambda: biases.alibi(0.5), TypeError, r"slopes: got float, allowed is a tensor of torch.float32 or float64"),
        (lambda: biases.alibi(X[None]), ValueError, r"slopes: got shape \(1, 2, 3\), allowed are \(nheads_q,\)"),
        (lambda: biases.alibi_slopes(0), ValueError, r"nheads: got 0, allowed are 1 and more"),
        (lambda: biases.relative(X.int()), TypeError, r"table: got torch.int32, allowed is a floating-point tensor"),
        (lambda: biases.relative(X[:, :2]), ValueError, r"table: got shape \(2, 2\), .*odd"),
        (lambda: biases.shaw(X, X), ValueError, r"table: got shape \(2, 3\) for q of shape \(2, 3\), allowed are"),
        (lambda: biases.shaw(X[None, None], X[:, :2]), ValueError, r"table: got shape \(2, 2\) for q"),
        (
            lambda: biases.shaw(X[None, None], X[None].expand(2, 2, 3)),
            ValueError,
            r"table: got 2 heads, .*nheads_q = 1",
        ),
        (lambda: biases.shaw(X[None, None], X), ValueError, r"table: got shape \(1, 1, 2, 2\), .*odd"),
        (lambda: biases.t5(X[0]), ValueError, r"weight: got shape \(3,\), allowed is \(num_buckets, nheads_q\)"),
        (lambda: biases.t5(X.int()), TypeError, r"weight: got torch.int32, allowed is a floating-point tensor"),
        (lambda: biases.t5(X), ValueError, r"weight: got 2 buckets, allowed are 4 and more"),
        (lambda: biases.t5(X[:1], bidirectional=False), ValueError, r"weight: got 1 buckets, allowed are 2 and more"),
        (lambda: biases.t5(torch.zeros(32, 2), max_distance=8), ValueError, r"max_distance: got 8, allowed are 9"),
        (lambda: biases.tensor(X) + biases.tensor(X[:, :2]), ValueError, r"bias: bias: got shapes .*\(2, 2\) to add"),
        (lambda: biases.alibi(X) + biases.alibi(X[0, :2]), ValueError, r"bias: slopes: got shapes .*\(2,\) to add"),
        (lambda: biases.relative(X) + biases.relative(X[[0, 0, 0]]), ValueError, r"bias: table: got shapes"),
        (lambda: biases.tensor(X) + X, TypeError, r"unsupported operand"),
    ],
)
def test_errors_of_biases(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 3), (4, 1, 3), (1, 4, 2, 1), (2, 1, 1, 3)])
def test_shapes_that_a_tensor_may_have(shape):
    biases.tensor(torch.ones(shape)).check(2, 4, 2, 3)


@pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")
def test_a_table_of_one_distance_has_the_gradient_of_a_number():
    """Every pair then has the same distance, on either side of the query."""
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (20, 23, 23))
    dout = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    found = []
    for make in (biases.relative, biases.tensor):
        x = torch.zeros(2, 20, 1, dtype=torch.float64, requires_grad=True)
        out, lse = attention(q, k, v, bias=make(x), return_lse=True, backend="triton")
        found.append(torch.autograd.grad((out, lse), x, (dout, torch.ones_like(lse)))[0])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "shape"),
    [(20, 150, (20, 1)), (20, 150, (1, 1)), (20, 150, (2, 1, 20, 150)), (270, 20, (1, 20)), (270, 20, (1, 1))],
    ids=str,
)
def test_the_gradient_of_a_broadcast_bias(seqlen_q, seqlen_k, shape):
    """There are more tiles of keys, or of queries, than partial sums."""
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dout, dlse = torch.randn_like(q), torch.randn(2, 2, seqlen_q, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(function(q, k, v, bias=bias)[:2], bias, (dout, dlse))
        for function in (partial(attention, return_lse=True, backend="triton"), reference.attention)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_infinite_bias_is_a_mask_of_torchs_function(monkeypatch, dtype):
    """Like torch's causal masks: nothing as large as the scores is stored for them, and rows that see nothing are 0."""
    q, k, v = (torch.randn(2, 2, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(2, 1, 5, 7).masked_fill(torch.rand(2, 1, 5, 7) < 0.4, -torch.inf)
    bias[0, :, 1] = -torch.inf
    bias[1, :, 2] = -1e5  # -inf in float16, but the same for all keys
    bias.requires_grad_()
    inputs = (q, k, v, bias)
    expected = reference.attention(*(x.float() for x in inputs[:3]), bias=bias)[0]
    grads = torch.autograd.grad(expected.sum(), inputs)
    monkeypatch.setattr(reference, "attention", None)
    out = attention(q, k, v, bias=bias, backend="torch")
    assert out[0, :, 1].eq(0).all()
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    for got, grad in zip(torch.autograd.grad(out.sum(), inputs), grads, strict=True):
        torch.testing.assert_close(got, grad, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_an_infinite_bias_hides_nan_under_a_compiler():
    """Keys that it hides from every query, like padding: a compiled graph cannot look for NaN in their values."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 7, 7))
    expected = attention(q, k[:, :, :-1], v[:, :, :-1], backend="torch")
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    bias = torch.tensor([0.0] * 6 + [-torch.inf]).view(1, 1, 1, 7)
    compiled = torch.compile(lambda *x: attention(*x, bias=bias, backend="torch"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), expected)
    torch._dynamo.reset()


def test_slopes_where_the_first_full_block_is_not_the_first_block():
    """A window hides the first keys of the last queries, and the next ones lie at its boundary."""
    case = Case(batch=1, nheads_q=1, nheads_kv=1, seqlen_q=160, seqlen_k=160, head_dim=16, alibi=True, window=(80, 0))
    assert_budget(partial(attention, backend="triton"), make_inputs(case, DEVICE))
