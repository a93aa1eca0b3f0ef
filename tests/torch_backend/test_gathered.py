"""Sparse patterns on a CPU: blocks of queries with the keys that they see, wherever these lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import attention, masks, testing
from fusedattn.backends.torch import gathered, mask_plan, merged
from fusedattn.backends.torch.boxes import cut, paste
from fusedattn.masks import Mask
from fusedattn.testing import Case
from tests.conftest import assert_accurate, torch_attention_beside_lse

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

B, H, KV = 2, 4, 2


@pytest.fixture
def small(monkeypatch):
    """Plans that gather keys for few tokens."""
    monkeypatch.setattr(mask_plan, "FEW", 0)
    monkeypatch.setattr(gathered, "CALL", 1)
    monkeypatch.setattr(gathered, "GATHER", 0)
    monkeypatch.setattr(gathered, "BLOCKS", (3, 8))


def chosen(*shape: int) -> Tensor:
    return torch.randint(-1, 9, shape)


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "strided": lambda n, m: masks.strided(6),
    "strided, both ways": lambda n, m: masks.strided(11, causal=False),
    "fixed, padding": lambda n, m: masks.fixed(7, 2) & masks.padding(torch.rand(B, m) < 0.6),
    "fixed, documents": lambda n, m: masks.fixed(7, 2) & masks.documents(chosen(B, n) // 3, chosen(B, m) // 3),
    "fixed, prefix": lambda n, m: masks.fixed(7, causal=False) & masks.prefix_lm(torch.tensor([3, 20])),
    "tokens": lambda n, m: masks.dilated(3, 1, 2, global_tokens=torch.rand(B, m) < 0.1),
    "BigBird": lambda n, m: masks.bigbird(4, n_random=1),
    "heads": lambda n, m: masks.selected_blocks(chosen(B, H, -(-n // 5), 2), (5, 4)),
    "KV heads": lambda n, m: masks.selected_blocks(chosen(1, KV, n, 2), (1, 4)) & masks.causal(),
    "batches": lambda n, m: masks.selected_blocks(chosen(B, 1, -(-n // 4), 2), 4),
    "nothing": lambda n, m: masks.selected_blocks(chosen(1, 1, n, 0), (1, 4)),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("nheads_q", "nheads_kv", "lists"), [(4, 4, 2), (6, 3, 2), (6, 2, 6)])
def test_lists_that_heads_share(nheads_q, nheads_kv, lists):
    case = Case(nheads_q=nheads_q, nheads_kv=nheads_kv, seqlen_q=33, seqlen_k=41, head_dim=8, dtype=torch.float64)
    mask = masks.selected_blocks(chosen(B, lists, 33, 2), (1, 6))
    inputs = replace(testing.make_inputs(case), mask=mask)
    for function in (torch_attention_beside_lse, functools.partial(attention, backend="torch")):
        torch.testing.assert_close(testing.run(function, inputs), testing.golden(inputs))


@pytest.fixture
def merging(small, monkeypatch):
    """Whatever can be merged is."""
    monkeypatch.setattr(gathered, "cost", lambda *plan: math.inf)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [{}, {"bias": "full"}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask(kind, options):
    sizes = {"nheads_q": H, "nheads_kv": KV, "seqlen_q": 33, "seqlen_k": 41, "head_dim": 8, "head_dim_v": 6}
    case = Case(batch=B, dtype=torch.float64, **sizes, **options)
    inputs = replace(testing.make_inputs(case), mask=MASKS[kind](33, 41))
    assert gathered.fits(inputs.mask)
    for function in (torch_attention_beside_lse, functools.partial(attention, backend="torch")):
        torch.testing.assert_close(testing.run(function, inputs), testing.golden(inputs))


SCATTERED: dict[str, Callable[[int, int], Mask]] = {
    **{kind: MASKS[kind] for kind in ("strided", "strided, both ways", "BigBird", "heads", "KV heads", "nothing")},
    "strided, all": lambda n, m: masks.strided(1),
    "strided, far": lambda n, m: masks.strided(100, causal=False),
    "strided, top left": lambda n, m: masks.strided(5, align="top_left"),
    "strided, ahead": lambda n, m: masks.strided(5, causal=False) & masks.window(0, None),
    "strided, window": lambda n, m: masks.strided(5) & masks.window(12, None) & masks.padding(torch.rand(B, m) < 0.6),
    "strided, narrow": lambda n, m: masks.strided(9) & masks.window(3, 0),
    "one batch empty": lambda n, m: masks.strided(4) & masks.padding(torch.tensor([[True], [False]]).expand(B, m)),
    "rows": lambda n, m: masks.selected_blocks(chosen(B, KV, n, 2), (1, 6)) & masks.window(9, 3),
}


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("lengths", [(33, 41), (41, 33), (7, 41), (1, 9)], ids=str)
@pytest.mark.parametrize("kind", SCATTERED)
def test_merged_parts(kind, lengths, monkeypatch):
    """In float64, with NaN in the gradient of rows that see nothing."""
    n, m = lengths
    case = Case(batch=B, nheads_q=H, nheads_kv=KV, seqlen_q=n, seqlen_k=m, head_dim=8, dtype=torch.float64)
    inputs = replace(testing.make_inputs(case), mask=SCATTERED[kind](n, m))
    run = Mock(wraps=merged.attention)
    monkeypatch.setattr(merged, "attention", run)
    blind = ~inputs.visible().any(-1)
    expected = testing.golden(inputs)
    poisoned = replace(inputs, dout=inputs.dout.masked_fill(blind[..., None], math.nan))
    for function in (torch_attention_beside_lse, functools.partial(attention, backend="torch")):
        torch.testing.assert_close(testing.run(function, poisoned), expected)
    assert run.called or blind.all()


@pytest.mark.usefixtures("merging")
def test_another_default_device():
    q, k, v = torch.randn(3, 1, 2, 20, 4).unbind()
    expected = attention(q, k, v, mask=masks.strided(3), backend="torch")
    with torch.device("meta"):
        assert torch.equal(attention(q, k, v, mask=masks.strided(3), backend="torch"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("merging")
def test_accuracy_of_merged_parts(dtype):
    case = Case(batch=1, nheads_q=H, nheads_kv=KV, seqlen_q=150, seqlen_k=150, head_dim=16, dtype=dtype)
    inputs = replace(testing.make_inputs(case), mask=masks.strided(11))
    assert_accurate(functools.partial(attention, backend="torch"), inputs)
    assert_accurate(torch_attention_beside_lse, inputs)


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("needed", ["qkv", "q", "kv"])
def test_second_derivatives_of_merged_parts(needed):
    q, k, v = torch.randn(3, 1, 1, 9, 3, dtype=torch.float64).unbind()
    inputs = [x.requires_grad_(name in needed) for x, name in zip((q, k, v), "qkv", strict=True)]
    mask = masks.strided(3)
    assert torch.autograd.gradgradcheck(lambda q, k, v: attention(q, k, v, mask=mask, backend="torch"), inputs)


@pytest.mark.usefixtures("small")
def test_second_derivatives():
    q, k, v = torch.randn(3, 1, 1, 9, 3, dtype=torch.float64).unbind()
    mask = masks.strided(3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention(q, k, v, mask=mask, backend="torch", return_lse=True), inputs
    )


def counted(monkeypatch: pytest.MonkeyPatch, n: int, mask: Mask, heads: int = 8) -> int:
    """The scores that torch's function computes for a head."""
    shapes: list[int] = []

    def count(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shapes.append(q.shape[1] * q.shape[2] * k.shape[2])
        return torch.zeros_like(q)

    with monkeypatch.context() as patch:
        patch.setattr(merged, "plan", lambda *group: [])
        patch.setattr(F, "scaled_dot_product_attention", count)
        attention(*torch.zeros(3, 1, heads, n, 4).unbind(), mask=mask, backend="torch")
    return sum(shapes) // heads


GROWING: dict[str, tuple[Callable[[int], Mask], float]] = {
    "fixed": (lambda root: masks.fixed(root, 8), 0.12),
    "dilated": (lambda root: masks.dilated(root, root), 0.12),
    "Longformer": (lambda root: masks.dilated(root, root, global_tokens=8), 0.14),
    "BigBird": (lambda root: masks.bigbird(root, n_global=1, n_random=1), 0.2),
    "neighborhood": (lambda root: masks.neighborhood((root, root), 5), 0.15),
}


@pytest.mark.parametrize("kind", GROWING)
def test_scores_that_are_computed(kind, monkeypatch):
    """A few times n sqrt(n), and eight times as many for four times the tokens."""
    make, share = GROWING[kind]
    small, large = (counted(monkeypatch, root * root, make(root)) for root in (32, 64))
    assert large <= 10 * small
    assert large <= share * 64**4


def test_strided_scores_are_computed_once():
    """The window, 64 to 192 keys, and every 64th key."""
    n = 4096
    found = merged.plan(masks.strided(64), mask_plan.ScoresShape(1, 8, n, n))
    assert sum(len(part.rows) * len(part.keys) for part in found) <= n * (64 + 64 + 64)


def test_heads_are_computed_apart(monkeypatch):
    """Two of 32 blocks for each 64 queries of each head, which together see nearly all."""
    n = 2048
    scores = torch.randn(1, 8, n // 64, n // 64)
    assert counted(monkeypatch, n, masks.top_blocks(scores, 2, 64)) == n * 2 * 64


def test_parts_of_any_tokens():
    x = torch.randn(2, 3, 9, 4, dtype=torch.float64, requires_grad=True)
    boxes = [(range(2), torch.tensor([1, 4, 8])), (range(2), range(3, 6)), (range(2), torch.tensor([0, 1]))]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        parts = cut(x, boxes)
        return *parts, paste(parts, boxes, x.shape)

    assert torch.equal(function(x)[0], x[:, :, [1, 4, 8]])
    assert torch.equal(function(x)[3][:, :, 1], 2 * x[:, :, 1])
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
