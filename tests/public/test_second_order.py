"""Derivatives of derivatives, forward-mode derivatives and vmap: PyTorch computes them, and kernels the first order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fusedattn import Rope, attention, attention_varlen, biases, masks, reference
from fusedattn.backends.torch import mask_plan
from fusedattn.testing import Case, make_inputs
from tests.conftest import INTERPRETING, triton_attention
from tests.helpers import quick

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels"),
]

OPTIONS = {
    "causal": {"mask": masks.causal()},
    "rope, soft-cap, window": {"mask": masks.window(3, 1), "rope": Rope.from_theta(4, 16), "softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([7])},
}


def qkv(seqlen_q: int = 3, seqlen_k: int = 4) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(1, heads, n, 4, dtype=torch.float64) for heads, n in ((2, seqlen_q), (1, seqlen_k), (1, seqlen_k))
    )


def functions(**options: object) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return (
        lambda q, k, v: triton_attention(q, k, v, **options),
        lambda q, k, v: reference.attention(q, k, v, **options)[0],
    )


@quick.every(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradgradcheck(name):
    fused, _ = functions(**OPTIONS[name])
    inputs = [x.requires_grad_() for x in qkv(2, 3)]
    assert torch.autograd.gradgradcheck(fused, inputs, fast_mode=True)


def test_gradgradcheck_of_everything_that_gets_a_gradient():
    q, k, v = qkv(2, 3)
    bias, relative, sinks = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 2, 3), (2, 2, 3), (2,)))

    def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, relative: Tensor, sinks: Tensor) -> Any:
        both = biases.tensor(bias) + biases.relative(relative)
        return triton_attention(q, k, v, bias=both, sinks=sinks, return_lse=True)

    inputs = [x.requires_grad_() for x in (q, k, v, bias, relative, sinks)]
    assert torch.autograd.gradgradcheck(fused, inputs, fast_mode=True)


def test_packed():
    q, k, v = (torch.randn(5, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    stops = torch.tensor([0, 2, 5], dtype=torch.int32)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, stops, stops, 3, 3, mask=masks.causal(), backend="triton")

    assert torch.autograd.gradgradcheck(fused, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_jvp(name):
    fused, eager = functions(**OPTIONS[name])
    inputs, tangents = qkv(), qkv()
    torch.testing.assert_close(jvp(fused, inputs, tangents), jvp(eager, inputs, tangents))


def test_jvp_of_some_inputs():
    fused, eager = functions(mask=masks.causal())
    q, k, v = qkv()
    got, expected = (jvp(lambda k, f=f: f(q, k, v), (k,), (torch.ones_like(k),)) for f in (fused, eager))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, 1, None)])
def test_vmap(in_dims):
    fused, eager = functions(mask=masks.causal())
    inputs = [x if dim is None else torch.randn(3, *x.shape, dtype=x.dtype).movedim(0, dim)
              for x, dim in zip(qkv(), in_dims, strict=True)]  # fmt: skip
    each = [[x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)] for i in range(3)]
    torch.testing.assert_close(vmap(fused, in_dims)(*inputs), torch.stack([eager(*x) for x in each]))

    def of_sum(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return grad(lambda q, k, v: f(q, k, v).square().sum(), argnums=(0, 1, 2))

    got = vmap(of_sum(fused), in_dims)(*inputs)
    expected = zip(*(of_sum(eager)(*x) for x in each), strict=True)
    torch.testing.assert_close(got, tuple(map(torch.stack, expected)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.causal()}, {"softcap": 2.0}, {"bias": torch.randn(4, 4)}],
    ids=lambda options: ", ".join(options),
)
def test_vmap_of_the_torch_backend(options):
    """Under vmap the torch backend cannot look for NaN."""
    x = torch.randn(3, 2, 2, 4, 8)

    def call(x: Tensor) -> Tensor:
        return attention(x, x, x, backend="torch", **options)

    of_sum = grad(lambda x: call(x).square().sum())
    torch.testing.assert_close(vmap(call)(x), torch.stack([call(y) for y in x]))
    torch.testing.assert_close(vmap(of_sum)(x), torch.stack([of_sum(y) for y in x]))
    torch.testing.assert_close(grad(lambda x: vmap(call)(x).square().sum())(x), vmap(of_sum)(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients_of_the_torch_backend(monkeypatch):
    """Gradients as torch.autograd.functional.jacobian(vectorize=True) takes them, of a result computed in pieces."""
    monkeypatch.setattr(mask_plan, "CALL", 1)
    q, k, v = (x.requires_grad_() for x in qkv(9, 9))
    monkeypatch.setattr(mask_plan, "BLOCKS", (3,))
    out = attention(q, k, v, mask=masks.window(2, 1), backend="torch")
    douts = torch.randn(2, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in douts]
    torch.testing.assert_close(list(got), [torch.stack(x) for x in zip(*expected, strict=True)])


@pytest.mark.parametrize("transform", [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))])
def test_hessian(transform):
    fused, eager = functions(mask=masks.causal())
    q, k, v = qkv(2, 2)
    got, expected = (transform(lambda k, f=f: f(q, k, v).square().sum())(k) for f in (fused, eager))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("transform", [jacfwd, jacrev])
def test_derivatives_of_one_gradient_by_another_input(transform):
    """Of dq by k, which needs no gradient itself when dq is computed."""
    fused, eager = functions(mask=masks.causal())
    q, k, v = qkv(2, 2)
    got, expected = (transform(lambda k, f=f: grad(lambda q: f(q, k, v).square().sum())(q))(k) for f in (fused, eager))
    torch.testing.assert_close(got, expected)


def test_first_order_gradients_of_torch_func_run_the_kernels(monkeypatch):
    inputs = make_inputs(Case(batch=1, seqlen_q=5, seqlen_k=5, head_dim=8))
    expected = torch.func.grad(lambda q: reference.attention(q, inputs.k, inputs.v)[0].sum())(inputs.q)
    monkeypatch.setattr(reference, "attention", None)
    got = torch.func.grad(lambda q: triton_attention(q, inputs.k, inputs.v).sum())(inputs.q)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_a_mask_under_vmap_is_refused():
    q, k, v = (x.float() for x in qkv())
    allowed = torch.ones(3, 3, 4, dtype=torch.bool)
    with pytest.raises((RuntimeError, NotImplementedError), match="Batching rule"):
        vmap(lambda m: triton_attention(q, k, v, mask=m))(allowed)
