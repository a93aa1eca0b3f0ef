"""Packed sequences: each gives the same results as alone, whatever else is in the pack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, attention, attention_varlen, biases, masks, testing
from fusedattn.testing import triton_functions
from tests.conftest import BACKENDS, DEVICE, INTERPRETING, assert_equal, assert_ratios, triton_attention
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS_Q, LENGTHS_K = (13, 0, 40, 1, 33), (20, 5, 40, 37, 0)
LONGEST, N = 40, 5
TOTAL_Q, TOTAL_K = sum(LENGTHS_Q) + 3, sum(LENGTHS_K) + 2  # some tokens belong to no sequence


def stops(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)


# Its own generator, so that no import which draws numbers changes these.
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=GENERATOR)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


ROPE = Rope.from_theta(HEAD_DIM, 64).at(integers(64, TOTAL_Q), integers(64, 1, TOTAL_K))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window, top-left": {"mask": masks.causal("top_left") & masks.window(9, None, "top_left")},
    "padding": {"mask": masks.causal() & masks.padding(uniform(1, TOTAL_K) < 0.6)},
    "prefix": {"mask": masks.prefix_lm(torch.tensor([3, 0, 17, 37, 0]))},
    "documents": {"mask": masks.documents(torch.arange(TOTAL_Q)[None] // 7, torch.arange(TOTAL_K)[None] // 7)},
    "layout": {"mask": masks.causal() & masks.block_sparse(uniform(N, HEADS, 3, 3) < 0.6, 16)},
    "boolean": {"mask": masks.boolean(uniform(N, 1, LONGEST, LONGEST) < 0.6)},
    "tree": {"mask": masks.tree(uniform(N, HEADS, LONGEST, LONGEST) < 0.6)},
    "tree of all, causal": {"mask": masks.causal() & masks.tree(uniform(LONGEST, LONGEST) < 0.6)},
    "bias of all": {"bias": biases.tensor(normal(1, HEADS, LONGEST, LONGEST)) + biases.relative(normal(HEADS, 1, 7))},
    "bias of each": {
        "bias": biases.tensor(normal(N, 1, 1, LONGEST)) + biases.relative(normal(N, 1, LONGEST, 7)),
        "mask": masks.causal(),
    },
    "alibi": {"bias": biases.alibi(uniform(N, HEADS)), "mask": masks.causal()},
    "soft-cap, sinks": {"softcap": 2.0, "sinks": normal(HEADS), "mask": masks.causal("top_left")},
    "rope, positions": {"rope": ROPE},
    "one pass": {"deterministic": False, "mask": masks.causal("top_left"), "rope": ROPE},
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([5]), "mask": masks.causal()},
    "functions": {
        "mask": triton_functions.mask_function(N, HEADS, torch.Generator().manual_seed(0)),
        "score_mod": triton_functions.score_function(HEADS, torch.Generator().manual_seed(1)),
    },
}


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if hasattr(x, "to") else x for name, x in options.items()}


def results(
    backend: str, dtype: torch.dtype, inputs: tuple[Tensor, ...], options: dict[str, Any], lengths_q: tuple[int, ...]
) -> dict[str, Tensor]:
    """out, lse and all gradients."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in zip("qkv", inputs, strict=True)}
    options, wide = dict(options), torch.promote_types(dtype, torch.float32)
    if options.get("bias") is not None:
        for name in ("tensor", "relative", "slopes"):
            x = getattr(options["bias"], name)
            if x is not None:
                leaves[name] = x.to(wide if name == "slopes" else dtype).requires_grad_()
                options["bias"] = replace(options["bias"], **{name: leaves[name]})
    if options.get("score_mod") is not None:
        leaves["learned"] = options["score_mod"].learned.to(wide).requires_grad_()
        options["score_mod"] = options["score_mod"].with_learned(leaves["learned"])
    if options.get("sinks") is not None:
        options["sinks"] = leaves["sinks"] = options["sinks"].to(dtype).requires_grad_()
    out, lse = attention_varlen(
        leaves["q"], leaves["k"], leaves["v"], stops(lengths_q), stops(LENGTHS_K), LONGEST, LONGEST,
        return_lse=True, backend=backend, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out)
    dlse = torch.randn(lse.shape, generator=generator).to(lse).masked_fill(lse.detach() == -torch.inf, 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    gradients = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def packed_inputs(head_dim_v: int = 24) -> tuple[Tensor, ...]:
    shapes = ((TOTAL_Q, HEADS, HEAD_DIM), (TOTAL_K, KV_HEADS, HEAD_DIM), (TOTAL_K, KV_HEADS, head_dim_v))
    return tuple(torch.randn(*shape).to(DEVICE) for shape in shapes)


def slope_terms(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Sums of the absolute terms of dslopes, each a sum over pairs: float64 ``(N, HEADS)``."""
    of_pairs = torch.zeros(N, HEADS, LONGEST, LONGEST, device=DEVICE)  # its gradient is that of the scores
    options = {**options, "bias": options["bias"] + biases.tensor(of_pairs)}
    dscores = results("torch", torch.float64, inputs, options, LENGTHS_Q)["dtensor"].abs()
    slopes = torch.ones(N, HEADS, dtype=torch.float64, device=DEVICE)
    lengths = torch.tensor(LENGTHS_Q, device=DEVICE), torch.tensor(LENGTHS_K, device=DEVICE)
    distances = biases.alibi(slopes).dense(LONGEST, LONGEST, lengths=lengths).abs()
    return (dscores * distances).sum((2, 3))


@pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")
@pytest.mark.parametrize("name", OPTIONS)
def test_meaning(name):
    """The same results as the torch backend, which computes one sequence after the other."""
    inputs, options = packed_inputs(), moved(OPTIONS[name])
    actual, expected = (results(x, torch.float64, inputs, options, LENGTHS_Q) for x in ("triton", "torch"))
    torch.testing.assert_close(actual, expected)


@quick.every(6)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_budget(name, dtype):
    inputs, options = tuple(x.to(dtype) for x in packed_inputs()), moved(OPTIONS[name])
    actual = results("triton", dtype, inputs, options, LENGTHS_Q)
    truth = results("torch", torch.float64, inputs, options, LENGTHS_Q)
    eager = results("torch", dtype, inputs, options, LENGTHS_Q)
    terms = {"dslopes": slope_terms(inputs, options)} if name == "alibi" else {}
    ratios = {x: testing.compare(actual[x], truth[x], eager[x], terms.get(x), dtype) for x in truth}
    assert_ratios(ratios, name)


def test_rope_at_default_positions():
    """The last query has the position of the last key; surplus queries would have positions before the first key."""
    inputs = packed_inputs()
    options = {"rope": Rope.from_theta(HEAD_DIM, LONGEST, device=DEVICE), "mask": masks.causal()}
    lengths = (13, 0, 40, 1, 0)
    actual = results("triton", torch.float32, inputs, options, lengths)
    truth = results("torch", torch.float64, inputs, options, lengths)
    eager = results("torch", torch.float32, inputs, options, lengths)
    assert_ratios({name: testing.compare(actual[name], truth[name], eager[name]) for name in truth})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_is_as_if_it_were_alone(dtype):
    """Bit for bit: no other sequence influences its results."""
    # Keys and values have a common part, so that rounding residuals matter.
    packed = [(x + offset).to(dtype).requires_grad_() for x, offset in zip(packed_inputs(), (0, 16, 16), strict=True)]
    third = [slice(13, 53), slice(25, 65), slice(25, 65)]  # the third sequence of q, k and v
    alone = [x[own].detach().transpose(0, 1)[None].requires_grad_() for x, own in zip(packed, third, strict=True)]
    out, lse = attention_varlen(
        *packed, stops(LENGTHS_Q), stops(LENGTHS_K), LONGEST, LONGEST, mask=masks.causal(), return_lse=True,
        backend="triton",
    )  # fmt: skip
    expected = dict(zip(("out", "lse"), triton_attention(*alone, mask=masks.causal(), return_lse=True), strict=True))
    found = {"out": out[third[0]].transpose(0, 1)[None], "lse": lse[None, :, third[0]]}
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, packed, dout)
    own = torch.autograd.grad(expected["out"], alone, dout[third[0]].transpose(0, 1)[None])
    for name, x, at, y in zip(("dq", "dk", "dv"), gradients, third, own, strict=True):
        found[name], expected[name] = x[at].transpose(0, 1)[None], y
    assert_equal(found, expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rows_of_no_sequence(backend):
    """Out is 0, lse -inf, gradients are 0, and NaN there reaches nothing."""
    q, k, v = packed_inputs()
    q[-3:], k[-2:], v[-2:] = torch.nan, torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(
        *leaves, stops(LENGTHS_Q), stops(LENGTHS_K), LONGEST, LONGEST, return_lse=True, backend=backend
    )
    assert (out[-3:] == 0).all()
    assert (lse[:, -3:] == -torch.inf).all()
    assert out.isfinite().all()
    for gradient, n in zip(torch.autograd.grad(out.sum(), leaves), (3, 2, 2), strict=True):
        assert (gradient[-n:] == 0).all()
        assert gradient.isfinite().all()


def test_the_longest_lengths_need_not_be_known():
    q, k, v = packed_inputs()
    lengths = stops(LENGTHS_Q), stops(LENGTHS_K)
    known = attention_varlen(q, k, v, *lengths, LONGEST, LONGEST, mask=masks.causal(), backend="triton")
    assert torch.equal(attention_varlen(q, k, v, *lengths, mask=masks.causal(), backend="triton"), known)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_no_sequences(backend):
    q, k, v = packed_inputs()
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = attention_varlen(q.requires_grad_(), k, v, none, none, backend=backend)
    assert (out == 0).all()
    if backend == "triton":  # eager attention has no gradient without a sequence
        assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nested_tensors(backend):
    """torch.nested's jagged layout, ``(batch, nheads, seqlen, head_dim)`` with a length for each sequence."""
    lengths = (5, 17, 2)

    def jagged(heads: int) -> tuple[Tensor, list[Tensor]]:
        parts = [torch.randn(n, heads, HEAD_DIM, device=DEVICE, requires_grad=True) for n in lengths]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2), parts

    (q, of_q), (k, of_k), (v, of_v) = jagged(HEADS), jagged(KV_HEADS), jagged(KV_HEADS)
    options = {"mask": masks.causal(), "rope": Rope.from_theta(HEAD_DIM, 32, device=DEVICE), "backend": backend}
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert out.is_nested
    assert (out.shape[0], out.shape[1]) == (3, HEADS)
    parts = zip(out.unbind(), lse.unbind(), of_q, of_k, of_v, strict=True)
    for own_out, own_lse, own_q, own_k, own_v in parts:
        alone = (x.detach().transpose(0, 1)[None] for x in (own_q, own_k, own_v))
        expected_out, expected_lse = attention(*alone, return_lse=True, **options)
        torch.testing.assert_close(own_out, expected_out[0])
        torch.testing.assert_close(own_lse, expected_lse[0])
    out.values().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (*of_q, *of_k, *of_v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_keys_than_all_queries(backend):
    """Without `max_seqlen_k`, which then defaults to the number of keys."""
    q, k = torch.randn(3, 2, 8, device=DEVICE), torch.randn(9, 2, 8, device=DEVICE)
    stops = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (3, 9)]
    found = attention_varlen(q, k, k, *stops, backend=backend)
    expected = attention(*(x.transpose(0, 1)[None] for x in (q, k, k)), backend="torch")
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


def test_nested_and_dense_do_not_mix():
    x = torch.nested.as_nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="k: got a dense tensor, allowed is a nested tensor, as q is"):
        attention(x, torch.randn(2, 2, 5, 4), x)
    with pytest.raises(ValueError, match="v: got NoneType, allowed is a nested tensor, as q is"):
        attention(x, x, None)
    by_token = x.transpose(1, 2)
    with pytest.raises(ValueError, match=r"q: got a nested tensor of shape .*ragged in seqlen"):
        attention(by_token, by_token, by_token)
    old = torch.nested.nested_tensor([torch.randn(3, 2, 4)])
    with pytest.raises(ValueError, match=r"q: got the layout torch\.strided"):
        attention(old, old, old)


def test_sinks_get_nothing_from_rows_of_no_sequence():
    """Its lse is -inf without any sink, so its gradient must not reach the sinks."""
    q, k, v = packed_inputs()
    found = []
    for n in (TOTAL_Q, TOTAL_Q - 3):  # with the rows after the last sequence, and without
        sinks = torch.linspace(-1, 1, HEADS, device=DEVICE).requires_grad_()
        _, lse = attention_varlen(
            q[:n], k, v, stops(LENGTHS_Q), stops(LENGTHS_K), LONGEST, LONGEST, sinks=sinks, return_lse=True,
            backend="triton",
        )  # fmt: skip
        found.append(torch.autograd.grad(lse, sinks, torch.ones_like(lse))[0])
    torch.testing.assert_close(*found)
