"""Linear attention of hostile numbers: NaN and Inf behind the mask or in the future, weights of 0, strides, ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import LinearState, linear_attention
from tests.conftest import BACKENDS, DEVICE, DTYPES
from tests.helpers import linear, quick
from tests.helpers.linear import LinearProblem

pytestmark = pytest.mark.usefixtures("poison", "_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)
BASE = LinearProblem(seqlen_q=70, nheads_kv=1, initial_state=True, valid="some")
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "sums": {"normalize": False},
    "packed": {"lengths": (5, 0, 60)},
}


def results(problem: LinearProblem, inputs: linear.LinearInputs, backend: str) -> linear.Results:
    return linear.run(linear.on_backend(backend), problem, inputs)


def with_rows(inputs: linear.LinearInputs, rows: Tensor, value: float, names: str = "kv") -> linear.LinearInputs:
    """Keys and values, or others of q, k and v, with `value` in the tokens that `rows` names, ``(batch, seqlen)``."""
    changed = {name: inputs.leaves[name].masked_fill(rows[:, None, :, None], value) for name in names}
    return inputs._replace(leaves=inputs.leaves | changed)


@quick.covering()
@backends
@pytest.mark.parametrize("feature_map", linear.MAPS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMS)
def test_hidden_keys_and_values_reach_nothing(form, value, feature_map, backend):
    """All results have the same bits, and the gradients of hidden tokens are 0."""
    problem = replace(BASE, **FORMS[form], feature_map=feature_map)
    inputs = linear.inputs_of(problem, DEVICE)
    hidden = ~inputs.options["valid"]
    found = results(problem, with_rows(inputs, hidden, value), backend)
    linear.assert_same(found, results(problem, inputs, backend))
    for name in ("dk", "dv"):
        assert found[name].isfinite().all()
        assert found[name].masked_select(hidden[:, None, :, None]).eq(0.0).all()


@quick.only(feature_map="elu+1")
@backends
@pytest.mark.parametrize("feature_map", ["elu+1", "jit"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("names", ["k", "v"])
def test_a_token_reaches_no_earlier_query(names, value, feature_map, backend):
    """Neither out nor dq of the tokens before it, in its chunk and in others, changes by a bit."""
    at = 37
    problem = replace(BASE, seqlen_q=130, valid=None, feature_map=feature_map, return_state=False)
    inputs = linear.inputs_of(problem, DEVICE)
    rows = torch.arange(130, device=DEVICE)[None] == at
    clean, found = results(problem, inputs, backend), results(problem, with_rows(inputs, rows, value, names), backend)
    for name in ("out", "dq"):
        assert torch.equal(found[name][:, :, :at], clean[name][:, :, :at]), name
        assert found[name][:, :, at:].isfinite().logical_not().any(dim=-1).all(), name


@backends
@pytest.mark.parametrize("names", ["q", "dout"])
def test_a_query_reaches_no_other_query(names, backend):
    """NaN in a query, or in what comes back to it, leaves the others' out and dq, and later tokens' dk and dv."""
    at = 37
    problem = replace(BASE, seqlen_q=130, valid=None, return_state=False)
    inputs = linear.inputs_of(problem, DEVICE)
    rows = torch.arange(130, device=DEVICE)[None] == at
    if names == "q":
        changed = with_rows(inputs, rows, math.nan, "q")
    else:
        dout = inputs.back[0].masked_fill(rows[:, None, :, None], math.nan)
        changed = inputs._replace(back=(dout, *inputs.back[1:]))
    clean, found = results(problem, inputs, backend), results(problem, changed, backend)
    for name in ("out", "dq"):
        for others in (slice(0, at), slice(at + 1, None)):
            assert torch.equal(found[name][:, :, others], clean[name][:, :, others]), name
    assert found["dq"][:, :, at].isnan().all()


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_what_comes_back_does_not_reach_hidden_tokens(causal, backend):
    """Their gradients are 0 even beside NaN in every dout."""
    inputs = linear.inputs_of(replace(BASE, causal=causal), DEVICE)
    inputs = inputs._replace(back=(inputs.back[0] * math.nan, *inputs.back[1:]))
    found = results(replace(BASE, causal=causal), inputs, backend)
    hidden = ~inputs.options["valid"][:, None, :, None]
    for name in ("dk", "dv"):
        assert found[name].masked_select(hidden).eq(0.0).all(), name
        assert found[name].masked_select(~hidden).isnan().all(), name


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_weights_that_cancel(causal, backend):
    """1 and -1: their sum is 0, so out and all gradients of that query are 0, though the sum of values is not."""
    q, k, v = ([[[[0.0, 0.0], [1.0, -1.0]]]], [[[[1.0, 0.0], [0.0, 1.0]]]], [[[[3.0], [1.0]]]])
    x = [torch.tensor(y, device=DEVICE, requires_grad=True) for y in (q, k, v)]
    out = linear_attention(*x, feature_map="identity", causal=causal, backend=backend)
    assert out.eq(0.0).all()
    for gradient in torch.autograd.grad(out, x, torch.ones_like(out)):
        assert gradient.eq(0.0).all()


@backends
def test_a_sequence_reaches_no_other(backend):
    problem = LinearProblem(seqlen_q=70, lengths=(20, 30, 15))
    inputs = linear.inputs_of(problem, DEVICE)
    rows = (torch.arange(70, device=DEVICE)[None] >= 20) & (torch.arange(70, device=DEVICE)[None] < 50)
    clean, found = (
        results(problem, inputs, backend),
        results(problem, with_rows(inputs, rows, math.nan, "qkv"), backend),
    )
    for name in ("out", "dq", "dk", "dv"):
        for others in (slice(0, 20), slice(50, None)):
            assert torch.equal(found[name][:, :, others], clean[name][:, :, others]), name
    for name in ("kv", "k_sum"):
        assert torch.equal(found[name][::2], clean[name][::2]), name


@backends
@pytest.mark.parametrize("lengths", [(0, 3, 0, 0, 64, 0), (0, 0), (1,), (65, 0)], ids=str)
def test_tokens_of_no_sequence(lengths, backend):
    """Out and all gradients of the tokens behind the last are 0, whatever stands there; empty sequences have no sum."""
    problem = LinearProblem(seqlen_q=70, lengths=lengths, nheads_kv=1)
    inputs = linear.inputs_of(problem, DEVICE)
    behind = torch.arange(70, device=DEVICE)[None] >= sum(lengths)
    found = results(problem, with_rows(inputs, behind, math.nan, "qkv"), backend)
    for name in ("out", "dq", "dk", "dv"):
        assert found[name].isfinite().all(), name
        assert found[name][:, :, sum(lengths) :].eq(0.0).all(), name
    for i, length in enumerate(lengths):
        if length == 0:
            assert found["kv"][i].eq(0.0).all()
            assert found["k_sum"][i].eq(0.0).all()


@backends
def test_no_sequence(backend):
    problem = LinearProblem(seqlen_q=5, lengths=())
    found = results(problem, linear.inputs_of(problem, DEVICE), backend)
    assert found["kv"].shape == (0, 2, 16, 16)
    assert all(found[name].eq(0.0).all() for name in ("out", "dq", "dk", "dv"))


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_queries_without_weights_get_zeros(causal, dtype, backend):
    """By relu of negative numbers, half of the queries have no feature; their rows contribute to no gradient."""
    problem = LinearProblem(seqlen_q=70, feature_map="relu", causal=causal, dtype=dtype, return_state=False)
    inputs = linear.inputs_of(problem, DEVICE)
    without = torch.arange(70, device=DEVICE) % 2 == 0
    q = torch.where(without[:, None], -inputs.leaves["q"].abs(), inputs.leaves["q"].abs())
    inputs = inputs._replace(leaves=inputs.leaves | {"q": q})
    found = results(problem, inputs, backend)
    for name in ("out", "dq"):
        assert found[name][:, :, without].eq(0.0).all(), name
        assert found[name][:, :, ~without].any(), name
    back = inputs.back[0].masked_fill(without[:, None], 3.0)
    other = results(problem, inputs._replace(back=(back, *inputs.back[1:])), backend)
    for name in ("dk", "dv"):
        assert torch.equal(found[name], other[name]), name


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_all_keys_hidden(causal, backend):
    """Out, the state and all gradients are 0; NaN in the keys and in dout change nothing."""
    problem = LinearProblem(seqlen_q=70, causal=causal, return_state=False)
    inputs = linear.inputs_of(problem, DEVICE)
    inputs.options["valid"] = torch.zeros(1, 70, dtype=torch.bool, device=DEVICE)
    found = results(problem, with_rows(inputs, ~inputs.options["valid"], math.nan), backend)
    for name, x in found.items():
        assert x.eq(0.0).all(), name


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x.flip(2)], 2)[:, :, : x.shape[2]],
    "gaps": lambda x: torch.cat([torch.full_like(x[..., :3], math.nan), x], -1)[..., 3:],
    "batch inside": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
}


@quick.only(layout="gaps")
@backends
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, backend):
    """Any strides whose last is 1 give the same bits; also those of what comes back."""
    problem = replace(BASE, batch=2, nheads_q=4, nheads_kv=2)
    inputs = linear.inputs_of(problem, DEVICE)
    move = LAYOUTS[layout]
    # The states may have any strides at all.
    leaves = {name: x.mT.contiguous().mT if name == "kv" else x for name, x in inputs.leaves.items()}
    moved = inputs._replace(
        leaves=leaves | {name: move(inputs.leaves[name]) for name in "qkv"},
        back=(move(inputs.back[0]), inputs.back[1].mT.contiguous().mT, inputs.back[2]),
    )
    found, expected = results(problem, moved, backend), results(problem, inputs, backend)
    if backend == "triton":
        linear.assert_same(found, expected)
    else:  # torch may sum in another order
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@backends
def test_an_expanded_gradient(backend):
    """That of ``out.sum()`` and of a sum of the state, whose strides are 0."""
    q, k, v = (torch.randn(1, 2, 70, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    out, state = linear_attention(q, k, v, return_state=True, backend=backend)
    found = torch.autograd.grad(out.sum() + state.kv.sum() + state.k_sum.sum(), (q, k, v))
    out, state = linear_attention(q, k, v, return_state=True, backend=backend)
    expected = torch.autograd.grad((out, *state), (q, k, v), [torch.ones_like(x) for x in (out, *state)])
    for actual, x in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, x, rtol=1e-5, atol=1e-5)


@backends
def test_features_of_any_strides(backend):
    """A function of torch may return an expanded tensor, or a transposed one."""
    q, k, v = (torch.rand(1, 2, 9, 16, device=DEVICE) for _ in range(3))
    for function in (lambda x: x[..., :1].expand(x.shape), lambda x: (x.mT * 2.0).contiguous().mT):
        found = linear_attention(q, k, v, feature_map=function, backend=backend)
        phi_q, phi_k = function(q).contiguous(), function(k).contiguous()
        expected = linear_attention(phi_q, phi_k, v, feature_map="identity", backend="torch")
        torch.testing.assert_close(found, expected)


@backends
def test_expanded_inputs(backend):
    q, k, v = (torch.randn(1, 1, 70, 16, device=DEVICE) for _ in range(3))
    out = linear_attention(q.expand(2, 4, 70, 16), k.expand(2, 2, 70, 16), v.expand(2, 2, 70, 16), backend=backend)
    torch.testing.assert_close(out, linear_attention(q, k, v, backend=backend).expand(2, 4, 70, 16))


@backends
@pytest.mark.parametrize(
    ("dtype", "feature_map", "normalize", "sizes"),
    [
        (torch.float32, "elu+1", True, {"q": 1e4, "k": 1e4, "v": 1e4}),
        (torch.float32, "identity", False, {"q": 1e4, "k": 1e4, "v": 1e4}),
        (torch.float32, "relu", True, {"q": 1e-12, "k": 1e-12}),
        (torch.float16, "elu+1", True, {"q": 16.0, "k": 16.0, "v": 600.0}),
        (torch.float16, "elu+1", True, {"q": 1e-3, "k": 1e-3, "v": 1e-3}),
        (torch.bfloat16, "relu", True, {"q": 1e4, "k": 1e4}),
    ],
    ids=str,
)
def test_large_and_small_numbers(sizes, normalize, feature_map, dtype, backend):
    """Every number is near the truth, as the largest sum of terms of its row goes, or beyond the range of its dtype."""
    problem = LinearProblem(dtype=dtype, feature_map=feature_map, normalize=normalize, return_state=False)
    inputs = linear.inputs_of(problem, DEVICE)
    leaves = {name: (x.double() * sizes.get(name, 1.0)).to(dtype) for name, x in inputs.leaves.items()}
    inputs = inputs._replace(leaves=leaves)
    found = results(problem, inputs, backend)
    expected = linear.truth(problem, inputs)
    unit = 64 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for name, terms in linear.sums_of_terms(problem, inputs).items():
        limit = unit * terms.amax(dim=-1, keepdim=True) + torch.finfo(dtype).smallest_normal
        too_large = expected[name].abs() > torch.finfo(found[name].dtype).max
        error = (found[name].double() - expected[name]).abs()
        assert ((error <= limit) | too_large).all(), name


@backends
def test_weights_beyond_float16(backend):
    """Sums of features are float32: 70 keys of 1,000 in float16, and queries of 100."""
    q, k, v = (torch.full((1, 1, 70, 16), x, dtype=torch.float16, device=DEVICE) for x in (100.0, 1000.0, 7.0))
    x = [y.requires_grad_() for y in (q, k, v)]
    out, state = linear_attention(*x, return_state=True, backend=backend)
    assert out.eq(7.0).all()
    assert (state.k_sum == 70 * 1001).all()
    dq, dk, dv = torch.autograd.grad(out, x, torch.ones_like(out))
    for x in (dq, dk):
        assert x.abs().max() < 1e-4
    expected = (1 / torch.arange(1.0, 71.0, device=DEVICE)).sum().half().expand(16)
    torch.testing.assert_close(dv[0, 0, 0], expected)


@quick.only(form="causal")
@backends
@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_callers_is_overwritten(form, backend):
    problem = replace(BASE, **FORMS[form])
    inputs = linear.inputs_of(problem, DEVICE)
    others = {name: x for name, x in inputs.options.items() if isinstance(x, Tensor)}
    tensors = [*inputs.leaves.values(), *inputs.back, *others.values()]
    before, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    results(problem, inputs, backend)
    assert all(map(torch.equal, tensors, before))
    assert [x._version for x in tensors] == versions


@backends
def test_the_state_that_is_returned_is_no_part_of_the_one_that_was_given(backend):
    """Also if there is no token."""
    for n in (0, 3):
        q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE) for _ in range(3))
        given = LinearState(torch.randn(1, 2, 16, 16, device=DEVICE), torch.rand(1, 2, 16, device=DEVICE))
        before = [x.clone() for x in given]
        _, state = linear_attention(q, k, v, initial_state=given, return_state=True, backend=backend)
        for x in state:
            x.fill_(9.0)
        assert all(map(torch.equal, given, before))


@backends
def test_only_some_gradients(backend):
    """Those that are asked for do not depend on which others are."""
    problem = replace(BASE, return_state=True)
    inputs = linear.inputs_of(problem, DEVICE)
    everything = results(problem, inputs, backend)
    for wanted in linear.LEAVES:
        x = {name: y.detach().requires_grad_(name == wanted) for name, y in inputs.leaves.items()}
        state = LinearState(x["kv"], x["k_sum"])
        out, final = linear.on_backend(backend)(x["q"], x["k"], x["v"], initial_state=state, **inputs.options)
        (found,) = torch.autograd.grad(
            [y for y in (out, *final) if y.requires_grad],
            x[wanted],
            [b for y, b in zip((out, *final), inputs.back, strict=True) if y.requires_grad],
        )
        torch.testing.assert_close(found, everything[f"d{wanted}"], rtol=1e-5, atol=1e-5)


def test_results_repeat_bit_for_bit():
    problem = replace(BASE, seqlen_q=130, nheads_q=4, nheads_kv=2)
    inputs = linear.inputs_of(problem, DEVICE)
    linear.assert_same(results(problem, inputs, "triton"), results(problem, inputs, "triton"))


def test_the_backends_agree_on_the_default():
    """None is Triton on a GPU and in its interpreter."""
    q, k, v = (torch.randn(1, 2, 70, 16, device=DEVICE) for _ in range(3))
    assert torch.equal(linear_attention(q, k, v), linear_attention(q, k, v, backend="triton"))
