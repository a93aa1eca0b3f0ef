"""Top blocks in the reference Transformer: each layer chooses from its own q and k, eager and fused alike."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, fuse, fusion_report, masks, unfuse
from fusedattn.transformer import (
    GPTModel,
    LinearAttention,
    MultiHeadAttention,
    ScaledDotProductAttention,
    TopBlockAttention,
    TransformerBlock,
)
from tests.conftest import BACKENDS, DEVICE
from tests.helpers import quick

pytestmark = pytest.mark.usefixtures("_seed")

VOCAB = 29


def gpt(attention: Any, **options: Any) -> GPTModel:
    """Weights so large that tokens and blocks differ."""
    given = {"n_layers": 2, "max_len": 64, "positions": "rotary", "n_kv_heads": 2} | options
    model = GPTModel(VOCAB, 32, 4, attention=attention, **given).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.4)
    return model.to(DEVICE)


def ids_of(batch: int, seqlen: int) -> Tensor:
    return torch.randint(VOCAB, (batch, seqlen)).to(DEVICE)


def qkv(n: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, n, 16, dtype=dtype) for heads in (4, 2, 2)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, size: int, n_chosen: int, valid: Tensor) -> Tensor:
    """Each query by itself: its own block, and those before it whose mean of real keys has the largest products."""
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        own, keys = i // size, k[b, h // 2]
        scores = {}
        for block in range(own):
            real = [j for j in range(block * size, block * size + size) if valid[b, j]]
            if real:
                scores[block] = float(q[b, h, i] @ keys[real].mean(dim=0))
        chosen = {own, *sorted(scores, key=lambda block: -scores[block])[: n_chosen - 1]}
        seen = [j for j in range(i + 1) if j // size in chosen and valid[b, j]]
        if seen:
            out[b, h, i] = (q[b, h, i] @ keys[seen].T / math.sqrt(16)).softmax(dim=-1) @ v[b, h // 2, seen]
    return out


@pytest.mark.parametrize("hidden", [None, 7, 8], ids=str)
@pytest.mark.parametrize(("size", "n_chosen"), [(4, 2), (5, 3), (8, 1), (64, 1)])
def test_the_layer_is_moba(size, n_chosen, hidden):
    q, k, v = qkv(23)
    valid = torch.ones(2, 23, dtype=torch.bool)
    valid[1, : hidden or 0] = False
    mask = masks.causal() if hidden is None else masks.causal() & masks.padding(valid)
    out, weights = TopBlockAttention(size, n_chosen)(q, k, v, mask)
    torch.testing.assert_close(out, by_definition(q, k, v, size, n_chosen, valid))
    assert weights is not None
    assert (weights.sum(dim=-1) - 1)[valid[:, None].expand(2, 4, 23)].abs().max() < 1e-12  # no row is empty


def test_all_blocks_are_softmax_attention():
    q, k, v = qkv(20)
    for mask in (masks.causal(), None, masks.full()):
        want = ScaledDotProductAttention()(q, k, v, mask)
        torch.testing.assert_close(TopBlockAttention(8, 3)(q, k, v, mask), want)


def test_without_a_causal_mask_blocks_are_chosen_from_all():
    """As by the masks that the choice is made of."""
    (q, _, _), (_, k, v) = qkv(5), qkv(20)
    chosen = masks.top_blocks(masks.mean_pooled_scores(q, k, 4), 2, (1, 4))
    torch.testing.assert_close(TopBlockAttention(4, 2)(q, k, v), ScaledDotProductAttention()(q, k, v, chosen))


def test_the_choice_is_by_rotated_tokens_and_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in qkv(20))
    rope = Rope.from_theta(16, 20)
    rotated = rope.rotate(q, k)
    chosen = masks.top_blocks(masks.mean_pooled_scores(*rotated, 4, causal=True), 2, (1, 4)) & masks.causal()
    found = TopBlockAttention(4, 2)(q, k, v, masks.causal(), rope=rope)[0]
    want = ScaledDotProductAttention()(*rotated, v, chosen)[0]
    torch.testing.assert_close(found, want)
    dout = torch.randn_like(want)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (found, want)), strict=True):
        torch.testing.assert_close(one, other)


@quick.covering()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 20, 70])
@pytest.mark.parametrize(("size", "n_chosen"), [(16, 2), (6, 2), (32, 5)])
@pytest.mark.parametrize("padded", [False, True])
def test_fused_and_not_fused_are_alike(n, size, n_chosen, padded, backend):
    layer = TopBlockAttention(size, n_chosen)
    valid = torch.arange(n, device=DEVICE) >= torch.tensor([[0], [n // 3]], device=DEVICE)
    mask = masks.causal() & masks.padding(valid) if padded else masks.causal()
    inputs = [x.to(DEVICE).requires_grad_() for x in qkv(n, torch.float32)]
    dout = torch.randn(2, 4, n, 16, device=DEVICE)

    def results() -> list[Tensor]:
        out, weights = layer(*inputs, mask, rope=Rope.from_theta(16, n, device=DEVICE), need_weights=False)
        assert weights is None
        return [out, *torch.autograd.grad(out, inputs, dout)]

    eager = results()
    fuse(layer, backend=backend)
    assert [str(x) for x in fusion_report(layer)] == [
        "attention: ScaledDotProductAttention -> FusedScaledDotProductAttention"
    ]
    for got, expected in zip(results(), eager, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    unfuse(layer)
    assert type(layer.attention) is ScaledDotProductAttention


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_what_padding_holds_does_not_matter(backend):
    """Not even for the choice of blocks; behind a whole block of it, a sequence has the logits that it has alone."""
    model = gpt(TopBlockAttention(4, 2))
    model = model if backend is None else fuse(model, backend=backend)
    ids, valid = ids_of(2, 21), torch.ones(2, 21, dtype=torch.bool, device=DEVICE)
    valid[0, :4] = False
    valid[1, 5:7] = False
    logits = model(ids, valid)
    assert torch.equal(logits[valid], model(torch.where(valid, ids, (ids + 1) % VOCAB), valid)[valid])
    torch.testing.assert_close(logits[:1, 4:], model(ids[:1, 4:]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_model_does_not_look_ahead(backend):
    """Not even by the mean of the block that the token is in."""
    model = gpt(TopBlockAttention(4, 2))
    model = model if backend is None else fuse(model, backend=backend)
    ids = ids_of(2, 19)
    changed = ids.clone()
    changed[:, 13:] = (ids[:, 13:] + 1) % VOCAB
    logits, other = model(ids), model(changed)
    torch.testing.assert_close(other[:, :13], logits[:, :13], atol=1e-5, rtol=0)
    assert (other[:, 13:] != logits[:, 13:]).any(dim=-1).all()


@pytest.mark.parametrize("fused", [False, True])
def test_generating_without_a_cache(fused):
    model = gpt(TopBlockAttention(4, 2)).double()
    model = fuse(model, backend="torch") if fused else model
    for seqlen in (1, 6):
        got = model.generate(ids_of(1, seqlen), 9, temperature=0, use_cache=False)
        assert torch.equal(got[:, seqlen:], model(got)[:, seqlen - 1 : -1].argmax(dim=-1))
        with pytest.raises(NotImplementedError, match=r"cache: got one with top blocks, allowed is None \(use_cache="):
            model.generate(ids_of(1, seqlen), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_half_precision_and_autocast(backend, dtype):
    model = gpt(TopBlockAttention(8, 2), n_layers=1)
    model = model if backend is None else fuse(model, backend=backend)
    ids = ids_of(2, 20)
    with torch.autocast(DEVICE, dtype=dtype):
        loss = model(ids).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    logits = model.to(dtype)(ids)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_dropout_is_that_of_the_layer_in_training():
    layer, (q, k, v) = TopBlockAttention(4, 2, dropout=0.5), qkv(12)
    first = layer(q, k, v)[0]
    assert not torch.equal(first, layer(q, k, v)[0])
    layer.eval()
    assert torch.equal(layer(q, k, v)[0], layer(q, k, v)[0])
    scaled = TopBlockAttention(64, 1, scale=0.5)(q, k, v)[0]
    torch.testing.assert_close(scaled, ScaledDotProductAttention(scale=0.5)(q, k, v)[0])


def test_every_block_of_a_model_has_a_copy():
    own = TopBlockAttention(8, 2)
    for attention in (own, LinearAttention("relu")):
        model = gpt(attention)
        cores = [block.self_attention.attention for block in model.blocks]
        assert len({id(core) for core in (attention, *cores)}) == 3
        assert {str(core) for core in cores} == {str(attention)}
        fuse(copy.deepcopy(model))
    assert TransformerBlock(32, 4, attention=own).self_attention.attention is own
    assert MultiHeadAttention(32, 4, attention=own)(torch.randn(2, 5, 32), mask=masks.causal()).shape == (2, 5, 32)
    assert "block_size=8, k=2" in str(own)


@pytest.mark.parametrize(
    "mask",
    [masks.window(3, 0), masks.causal() & masks.strided(4), masks.boolean(torch.ones(20, 20, dtype=torch.bool))],
    ids=["window", "strided", "boolean"],
)
def test_other_masks_are_refused(mask):
    """A mean of keys that a query may not see would tell it about them."""
    with pytest.raises(NotImplementedError, match="mask: got another mask than top-block attention can have"):
        TopBlockAttention(4, 2)(*qkv(20), mask)


def test_wrong_arguments():
    for arguments, error, message in (
        ((0, 1), ValueError, "block_size: got 0"),
        ((4, 0), ValueError, "k: got 0"),
        ((4.0, 1), TypeError, "block_size: got float"),
        ((4, True), TypeError, "k: got bool"),
        ((4, 1, 1.0), ValueError, "dropout: got 1.0"),
    ):
        with pytest.raises(error, match=message):
            TopBlockAttention(*arguments)
    with pytest.raises(ValueError, match="q, k: got shapes"):
        TopBlockAttention(4, 1)(*(torch.randn(2, 20, 16) for _ in range(3)))
    with pytest.raises(ValueError, match="valid: got shape"):
        TopBlockAttention(4, 1)(*qkv(20), masks.padding(torch.ones(2, 5, dtype=torch.bool)))
