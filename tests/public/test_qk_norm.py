"""Normalisation of q and k: its definition, results and gradients on both backends, hostile inputs."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedattn
from fusedattn import KVCache, QKNorm, attention, attention_varlen, attention_weights, masks, reference, testing
from fusedattn.caches import append
from fusedattn.testing import Case
from tests.conftest import BACKENDS, DEVICE, INTERPRETING, assert_accurate, assert_equal, inputs_of, triton_attention
from tests.helpers import quick
from tests.helpers.interpreted import interpreted, seen_launches

pytestmark = pytest.mark.usefixtures("poison", "_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)
kinds = pytest.mark.parametrize("kind", ["shared", "per_head", "scale", "across_heads"])
NORMED = Case("norm", seqlen_q=37, seqlen_k=45, qk_norm="per_head", rope="half", causal="bottom_right")
LONG = {"batch": 1, "nheads_q": 2, "nheads_kv": 1, "seqlen_q": 150, "seqlen_k": 150}
SMALL = replace(NORMED, nheads_q=2, nheads_kv=1, seqlen_q=5, seqlen_k=7, head_dim=16)


def factors_like(out: Tensor) -> Tensor:
    """The same numbers for all dtypes and layouts."""
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(out)


def gradients(function: Callable[..., Tensor], *x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """out, and the gradients of all tensors of its sum with fixed factors."""
    tensors = [t.detach().requires_grad_() for t in x]
    out = function(*tensors, **options)
    found = torch.autograd.grad(out, tensors, factors_like(out), allow_unused=True)
    return out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True))


def with_norm(backend: str, **norm: Any) -> Callable[..., Tensor]:
    """Attention as a function of q, k, v and the two weights."""

    def function(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, **options: Any) -> Tensor:
        return attention(q, k, v, qk_norm=QKNorm(q_weight, k_weight, **norm), backend=backend, **options)

    return function


def tensors(n: int = 5, m: int = 7, heads: tuple[int, int] = (4, 2), head_dim: int = 16) -> list[Tensor]:
    shapes = [(2, heads[0], n, head_dim), *[(2, heads[1], m, head_dim)] * 2, (head_dim,), (head_dim,)]
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_definition_is_that_of_torch(dtype):
    x, weight = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    x, weight = x.to(dtype), weight.to(dtype)
    tolerance = {} if dtype != torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-2}
    norm = QKNorm(weight, None, eps=1e-5)
    torch.testing.assert_close(norm.of_queries(x), F.rms_norm(x, (8,), weight, 1e-5), **tolerance)
    torch.testing.assert_close(norm.of_keys(x), F.rms_norm(x, (8,), None, 1e-5), **tolerance)
    length = QKNorm(eps=1e-12, kind="l2").of_keys(x)
    torch.testing.assert_close(length, F.normalize(x, dim=-1), **tolerance)
    whole = QKNorm(weight.repeat(3).view(3, 8), None, eps=1e-5, across_heads=True).of_queries(x)
    flat = F.rms_norm(x.transpose(1, 2).flatten(2), (24,), weight.repeat(3), 1e-5)
    torch.testing.assert_close(whole, flat.unflatten(2, (3, 8)).transpose(1, 2), **tolerance)


@quick.every(4)
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [{}, {"seqlen_q": 1}, LONG, {"head_dim": 40}])
def test_accuracy(kind, dtype, shape):
    """Tiles of many and of few queries, several tiles of the prologue, features that no tile divides."""
    assert_accurate(triton_attention, inputs_of(replace(NORMED, qk_norm=kind, dtype=dtype, **shape)), (kind, shape))


@quick.every(4)
@kinds
@pytest.mark.parametrize("head_dim", [64, 100, 200])
@pytest.mark.parametrize("n_parts", [1, 3])
def test_one_program_walks_over_several_tiles(kind, head_dim, n_parts, monkeypatch):
    from fusedattn.kernels import prologue

    monkeypatch.setattr(prologue, "PARTS", n_parts)
    case = replace(NORMED, batch=1, nheads_q=2, nheads_kv=1, qk_norm=kind, head_dim=head_dim, seqlen_q=130, seqlen_k=70)
    assert_accurate(triton_attention, inputs_of(replace(case, causal=None)), (kind, head_dim))


@backends
@pytest.mark.parametrize("eps", [1e-2, 1.0])
@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_each_eps_counts(backend, eps, kind):
    x = tensors()
    found = gradients(with_norm(backend, eps=eps, kind=kind), *x)
    expected = gradients(with_norm("torch", eps=eps, kind=kind), *(t.double() for t in x))
    for actual, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-3, atol=1e-5)


@backends
def test_a_gradient_of_one_head_alone_reaches_all_across_heads(backend):
    """The other heads are in the norm."""
    x = tensors()
    weights = [w.expand(n, 16).contiguous() for w, n in zip(x[3:], (4, 2), strict=True)]

    def first_head(*t: Tensor) -> Tensor:
        return with_norm(backend, across_heads=True)(*t)[:, :1]

    found = gradients(first_head, *x[:3], *weights)
    assert found[1][:, 1:].any()
    definition = functools.partial(with_norm("torch", across_heads=True))
    expected = gradients(lambda *t: definition(*t)[:, :1], *(t.double() for t in (*x[:3], *weights)))
    for actual, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-3, atol=1e-5)


@backends
def test_weights_of_any_shape(backend):
    """A shape that broadcasts gets the sum of the gradients of all elements."""
    q, k, v, *_ = tensors()
    torch.manual_seed(3)
    for of_q, of_k in (((), ()), ((1,), (16,)), ((16,), (2, 1)), ((4, 1), (1, 1)), ((1, 16), (2, 16)), ((4, 16), ())):
        weights = [torch.rand(shape, device=DEVICE) + 0.5 for shape in (of_q, of_k)]
        whole = [x.expand(n, 16).contiguous() for x, n in zip(weights, (4, 2), strict=True)]
        found = gradients(with_norm(backend), q, k, v, *weights)
        expected = gradients(with_norm(backend), q, k, v, *whole)
        for x, y in zip(found, expected, strict=True):
            y = y.sum_to_size(torch.atleast_2d(x).shape).view(x.shape) if x.dim() < 4 else y
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@backends
def test_weights_that_are_absent_are_one(backend):
    q, k, v, *_ = tensors()
    ones = torch.ones(16, device=DEVICE)
    for norm in (QKNorm(), QKNorm(ones), QKNorm(None, ones)):
        found = gradients(functools.partial(attention, qk_norm=norm, backend=backend), q, k, v)
        expected = gradients(with_norm(backend), q, k, v, ones, ones)
        for x, y in zip(found, expected, strict=False):
            torch.testing.assert_close(x, y)


@backends
def test_only_the_tensors_that_need_a_gradient_get_one(backend):
    x = tensors(2, 3, (2, 1))
    whole = gradients(with_norm(backend), *x)[1:]
    for needed in range(1, 32):
        leaves = [t.detach().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(x)]
        out = with_norm(backend)(*leaves)
        out.backward(factors_like(out))
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.grad is not None:
                assert torch.equal(leaf.grad, whole[i]) if backend == "triton" else leaf.grad.allclose(whole[i])


@kinds
@backends
def test_a_nan_behind_the_mask_reaches_nothing(kind, backend):
    """Not even the gradients of the weights, to which every key contributes."""
    if kind == "across_heads":
        heads = slice(None)
    else:
        heads = slice(0, 1)
    inputs = inputs_of(replace(SMALL, qk_norm=kind, causal=None, batch=2))
    valid = torch.tensor([[True] * 5 + [False] * 2, [False] * 7], device=DEVICE)
    clean = replace(inputs, mask=masks.padding(valid))
    poisoned = clean.with_leaves({"k": clean.k.clone(), "q": clean.q.clone(), "v": clean.v.clone()})
    for bad, at in ((math.nan, 5), (math.inf, 6)):
        poisoned.k[0, heads, at, 3] = bad
        poisoned.k[1, heads, at, 2] = bad
        poisoned.v[0, heads, at] = bad
    poisoned.q[1, heads, 2, 1] = math.nan  # it sees nothing
    function = functools.partial(attention, backend=backend)
    found, expected = testing.run(function, poisoned), testing.run(function, clean)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], msg=name)
        assert not x.isnan().any(), name


@backends
def test_a_nan_that_is_seen_reaches_the_weights(backend):
    q, k, v, *weights = tensors()
    k[0, 1, 2, 3] = math.nan
    out, *_, dk_weight = gradients(with_norm(backend), q, k, v, *weights)
    assert out[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()
    assert out[1].isfinite().all()
    assert dk_weight.isnan().all()


@backends
@pytest.mark.parametrize(("n", "m"), [(0, 7), (5, 0), (0, 0), (1, 1)])
def test_lengths_of_zero_and_one(backend, n, m):
    out, dq, dk, dv, dq_weight, dk_weight = gradients(with_norm(backend), *tensors(n, m))
    assert out.shape == (2, 4, n, 16)
    if not n or not m:
        assert not any(x.any() for x in (out, dq, dk, dv, dq_weight, dk_weight))
    else:
        assert all(x.isfinite().all() for x in (dq, dk, dv, dq_weight, dk_weight))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e20, 1e37])
def test_large_and_small_numbers(backend, dtype, size):
    """Squares of large ones overflow; small ones are less than eps."""
    q, k, v, *weights = tensors()
    q, k = (x.clamp(-3, 3).mul(size).to(dtype) for x in (q, k))
    for across_heads in (False, True):
        norm = QKNorm(*weights, across_heads=across_heads)
        out = attention(q, k, v.to(dtype), qk_norm=norm, backend=backend)
        wide = (x.double() for x in (q, k, v.to(dtype)))
        expected = reference.attention(*wide, qk_norm=norm.mapped(Tensor.double))[0]
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@backends
def test_a_row_of_zeros_stays_zero(backend):
    q, k, v, *weights = tensors()
    q[0, 0, 1] = k[0, 0, 2] = 0.0
    found = gradients(with_norm(backend), q, k, v, *weights)
    expected = gradients(with_norm("torch"), *(x.double() for x in (q, k, v, *weights)))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


@backends
@pytest.mark.parametrize("scale", [-0.3, 1e-45, 0.0, -1e-40])
def test_any_scale(backend, scale):
    """Kernels get a positive scale: the sign goes into q, which the norm keeps."""
    x = tensors()
    found = gradients(with_norm(backend), *x, scale=scale)
    expected = gradients(with_norm("torch"), *(t.double() for t in x), scale=scale)
    for actual, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-3, atol=1e-5)


@backends
def test_strides(backend):
    """Tensors whose tokens are contiguous; weights that are columns, or of another dtype."""
    x = tensors()
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3]]
    weights = [torch.stack((w, w + 1), -1)[:, 0] for w in x[3:]]
    assert not weights[0].is_contiguous()
    for y, expected in zip(
        gradients(with_norm(backend), *moved, *weights), gradients(with_norm(backend), *x), strict=True
    ):
        torch.testing.assert_close(y, expected)
    halves = [t.bfloat16() for t in x[:3]]
    found = gradients(with_norm(backend), *halves, *x[3:])
    assert found[1].dtype == torch.bfloat16
    assert found[4].dtype == torch.float32


@interpreted
def test_heads_are_summed_once_in_each_direction():
    """The factor of a token is that of the forward, computed again; the projection comes from its gradient."""
    inputs = inputs_of(replace(NORMED, qk_norm="across_heads"))
    with seen_launches() as launches:
        testing.run(triton_attention, inputs)
    names = [kernel for kernel, _ in launches]
    assert names.count("qk_norm_rows") == 2 + 2 + 2  # of q and k: forward, factor and projection


@quick.every(2)
@kinds
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_repeat_bit_for_bit(kind, deterministic):
    inputs = inputs_of(replace(NORMED, qk_norm=kind, dtype=torch.bfloat16))
    function = functools.partial(triton_attention, deterministic=deterministic)
    first, again = testing.run(function, inputs), testing.run(function, inputs)
    if deterministic or INTERPRETING:
        assert_equal(first, again)


@quick.every(3)
@kinds
@backends
def test_packed_sequences(kind, backend):
    """Each as if it were alone; tokens behind the last get no gradient."""
    lengths, total = (5, 0, 33, 1), 41
    inputs = inputs_of(replace(NORMED, batch=1, seqlen_q=total, seqlen_k=total, qk_norm=kind))
    assert inputs.rope is not None
    packed = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    def whole(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        norm = replace(inputs.qk_norm, q_weight=q_weight, k_weight=k_weight)
        x = (x[0].transpose(0, 1) for x in (q, k, v))
        options = {"mask": masks.causal(), "rope": inputs.rope, "qk_norm": norm, "backend": backend}
        return attention_varlen(*x, packed, packed, max(lengths), max(lengths), **options).transpose(0, 1)[None]

    def each(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        norm = replace(inputs.qk_norm, q_weight=q_weight, k_weight=k_weight)
        parts = [
            attention(*(x[:, :, i:j] for x in (q, k, v)), mask=masks.causal(), rope=inputs.rope, qk_norm=norm)
            for i, j in zip(packed.tolist(), packed.tolist()[1:], strict=False)
        ]
        rest = q.new_zeros((*q.shape[:2], total - sum(lengths), q.shape[3]))
        return torch.cat((*parts, rest), dim=2)

    x = list(inputs.leaves.values())
    for actual, expected in zip(gradients(whole, *x), gradients(each, *x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_many_sequences(monkeypatch):
    """More than a norm has parts: each gets a program all the same."""
    from fusedattn.kernels import prologue

    monkeypatch.setattr(prologue, "PARTS", 1)
    q, k, v, *weights = tensors(3, 3)
    for actual, expected in zip(
        gradients(with_norm("triton"), q, k, v, *weights), gradients(with_norm("torch"), q, k, v, *weights), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@backends
def test_nested_tensors(backend):
    q, k, v, *weights = tensors(6, 6)
    norm = QKNorm(*weights)
    lengths = torch.tensor([6, 4], device=DEVICE)
    nested = [
        torch.nested.nested_tensor([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)], layout=torch.jagged)
        for x in (q, k, v)
    ]
    out = attention(*(x.transpose(1, 2) for x in nested), qk_norm=norm, backend=backend)
    for i, part in enumerate(out.transpose(1, 2).unbind()):
        n = int(lengths[i])
        alone = attention(*(x[i : i + 1, :, :n] for x in (q, k, v)), qk_norm=norm, backend=backend)
        torch.testing.assert_close(part.transpose(0, 1), alone[0], rtol=1e-4, atol=1e-5)


@quick.every(2)
@kinds
@backends
def test_keys_of_a_cache_are_normalised_before_they_are_appended(kind, backend):
    inputs = inputs_of(replace(NORMED, qk_norm=kind, seqlen_q=3, causal=None))
    norm = inputs.qk_norm
    assert norm is not None
    cache = KVCache.contiguous(2, 2, 45, 32, dtype=torch.float32, rope=inputs.rope, device=DEVICE)
    append(cache, norm.of_keys(inputs.k), inputs.v, backend=backend)
    out = attention(inputs.q, cache=cache, qk_norm=norm, backend=backend)
    expected = attention(inputs.q, inputs.k, inputs.v, rope=inputs.rope, qk_norm=norm, backend="torch")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@kinds
def test_weights_of_an_attention(kind):
    inputs = inputs_of(replace(NORMED, qk_norm=kind))
    _, lse = attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    found = attention_weights(inputs.q, inputs.k, lse, **inputs.options)
    expected = reference.attention(inputs.q, inputs.k, inputs.v, **inputs.options)[2]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@backends
def test_the_largest_scores(backend):
    inputs = inputs_of(replace(NORMED, qk_norm="per_head"))
    _, largest = attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_max=True, backend=backend)
    torch.testing.assert_close(largest, reference.largest_scores(inputs.q, inputs.k, **inputs.options))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled(backend):
    """One graph; the operator, with its fake, gives the gradients of the weights too."""
    torch.compiler.reset()
    x = tensors()
    function = with_norm(backend, across_heads=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(gradients(compiled, *x), gradients(function, *x), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(not INTERPRETING, reason="a GPU has no float64 kernels")
def test_second_derivatives_and_vmap():
    x = [t.double().requires_grad_() for t in tensors(2, 3, (2, 1), 4)]
    function = with_norm("triton")
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True)
    q, k, v, *weights = (t.detach() for t in x)
    by_weight = torch.func.vmap(lambda w: function(q, k, v, w, weights[1]))(torch.stack((weights[0], 2 * weights[0])))
    torch.testing.assert_close(by_weight[1], function(q, k, v, 2 * weights[0], weights[1]))
    _, tangent = torch.func.jvp(lambda w: function(q, k, v, w, weights[1]), (weights[0],), (weights[1],))
    near = [function(q, k, v, weights[0] + step * weights[1], weights[1]) for step in (1e-6, -1e-6)]
    torch.testing.assert_close(tangent, (near[0] - near[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_a_norm_can_be_copied_and_moved():
    norm = QKNorm(torch.ones(4), None, eps=1e-3, kind="l2", across_heads=True)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), norm.to("cpu"), norm.mapped(torch.clone)):
        assert (other.eps, other.kind, other.across_heads, other.k_weight) == (1e-3, "l2", True, None)
        assert torch.equal(other.q_weight, norm.q_weight)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"q_weight": 1.0}, TypeError, "qk_norm.q_weight: got float, allowed are floating-point tensors and None"),
        ({"k_weight": torch.ones(4, dtype=torch.int32)}, TypeError, "qk_norm.k_weight: got torch.int32"),
        ({"q_weight": torch.ones(1, 1, 4)}, ValueError, r"qk_norm.q_weight: got shape \(1, 1, 4\)"),
        ({"eps": 0.0}, ValueError, "qk_norm.eps: got 0.0, allowed are positive numbers"),
        ({"eps": math.nan}, ValueError, "qk_norm.eps: got nan"),
        ({"eps": math.inf}, ValueError, "qk_norm.eps: got inf"),
        ({"eps": "1"}, TypeError, "qk_norm.eps: got str"),
        ({"eps": True}, TypeError, "qk_norm.eps: got bool"),
        ({"kind": "layer"}, ValueError, "qk_norm.kind: got 'layer', allowed are 'rms' and 'l2'"),
    ],
)
def test_wrong_norms_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        QKNorm(**arguments)


@backends
def test_norms_that_do_not_fit_are_refused(backend):
    q, k, v, *_ = tensors()
    for weight, text in ((torch.ones(8), r"\(8,\)"), (torch.ones(3, 16), r"\(3, 16\)"), (torch.ones(0), r"\(0,\)")):
        for name, nheads in (("q_weight", 4), ("k_weight", 2)):
            allowed = rf"qk_norm.{name}: got shape {text}, allowed .* \(nheads, head_dim\) = \({nheads}, 16\)"
            with pytest.raises(ValueError, match=allowed):
                attention(q, k, v, qk_norm=QKNorm(**{name: weight.to(DEVICE)}), backend=backend)
    with pytest.raises(TypeError, match=r"qk_norm: got Tensor, allowed are fusedattn.QKNorm and None"):
        attention(q, k, v, qk_norm=q, backend=backend)
    with pytest.raises(ValueError, match=r"qk_norm.q_weight: got device meta"):
        attention(q, k, v, qk_norm=QKNorm(torch.ones(16, device="meta")), backend=backend)
    wide = torch.zeros(1, 1, 2, 576, device=DEVICE)
    if backend == "triton":
        assert "qk_norm: got a norm with head_dim 576" in str(
            fusedattn.not_supported_reasons(wide, wide, wide[..., :512], qk_norm=QKNorm(), backend=backend)
        )
