"""``FusedMultiheadAttention`` against ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedattn import attention, fuse, masks, unfuse
from fusedattn.integrations import torch_nn
from fusedattn.integrations.torch_nn import FusedMultiheadAttention
from fusedattn.testing import compare_results
from tests.conftest import DEVICE, INTERPRETING, assert_ratios
from tests.helpers.torch_layers import (
    BATCH,
    HEAD_DIM,
    HEADS,
    SEQLEN_K,
    SEQLEN_Q,
    WARNINGS,
    WIDTH,
    assert_same,
    backends,
    exact,
)

pytestmark = [pytest.mark.usefixtures("_seed"), pytest.mark.filterwarnings(*WARNINGS)]


def pair(backend: str, **options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's module and its fused copy; biases that torch initialises to 0 are random."""
    reference = nn.MultiheadAttention(WIDTH, HEADS, device=DEVICE, dtype=exact(backend), **options)
    for bias in (reference.in_proj_bias, reference.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return reference, fuse(copy.deepcopy(reference), backend=backend)


def inputs_of(module: nn.MultiheadAttention, kind: str, batched: bool = True) -> list[Tensor]:
    """query, key and value: `kind` is "self", "memory" (key is value) or "all"."""

    def draw(length: int, width: int) -> Tensor:
        x = torch.randn(BATCH, length, width, device=DEVICE, dtype=module.out_proj.weight.dtype)
        x = x[0] if not batched else x if module.batch_first else x.transpose(0, 1)
        return x.detach().requires_grad_()

    query = draw(SEQLEN_Q, WIDTH)
    if kind == "self":
        return [query] * 3
    key = draw(SEQLEN_K, module.kdim)
    return [query, key, key if kind == "memory" else draw(SEQLEN_K, module.vdim)]


def mask_of(kind: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """A mask with torch's polarity, "bool" or "float"; the first key is visible."""
    if kind is None:
        return None
    hidden = torch.rand(shape, device=DEVICE) < 0.4
    hidden[..., 0] = False
    if kind == "bool":
        return hidden
    return torch.randn(shape, device=DEVICE, dtype=dtype).masked_fill(hidden, -math.inf).requires_grad_()


def added_for(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)


def outcome(module: nn.Module, inputs: list[Tensor], **options: Any) -> list[Tensor | None]:
    """Output, weights, and the gradients of a loss of both by inputs, float masks and parameters."""
    out, weights = module(*inputs, **options)
    generator = torch.Generator().manual_seed(1)
    results = [x for x in (out, weights) if x is not None]
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    leaves = {id(x): x for x in (*inputs, *options.values(), *module.parameters()) if torch.is_tensor(x)}
    wanted = [x for x in leaves.values() if x.requires_grad]
    return [out, weights, *torch.autograd.grad(results, wanted, drawn, allow_unused=True, materialize_grads=True)]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "batch": ("first", "second", None),
    "inputs": ("self", "memory", "all"),
    "widths": ({}, {"kdim": 6}, {"kdim": 6, "vdim": 10}),
    "bias": (True, False),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "key_padding_mask": (None, "bool", "float"),
    "attn_mask": (None, "bool", "float", "bool of heads", "float of heads"),
    "weights": (None, "average", "of heads"),
    "training": (True, False),
}


def pairs_of_options() -> list[dict[str, Any]]:
    """Combinations that contain every pair of values of different options."""
    combined = (dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values()))
    possible = [case for case in combined if not case["widths"] or case["inputs"] == "all"]
    random.Random(0).shuffle(possible)
    chosen: list[dict[str, Any]] = []
    met: set[Any] = set()
    for case in possible:
        new = set(itertools.combinations([(name, str(value)) for name, value in case.items()], 2)) - met
        if new:
            chosen.append(case)
            met |= new
    return chosen


PAIRS = pairs_of_options()


@pytest.mark.parametrize(
    ("backend", "case"),
    # The treatment of options does not depend on the backend, and the interpreter is slow.
    [*(("torch", case) for case in PAIRS), *(("triton", case) for case in PAIRS[:: 4 if INTERPRETING else 1])],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_options(backend, case):
    batched = case["batch"] is not None
    made = {name: case[name] for name in ("bias", "add_bias_kv", "add_zero_attn")} | case["widths"]
    reference, fused = pair(backend, batch_first=case["batch"] == "first", **made)
    for module in (reference, fused):
        module.train(case["training"])
    inputs = inputs_of(reference, case["inputs"], batched)
    seqlen_k = SEQLEN_Q if case["inputs"] == "self" else SEQLEN_K
    kind, _, of_heads = (case["attn_mask"] or "").partition(" ")
    heads = (BATCH * HEADS if batched else HEADS,) if of_heads else ()
    of_batch = (BATCH,) if batched else ()
    options = {
        "key_padding_mask": mask_of(case["key_padding_mask"], (*of_batch, seqlen_k), exact(backend)),
        "attn_mask": mask_of(kind or None, (*heads, SEQLEN_Q, seqlen_k), exact(backend)),
        "need_weights": case["weights"] is not None,
        "average_attn_weights": case["weights"] == "average",
    }
    assert_same(outcome(fused, inputs, **options), outcome(reference, inputs, **options))
    with torch.no_grad():  # torch's fused operator, if it supports the case
        assert_same(fused(*inputs, **options), reference(*inputs, **options))


@pytest.mark.parametrize(
    ("backend", "kind", "padded", "inputs"),
    [
        *itertools.product(["torch"], ["bool", "float"], [False, True], ["self", "memory"]),
        ("triton", "float", True, "memory"),
        ("triton", "bool", False, "self"),
    ],
)
def test_causal_hint(backend, kind, padded, inputs):
    reference, fused = pair(backend, batch_first=True)
    inputs = inputs_of(reference, inputs)
    hidden = torch.ones(SEQLEN_Q, inputs[1].shape[1], dtype=torch.bool, device=DEVICE).triu(1)
    mask = hidden if kind == "bool" else added_for(hidden, exact(backend))
    options: dict[str, Any] = {"attn_mask": mask, "need_weights": False}
    if padded:
        options["key_padding_mask"] = mask_of("bool", (BATCH, inputs[1].shape[1]), exact(backend))
    expected = outcome(reference, inputs, **options)
    for reading in (mask, torch.full_like(mask, torch.nan) if kind == "float" else ~mask):
        assert_same(outcome(fused, inputs, **{**options, "attn_mask": reading}, is_causal=True), expected)
    # With weights, the mask decides.
    options |= {"need_weights": True, "attn_mask": mask_of(kind, tuple(mask.shape), exact(backend)), "is_causal": True}
    assert_same(outcome(fused, inputs, **options), outcome(reference, inputs, **options))


@backends
@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_causal_hint_is_not_taken_for_appended_keys(backend, option):
    """Every query sees appended keys; torch's hint would show them only to queries after the last key."""
    reference, fused = pair(backend, **{option: True})
    inputs = inputs_of(reference, "self")
    mask = torch.ones(SEQLEN_Q, SEQLEN_Q, dtype=torch.bool, device=DEVICE).triu(1)
    options = {"attn_mask": mask, "need_weights": False}
    assert_same(outcome(fused, inputs, is_causal=True, **options), outcome(reference, inputs, **options))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_is_for_the_kernels_to_skip(kind, monkeypatch):
    """Also as a float mask, into which the layers of torch turn a bool one."""
    seen = []

    def watched(*args: Any, mask: masks.Mask, **options: Any) -> Any:
        seen.append(mask)
        return attention(*args, mask=mask, **options)

    monkeypatch.setattr(torch_nn, "attention", watched)
    reference, fused = pair("torch")
    padding = mask_of(kind, (BATCH, SEQLEN_Q), torch.float64)
    fused(*inputs_of(reference, "self"), key_padding_mask=padding, need_weights=False)
    visible = ~padding if kind == "bool" else padding != -math.inf
    assert seen[0].valid.equal(visible)
    assert seen[0].allowed is None


@backends
def test_dropout(backend):
    _, fused = pair(backend, dropout=0.25, batch_first=True)
    inputs = inputs_of(fused, "memory")
    torch.manual_seed(3)
    out, weights = fused(*inputs, average_attn_weights=False)
    torch.manual_seed(3)
    alone, nothing = fused(*inputs, need_weights=False)
    assert nothing is None
    assert_same([alone], [out])
    torch.manual_seed(3)
    assert_same([fused(*inputs)[1]], [weights.mean(1)])

    fused.eval()
    whole = fused(*inputs, average_attn_weights=False)[1]
    kept = weights != 0
    assert 0 < kept.sum() < kept.numel()
    assert_same([weights], [whole * kept / 0.75])
    # From the weights on, with torch's own operations.
    value = F.linear(inputs[2], fused.in_proj_weight[2 * WIDTH :], fused.in_proj_bias[2 * WIDTH :])
    heads = weights @ value.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
    assert_same([out], [fused.out_proj(heads.transpose(1, 2).flatten(2))])

    fused.train()
    gradients = []
    for need_weights in (False, True):  # the same draw gives the same gradients of the output
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(fused(*inputs, need_weights=need_weights)[0].sum(), inputs[:2]))
    assert_same(*gradients)
    assert_same(gradients[0], torch.autograd.grad(fused.out_proj(heads.transpose(1, 2).flatten(2)).sum(), inputs[:2]))


def test_dropout_has_torchs_distribution():
    reference, fused = pair("torch", dropout=0.3, batch_first=True)
    query = torch.randn(4, 10, WIDTH, dtype=torch.float64, device=DEVICE)
    key = torch.randn(4, 500, WIDTH, dtype=torch.float64, device=DEVICE)
    for module in (reference, fused):
        weights = module.train()(query, key, key, average_attn_weights=False)[1]
        kept = weights != 0
        assert abs(kept.double().mean().item() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / weights.numel())
        whole = module.eval()(query, key, key, average_attn_weights=False)[1]
        assert_same([weights], [whole * kept / 0.7])


@backends
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_rows_that_see_nothing(backend, kind, need_weights):
    reference, fused = pair(backend, batch_first=True)
    query, key, _ = inputs_of(reference, "memory")
    padding = torch.tensor([[True], [False]], device=DEVICE).expand(BATCH, SEQLEN_K)
    padding = padding if kind == "bool" else added_for(padding, query.dtype)
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    out, weights = fused(query, key, key, **options)
    expected, its_weights = reference(query, key, key, **options)
    assert out[0].equal(fused.out_proj.bias.expand_as(out[0]))
    assert_same([out[1]], [expected[1]])
    if need_weights:
        assert weights[0].eq(0).all()
        assert its_weights[0].isnan().all()
        assert_same([weights[1]], [its_weights[1]])
    loss = out.square().sum() + (weights.square().sum() if need_weights else 0.0)
    dquery, dkey, *of_parameters = torch.autograd.grad(loss, (query, key, *fused.parameters()))
    assert all(x[0].eq(0).all() and x[1].ne(0).all() for x in (dquery, dkey))
    assert all(x.isfinite().all() for x in of_parameters)


@backends
@pytest.mark.parametrize("kind", ["bool padding", "float padding", "bool mask"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_behind_a_mask(backend, kind, poison):
    _, fused = pair(backend, batch_first=True)
    query, key, _ = inputs_of(fused, "memory")
    hidden = mask_of("bool", (1, SEQLEN_K), query.dtype).expand(BATCH, -1)
    options = {
        "bool mask": {"attn_mask": hidden[:1].expand(SEQLEN_Q, -1)},
        "bool padding": {"key_padding_mask": hidden},
        "float padding": {"key_padding_mask": added_for(hidden, query.dtype)},
    }[kind]
    for need_weights in (False, True):
        keys = [key.masked_fill(hidden[..., None], fill) for fill in (0.0, poison)]
        assert_same(*(fused(query, x, x, need_weights=need_weights, **options) for x in keys))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_accuracy(backend, dtype):
    """The error against float64, compared with the error of torch's module in the same dtype."""
    reference = nn.MultiheadAttention(32, 2, batch_first=True, device=DEVICE, dtype=dtype)
    x = torch.randn(2, 33, 32, device=DEVICE, dtype=dtype)
    padding = torch.arange(33, device=DEVICE) >= torch.tensor([33, 20], device=DEVICE)[:, None]
    fused = fuse(copy.deepcopy(reference), backend=backend)
    exactly = copy.deepcopy(reference).double()
    results = []
    for module, inputs in ((fused, x), (exactly, x.double()), (reference, x)):
        inputs = inputs.clone().requires_grad_()
        out, _ = module(inputs, inputs, inputs, key_padding_mask=padding, need_weights=False)
        out.square().sum().backward()
        results.append({"out": out.detach(), "din": inputs.grad, "dweight": module.in_proj_weight.grad})
    assert_ratios(compare_results(*results, dtype))


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(backend, dtype):
    reference, fused = (x.float() for x in pair(backend, batch_first=True, add_bias_kv=True, add_zero_attn=True))
    x = torch.randn(BATCH, SEQLEN_Q, WIDTH, device=DEVICE)
    mask = torch.randn(SEQLEN_Q, SEQLEN_Q, device=DEVICE)
    padding = torch.zeros(BATCH, SEQLEN_Q, device=DEVICE)
    for need_weights in (True, False):
        options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
        with torch.autocast(DEVICE, dtype):
            out, weights = fused(x, x, x, **options)
        expected, its_weights = reference(x, x, x, **options)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
        if need_weights:
            assert weights.dtype == dtype
            torch.testing.assert_close(weights.float(), its_weights, rtol=0.02, atol=0.01)
    with torch.autocast(DEVICE, dtype):  # large scores, which the dtype holds less exactly than lse
        _, weights = fused(8 * x, 8 * x, 8 * x, average_attn_weights=False)
    total = weights.float().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2 * torch.finfo(dtype).eps)


@backends
def test_strides(backend):
    """Inputs and masks that are not contiguous or are expanded; none is written to."""
    reference, fused = pair(backend, batch_first=True)
    query = torch.randn(WIDTH, SEQLEN_Q, BATCH, device=DEVICE, dtype=exact(backend)).permute(2, 1, 0)
    key = torch.randn(1, 1, 2 * WIDTH, device=DEVICE, dtype=exact(backend))[..., ::2].expand(BATCH, SEQLEN_K, -1)
    hidden = mask_of("bool", (SEQLEN_K, SEQLEN_Q), exact(backend)).T
    added = mask_of("float", (1, 1, SEQLEN_K), exact(backend)).detach().expand(BATCH * HEADS, SEQLEN_Q, -1)
    padding = mask_of("float", (1, SEQLEN_K), exact(backend)).detach().expand(BATCH, -1)
    for attn_mask in (hidden, added):
        options = {"attn_mask": attn_mask, "key_padding_mask": padding}
        given = [x.clone() for x in (query, key, attn_mask, padding)]
        inputs = [query.requires_grad_(), key.requires_grad_(), key]
        if not hidden.all(dim=-1).any():
            assert_same(outcome(fused, inputs, **options), outcome(reference, inputs, **options))
        assert all(a.equal(b) for a, b in zip(given, (query, key, attn_mask, padding), strict=True))


@backends
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 1, 1), (2, 1, 7), (2, 0, 3), (2, 3, 0), (0, 3, 3)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_small_sizes(backend, batch, seqlen_q, seqlen_k, need_weights):
    reference, fused = pair(backend, batch_first=True)
    place = {"device": DEVICE, "dtype": exact(backend), "requires_grad": True}
    query, key = (torch.randn(batch, n, WIDTH, **place) for n in (seqlen_q, seqlen_k))
    assert_same(*(outcome(x, [query, key, key], need_weights=need_weights) for x in (fused, reference)))


X = torch.randn(BATCH, SEQLEN_Q, WIDTH)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ([X[None]] * 3, {}, ValueError, r"query: got shape \(1, 2, 5, 16\), allowed is .*\(batch, seqlen, 16\)"),
        ([X[..., :8]] * 3, {}, ValueError, r"query: got shape \(2, 5, 8\)"),
        ([X, X[0], X], {}, ValueError, r"key: got shape \(5, 16\), allowed is \(batch, seqlen, 16\)"),
        ([X, X, X[..., :3]], {}, ValueError, r"value: got shape \(2, 5, 3\)"),
        ([X, X, X[:, :3]], {}, ValueError, r"value: .* allowed is the batch and length of key, \(2, 5, 16\)"),
        ([X, X[:1], X[:1]], {}, ValueError, r"key: got shape \(1, 5, 16\), allowed is the batch of query, 2"),
        ([X] * 3, {"is_causal": True}, ValueError, "attn_mask: got None"),
        ([X] * 3, {"key_padding_mask": torch.ones(2, 5).byte()}, TypeError, "key_padding_mask: got torch.uint8"),
        ([X] * 3, {"attn_mask": torch.ones(5, 5).long()}, TypeError, "attn_mask: got torch.int64"),
        ([X] * 3, {"key_padding_mask": torch.ones(2, 6)}, ValueError, r"key_padding_mask: .* allowed is \(2, 5\)"),
        ([X[0]] * 3, {"key_padding_mask": torch.ones(1, 5)}, ValueError, r"key_padding_mask: .* allowed is \(5,\)"),
        ([X] * 3, {"attn_mask": torch.ones(1, 5, 5)}, ValueError, r"attn_mask: .* \(5, 5\) and \(4, 5, 5\)"),
        ([X] * 3, {"attn_mask": torch.ones(2, 2, 5, 5)}, ValueError, r"attn_mask: got shape \(2, 2, 5, 5\)"),
        ([X.double()] * 3, {}, RuntimeError, "dtype"),
    ],
)
def test_errors(inputs, options, error, message):
    reference = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    fused = fuse(copy.deepcopy(reference), backend="torch")
    with pytest.raises((AssertionError, RuntimeError)):
        reference(*inputs, **options)
    with pytest.raises(error, match=message):
        fused(*inputs, **options)


def test_reasons():
    assert torch_nn.reasons(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, add_bias_kv=True)) == []
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=1.0, add_bias_kv=True)
    module.bias_v = None
    assert len(torch_nn.reasons(module)) == 2
    with pytest.raises(NotImplementedError, match=r"dropout: got 1\.0.*; .*bias_k, bias_v: got one"):
        fuse(module)
    assert type(module) is nn.MultiheadAttention


@backends
def test_nested_tensors(backend):
    reference, fused = pair(backend, batch_first=True)
    sequences = [torch.randn(n, WIDTH, device=DEVICE, dtype=exact(backend)) for n in (3, 1, 0, 9)]
    x = torch.nested.nested_tensor(sequences)
    with torch.no_grad():
        out, weights = fused.eval()(x, x, x, need_weights=False)
        expected, _ = reference.eval()(x, x, x, need_weights=False)
    assert weights is None
    assert out.layout == torch.strided
    assert_same(out.unbind(), expected.unbind())

    # torch has no gradients here, so compare with those of each sequence alone.
    x = torch.nested.nested_tensor(sequences, requires_grad=True)
    out, _ = fused(x, x, x, need_weights=False)
    (found,) = torch.autograd.grad(sum(y.square().sum() for y in out.unbind()), x)
    for sequence, gradient in zip(sequences, found.unbind(), strict=True):
        leaf = sequence.clone().requires_grad_()
        alone, _ = fused(leaf, leaf, leaf, need_weights=False)
        assert_same([gradient], torch.autograd.grad(alone.square().sum(), leaf))


def test_backend_is_that_of_the_module(monkeypatch):
    seen = []

    def watched(function: Any, *args: Any, **options: Any) -> Any:
        seen.append((options["backend"], options["dropout_p"]))
        return function(*args, **options)

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(torch_nn, name, partial(watched, getattr(torch_nn, name)))
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, batch_first=True), backend="torch")
    nested = torch.nested.nested_tensor([X[0], X[1, :2]])
    for x, need_weights in ((X, True), (X, False), (nested, False)):
        module(x, x, x, need_weights=need_weights)
    assert seen == [("torch", 0.25)] * 3


def test_nested_tensors_that_are_refused():
    x = torch.nested.nested_tensor([X[0], X[1, :2]])
    jagged = torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged)
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), backend="torch")
    with pytest.raises(NotImplementedError, match="not one tensor; key_padding_mask; attn_mask; need_weights=True;"):
        module(x, x, X, key_padding_mask=torch.zeros(2, 5), attn_mask=torch.zeros(5, 5))
    with pytest.raises(NotImplementedError, match=r"another layout than torch\.strided;"):
        module(jagged, jagged, jagged, need_weights=False)
    for wrong, dimensions in (([], 1), ([torch.zeros(2, 5, 4)], 4)):
        y = torch.nested.nested_tensor(wrong)
        with pytest.raises(NotImplementedError, match=f"with {dimensions} dimensions; allowed"):
            module(y, y, y, need_weights=False)
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True, kdim=8, vdim=8), backend="torch")
    with pytest.raises(NotImplementedError, match="batch_first=False; kdim or vdim; bias_k or add_zero_attn;"):
        module(x, x, x, need_weights=False)


def test_the_module_is_unchanged():
    reference = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    parameters, names = list(reference.parameters()), list(reference.state_dict())
    module = fuse(reference, backend="torch")
    assert module is reference
    assert type(module) is FusedMultiheadAttention
    assert list(module.state_dict()) == names
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert not module._qkv_same_embed_dim
    unfuse(module)
    assert type(module) is nn.MultiheadAttention
    assert module._qkv_same_embed_dim
    assert "backend" not in vars(module)


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 10}])
def test_copies(widths):
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **widths), backend="torch").to(DEVICE)
    inputs = inputs_of(module, "all")
    expected = module(*inputs)
    fresh = FusedMultiheadAttention(WIDTH, HEADS, batch_first=True, backend="torch", device=DEVICE, **widths)
    assert list(fresh.state_dict()) == list(module.state_dict())
    assert not torch.equal(fresh(*inputs)[0], expected[0])
    fresh.load_state_dict(module.state_dict())
    for twin in (fresh, copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert (type(twin), twin.backend) == (FusedMultiheadAttention, "torch")
        assert_same(twin(*inputs), expected)
        unfuse(twin)
        assert twin._qkv_same_embed_dim == (not widths)
        assert_same(twin(*inputs), expected)
        fuse(twin, backend="torch")
    with pytest.raises(ValueError, match="backend: got 'fast'"):
        FusedMultiheadAttention(WIDTH, HEADS, backend="fast")


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 10}])
def test_reset_parameters(widths):
    reference = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, **widths)
    module = fuse(copy.deepcopy(reference), backend="torch")
    parameters = list(module.parameters())
    for x in (reference, module):
        torch.manual_seed(5)
        x._reset_parameters()
    assert all(a.equal(b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert type(module) is FusedMultiheadAttention


def test_state_of_an_old_checkpoint():
    """torch 1.1 pickled modules without the attribute that says how the projections are stored."""
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS), backend="torch")
    state = {name: x for name, x in vars(module).items() if name != "_qkv_same_embed_dim"}
    restored = FusedMultiheadAttention.__new__(FusedMultiheadAttention)
    restored.__setstate__(state)
    assert unfuse(restored)._qkv_same_embed_dim


def test_hooks_and_parametrizations():
    """Hooks of the module run; torch only uses the weight and the bias of `out_proj`, not its hooks."""
    reference = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    parametrize.register_parametrization(reference.out_proj, "weight", nn.Tanh())
    called: list[str] = []
    reference.register_forward_hook(lambda *_: called.append("module"))
    reference.out_proj.register_forward_hook(lambda *_: called.append("out_proj"))
    module = fuse(copy.deepcopy(reference), backend="torch")
    assert_same(module(X, X, X), reference(X, X, X))
    assert called == ["module"] * 2

    parametrize.register_parametrization(module, "in_proj_weight", nn.Tanh())
    tanh = {"in_proj_weight": reference.in_proj_weight.tanh()}
    assert_same(module(X, X, X), torch.func.functional_call(reference, tanh, (X, X, X)))
    with torch.no_grad():
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True).eval()
        layer.self_attn = module
        layer(X)
    assert called == ["module"] * 5


@backends
def test_compile_of_all_options(backend):
    torch._dynamo.reset()
    options = {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True, "dropout": 0.5}
    module = fuse(nn.MultiheadAttention(WIDTH, HEADS, **options), backend=backend).to(DEVICE)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(module, "all")
    masked = {"key_padding_mask": mask_of("float", (BATCH, SEQLEN_K), torch.float32),
              "attn_mask": mask_of("bool", (BATCH * HEADS, SEQLEN_Q, SEQLEN_K), torch.float32)}  # fmt: skip
    for training, need_weights in ((False, True), (False, False), (True, False)):
        module.train(training)
        out, weights = compiled(*inputs, **masked, need_weights=need_weights)
        assert out.isfinite().all()
        if not training:
            assert_same((out, weights), module(*inputs, **masked, need_weights=need_weights))
