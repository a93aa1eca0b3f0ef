"""Gradients of tensors that scores read by index: ALiBi's slopes, and tensors that a user's function reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedattn import ArgGradient, ScoreMod, attention, attention_varlen, biases, masks
from fusedattn.kernels import exact_sum
from fusedattn.kernels.exact_sum import add_exactly
from tests.conftest import DEVICE, INTERPRETING, torch_attention, triton_attention
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses

pytestmark = pytest.mark.usefixtures("poison", "_seed")
in_float64 = pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")

BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 4, 2, 19, 35, 8
WIDTH = 5  # of the picture in `picture`, whose points are queries and keys


@triton.jit
def _unit(score, batch, head, q_index, k_index, args):
    return 1.0 + 0.0 * score


@triton.jit
def _score(score, batch, head, q_index, k_index, args):
    return score


@triton.jit
def _temperature(score, batch, head, q_index, k_index, args):
    return score * tl.load(args[0] + head)


@triton.jit
def _temperature_derivative(score, batch, head, q_index, k_index, args):
    return tl.load(args[0] + head) + 0.0 * score


@triton.jit
def _head(batch, head, q_index, k_index, args):
    return head


def temperature(dtype: torch.dtype) -> ScoreMod:
    """A factor for each head: the index depends on no pair."""
    return ScoreMod(
        _temperature, _temperature_derivative, lambda s, b, h, i, j, args: s * args[0][h],
        (torch.rand(HEADS, dtype=dtype) + 0.5,), (ArgGradient(0, _head, _score),),
    )  # fmt: skip


@triton.jit
def _gate(score, batch, head, q_index, k_index, args):
    row = (batch * args[2] + head) * args[3]
    return score + tl.load(args[0] + row + k_index) * tl.load(args[1] + q_index)


@triton.jit
def _gate_of_key(batch, head, q_index, k_index, args):
    return (batch * args[2] + head) * args[3] + k_index


@triton.jit
def _by_key(score, batch, head, q_index, k_index, args):
    return tl.load(args[1] + q_index) + 0.0 * score


@triton.jit
def _gate_of_query(batch, head, q_index, k_index, args):
    return q_index


@triton.jit
def _by_query(score, batch, head, q_index, k_index, args):
    return tl.load(args[0] + (batch * args[2] + head) * args[3] + k_index) + 0.0 * score


def gates(dtype: torch.dtype) -> ScoreMod:
    """Two tensors of different dtypes: one value for each key of each head and batch, and one for each query."""
    of_keys, of_queries = torch.randn(BATCH, HEADS, SEQLEN_K, dtype=dtype), torch.randn(SEQLEN_Q, dtype=torch.float64)
    return ScoreMod(
        _gate, _unit, lambda s, b, h, i, j, args: s + args[0][b, h, j] * args[1][i],
        (of_keys, of_queries, HEADS, SEQLEN_K),
        (ArgGradient(1, _gate_of_query, _by_query), ArgGradient(0, _gate_of_key, _by_key)),
    )  # fmt: skip


@triton.jit
def _step(q_index, k_index, width):
    """Index of a step across a picture in a table of ``(2 * width - 1) ** 2`` steps."""
    down = tl.minimum(tl.maximum(q_index // width - k_index // width, 1 - width), width - 1) + width - 1
    right = q_index % width - k_index % width + width - 1
    return down * (2 * width - 1) + right


@triton.jit
def _picture(score, batch, head, q_index, k_index, args):
    entry = _step(q_index, k_index, args[1])
    n = (2 * args[1] - 1) * (2 * args[1] - 1)
    return score * tl.load(args[0] + n + entry) + tl.load(args[0] + entry)


@triton.jit
def _picture_derivative(score, batch, head, q_index, k_index, args):
    n = (2 * args[1] - 1) * (2 * args[1] - 1)
    return tl.load(args[0] + n + _step(q_index, k_index, args[1])) + 0.0 * score


@triton.jit
def _picture_offset(batch, head, q_index, k_index, args):
    return _step(q_index, k_index, args[1])


@triton.jit
def _picture_factor(batch, head, q_index, k_index, args):
    return (2 * args[1] - 1) * (2 * args[1] - 1) + _step(q_index, k_index, args[1])


def _picture_eager(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, args: tuple[Any, ...]) -> Tensor:
    table, width = args
    down = (i // width - j // width).clamp(1 - width, width - 1) + width - 1
    right = i % width - j % width + width - 1
    return s * table[1, down, right] + table[0, down, right]


def picture(dtype: torch.dtype) -> ScoreMod:
    """A table of two-dimensional steps. Each pair reads two entries: an offset and a factor."""
    table = torch.randn(2, 2 * WIDTH - 1, 2 * WIDTH - 1, dtype=dtype)
    return ScoreMod(
        _picture, _picture_derivative, _picture_eager, (table, WIDTH),
        (ArgGradient(0, _picture_offset, _unit), ArgGradient(0, _picture_factor, _score)),
    )  # fmt: skip


MODS: dict[str, Callable[[torch.dtype], ScoreMod]] = {"temperature": temperature, "gates": gates, "picture": picture}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal, soft-cap": {"mask": masks.causal(), "softcap": 1.5, "scale": -0.4},
    "window, dropout": {"mask": masks.window(6, 4), "dropout_p": 0.3, "dropout_seed": torch.tensor([5], device=DEVICE)},
}
mods, options = pytest.mark.parametrize("mod", MODS), pytest.mark.parametrize("name", OPTIONS)


def qkv(dtype: torch.dtype, seqlen_q: int = SEQLEN_Q, seqlen_k: int = SEQLEN_K) -> list[Tensor]:
    sizes = ((HEADS, seqlen_q), (KV_HEADS, seqlen_k), (KV_HEADS, seqlen_k))
    return [torch.randn(BATCH, h, n, HEAD_DIM, dtype=dtype).to(DEVICE).requires_grad_() for h, n in sizes]


def learning(score_mod: ScoreMod) -> tuple[ScoreMod, list[Tensor]]:
    """Make the tensors with gradients new leaves. Returns the new function and the leaves."""
    args = list(score_mod.args)
    for i in score_mod.learned_args:
        args[i] = args[i].to(DEVICE).requires_grad_()
    return replace(score_mod, args=tuple(args)), [args[i] for i in score_mod.learned_args]


def gradients(function: Callable[..., Tensor], x: list[Tensor], leaves: list[Tensor], **given: Any) -> list[Tensor]:
    out = function(*x, **given)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return list(torch.autograd.grad(out, [*x, *leaves], dout))


@quick.every(2, start=1)
@in_float64
@options
@mods
def test_args(mod, name):
    score_mod, leaves = learning(MODS[mod](torch.float64))
    x = qkv(torch.float64)
    got, expected = (
        gradients(function, x, leaves, score_mod=score_mod, **OPTIONS[name])
        for function in (triton_attention, torch_attention)
    )
    torch.testing.assert_close(got, expected)
    assert all(bool((g != 0).any()) for g in got)


@in_float64
def test_args_of_packed_sequences():
    """A function gets the number of the sequence as its batch."""
    score_mod, leaves = learning(gates(torch.float64))
    x = qkv(torch.float64)
    stops_q, stops_k = (torch.arange(BATCH + 1, dtype=torch.int32) * n for n in (SEQLEN_Q, SEQLEN_K))

    def packed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v))
        out = attention_varlen(q, k, v, stops_q, stops_k, SEQLEN_Q, SEQLEN_K, backend="triton", **given)
        return out.unflatten(0, (BATCH, SEQLEN_Q)).transpose(1, 2)

    got, expected = (gradients(f, x, leaves, score_mod=score_mod) for f in (packed, torch_attention))
    torch.testing.assert_close(got, expected)


@quick.only(mod="gates")
@mods
def test_args_in_other_dtypes(mod):
    """A gradient has the dtype of its tensor; it is rounded once."""
    for dtype in (torch.float32, torch.bfloat16):
        score_mod, leaves = learning(MODS[mod](dtype))
        x = [y.detach().to(torch.float32).requires_grad_() for y in qkv(torch.float32)]
        got, expected = (
            gradients(function, x, leaves, score_mod=score_mod, mask=masks.causal())[3:]
            for function in (triton_attention, torch_attention)
        )
        assert [g.dtype for g in got] == [leaf.dtype for leaf in leaves]
        for a, b, leaf in zip(got, expected, leaves, strict=True):
            unit = max(torch.finfo(leaf.dtype).eps, torch.finfo(torch.float32).eps)
            torch.testing.assert_close(a, b, rtol=4 * unit, atol=16 * unit * b.abs().max().item())


@in_float64
def test_slopes():
    """Slopes, shared and per batch, from a table that is not contiguous, together with another bias."""
    x, table = qkv(torch.float64), torch.randn(HEADS, 1, 7, dtype=torch.float64, requires_grad=True)
    for slopes in (torch.rand(HEADS, dtype=torch.float64), torch.rand(BATCH, 2 * HEADS, dtype=torch.float64)[:, ::2]):
        leaf = slopes.requires_grad_()
        got, expected = (
            gradients(function, x, [leaf, table], bias=biases.alibi(leaf) + biases.relative(table))
            for function in (triton_attention, torch_attention)
        )
        torch.testing.assert_close(got, expected)


@quick.every(5, start=1)
@in_float64
@pytest.mark.parametrize("reach", [0, 3, 60])
@pytest.mark.parametrize(
    ("batch", "heads", "rows"),
    [(BATCH, HEADS, 1), (BATCH, 1, 1), (1, HEADS, 1), (1, 1, 1), (BATCH, HEADS, SEQLEN_Q), (1, 1, SEQLEN_Q)],
)
def test_relative(batch, heads, rows, reach):
    """Tables of every shape; a table of one row is shared by all queries."""
    table = torch.randn(batch, heads, rows, 2 * reach + 1, dtype=torch.float64, requires_grad=True)
    x = [y.detach() for y in qkv(torch.float64)]
    got, expected = (
        gradients(
            lambda *x, f=function: f(*x[:3], mask=masks.causal(), bias=biases.relative(x[3])),
            [*(y.requires_grad_() for y in x), table],
            [],
        )
        for function in (triton_attention, torch_attention)
    )
    torch.testing.assert_close(got, expected)


def test_a_shared_table_takes_no_room_for_queries(monkeypatch):
    """T5's table, which may have far fewer numbers than there are queries."""
    sizes: list[int] = []
    zeros = torch.zeros

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        sizes.append(zeros(*args, **{**kwargs, "device": "meta"}).numel())
        return zeros(*args, **kwargs)

    weight = torch.randn(8, HEADS, device=DEVICE, requires_grad=True)
    out = triton_attention(*qkv(torch.float32), bias=biases.t5(weight, max_distance=9))
    monkeypatch.setattr(torch, "zeros", counting)
    out.sum().backward()
    assert 0 < max(sizes) <= HEADS * 19 * exact_sum.WORDS.value


@in_float64
def test_second_order():
    score_mod, leaves = learning(temperature(torch.float64))
    x = [y.detach()[:1, :, :3].requires_grad_() for y in qkv(torch.float64)]
    slopes = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, factors: Tensor) -> Tensor:
        changed = replace(score_mod, args=(factors,))
        return triton_attention(q, k, v, bias=biases.alibi(slopes), score_mod=changed, softcap=2.0)

    assert torch.autograd.gradgradcheck(function, (*x, slopes, *leaves), fast_mode=True)


@pytest.mark.thorough
@mods
def test_compiled(mod):
    score_mod, leaves = learning(MODS[mod](torch.float32))
    slopes = torch.rand(HEADS, device=DEVICE, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, bias=biases.alibi(slopes), score_mod=score_mod, backend="triton")

    x = qkv(torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, expected = (gradients(f, x, [slopes, *leaves]) for f in (compiled, function))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.thorough
def test_the_order_of_batches_does_not_change_a_bit():
    """Also of tensors that all batches share: the sums are exact."""
    score_mod, leaves = learning(picture(torch.float32))
    slopes = torch.rand(HEADS, device=DEVICE, requires_grad=True)
    x = qkv(torch.float32)
    got, expected = (
        gradients(
            lambda q, k, v, order=order: triton_attention(
                q[order], k[order], v[order], mask=masks.causal(), bias=biases.alibi(slopes), score_mod=score_mod
            )[order],
            x,
            [slopes, *leaves],
        )
        for order in (slice(None), [1, 0])
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_no_gradient_is_computed_that_nobody_needs():
    x, slopes = qkv(torch.float32), torch.rand(HEADS, device=DEVICE)
    for score_mod, n in ((temperature(torch.float32), 0), (learning(temperature(torch.float32))[0], 1)):
        given = {"score_mod": replace(score_mod, args=(score_mod.args[0].to(DEVICE),)), "bias": biases.alibi(slopes)}
        with checked_accesses() if INTERPRETING else nullcontext() as accesses:
            triton_attention(*x, **given).sum().backward()
        assert accesses is None or accesses.launched.count("attention_bwd_learned") == n


@triton.jit
def _beyond(batch, head, q_index, k_index, args):
    return tl.where(k_index == 3, -1, tl.where(k_index == 4, 1 << 30, head))


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.float64] if INTERPRETING else [])], ids=str)
def test_an_index_that_is_not_there_adds_nothing(dtype):
    score_mod, (factors,) = learning(temperature(dtype))
    wrong = replace(score_mod, arg_gradients=(ArgGradient(0, _beyond, _score),))
    x = qkv(dtype)
    with checked_accesses() if INTERPRETING else nullcontext():
        (got,) = gradients(triton_attention, x, [factors], score_mod=wrong)[3:]
    assert got.isfinite().all()


@triton.jit
def _from_the_diagonal(score, batch, head, q_index, k_index, args):
    return score / (q_index - k_index)


def test_hidden_pairs_do_not_matter():
    """The derivative is infinite on the diagonal, which the mask hides."""
    score_mod, (factors,) = learning(temperature(torch.float32))
    odd = replace(score_mod, arg_gradients=(ArgGradient(0, _head, _from_the_diagonal),))
    mask = masks.boolean(~torch.eye(SEQLEN_Q, SEQLEN_K, dtype=torch.bool, device=DEVICE))
    (got,) = gradients(triton_attention, qkv(torch.float32), [factors], score_mod=odd, mask=mask)[3:]
    assert got.isfinite().all()


@pytest.mark.skipif(not INTERPRETING, reason="on a GPU compute-sanitizer looks at addresses")
def test_functions_get_queries_and_keys_that_are_there():
    """Also in tiles that reach beyond the last query or key: each tensor ends where its storage does."""
    score_mod, leaves = learning(gates(torch.float32))
    with checked_accesses():
        gradients(triton_attention, qkv(torch.float32), leaves, score_mod=score_mod)


def test_nothing_to_see_gives_zeros():
    score_mod, (factors,) = learning(temperature(torch.float32))
    slopes = torch.rand(HEADS, device=DEVICE, requires_grad=True)
    for seqlen_q, seqlen_k, mask in (
        (3, 0, masks.full()),
        (0, 3, masks.full()),
        (3, 4, masks.boolean(torch.zeros(3, 4, dtype=torch.bool, device=DEVICE))),
    ):
        x = qkv(torch.float32, seqlen_q, seqlen_k)
        out = triton_attention(*x, mask=mask, bias=biases.alibi(slopes), score_mod=score_mod)
        for gradient in torch.autograd.grad(out.sum(), (factors, slopes)):
            assert (gradient == 0).all()


def test_a_nan_reaches_the_tensors_that_its_query_reads():
    """It reaches nothing else."""
    score_mod, (factors,) = learning(temperature(torch.float32))
    slopes = torch.rand(BATCH, HEADS, device=DEVICE, requires_grad=True)
    x = qkv(torch.float32)
    with torch.no_grad():
        x[0][1, 2, 4, 3] = math.nan
    dfactors, dslopes = gradients(
        triton_attention, x, [factors, slopes], score_mod=score_mod, bias=biases.alibi(slopes)
    )[3:]
    assert dfactors.isnan().tolist() == [head == 2 for head in range(HEADS)]
    assert dslopes.isnan().nonzero().tolist() == [[1, 2]]


@triton.jit
def _add(sums, index_ptr, terms_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < n, other=0)
    terms = tl.load(terms_ptr + at, mask=at < n, other=0.0)
    add_exactly(sums, index, terms, at < n)


def exactly(terms: Tensor, index: Tensor | None = None, n_sums: int = 1) -> Tensor:
    sums = exact_sum.zeros(n_sums, terms.dtype, torch.device(DEVICE))
    index = torch.zeros(len(terms), dtype=torch.int32) if index is None else index
    _add[(triton.cdiv(len(terms), 16),)](sums, index.to(DEVICE), terms.to(DEVICE), len(terms), BLOCK=16)
    return exact_sum.rounded(sums).cpu()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=70), st.randoms(use_true_random=False))
def test_sums_are_exact(terms, random):
    with np.errstate(over="ignore"):
        expected = float(np.float32(math.fsum(terms)))
    got = exactly(torch.tensor(terms))
    assert got.item() == pytest.approx(expected, rel=2.0**-23, abs=2.0**-149)
    random.shuffle(terms)
    assert torch.equal(got, exactly(torch.tensor(terms)))


def test_sums_of_both_ends_of_the_range():
    least, greatest = 2.0**-149, torch.finfo(torch.float32).max
    assert exactly(torch.tensor([greatest, least, -greatest])).item() == least
    assert exactly(torch.tensor([greatest, -least, -greatest])).item() == -least
    assert exactly(torch.full((100,), -least)).item() == -100 * least
    assert exactly(torch.tensor([greatest, greatest])).item() == math.inf
    assert exactly(torch.tensor([-greatest, -greatest])).item() == -math.inf
    assert exactly(torch.tensor([0.0, -0.0])).item() == 0.0


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([math.inf, -3e38, -3e38, -3e38], math.inf),
        ([-math.inf, 1e38], -math.inf),
        ([math.inf, -math.inf], None),
        ([math.nan], None),
    ],
)
def test_sums_of_non_finite_terms(terms, expected):
    """The sum beside it is not touched."""
    got = exactly(torch.tensor([*terms, 2.0]), torch.tensor([*(1 for _ in terms), 0]), 3)
    assert got[0].item() == 2.0
    assert got[2].item() == 0.0
    assert got[1].isnan() if expected is None else got[1].item() == expected


X = torch.rand(3)
OF_X = ArgGradient(0, _head, _score)
WRONG: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], type[Exception], str]] = {
    "index": ((X,), (ArgGradient(1, _head, _score),), ValueError, r"arg_gradients: got arg=1, allowed are 0 .. 0"),
    "a number": ((0.5,), (OF_X,), TypeError, r"args\[0\]: got float, allowed with a gradient is a floating-point"),
    "integers": ((X.int(),), (OF_X,), TypeError, r"args\[0\]: got torch.int32, allowed with a gradient"),
    "strides": ((torch.rand(4)[::2],), (OF_X,), ValueError, r"args\[0\]: got strides \(2,\), allowed with a gradient"),
    "no ArgGradient": ((X,), (_head,), TypeError, r"arg_gradients: got \w+, allowed are fusedattn.ArgGradient"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    args, arg_gradients, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        ScoreMod(_temperature, _temperature_derivative, None, args, arg_gradients)


def test_errors_of_functions():
    for make, name in ((lambda f: ArgGradient(0, f, _score), "index"), (lambda f: ArgGradient(0, _head, f), "deriv")):
        with pytest.raises(TypeError, match=f"{name}.*: got function, allowed is a @triton.jit function"):
            make(lambda *args: None)


def test_the_torch_backend_needs_no_functions_for_them():
    score_mod, (factors,) = learning(temperature(torch.float32))
    without = replace(score_mod, arg_gradients=())
    x = qkv(torch.float32)
    got, expected = (gradients(torch_attention, x, [factors], score_mod=mod) for mod in (without, score_mod))
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(got, expected))
    with pytest.raises(NotImplementedError, match=r"score_mod: got args\[0\] that require grad"):
        triton_attention(*x, score_mod=without)
