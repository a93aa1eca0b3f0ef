"""``merge``: attentions over parts of the keys, joined, are the attention over all keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, attention, attention_varlen, biases, masks, merge, testing
from fusedattn.masks import Mask
from fusedattn.testing import Case
from tests.conftest import BACKENDS, DEVICE, DTYPES, TORCH_LIMIT, assert_accurate, assert_ratios, inputs_of
from tests.helpers import quick

pytestmark = pytest.mark.usefixtures("_seed")

BASE = Case(nheads_q=4, nheads_kv=2, seqlen_q=19, seqlen_k=53, head_dim=16)

# The fields of BASE that each feature changes.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "more queries than keys": {"causal": "bottom_right", "seqlen_q": 61},
    "padding, and an empty batch": {"padding": "uneven", "empty_batch": True},
    "window": {"window": (11, 3)},
    "bias": {"bias": "full"},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "soft-cap": {"softcap": 0.7},
    "rope": {"rope": "half", "causal": "bottom_right"},
    "one query": {"seqlen_q": 1},
    "wider values": {"head_dim_v": 33},
    "negative scale": {"scale": -0.6},
}

# Where the parts begin and end: 1, 2 and 5 of them, some without keys.
PARTS: tuple[tuple[int, ...], ...] = ((0, 53), (0, 20, 53), (0, 0, 1, 30, 30, 53))


def part_of(options: dict[str, Any], keys: slice, seqlen_q: int, seqlen_k: int, first: bool) -> dict[str, Any]:
    """The options of the attention over some of the keys; sinks belong to the first."""
    mask: Mask = options["mask"]
    found = {name: x for name, x in options.items() if name != "sinks" or first}
    found["mask"] = masks.boolean(mask.dense(seqlen_q, seqlen_k, device=DEVICE)[..., keys])
    if options.get("bias") is not None:
        found["bias"] = biases.tensor(options["bias"].dense(seqlen_q, seqlen_k)[..., keys])
    rope: Rope | None = options["rope"]
    if rope is not None:
        at_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=DEVICE)
        found["rope"] = rope.at(at_q, torch.arange(seqlen_k, device=DEVICE)[keys])
    return found


def in_parts(stops: Sequence[int], backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The attention with keys from each stop to the next, merged."""

    def function(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any) -> tuple[Tensor, Tensor]:
        assert return_lse
        wide, parts = q.to(torch.promote_types(q.dtype, torch.float32)), []  # in which gradients of parts add up
        for i, (start, stop) in enumerate(itertools.pairwise(stops)):
            keys = slice(start, stop)
            own = part_of(options, keys, q.shape[2], k.shape[2], first=i == 0)
            one = wide.to(q.dtype), k[:, :, keys], v[:, :, keys]
            parts.append(attention(*one, **own, return_lse=True, backend=backend))
        outs, lses = zip(*parts, strict=True)
        return merge(outs, lses)

    return function


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stops", PARTS, ids=lambda stops: f"{len(stops) - 1} parts")
@pytest.mark.parametrize("feature", FEATURES)
def test_parts_keep_the_budget_of_the_whole(feature, stops, dtype, backend):
    """Out, lse and all gradients."""
    case = replace(BASE, **FEATURES[feature], dtype=dtype)
    function, inputs = in_parts(stops, backend), inputs_of(case)
    if backend == "triton":
        assert_accurate(function, inputs, case)
    else:
        assert_ratios(testing.check(function, inputs), case, TORCH_LIMIT[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_that_all_queries_see_and_a_causal_suffix(backend):
    """As with a shared prefix: no mask for its keys, the mask of the suffix alone for the others."""
    q, k, v = (torch.randn(2, h, n, 16, device=DEVICE) for h, n in ((4, 9), (2, 40), (2, 40)))
    prefix = attention(q, k[:, :, :31], v[:, :, :31], return_lse=True, backend=backend)
    suffix = attention(q, k[:, :, 31:], v[:, :, 31:], mask=masks.causal(), return_lse=True, backend=backend)
    out, lse = merge(*zip(prefix, suffix, strict=True))
    expected, expected_lse = attention(q, k, v, mask=masks.causal(), return_lse=True, backend=backend)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences(backend):
    q, k, v = (torch.randn(n, h, 16, device=DEVICE) for n, h in ((7, 4), (12, 2), (12, 2)))
    stops_q, stops_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, 3, 7), (0, 5, 12)))
    options: dict[str, Any] = {"return_lse": True, "backend": backend}
    shown = torch.rand(1, 12, device=DEVICE) < 0.5
    outs, lses = zip(
        *(attention_varlen(q, k, v, stops_q, stops_k, mask=masks.padding(part), **options) for part in (shown, ~shown)),
        strict=True,
    )
    out, lse = merge(outs, [x.T for x in lses])
    expected, expected_lse = attention_varlen(q, k, v, stops_q, stops_k, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.T, expected_lse)


def numbers(parts: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Random outs, ``(*shape, 3)``, and lses."""
    of_lse = torch.promote_types(dtype, torch.float32)
    outs = [torch.randn((*shape, 3), device=DEVICE, dtype=of_lse).to(dtype) for _ in range(parts)]
    return outs, [3.0 * torch.randn(shape, device=DEVICE, dtype=of_lse) for _ in range(parts)]


def by_hand(outs: Sequence[float], lses: Sequence[float]) -> tuple[float, float]:
    """The formula for one feature of one row, in Python's floats."""
    largest = max(lses)
    lse = largest + math.log(math.fsum(math.exp(x - largest) for x in lses))
    return math.fsum(math.exp(x - lse) * out for x, out in zip(lses, outs, strict=True)), lse


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_the_formula(dtype, shape):
    """Of each number; out is the rounded float32 one."""
    outs, lses = numbers(4, *shape, dtype=dtype)
    out, lse = merge(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert (out.shape, lse.shape) == ((*shape, 3), shape)
    rows = [
        [x.expand(*shape, 3).flatten().tolist() for x in (y, z[..., None])] for y, z in zip(outs, lses, strict=True)
    ]
    expected = [
        by_hand(*zip(*terms, strict=True)) for terms in zip(*(zip(*row, strict=True) for row in rows), strict=True)
    ]
    wide = torch.tensor(expected, dtype=torch.float64, device=DEVICE)
    eps, eps_of_lse = (torch.finfo(x.dtype).eps for x in (out, lse))
    torch.testing.assert_close(out.double().flatten(), wide[:, 0], rtol=eps / 2, atol=8 * eps_of_lse)
    torch.testing.assert_close(
        lse[..., None].expand(*shape, 3).double().flatten(), wide[:, 1], rtol=0, atol=8 * eps_of_lse
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_keeps_its_bits(dtype):
    outs, lses = numbers(1, 2, 3, dtype=dtype)
    out, lse = merge(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


def test_merging_what_was_merged():
    """As ring attention does, one part after the other."""
    outs, lses = numbers(5, 2, 3)
    out, lse = outs[0], lses[0]
    for x, y in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge((out, x), (lse, y))
    torch.testing.assert_close((out, lse), merge(outs, lses))


@pytest.mark.parametrize("returned", ["out", "lse", "both"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_derivatives(parts, returned):
    """Of first and second order, by difference quotients; one part does not see a row, none sees another."""
    outs, lses = numbers(parts, 4)
    lses[-1][1] = -math.inf
    for x in lses:
        x[2] = -math.inf
    finite = torch.stack(lses) != -math.inf

    def function(outs: Tensor, lses: Tensor) -> tuple[Tensor, ...]:
        # The difference quotient of a constant -inf is NaN.
        out, lse = merge(outs.unbind(), torch.where(finite, lses, -math.inf).unbind())
        lse = lse.masked_fill(~finite.any(dim=0), 0.0)
        return {"out": (out,), "lse": (lse,), "both": (out, lse)}[returned]

    inputs = torch.stack(outs).requires_grad_(), torch.stack(lses).nan_to_num(neginf=0.0).requires_grad_()
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("at", [0.0, 1e4, -1e4, 1e6])
def test_gradients_of_large_lses(at):
    """A gradient by the value of lse would have an error of a unit in its last place, 1e-3 at 1e4."""
    outs, _ = numbers(3, 5, dtype=torch.float32)
    lses = [torch.randint(-8, 9, (5,), device=DEVICE) / 4 + at for _ in range(3)]  # exact
    dout, dlse = torch.randn(5, 3, device=DEVICE), torch.randn(5, device=DEVICE)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (*outs, *lses)]
        return torch.autograd.grad(merge(leaves[:3], leaves[3:]), leaves, (dout.to(dtype), dlse.to(dtype)))

    for actual, expected in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("back", [1.0, math.nan, math.inf])
def test_rows_that_no_part_sees(dtype, back):
    """Out 0, lse -inf, gradients 0, whatever stands in the outs and comes back."""
    outs, lses = numbers(3, 4, dtype=dtype)
    for x, y, value in zip(outs, lses, (math.nan, math.inf, 1.0), strict=True):
        x[1], y[1] = value, -math.inf
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = merge(leaves[:3], leaves[3:])
    assert out[1].eq(0.0).all()
    assert lse[1] == -math.inf
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dout[1] = dlse[1] = back
    for gradient in torch.autograd.grad((out, lse), leaves, (dout, dlse)):
        assert gradient.isfinite().all()
        assert gradient[1].eq(0.0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_part_that_sees_nothing_contributes_nothing(value):
    """Whatever its out holds; the results are those of the other parts, bit for bit."""
    outs, lses = numbers(3, 4, dtype=torch.float32)
    outs[1].fill_(value)
    lses[1].fill_(-math.inf)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    found = merge(leaves[:3], leaves[3:])
    expected = merge(leaves[:3:2], leaves[3::2])
    assert all(map(torch.equal, found, expected))
    back = torch.randn(4, 3, device=DEVICE), torch.randn(4, device=DEVICE)
    gradients = torch.autograd.grad(found, leaves, back)
    assert gradients[1].eq(0.0).all()
    assert gradients[4].eq(0.0).all()
    others = [x for i, x in enumerate(gradients) if i not in (1, 4)]
    wanted = torch.autograd.grad(expected, [*leaves[:3:2], *leaves[3::2]], back)
    for actual, x in zip(others, wanted, strict=True):
        assert torch.equal(actual, x)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("beside", [1.0, -math.inf], ids=["beside numbers", "alone"])
def test_an_lse_that_is_not_finite_spoils_its_row_alone(value, beside):
    outs, lses = numbers(3, 4, dtype=torch.float32)
    clean = merge(outs, lses)
    for x in lses:
        x[2] = beside
    lses[1][2] = value
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = merge(leaves[:3], leaves[3:])
    rows = torch.tensor([0, 1, 3], device=DEVICE)
    for x, y in zip((out, lse), clean, strict=True):
        assert x[2].isnan().all()
        assert torch.equal(x[rows], y[rows])
    for gradient in torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse))):
        assert gradient[rows].isfinite().all()


def test_far_apart():
    """A difference beyond float32, and a part whose weight is too small for it."""
    outs, _ = numbers(2, 2, dtype=torch.float32)
    lses = [torch.tensor([3e38, 0.0], device=DEVICE), torch.tensor([-3e38, -200.0], device=DEVICE)]
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = merge(leaves[:2], leaves[2:])
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), leaves):
        assert gradient.isfinite().all()


def test_under_a_compiler_and_in_transforms():
    outs, lses = numbers(2, 3, 4, dtype=torch.float32)
    lses[0][1] = -math.inf
    expected = merge(outs, lses)
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(outs, lses), expected)
    torch.testing.assert_close(torch.func.vmap(merge)(outs, lses), expected)
    tangents = [torch.randn_like(x) for x in outs], [torch.zeros_like(x) for x in lses]
    _, (moved, still) = torch.func.jvp(merge, (outs, lses), tangents)
    torch.testing.assert_close(moved, merge(tangents[0], lses)[0])
    assert still.eq(0.0).all()


def test_under_autocast():
    """Nothing is rounded but out, to the dtype of outs."""
    outs, lses = numbers(2, 3, 4, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = merge(outs, lses)
    assert all(map(torch.equal, found, merge(outs, lses)))


X, Y = torch.zeros(2, 3), torch.zeros(2)
NESTED = torch.nested.as_nested_tensor([X, X[:1]], layout=torch.jagged)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "nothing": ([], [], ValueError, "outs: got no tensor, allowed are one and more"),
    "no sequence": (X, [Y], TypeError, "outs: got Tensor, allowed is a sequence of tensors"),
    "an iterator": ([X], iter([Y]), TypeError, "lses: got list_iterator, allowed is a sequence of tensors"),
    "no tensor": ([X, None], [Y, Y], TypeError, r"outs\[1\]: got NoneType, allowed is a dense torch.Tensor"),
    "a nested tensor": ([NESTED], [Y], TypeError, r"outs\[0\]: got a nested tensor, allowed is a dense"),
    "fewer lses": ([X, X], [Y], ValueError, "lses: got 1 tensors, allowed are as many as outs, 2"),
    "integers": ([X.int()], [Y], TypeError, r"outs\[0\]: got torch.int32, allowed are torch.float16, .*torch.float64"),
    "a number": ([X[0, 0]], [Y], ValueError, r"outs\[0\]: got shape \(\), allowed are shapes that end in head_dim_v"),
    "shapes": (
        [X, X[:1]],
        [Y, Y],
        ValueError,
        r"outs\[1\]: got shape \(1, 3\), allowed is that of outs\[0\], \(2, 3\)",
    ),
    "shapes of lses": ([X, X], [Y, X], ValueError, r"lses\[1\]: got shape \(2, 3\), allowed is .*, \(2,\)"),
    "dtypes": ([X, X.half()], [Y, Y], TypeError, r"outs\[1\]: got torch.float16, allowed is torch.float32"),
    "dtypes of lses": ([X.half()], [Y.half()], TypeError, r"lses\[0\]: got torch.float16, allowed is torch.float32"),
    "float64": ([X.double()], [Y], TypeError, r"lses\[0\]: got torch.float32, allowed is torch.float64"),
    "devices": ([X, X.to("meta")], [Y, Y], ValueError, r"outs\[1\]: got device meta, allowed is .* cpu"),
    "devices of lses": ([X], [Y.to("meta")], ValueError, r"lses\[0\]: got device meta, allowed is .* cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    outs, lses, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        merge(outs, lses)
