"""The overhead of a call: things that must not happen on the way. test_cpu_speed.py measures it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fusedattn
from fusedattn import Rope, attention, masks, reference
from fusedattn.backends.torch import fast_path
from fusedattn.backends.triton import autograd, launching
from fusedattn.kernels import attention_bwd_rows
from fusedattn.kernels import problem as kernel_problem
from fusedattn.testing import triton_functions
from tests.conftest import INTERPRETING

PACKAGE = Path(fusedattn.__file__).parent
interpreted = pytest.mark.skipif(not INTERPRETING, reason="without a GPU the launches can be left out")


def qkv(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype=dtype, **options) for _ in range(3)]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each function of the package, by name.

    Functions of other packages are not counted, nor comprehensions, which are functions in some versions of Python.
    """
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE) and code.co_name.isidentifier():
            calls[code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(("mask", "most"), [(None, 10), (masks.causal(), 12)], ids=["plain", "causal"])
def test_functions_of_a_plain_call(monkeypatch, mask, most):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = qkv(1, 2, 8, 16)
    attention(q, k, v, mask=mask)
    with counted() as calls:
        attention(q, k, v, mask=mask)
    assert calls["attention"] == 2  # the public function, and the one in `fast_path`
    assert sum(calls.values()) <= most, calls


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)


@interpreted
@pytest.mark.parametrize(("backward", "most"), [(False, 85), (True, 195)])
def test_functions_on_the_way_to_the_kernels(no_launch, backward, most):
    q, k, v = (x.requires_grad_(backward) for x in qkv(1, 2, 8, 16))
    mask, rope = masks.causal(), Rope.from_theta(16, 8)

    def call() -> None:
        out = attention(q, k, v, mask=mask, rope=rope, backend="triton")
        if backward:
            torch.autograd.grad(out, (q, k, v), out.detach())

    call()
    with torch.autograd.set_multithreading_enabled(False), counted() as calls:
        call()
    assert sum(calls.values()) <= most, calls


@interpreted
def test_lengths_fill_no_cache(no_launch):
    """No length compiles or looks up anything new: generation has another length at every token."""

    def kept() -> list[int]:
        caches = (launching._band, launching._plain_call, attention_bwd_rows._constants)
        return [len(kernel_problem._constants), *(cache.cache_info().currsize for cache in caches)]

    def call(seqlen: int) -> None:
        q, k, v = (x.requires_grad_() for x in qkv(1, 2, seqlen, 16))
        attention(q, k, v, mask=masks.causal(), backend="triton").sum().backward()

    for seqlen in (7, 20, 39):  # tiles of few queries have two sizes
        call(seqlen)
    before = kept()
    for seqlen in range(8, 40):
        call(seqlen)
    assert kept() == before


@interpreted
def test_autograd_only_where_there_is_a_gradient(monkeypatch, no_launch):
    applied: list[str] = []

    def noted(function: Any) -> Callable[..., Any]:
        apply = function.apply

        def noted_apply(*args: Any) -> Any:
            applied.append(function.__name__)
            return apply(*args)

        return noted_apply

    for function in (autograd.Attention, autograd.DirectAttention, autograd.AttentionBackward):
        monkeypatch.setattr(function, "apply", noted(function))
    q, k, v = qkv(1, 2, 8, 16)
    attention(q, k, v, backend="triton")
    assert applied == []
    q.requires_grad_()
    with torch.no_grad():
        attention(q, k, v, backend="triton")
    assert applied == []
    out = attention(q, k, v, backend="triton")
    torch.autograd.grad(out.sum(), q)
    assert applied == ["DirectAttention"]
    out = attention(q, k, v, backend="triton")
    torch.autograd.grad(out.sum(), q, create_graph=True)
    assert applied == ["DirectAttention", "DirectAttention", "AttentionBackward"]


def test_sizes_that_are_symbols():
    """Under a transform, a tracer makes tensors of the ordinary type."""
    x = torch.randn(3, 2, 2, 8, 16)

    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda x: attention(x, x, x, mask=masks.causal(), backend="torch"))(x)

    traced = make_fx(function, tracing_mode="symbolic")(x)
    torch.testing.assert_close(traced(x), function(x))


@interpreted
def test_transforms_of_a_call_without_a_gradient_to_keep():
    """Forward mode needs no requires_grad, and reaches a backward without create_graph, as does vmap."""
    q, k, v = qkv(1, 2, 5, 8, dtype=torch.float64)
    douts = torch.stack(qkv(1, 2, 5, 8, dtype=torch.float64))
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(q, douts[0]), k, v, backend="triton")
        assert forward_ad.unpack_dual(out).tangent is not None
    q.requires_grad_()
    out = attention(q, k, v, backend="triton")
    with forward_ad.dual_level():
        (dq,) = torch.autograd.grad(out, q, forward_ad.make_dual(douts[0], douts[1]), retain_graph=True)
        tangent = forward_ad.unpack_dual(dq).tangent
    torch.testing.assert_close(tangent, torch.autograd.grad(out, q, douts[1], retain_graph=True)[0])
    (found,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)
    for dq, dout in zip(found, douts, strict=True):
        torch.testing.assert_close(dq, torch.autograd.grad(out, q, dout, retain_graph=True)[0])


def in_another_layout(x: Tensor) -> Tensor:
    """Store ``x`` as ``(batch, seqlen, nheads, head_dim)``, as a part of a larger tensor."""
    wide = torch.zeros(x.shape[0], x.shape[2], 3, *x.shape[1::2], dtype=x.dtype)
    wide[:, :, 1] = x.transpose(1, 2)
    return wide[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal("top_left"), masks.full()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_k", [1, 9, 13, 300])
@pytest.mark.parametrize("strided", [False, True])
def test_the_answer_of_a_plain_call(mask, dtype, seqlen_k, strided):
    q, (k, v) = qkv(2, 3, 9, 8, dtype=dtype)[0], qkv(2, 3, seqlen_k, 8, dtype=dtype)[1:]
    if strided:
        q, k, v = map(in_another_layout, (q, k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    golden = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, expected = attention(q, k, v, mask=mask, backend="torch"), reference.attention(*golden, mask=mask)[0]
    tolerance = {"rtol": 0.0, "atol": 0.05 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    for x, y in zip(found, torch.autograd.grad(expected.sum(), golden), strict=True):
        torch.testing.assert_close(x.double(), y, **tolerance)


def expect_no_plain_answer(q: Any, k: Any, v: Any, mask: Any = None, backend: Any = "torch") -> None:
    assert fast_path.attention(q, k, v, mask, backend) is None


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_a_non_finite_argument_is_no_plain_call(name, value, mask):
    q, k, v = qkv(2, 3, 9, 8)
    {"q": q, "k": k, "v": v}[name][1, 2, 5, 3] = value
    expect_no_plain_answer(q, k, v, mask)
    expected = reference.attention(q, k, v, mask=mask)[0]
    torch.testing.assert_close(attention(q, k, v, mask=mask, backend="torch"), expected, equal_nan=True)


def test_values_whose_sum_overflows_are_no_plain_call():
    q, k, v = qkv(1, 1, 4, 8)
    v = torch.full_like(v, 2e37)
    expect_no_plain_answer(q, k, v)
    assert attention(q, k, v, backend="torch").isfinite().all()


def overlapping(x: Tensor) -> Tensor:
    return x.flatten().as_strided(x.shape, (x.stride(0), x.stride(1), x.shape[3] // 2, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k.double(), v),
        lambda q, k, v: (q.int(), k.int(), v.int()),
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q[0, 0], k, v),
        lambda q, k, v: (q, k[0], v[0]),
        lambda q, k, v: (q, k[:1], v[:1]),
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q, k, v[..., :4]),
        lambda q, k, v: (q[..., :4], k, v),
        lambda q, k, v: (q, k, v[:, :, :5]),
        lambda q, k, v: (q[:, :, :0], k, v),
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v: (q[:0], k[:0], v[:0]),
        lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
        lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]),
        lambda q, k, v: (q.mT.contiguous().mT, k, v),
        lambda q, k, v: (q[..., ::2], k[..., ::2], v[..., ::2]),
        lambda q, k, v: (overlapping(q), k, v),
        lambda q, k, v: (q, k, overlapping(v)),
        lambda q, k, v: (q, k[:, :, :1].expand_as(k), v),
        lambda q, k, v: (q, k.to("meta"), v),
        lambda q, k, v: (q.tolist(), k, v),
        lambda q, k, v: (torch.nn.Parameter(q), k, v),
    ],
)
def test_a_call_that_needs_checks_is_no_plain_call(change):
    expect_no_plain_answer(*change(*qkv(2, 4, 8, 8)))


LONG = 300  # more scores than a plain call may have
MASKS = {
    "window": lambda n: masks.window(2, 0),
    "open window": lambda n: masks.window(None, 1),
    "causal window": lambda n: masks.causal() & masks.window(3, None),
    "padding": lambda n: masks.padding(torch.arange(n) < torch.tensor([[n], [n // 2]])),
    "all padding": lambda n: masks.padding(torch.arange(n) < torch.tensor([[0], [1]])),
    "causal padding": lambda n: masks.causal() & masks.padding(torch.arange(n) >= torch.tensor([[n // 2], [1]])),
    "boolean": lambda n: masks.boolean(torch.arange(n) % 3 == 0),
    "pairs": lambda n: masks.boolean(torch.rand(4, n, n) < 0.2),
    "prefix": lambda n: masks.prefix_lm(torch.tensor([1, n])),
    "documents": lambda n: masks.documents(torch.arange(n).expand(2, -1) // 3),
    "blocks": lambda n: masks.block_sparse(torch.tensor([[True]]), 304),
    "tree": lambda n: masks.tree(torch.rand(4, n, n) < 0.2),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_few_scores_is_a_plain_call(name):
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, 8, 8))
    mask = MASKS[name](8)
    out = fast_path.attention(q, k, v, mask, "torch")
    golden = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference.attention(*golden, mask=mask)[0]
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=1e-5)
    assert (out[~mask.dense(8, 8).any(-1).expand(2, 4, 8)] == 0).all()
    found = torch.autograd.grad(out.sum(), (q, k, v))
    for x, y in zip(found, torch.autograd.grad(expected.sum(), golden), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_many_scores_is_no_plain_call(name):
    expect_no_plain_answer(*qkv(2, 4, LONG, 8), MASKS[name](LONG))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(8, 8, dtype=torch.bool),
        torch.ones(8, 8),
        "causal",
        masks.function(triton_functions._sees, lambda b, h, i, j, args: i >= j, (torch.ones(8), 2)),
        masks.padding(torch.ones(2, 8, dtype=torch.bool, device="meta")),
    ],
)
def test_other_masks_are_no_plain_call(mask):
    expect_no_plain_answer(*qkv(2, 4, 8, 8), mask)


def test_a_window_of_few_queries_is_no_plain_call():
    """The window may leave them few of the keys."""
    (q, _, _), (_, k, v) = qkv(2, 4, 1, 8), qkv(2, 4, 8, 8)
    expect_no_plain_answer(q, k, v, masks.window(2, 0))


def test_a_plain_call_with_a_mask_that_does_not_fit():
    with pytest.raises(ValueError, match="padding"):
        attention(*qkv(2, 4, 8, 8), mask=masks.padding(torch.ones(2, 7, dtype=torch.bool)), backend="torch")


def test_other_circumstances_are_no_plain_call(monkeypatch):
    q, k, v = qkv(2, 4, 8, 8)
    assert fast_path.attention(q, k, v, None, "torch") is not None
    expect_no_plain_answer(q, k, v, backend="triton")
    expect_no_plain_answer(q, k, v, backend="cuda")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect_no_plain_answer(q, k, v)
        assert attention(q, k, v, backend="torch").dtype == torch.bfloat16

    def transformed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        expect_no_plain_answer(q, k, v)
        return q

    torch.vmap(transformed)(*(x[None] for x in (q, k, v)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    expect_no_plain_answer(q, k, v, backend=None)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert fast_path.attention(q, k, v, None, None) is not None


@pytest.mark.parametrize(
    "option",
    [
        {"scale": 0.5},
        {"softcap": 5.0},
        {"bias": torch.ones(8, 8)},
        {"sinks": torch.zeros(4)},
        {"rope": Rope.from_theta(8, 8)},
        {"dropout_p": 0.5},
        {"return_lse": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_is_no_plain_call(monkeypatch, option):
    def refuse(*args: object) -> None:
        raise AssertionError("a plain call")

    monkeypatch.setattr(fast_path, "attention", refuse)
    attention(*qkv(2, 4, 8, 8), backend="torch", **option)


@pytest.mark.parametrize("dropout_p", [False, 0, "0", None, math.nan])
def test_wrong_dropout_of_a_call_that_is_plain_otherwise(dropout_p):
    q, k, v = qkv(2, 4, 8, 8)
    if dropout_p == 0 and not isinstance(dropout_p, bool):
        attention(q, k, v, dropout_p=dropout_p, backend="torch")
    else:
        with pytest.raises((TypeError, ValueError), match="dropout_p: got"):
            attention(q, k, v, dropout_p=dropout_p, backend="torch")
