"""The torch backend where it writes weights out: in steps of few scores, the result is the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import attention, attention_varlen, masks, reference
from fusedattn.backends.torch import eager, mask_plan
from fusedattn.testing.triton_functions import score_function

pytestmark = pytest.mark.usefixtures("_seed")

B, H, H_KV, N, M, D = 3, 4, 2, 37, 41, 8


@pytest.fixture(params=[1, 3000, 7000, 2**17], ids=lambda n: f"{n} scores")
def _steps_of(request, monkeypatch):
    """Steps of some queries of a head, of a head, of a batch, and of everything."""
    monkeypatch.setattr(eager, "SCORES", request.param)
    monkeypatch.setattr(eager, "LEAST_ROWS", 10)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, n, h, D, dtype=dtype).transpose(1, 2) for n, h in ((N, H), (M, H_KV), (M, H_KV)))
    return q, k, v


def options() -> dict[str, dict[str, Any]]:
    seed = torch.tensor([7])
    return {
        "dropout": {"dropout_p": 0.3, "dropout_seed": seed},
        "softcap": {"softcap": 2.0},
        "softcap and a mask": {"softcap": 2.0, "mask": masks.causal()},
        "softcap and dropout": {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": seed, "mask": masks.window(9, 4)},
        "padding": {
            "softcap": 2.0,
            "mask": masks.padding(torch.arange(M) < torch.tensor([[M], [M // 3], [0]])),
            "dropout_p": 0.3,
            "dropout_seed": seed,
        },
        "documents": {
            "dropout_p": 0.3,
            "dropout_seed": seed,
            "mask": masks.documents(torch.arange(N)[None].expand(B, N) // 12, torch.arange(M)[None].expand(B, M) // 12),
        },
        "a mask of each head": {"dropout_p": 0.3, "dropout_seed": seed, "mask": torch.rand(1, H, N, M) < 0.5},
        "a mask of each batch": {"dropout_p": 0.3, "dropout_seed": seed, "mask": torch.rand(B, 1, N, M) < 0.5},
        "a bias of each head": {"softcap": 2.0, "bias": torch.randn(H, N, M).double()},
        "a bias of everything": {"softcap": 2.0, "bias": torch.randn(B, H, N, M).double(), "sinks": torch.randn(H)},
        "a bias of keys": {"softcap": 2.0, "bias": torch.randn(B, 1, 1, M).double(), "mask": masks.causal()},
        "sinks": {"softcap": 2.0, "sinks": torch.randn(H).double(), "mask": masks.window(3, 0)},
        "sinks and dropout": {"sinks": torch.randn(H).double(), "dropout_p": 0.3, "dropout_seed": seed},
        "a function": {
            "score_mod": score_function(H, torch.Generator().manual_seed(1)),
            "softcap": 2.0,
            "mask": masks.causal(),
        },
    }


@pytest.mark.usefixtures("_steps_of")
@pytest.mark.parametrize("name", options())
def test_by_steps(name):
    """In float64: out, lse and the gradients through both."""
    given = options()[name]
    x = [x.requires_grad_() for x in qkv()]
    if "sinks" in given:
        given["sinks"] = given["sinks"].double().requires_grad_()
        x.append(given["sinks"])
    got, expected = attention(*x[:3], **given, return_lse=True, backend="torch"), reference.attention(*x[:3], **given)
    alone = attention(*x[:3], **given, backend="torch")
    torch.testing.assert_close(got, expected[:2])
    torch.testing.assert_close(alone, expected[0])
    douts = torch.randn_like(got[0]), torch.randn_like(got[1])
    seen = expected[1].isfinite()
    grads, wanted = (
        torch.autograd.grad((out, lse.masked_fill(~seen, 0.0)), x, douts) for out, lse in (got, expected[:2])
    )
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_packed_sequences_are_not_rounded_on_the_way(dtype, return_lse):
    """In 16 bits, a packed result has the same error as one that is not packed."""
    q, k, v = (torch.randn(B, N, H, D, dtype=dtype) for _ in range(3))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    offsets = torch.arange(0, B * N + 1, N, dtype=torch.int32)
    given: dict[str, Any] = {"scale": 2.0, "return_lse": return_lse, "backend": "torch"}
    got = attention_varlen(*packed, offsets, offsets, **given)
    expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), **given)
    if return_lse:
        torch.testing.assert_close(got[1], expected[1].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)
        got, expected = got[0], expected[0]
    assert torch.equal(got, expected.transpose(1, 2).flatten(0, 1))


@pytest.mark.thorough
def test_derivatives_of_derivatives():
    """If torch's kernel computes the gradients, eager functions compute their derivatives."""
    q, k, v = (x[:1, :, :5].detach().requires_grad_() for x in qkv())
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    for mask in (masks.full(), masks.causal("top_left"), masks.window(2, 1), torch.rand(5, 5) < 0.7):

        def call(*x: Tensor, mask: Any = mask) -> Any:
            return attention(*x[:3], sinks=x[3] if len(x) > 3 else None, mask=mask, return_lse=True, backend="torch")

        assert torch.autograd.gradgradcheck(lambda *x: call(*x)[0], (q, k, v, sinks))
        finite = mask if isinstance(mask, Tensor) else mask.dense(5, 5)
        if finite.any(-1).all():
            assert torch.autograd.gradgradcheck(call, (q, k, v))


def test_derivatives_of_derivatives_in_16_bits():
    """Scores are not rounded: the error is that of rounding the inputs and the results once."""
    inputs = [x.to(torch.bfloat16) for x in qkv()]

    def second(dtype: torch.dtype) -> Tensor:
        x = [y.to(dtype).requires_grad_() for y in inputs]
        out, lse = attention(*x, scale=2.0, return_lse=True, backend="torch")
        (grad,) = torch.autograd.grad(out.float().sum() + lse.sum(), x[0], create_graph=True)
        return torch.autograd.grad(grad.float().square().sum(), x[1])[0].double()

    exact = second(torch.float64)
    assert (second(torch.bfloat16) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("lost", ["k", "v", "both"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask",
    [
        masks.padding(torch.arange(M) < torch.tensor([[M - 5], [M // 3], [0]])),
        masks.padding(torch.arange(M) < torch.tensor([[M - 5], [M // 3], [0]])) & masks.causal(),
        masks.boolean((torch.arange(M) < torch.tensor([[M - 5], [M // 3], [0]]))[:, None, None]),
    ],
    ids=["padding", "causal", "boolean"],
)
def test_padding_may_have_any_value(monkeypatch, mask, value, lost):
    """Padding may hold any value without a call of the reference, with or without gradients, unless a query sees it."""
    q, k, v = (x.detach() for x in qkv())
    hidden = ~mask.dense(N, M, batch=B, nheads=1).any(2)[:, :, :, None]
    poisoned = [q, *(x.masked_fill(hidden, value) if lost in (name, "both") else x for name, x in (("k", k), ("v", v)))]
    dout = torch.randn(B, H, N, D, dtype=torch.float64)

    def results(*x: Tensor) -> list[Tensor]:
        x = tuple(y.detach().requires_grad_() for y in x)
        out, lse = attention(*x, mask=mask, return_lse=True, backend="torch")
        alone = attention(*x, mask=mask, backend="torch")
        return [out, lse, alone, *torch.autograd.grad(out, x, dout), *torch.autograd.grad(alone, x, dout)]

    expected = results(q, k, v)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "attention", None)
        got = results(*poisoned)
    torch.testing.assert_close(got, expected)
    seen = poisoned[1].clone()
    seen[0, 0, 0] = value
    out = attention(poisoned[0], seen, poisoned[2], mask=mask, backend="torch")
    torch.testing.assert_close(out, reference.attention(poisoned[0], seen, poisoned[2], mask=mask)[0], equal_nan=True)
    queries = q.clone()
    queries[:, 0, 3, 0] = torch.nan
    out = attention(queries, *poisoned[1:], mask=mask, backend="torch")
    expected_out = expected[2].detach().clone()
    expected_out[:, 0, 3] = torch.where(hidden.all(2)[:, 0], 0.0, torch.nan)
    torch.testing.assert_close(out, expected_out, equal_nan=True)
    x = [y.detach().requires_grad_() for y in (queries, *poisoned[1:])]
    grads, wanted = (
        torch.autograd.grad(function(*x, mask=mask, **given)[0], x, dout)
        for function, given in (
            (attention, {"return_lse": True, "backend": "torch"}),
            (reference.attention, {}),
        )
    )
    assert wanted[1].isnan().any()
    torch.testing.assert_close(grads, wanted, equal_nan=True)


@pytest.mark.parametrize("alone", range(4), ids=["q", "k", "v", "sinks"])
def test_one_gradient_alone_is_that_beside_the_others(alone):
    x = (*qkv(torch.float32), torch.randn(H))

    def grads(*leaves: int) -> tuple[Tensor, ...]:
        q, k, v, sinks = (x[i].clone().requires_grad_(i in leaves) for i in range(4))
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True, backend="torch")
        return torch.autograd.grad(out.sum() + lse.sin().sum(), [(q, k, v, sinks)[i] for i in leaves])

    torch.testing.assert_close(grads(alone)[0], grads(0, 1, 2, 3)[alone], rtol=0, atol=0)


def test_a_nan_of_a_query_shows_in_the_gradient_of_sinks():
    """Also if q, k and v get no gradient."""
    q, k, v = qkv()
    q[1, 2, 3] = torch.nan
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    out = attention(q, k, v, sinks=sinks, backend="torch")
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert grad.isnan().tolist() == [False, False, True, False]


def test_lse_of_queries_that_no_piece_has(monkeypatch):
    """It is ``-inf``, beside pieces that leave such queries out."""
    monkeypatch.setattr(mask_plan, "FEW", 0)
    monkeypatch.setattr(mask_plan, "CALL", 1)
    q, k, v = qkv()
    mask = masks.causal() & masks.padding(torch.arange(M) >= torch.tensor([[0], [M // 2], [M]]))
    got = attention(q, k, v, mask=mask, return_lse=True, backend="torch")
    torch.testing.assert_close(got, reference.attention(q, k, v, mask=mask)[:2])
    assert (got[1] == -torch.inf).any()
