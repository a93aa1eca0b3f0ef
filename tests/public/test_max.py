"""``return_max=True``: the largest score of each query, as the softmax sees it."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import attention, attention_varlen, masks, reference, testing
from fusedattn.testing import Case
from tests.conftest import (
    BACKENDS,
    DEVICE,
    DTYPES,
    INTERPRETING,
    assert_equal,
    assert_ratios,
    inputs_of,
    torch_attention,
    triton_attention,
)
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)

BASE = Case(nheads_q=4, nheads_kv=2, seqlen_k=101, head_dim=16)
# In the interpreter 2 queries have their keys split among programs, and 37 are computed in tiles of their own.
QUERIES = pytest.mark.parametrize("queries", [2, 37], ids=["few queries", "many queries"])

# The fields of BASE that each feature changes.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal, top-left": {"causal": "top_left"},
    "padding, and an empty batch": {"padding": "uneven", "empty_batch": True, "causal": "bottom_right"},
    "window": {"window": (40, 0)},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "documents": {"documents": "shuffled"},
    "boolean": {"boolean": "full"},
    "block-sparse": {"layout": 16},
    "mask function": {"mask_function": True},
    "bias": {"bias": "full"},
    "bias with -inf": {"bias": "per_key", "bias_inf": True},
    "alibi": {"alibi": "per_batch"},
    "relative": {"relative": "per_query"},
    "soft-cap": {"softcap": 0.7},
    "score function": {"score_mod": True},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "rope": {"rope": "half", "causal": "bottom_right"},
    "positions": {"rope": "interleaved", "rotary_dim": 6, "rope_positions": True, "rope_tables": "per_batch"},
    "dropout": {"dropout_p": 0.3},
    "odd widths": {"head_dim": 20, "head_dim_v": 33},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.6},
    "no scale": {"scale": 0.0},
    "one head": {"nheads_q": 2, "nheads_kv": 2},
    "everything": {
        "causal": "bottom_right", "padding": "uneven", "rope": "half", "window": (60, 2), "bias": "full", "alibi": True,
        "softcap": 1.5, "sinks": True, "dropout_p": 0.2, "head_dim_v": 24,
    },
}  # fmt: skip

NOT_OF_SCORES = ("sinks", "dropout_p", "dropout_seed")


def by_reference(inputs: testing.Inputs, dtype: torch.dtype | None = None) -> Tensor:
    """The definition, in the dtype of the inputs or in another one."""
    x = inputs if dtype is None else inputs.to(dtype)
    options = {name: value for name, value in x.options.items() if name not in NOT_OF_SCORES}
    return reference.largest_scores(x.q, x.k, **options)


@quick.covering()
@quick.pairwise()
@backends
@QUERIES
@pytest.mark.parametrize("feature", FEATURES)
def test_the_budget(feature, queries, backend):
    """As for lse: by eager PyTorch's error in the same dtype. Nothing else of the call changes."""
    dtype = DTYPES[(list(FEATURES).index(feature) + queries) % 3]
    case = replace(BASE, **FEATURES[feature], seqlen_q=queries, dtype=dtype)
    inputs = inputs_of(case)
    options = {"return_lse": True, "backend": backend, **inputs.options}
    out, lse, largest = attention(inputs.q, inputs.k, inputs.v, return_max=True, **options)
    found = testing.compare(largest, by_reference(inputs, torch.float64), by_reference(inputs))
    assert_ratios({"largest": found}, case)
    same = dict(zip(("out", "lse"), attention(inputs.q, inputs.k, inputs.v, **options), strict=True))
    assert_equal({"out": out, "lse": lse}, same)


@quick.covering()
@quick.pairwise()
@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_whole_numbers(queries, group, dtype, backend):
    """Their scores are exact: equal to those of Python's ints, with a causal mask and without a key for some."""
    generator = torch.Generator().manual_seed(queries)
    q, k = (torch.randint(-4, 5, (1, h, n, 8), generator=generator) for h, n in ((2 * group, queries), (2, 35)))
    sides = [x.to(DEVICE, dtype) for x in (q, k, k)]
    out, largest = attention(*sides, mask=masks.causal(), scale=0.5, return_max=True, backend=backend)
    assert out.dtype == dtype
    assert largest.dtype == torch.float32
    for h, i in ((h, i) for h in range(2 * group) for i in range(queries)):
        keys = k[0, h // group, : max(0, i + 1 + 35 - queries)].tolist()
        scores = [sum(a * b for a, b in zip(q[0, h, i].tolist(), key, strict=True)) for key in keys]
        assert largest[0, h, i].item() == max(scores, default=-math.inf) * 0.5


@backends
@pytest.mark.parametrize("mask", [None, masks.causal("top_left")], ids=["no mask", "causal"])
def test_a_plain_call(mask, backend):
    """The torch backend runs such a call without return_max directly by torch's function."""
    q, k, v = torch.randn(3, 1, 2, 9, 16, device=DEVICE).unbind()
    out, largest = attention(q, k, v, mask=mask, return_max=True, backend=backend)
    torch.testing.assert_close(out, attention(q, k, v, mask=mask, backend=backend))
    torch.testing.assert_close(largest, reference.largest_scores(q, k, mask=mask))


@backends
@QUERIES
def test_what_is_returned(queries, backend):
    q, k, v = (torch.randn(2, h, n, 16, device=DEVICE) for h, n in ((4, queries), (2, 101), (2, 101)))
    call = functools.partial(attention, q, k, v, mask=masks.causal(), backend=backend)
    out, lse, largest = call(return_lse=True, return_max=True)
    alone, other = call(return_max=True)
    assert torch.equal(other, largest)
    torch.testing.assert_close(alone, out)  # torch's function returns no lse, which another one computes
    assert largest.shape == lse.shape == (2, 4, queries)
    assert (largest <= lse).all()
    assert (lse <= largest + math.log(101)).all()


@quick.only(dtype=torch.bfloat16)
@backends
@QUERIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_that_is_seen_and_one_that_is_not(dtype, queries, backend):
    """Of a query, a key, or a bias; and an infinite score, with which out is NaN too."""
    q, k, v = (torch.randn(1, h, n, 16, device=DEVICE) for h, n in ((2, queries), (1, 101), (1, 101)))
    shown = torch.rand(1, 2, queries, 101, device=DEVICE) < 0.7
    bias = torch.zeros(2, queries, 101, device=DEVICE)
    q[0, 0, 0, 3] = k[0, 0, 50, 1] = k[0, 0, 7] = math.nan
    shown[..., 7] = False
    bias[1, 1, 2], bias[1, 0, 99] = math.nan, math.inf
    bias[1, 1, 3] = -math.inf
    sides = [x.to(dtype) for x in (q, k, v)]
    _, largest = attention(*sides, mask=shown, bias=bias, return_max=True, backend=backend)
    truth = reference.largest_scores(sides[0].double(), sides[1].double(), mask=shown, bias=bias.double())
    spoiled = shown[..., 50].clone()  # those that see the key of NaN
    spoiled[0, 0, 0] = True
    spoiled[0, 1, 1] |= shown[0, 1, 1, 2]
    spoiled[0, 1, 0] |= shown[0, 1, 0, 99]
    assert torch.equal(truth.isnan(), spoiled)
    assert torch.equal(largest.isnan(), spoiled)
    torch.testing.assert_close(largest.double(), truth, equal_nan=True, rtol=1e-5, atol=1e-5)


@backends
@QUERIES
@pytest.mark.parametrize("sink", [-math.inf, 30.0])
def test_sinks_do_not_count(sink, queries, backend):
    """Nor for rows that see nothing, whose lse is their sink."""
    q, k, v = (torch.randn(1, h, n, 16, device=DEVICE) for h, n in ((2, queries), (1, 101), (1, 101)))
    shown = torch.rand(1, 1, queries, 101, device=DEVICE) < 0.5
    shown[0, 0, 1] = False
    sinks = torch.full((2,), sink, device=DEVICE)
    options: dict[str, Any] = {"mask": shown, "backend": backend}
    _, lse, largest = attention(q, k, v, sinks=sinks, return_lse=True, return_max=True, **options)
    assert largest[0, :, 1].eq(-math.inf).all()
    assert lse[0, :, 1].eq(sink).all()
    torch.testing.assert_close(largest, attention(q, k, v, return_max=True, **options)[1])


@backends
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 0), (0, 5), (40, 0), (1, 1)])
def test_without_keys_or_queries(seqlen_q, seqlen_k, backend):
    q, k = torch.randn(2, 2, seqlen_q, 8, device=DEVICE), torch.randn(2, 1, seqlen_k, 8, device=DEVICE)
    out, largest = attention(q, k, k, return_max=True, backend=backend)
    assert largest.shape == out.shape[:3]
    if seqlen_k == 0:
        assert largest.eq(-math.inf).all()


@quick.covering()
@backends
@pytest.mark.parametrize(
    "lengths", [((2, 1, 0, 2, 1), (70, 1, 33, 0, 20)), ((30, 0, 7), (33, 20, 50))], ids=["few", "many"]
)
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal(), "softcap": 1.5}], ids=["plain", "causal"])
def test_packed_sequences(options, lengths, backend):
    """Each as alone; tokens of no sequence have -inf."""
    stops = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=DEVICE) for x in lengths]
    q, k, v = (
        torch.randn(sum(n) + 2, h, 16, device=DEVICE) for n, h in ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2))
    )
    longest = [max(x) for x in lengths]
    _, largest = attention_varlen(q, k, v, *stops, *longest, return_max=True, backend=backend, **options)
    assert largest.shape == (4, sum(lengths[0]) + 2)
    assert largest[:, sum(lengths[0]) :].eq(-math.inf).all()
    for i in range(len(lengths[0])):
        own, keys = (slice(x[i], x[i + 1]) for x in stops)
        one, two = (x.transpose(0, 1)[None].double() for x in (q[own], k[keys]))
        expected = reference.largest_scores(one, two, **options)[0]
        torch.testing.assert_close(largest[:, own].double(), expected, rtol=1e-5, atol=1e-5)
    both = attention_varlen(q, k, v, *stops, *longest, return_lse=True, return_max=True, backend=backend, **options)
    assert len(both) == 3
    assert torch.equal(both[2], largest)


@backends
def test_nested_tensors(backend):
    parts = [torch.randn(n, 4, 16, device=DEVICE) for n in (3, 50)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    *_, largest = attention(x, x, x, return_lse=True, return_max=True, backend=backend)
    for one, got in zip(parts, largest.unbind(), strict=True):
        y = one.transpose(0, 1)[None].double()
        torch.testing.assert_close(got.double(), reference.largest_scores(y, y)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(attention(x, x, x, return_max=True, backend=backend)[1].values(), largest.values())


@quick.only(queries=2, backend="triton")
@backends
@QUERIES
def test_under_a_compiler(queries, backend):
    """One graph, with gradients for out and lse alone."""
    torch._dynamo.reset()
    q, k, v = (
        torch.randn(2, h, n, 16, device=DEVICE, requires_grad=True) for h, n in ((4, queries), (2, 101), (2, 101))
    )
    call = functools.partial(attention, mask=masks.causal(), return_lse=True, return_max=True, backend=backend)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, found = call(q, k, v), compiled(q, k, v)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert [x.requires_grad for x in found] == [x.requires_grad for x in expected] == [True, True, False]
    found[0].sum().backward()
    stops = [torch.tensor([0, 1, n], dtype=torch.int32, device=DEVICE) for n in (queries, 101)]
    packed = [x.detach()[0].transpose(0, 1) for x in (q, k, v)]
    varlen = functools.partial(
        attention_varlen, max_seqlen_q=queries, max_seqlen_k=101, return_max=True, backend=backend
    )
    compiled = torch.compile(varlen, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*packed, *stops)[1], varlen(*packed, *stops)[1])


@backends
def test_transforms(backend):
    """vmap maps it; it has no tangent, and may stand beside a result that is differentiated."""
    q, k, v = (torch.randn(3, 1, 2, 5, 8, device=DEVICE) for _ in range(3))
    # Without lse the torch backend runs torch's own function, which has no forward mode.
    call = functools.partial(attention, return_lse=True, return_max=True, backend=backend)
    *_, largest = torch.func.vmap(call)(q, k, v)
    for i in range(3):
        torch.testing.assert_close(largest[i], call(q[i], k[i], v[i])[2])
    found, tangents = torch.func.jvp(lambda x: call(x, k[0], v[0]), (q[0],), (torch.ones_like(q[0]),))
    torch.testing.assert_close(found[2], largest[0])
    assert tangents[0].abs().sum() > 0
    assert tangents[2].eq(0.0).all()

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        out, _, largest = call(x, k[0], v[0])
        return out.sum() + largest.sum(), largest

    gradient, beside = torch.func.grad(total, has_aux=True)(q[0])
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: call(x, k[0], v[0])[0].sum())(q[0]))
    torch.testing.assert_close(beside, largest[0])


@pytest.mark.skipif(not INTERPRETING, reason="checks the interpreter's accesses")
@QUERIES
def test_each_element_is_written_once(queries):
    inputs = inputs_of(replace(BASE, seqlen_q=queries, causal="bottom_right"))
    with checked_accesses() as accesses:
        triton_attention(inputs.q, inputs.k, inputs.v, return_max=True, **inputs.options)
    assert ("attention_combine" in accesses.launched) == (queries == 2)


def test_the_torch_backend_stores_few_scores(monkeypatch):
    """Of 2^24 scores, never more than 64 rows at once."""
    q, k = torch.randn(1, 2, 2048, 4), torch.randn(1, 1, 4096, 4)
    sizes = []
    modified = reference.modified

    def noted(scores: Tensor, *args: Any, **others: Any) -> Tensor:
        sizes.append(scores.numel())
        return modified(scores, *args, **others)

    monkeypatch.setattr(reference, "modified", noted)
    _, largest = torch_attention(q, k, k, return_max=True)
    assert max(sizes) <= 2 * 64 * 4096
    torch.testing.assert_close(largest, (q @ k.mT).amax(-1) * 0.5)


@backends
def test_under_autocast(backend):
    q, k, v = torch.randn(3, 1, 2, 9, 16, device=DEVICE).unbind()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out, largest = attention(q, k, v, return_max=True, backend=backend)
    assert (out.dtype, largest.dtype) == (torch.bfloat16, torch.float32)
    expected = reference.largest_scores(*(x.bfloat16().double() for x in (q, k)))
    torch.testing.assert_close(largest.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_are_those_without_it(requires_grad):
    inputs = inputs_of(replace(BASE, seqlen_q=5))
    with nullcontext() if requires_grad else torch.no_grad():
        leaves = [x.requires_grad_(requires_grad) for x in (inputs.q, inputs.k, inputs.v)]
        out, largest = triton_attention(*leaves, return_max=True)
        assert (out.requires_grad, largest.requires_grad) == (requires_grad, False)
    if requires_grad:
        found = torch.autograd.grad(out.sum(), leaves)
        expected = torch.autograd.grad(triton_attention(*leaves).sum(), leaves)
        assert all(map(torch.equal, found, expected))
