"""Masks: which keys are visible, which values must not leak, and which blocks are visited."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, attention, biases, masks, reference, testing
from fusedattn.backends.torch import sdpa
from fusedattn.masks import Mask
from fusedattn.testing import Case
from tests.conftest import BACKENDS, DEVICE, assert_accurate, assert_equal, torch_attention_beside_lse, triton_attention
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

# Several tiles in both directions, some of them partial.
SHAPE_ONLY = {"nheads_q": 2, "nheads_kv": 1, "seqlen_q": 45, "seqlen_k": 53, "head_dim": 16}
SHAPE = Case(**SHAPE_ONLY)  # type: ignore[arg-type]


def hiding(kind: str, inputs: testing.Inputs) -> tuple[Mask, Tensor]:
    """A mask, and the keys ``(batch, seqlen_k)`` that it hides from every query."""
    batch, seqlen_q, seqlen_k = inputs.q.shape[0], inputs.q.shape[2], inputs.k.shape[2]
    hidden = torch.zeros(batch, seqlen_k, dtype=torch.bool)
    if kind == "causal, top-left":
        hidden[:, seqlen_q:] = True
        mask = masks.causal("top_left")
    else:
        if kind == "right":
            hidden[0, 20:], hidden[1, 33:] = True, True
        elif kind == "left":
            hidden[0, :17], hidden[1, :35] = True, True
        elif kind == "uneven":
            hidden[:, 3::4] = True
        elif kind == "everything":
            hidden[1] = True
        hidden[0, 7] = True
        mask = masks.padding(~hidden)
    if kind == "boolean":
        hidden[0] = hidden[1]
        hidden[:, 5::7] = True
        mask = masks.boolean(~hidden[:1, None, None, :])
    return mask.to(DEVICE), hidden.to(DEVICE)


@quick.every(6, backend="torch")
@backends
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, math.nan) for kind in ("right", "left", "uneven", "everything", "boolean", "causal, top-left")),
        ("uneven", math.inf),
        ("boolean", -math.inf),
        ("causal, top-left", math.inf),
    ],
)
def test_keys_that_no_query_sees(kind, value, backend):
    """Their values change no bit of any result, and their own gradients are 0."""
    inputs = testing.make_inputs(SHAPE, DEVICE)
    mask, hidden = hiding(kind, inputs)
    where = hidden[:, None, :, None]
    inputs = replace(inputs, mask=mask)
    clean = replace(inputs, k=inputs.k.masked_fill(where, 0.0), v=inputs.v.masked_fill(where, 0.0))
    poisoned = replace(inputs, k=inputs.k.masked_fill(where, value), v=inputs.v.masked_fill(where, value))
    function = functools.partial(attention, backend=backend)
    got = testing.run(function, poisoned)
    expected = testing.run(function, clean)
    for name in ("dk", "dv"):
        assert (got[name].masked_select(where) == 0).all()
    if backend == "triton" and kind not in ("boolean", "causal, top-left"):
        assert_equal(got, expected)
    else:  # the kernel recomputes, or the reference sums in another order
        torch.testing.assert_close(got, expected)
    out = function(poisoned.q, poisoned.k, poisoned.v, mask=mask)
    torch.testing.assert_close(out, expected["out"])


POISONED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "causal, top-left": {"causal": "top_left"},
    "boolean": {"boolean": "full"},
    "causal, padding": {"causal": "bottom_right", "padding": "uneven"},
    "causal, RoPE": {"causal": "bottom_right", "rope": "interleaved", "rotary_dim": 8},
    "everything": {"causal": "bottom_right", "boolean": "full", "padding": "right", "rope": "half"},
    # Tiles with boundary blocks to the left of full ones; only their first queries see a poisoned key.
    "window": {"window": (60, 20), "seqlen_q": 90, "seqlen_k": 100},
}


@quick.every(3, backend="torch")
@backends
@pytest.mark.parametrize(
    ("kind", "tensor", "value", "dtype"),
    [
        *((kind, "k", math.nan, torch.float32) for kind in POISONED),
        *((kind, "kv", math.nan, torch.float16) for kind in POISONED),
        *((kind, "v", math.inf, torch.bfloat16) for kind in ("causal", "boolean", "everything")),
        *((kind, "k", math.inf, torch.float32) for kind in ("causal", "boolean", "causal, RoPE")),
        *((kind, "k", -math.inf, torch.bfloat16) for kind in ("causal", "boolean")),
    ],
)
def test_rows_that_a_nan_reaches(kind, tensor, value, dtype, backend):
    """A NaN reaches the queries that see it. It reaches no other query, and no key that only other queries see."""
    inputs = testing.make_inputs(Case(**SHAPE_ONLY | POISONED[kind], dtype=dtype), DEVICE)
    poisoned = torch.zeros(2, 2, inputs.k.shape[2], dtype=torch.bool, device=DEVICE)
    if "k" in tensor:
        inputs.k[0, 0, [31, 37]] = value
        inputs.k[1, 0, 44, 3] = value
        poisoned[0, :, [31, 37]], poisoned[1, :, 44] = True, True
    if "v" in tensor:
        inputs.v[0, 0, 27, 5] = value
        poisoned[0, :, 27] = True
    seen = inputs.mask.dense(inputs.q.shape[2], inputs.k.shape[2], device=DEVICE).expand(2, 2, -1, -1)
    reached = (seen & poisoned[:, :, None]).any(-1)  # (batch, nheads_q, seqlen_q)
    keys_reached = (seen & reached[..., None]).any(-2).any(1, keepdim=True)  # (batch, nheads_kv, seqlen_k)
    assert 0 < int(reached.sum()) < reached.numel()
    clean = replace(inputs, k=inputs.k.nan_to_num(0.0, 0.0, 0.0), v=inputs.v.nan_to_num(0.0, 0.0, 0.0))

    function = functools.partial(attention, backend=backend)
    got, truth, eager = testing.run(function, inputs), testing.golden(clean), testing.baseline(clean)
    got["out without lse"] = function(inputs.q, inputs.k, inputs.v, mask=inputs.mask, rope=inputs.rope)
    for name, x in got.items():
        free = ~(keys_reached if name in ("dk", "dv") else reached)
        x, golden, same_dtype = (
            t.masked_fill(~(free[..., None] if t.dim() == 4 else free), 0.0)
            for t in (x, truth[name.partition(" ")[0]], eager[name.partition(" ")[0]])
        )
        assert int(x.isnan().sum()) == 0, name
        if backend == "triton":
            assert testing.compare(x, golden, same_dtype).used <= 1.5, name  # only some rows: see assert_accurate
        else:
            torch.testing.assert_close(x, same_dtype, atol=2e-2, rtol=2e-2)
    if math.isnan(value):
        assert clean_rows(got["out"][reached]) == 0
        assert clean_rows(got["out without lse"][reached]) == 0
        if tensor == "k":
            assert clean_rows(got["lse"][reached][:, None]) == 0
    # Infinities too: a row that is NaN in out must not look clean in dq, nor a key visible to it in dk.
    rows = got["out"].isnan().any(-1)
    assert clean_rows(got["dq"][rows]) == 0
    keys = (seen & rows[..., None]).any(-2).any(1, keepdim=True)
    assert clean_rows(got["dk"][keys]) == 0
    if tensor == "v":  # dv does not depend on v
        assert got["dv"].isfinite().all()


def clean_rows(x: Tensor) -> int:
    """The number of rows without NaN."""
    return int((~x.isnan().any(-1)).sum())


@pytest.mark.parametrize("sign", [1, -1])
@backends
def test_an_infinite_score_is_never_a_silent_zero(sign, backend):
    """If out is NaN, so is dq: a row must not look as if it had seen nothing."""
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE) for n in (5, 20, 20))
    q, k = q.abs(), k.clone()
    k[0, 0, 3, 0] = sign * math.inf
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    dq, _, _ = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    if sign > 0:
        assert clean_rows(out) == 0
    assert clean_rows(dq[out.isnan().any(-1)]) == 0
    assert clean_rows(dq) == 0  # 0 times infinity, for a weight of 0
    assert int((lse == -math.inf).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensor", ["q", "k"])
def test_a_row_whose_scores_are_all_nan(tensor, dtype):
    """Its maximum is that of an empty row, but it is not a row that sees nothing."""
    inputs = testing.make_inputs(replace(SHAPE, seqlen_q=3, seqlen_k=1 if tensor == "k" else 20, dtype=dtype), DEVICE)
    getattr(inputs, tensor)[0, :, 0] = math.nan
    results = testing.run(triton_attention, inputs)
    rows = slice(0, 1) if tensor == "q" else slice(None)
    for name in ("out", "dq"):
        assert clean_rows(results[name][0, :, rows]) == 0, name
        assert results[name][1].isfinite().all()
    assert results["lse"][0, :, rows].isnan().all()


@backends
def test_a_row_whose_scores_are_all_minus_infinity(backend):
    """An infinite query causes it: out and lse are those of a row that sees nothing."""
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE) for n in (5, 20, 20))
    q[0, 0, 2, 0], k = -math.inf, k.abs()
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert (out[0, 0, 2] == 0).all()
    assert lse[0, 0, 2] == -math.inf
    others = [0, 1, 3, 4]
    assert out[0, 0, others].isfinite().all()
    assert lse[0, 0, others].isfinite().all()


@dtypes
def test_the_lse_of_a_row_of_minus_infinity_may_have_a_gradient_of_nan(dtype):
    """Formulas of several lse give one easily. It reaches no key."""
    q, k, v = (torch.randn(1, 2, n, 16, dtype=dtype, device=DEVICE, requires_grad=True) for n in (20, 40, 40))
    bias = torch.zeros(20, 40, device=DEVICE)
    bias[3::5] = -math.inf
    dout, dlse = torch.randn_like(q), torch.zeros(1, 2, 20, device=DEVICE)
    found = []
    for value in (0.0, math.nan):
        results = attention(q, k, v, bias=bias, return_lse=True, backend="triton")
        found.append(torch.autograd.grad(results, (q, k, v), (dout, dlse.index_fill(2, torch.arange(3, 20, 5), value))))
    for finite, poisoned in zip(*found, strict=True):
        assert torch.equal(finite, poisoned)


def test_a_hidden_nan_changes_no_weight_that_dropout_keeps():
    """The forward computes the tile a second time, and must drop the same weights."""
    q, k, v = (torch.randn(1, 1, 40, 16, device=DEVICE) for _ in range(3))
    seed = torch.tensor([3], device=DEVICE)
    poisoned = v.index_fill(2, torch.tensor([39], device=DEVICE), math.nan)
    outs = [
        attention(q, k, x, mask=masks.causal(), dropout_p=0.4, dropout_seed=seed, backend="triton")[:, :, :39]
        for x in (v, poisoned)
    ]
    torch.testing.assert_close(*outs)


def test_queries_of_a_document_without_keys_see_nothing():
    q, k, v = (torch.randn(1, 1, 40, 16, device=DEVICE) for _ in range(3))
    ids_q = torch.arange(40, dtype=torch.int32, device=DEVICE)[None] // 4
    mask = masks.documents(ids_q, torch.where(ids_q == 3, 4, ids_q))
    out = attention(q, k, v, mask=mask, backend="triton")
    torch.testing.assert_close(out, reference.attention(q, k, v, mask=mask)[0])
    assert (out[:, :, 12:16] == 0).all()


@backends
def test_without_keys_the_lse_is_the_sink(backend):
    q, k = torch.randn(2, 2, 20, 16, device=DEVICE), torch.randn(2, 2, 0, 16, device=DEVICE)
    sinks, dlse = torch.randn(2, device=DEVICE, requires_grad=True), torch.randn(2, 2, 20, device=DEVICE)
    _, lse = attention(q, k, k, sinks=sinks, return_lse=True, backend=backend)
    assert torch.equal(lse, sinks[:, None].expand(2, 2, 20))
    torch.testing.assert_close(torch.autograd.grad(lse, sinks, dlse)[0], dlse.sum((0, 2)))


@backends
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bias_that_is_no_number(backend, value):
    """A row of such values becomes NaN; a value that the mask hides changes nothing."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=DEVICE) for _ in range(3))
    bias = torch.zeros(8, 8, device=DEVICE)
    bias[5] = bias[1, 6] = value
    out = attention(q, k, v, mask=masks.causal(), bias=bias, backend=backend)
    assert out[:, :, 5].isnan().all()
    others = [0, 1, 2, 3, 4, 6, 7]
    expected = attention(q, k, v, mask=masks.causal(), backend=backend)
    torch.testing.assert_close(out[:, :, others], expected[:, :, others])


def with_empty_rows(kind: str) -> testing.Inputs:
    if kind == "causal, more queries":
        return testing.make_inputs(replace(SHAPE, seqlen_q=53, seqlen_k=20, causal="bottom_right"), DEVICE)
    if kind == "left padding, causal":
        inputs = testing.make_inputs(replace(SHAPE, causal="bottom_right"), DEVICE)
        valid = torch.arange(53, device=DEVICE) >= torch.tensor([[12], [40]], device=DEVICE)
        return replace(inputs, mask=inputs.mask & masks.padding(valid))
    if kind == "window, padding with gaps":
        inputs = testing.make_inputs(replace(SHAPE, window=(1, 0)), DEVICE)
        return replace(inputs, mask=inputs.mask & masks.padding(torch.arange(53, device=DEVICE).expand(2, 53) % 5 < 2))
    if kind == "documents without keys":
        ids_q, ids_k = (torch.arange(n, device=DEVICE).expand(2, n) // 7 for n in (45, 53))
        mask = masks.documents(ids_q, ids_k // 2 * 2)  # keys of every second document
        return replace(testing.make_inputs(SHAPE, DEVICE), mask=mask)
    if kind == "empty batch":
        return testing.make_inputs(Case(**SHAPE_ONLY, padding="uneven", empty_batch=True), DEVICE)
    if kind == "empty batch, RoPE":
        return testing.make_inputs(Case(**SHAPE_ONLY, padding="uneven", empty_batch=True, rope="half"), DEVICE)
    inputs = testing.make_inputs(replace(SHAPE, boolean="full"), DEVICE)
    inputs.mask.allowed[:, 0, 3::5] = False
    inputs.mask.allowed[1, 1, 30:] = False
    return inputs


EMPTY_ROWS = (
    "causal, more queries", "left padding, causal", "window, padding with gaps", "documents without keys",
    "empty batch", "empty batch, RoPE", "boolean",
)  # fmt: skip


@quick.every(3, backend="torch")
@backends
@dtypes
@pytest.mark.parametrize("kind", EMPTY_ROWS)
def test_rows_that_see_nothing(kind, dtype, backend):
    inputs = with_empty_rows(kind).to(dtype)
    function = functools.partial(attention, backend=backend)
    results = testing.run(function, inputs)
    empty = ~inputs.mask.dense(*results["out"].shape[2:3], inputs.k.shape[2], device=DEVICE).any(-1)
    empty = empty.expand(results["lse"].shape)
    assert empty.any()
    assert not empty.all()
    for name in ("out", "dq"):
        assert (results[name][empty] == 0).all()
        assert not results[name][empty].signbit().any() or name == "dq"
    assert torch.equal(results["lse"] == -math.inf, empty)
    assert all(results[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))
    if backend == "triton":
        assert_accurate(function, inputs, kind)
    out = function(inputs.q, inputs.k, inputs.v, mask=inputs.mask, rope=inputs.rope)
    assert (out[empty] == 0).all()
    assert out.isfinite().all()


@quick.every(3, backend="torch")
@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_a_sink_of_nothing_where_nothing_is_visible(seqlen_q, dtype, backend):
    """A sink of -inf counts as none: lse is -inf there, and all gradients are 0."""
    inputs = testing.make_inputs(Case(seqlen_q=seqlen_q, seqlen_k=33, sinks=True, dtype=dtype), DEVICE)
    inputs = replace(inputs, mask=masks.boolean(torch.zeros(33, dtype=torch.bool, device=DEVICE)))
    inputs = inputs.with_leaves(inputs.leaves | {"sinks": torch.full_like(inputs.sinks, -math.inf)})
    results = testing.run(functools.partial(attention, backend=backend), replace(inputs, dlse=inputs.dlse * 0))
    assert (results.pop("lse") == -math.inf).all()
    assert all((x == 0).all() for x in results.values())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", EMPTY_ROWS)
def test_rows_that_see_nothing_under_any_kernel_of_torch(monkeypatch, kind, with_bias):
    """Some kernels give NaN for a fully masked row; the torch backend passes no such row to them."""

    def naive(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        enable_gqa: bool,
        attn_mask: Any = None,
        is_causal: bool = False,
    ) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = scale * q @ k.mT
        if is_causal:
            visible = masks.causal("top_left").dense(q.shape[2], k.shape[2], device=q.device)
            scores = scores.masked_fill(~visible, -math.inf)
        return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", naive)
    inputs = with_empty_rows(kind)
    inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    if with_bias:
        inputs = replace(inputs, bias=biases.tensor(torch.randn(inputs.q.shape[2], inputs.k.shape[2], device=DEVICE)))
    expected, got = testing.baseline(inputs), testing.run(torch_attention_beside_lse, inputs)
    torch.testing.assert_close(got, expected)


@quick.only(kind=lambda kind: kind in EMPTY_ROWS[:4])
@backends
@pytest.mark.parametrize("kind", EMPTY_ROWS)
def test_nan_in_a_row_that_sees_nothing(kind, backend):
    """A NaN in its query, or in the gradient of its output or lse, reaches no gradient."""
    inputs = with_empty_rows(kind)
    function = functools.partial(attention, backend=backend)
    empty = ~inputs.mask.dense(inputs.q.shape[2], inputs.k.shape[2], device=DEVICE).any(-1)
    empty = empty.expand(inputs.dlse.shape)
    nan = replace(
        inputs,
        q=inputs.q.masked_fill(empty[..., None], math.nan),
        dout=inputs.dout.masked_fill(empty[..., None], math.nan),
        dlse=inputs.dlse.masked_fill(empty, math.nan),
    )

    def run(x: testing.Inputs) -> dict[str, Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out, lse = function(q, k, v, mask=x.mask, rope=x.rope, return_lse=True)
        dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (x.dout, x.dlse))
        return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    clean = replace(inputs, dlse=inputs.dlse.masked_fill(empty, 0.0))
    got, expected = run(nan), run(clean)
    if backend == "triton":
        assert_equal(got, expected)
    else:
        torch.testing.assert_close(got, expected)
    assert (got["dq"][empty] == 0).all()


@backends
@pytest.mark.parametrize("rope", [None, "default", "positions", "positions per batch"])
@pytest.mark.parametrize(
    ("batch", "nheads_q", "nheads_kv", "seqlen_q", "seqlen_k"),
    [(0, 4, 2, 5, 7), (2, 0, 2, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0), (2, 4, 2, 0, 0), (0, 4, 2, 0, 0)],
)
def test_nothing_there(batch, nheads_q, nheads_kv, seqlen_q, seqlen_k, rope, backend):
    """Zero-length dimensions: shapes are right, and every number in a result is 0 or -inf."""
    q = torch.randn(batch, nheads_q, seqlen_q, 16, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(batch, nheads_kv, seqlen_k, 16, device=DEVICE, requires_grad=True) for _ in "kv")
    tables = None
    if rope is not None:
        tables = Rope.from_theta(8, 32, device=DEVICE)
        at = [torch.arange(n, device=DEVICE) for n in (seqlen_q, seqlen_k)]
        if rope == "positions":
            tables = tables.at(*at)
        elif rope == "positions per batch":
            tables = tables.at(*(x.expand(batch, -1) for x in at))
    valid = torch.ones(batch, seqlen_k, dtype=torch.bool, device=DEVICE)
    allowed = torch.ones(batch, nheads_q, seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE)
    for mask in (masks.full(), masks.causal() & masks.padding(valid) & masks.boolean(allowed)):
        for return_lse in (True, False):
            out = attention(q, k, v, mask=mask, rope=tables, return_lse=return_lse, backend=backend)
            if return_lse:
                out, lse = out
                assert lse.shape == q.shape[:3]
                assert (lse == -math.inf).all()
            assert out.shape == q.shape
            assert (out == 0).all()
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
            assert all((g == 0).all() for g in grads)


def test_hidden_keys_and_empty_rows_may_have_any_position(monkeypatch):
    """A tokenizer's positions are often -1 in the padding, and on a GPU nothing checks them."""
    monkeypatch.setattr(Rope, "check_positions", lambda self: None)
    q, k, v = (torch.randn(2, 1, n, 16, device=DEVICE, requires_grad=True) for n in (9, 9, 9))
    valid = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    valid[0, :4] = False
    mask = masks.causal() & masks.padding(valid)
    positions = (valid.long().cumsum(1) - 1).masked_fill(~valid, -1)
    rope = Rope.from_theta(16, 16, device=DEVICE)
    results = []
    for at in (positions, positions.clamp(min=0)):
        out = attention(q, k, v, mask=mask, rope=rope.at(at, at.clone()), backend="triton")
        results.append({"out": out, **dict(zip("qkv", torch.autograd.grad(out.sum(), (q, k, v)), strict=True))})
    torch.testing.assert_close(*results)


@backends
def test_visible_positions_outside_the_tables_are_never_a_number(backend, monkeypatch):
    """A GPU and a compiled graph omit the check; there the result is NaN."""
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("indexing out of bounds is fatal to a CUDA context")
    monkeypatch.setattr(Rope, "check_positions", lambda self: None)
    q, k, v = (torch.randn(1, 1, 5, 16, device=DEVICE) for _ in "qkv")
    at = torch.arange(5, device=DEVICE)
    rope = Rope.from_theta(16, 5, device=DEVICE)
    for bad in (-1, -5, 5):
        try:
            out = attention(q, k, v, rope=rope.at(at.where(at != 2, bad), at), backend=backend)
        except (IndexError, ValueError):
            continue
        assert out[0, 0, 2].isnan().all(), bad
        assert out[0, 0, [0, 1, 3, 4]].isfinite().all()


def test_both_causal_alignments_at_once():
    inputs = testing.make_inputs(replace(SHAPE, causal="bottom_right"), DEVICE)
    assert_accurate(triton_attention, replace(inputs, mask=inputs.mask & masks.causal("top_left")))


BANDS = {
    "a window at the end": masks.window(2, 3),
    "a window at the start": masks.window(2, 3, "top_left"),
    "two of each side, at the end": masks.window(9, 2) & masks.window(4, 7),
    "two of each side, at the start": masks.window(9, 2, "top_left") & masks.window(4, 7, "top_left"),
    "one at either end": masks.window(5, None) & masks.window(None, 3, "top_left"),
}


@pytest.mark.parametrize("lengths", [(21, 37), (37, 21)])
@pytest.mark.parametrize("name", BANDS)
def test_bands_of_either_alignment(name, lengths):
    """Each band narrows the others, and counts from its own end."""
    q, k, v = (
        torch.randn(1, 1, n, 16, device=DEVICE, requires_grad=True) for n in (lengths[0], lengths[1], lengths[1])
    )
    results = []
    for mask in (BANDS[name], BANDS[name].dense(*lengths, device=DEVICE)):
        out = triton_attention(q, k, v, mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
