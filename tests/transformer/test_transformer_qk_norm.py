"""The reference Transformer with normalised queries and keys."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn import QKNorm, fuse, masks, unfuse
from fusedattn.rope import apply_rope
from fusedattn.transformer import GPTModel, LinearAttention, MultiHeadAttention, QueryKeyNorm, TopBlockAttention
from fusedattn.transformer.positions import RotaryPositionalEmbedding
from tests.helpers.layers import assert_learns

pytestmark = pytest.mark.usefixtures("_seed")

WIDTH, HEADS, KV_HEADS, LENGTH, VOCABULARY = 32, 4, 2, 7, 19


def drawn(model: nn.Module) -> nn.Module:
    """The model with weights that tell heads, features, queries and keys apart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_weight", "k_weight")):
                parameter.uniform_(0.3, 3.0)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


def gpt(**options: object) -> GPTModel:
    model = GPTModel(
        VOCABULARY, WIDTH, HEADS, 2, n_kv_heads=KV_HEADS, max_len=24, positions="rotary", qk_norm=True, **options
    )
    return drawn(model.double()).eval()  # type: ignore[return-value]


def results(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits = model(ids)
    F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def test_the_formula():
    """Root-mean-square norm of each head, then the rotation."""
    rope = RotaryPositionalEmbedding(8, 16)
    layer = drawn(MultiHeadAttention(WIDTH, HEADS, n_kv_heads=KV_HEADS, rope=rope, qk_norm=True)).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    q, k, v = (
        projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q, k = F.rms_norm(q, (8,), layer.qk_norm.q_weight, 1e-6), F.rms_norm(k, (8,), layer.qk_norm.k_weight, 1e-6)
    tables = rope.tables()
    q, k = (apply_rope(t, tables.cos, tables.sin, torch.arange(LENGTH)) for t in (q, k))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=masks.causal()), expected)


def test_fused_and_not_are_the_same():
    model = gpt()
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    expected = results(model, ids)
    for backend in ("torch", "triton"):
        fused = fuse(copy.deepcopy(model), backend=backend)
        for actual, truth in zip(results(fused, ids), expected, strict=True):
            torch.testing.assert_close(actual, truth)
        assert torch.equal(unfuse(fused)(ids), expected[0])


def test_the_norm_runs_inside_of_fused_attention(monkeypatch):
    from fusedattn.integrations import modules

    spy = Mock(wraps=modules.attention)
    monkeypatch.setattr(modules, "attention", spy)
    fuse(gpt(), backend="torch")(torch.randint(VOCABULARY, (1, 3)))
    assert [type(call.kwargs["qk_norm"]) for call in spy.call_args_list] == [QKNorm, QKNorm]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_generation_with_a_cache(attention, fused):
    """A cache keeps normalised keys."""
    model = gpt(attention=attention)
    if fused:
        fuse(model, backend="torch")
    ids = torch.randint(VOCABULARY, (2, 4))
    with_cache = model.generate(ids, 8, temperature=0.0)
    assert torch.equal(with_cache, model.generate(ids, 8, temperature=0.0, use_cache=False))


@pytest.mark.parametrize("attention", [LinearAttention("relu"), TopBlockAttention(2, 2)], ids=["linear", "top blocks"])
def test_other_attention_gets_normalised_tensors(attention):
    layer = drawn(MultiHeadAttention(WIDTH, HEADS, qk_norm=True, attention=attention)).double()
    plain = MultiHeadAttention(WIDTH, HEADS, attention=attention).double()
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if "qk_norm" not in name})
    x = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    normed, found = layer(x, mask=masks.causal()), plain(x, mask=masks.causal())
    assert not torch.allclose(normed, found)
    # Norms do not depend on the size of a projection.
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight *= 5.0
            projection.bias *= 5.0
    torch.testing.assert_close(layer(x, mask=masks.causal()), normed, rtol=1e-4, atol=1e-6)


def test_weights_can_be_asked_for():
    layer = fuse(drawn(MultiHeadAttention(WIDTH, HEADS, qk_norm=True)), backend="torch")
    x = torch.randn(1, 5, WIDTH)
    out, weights = layer(x, need_weights=True)
    torch.testing.assert_close(out, layer(x))
    assert weights.shape == (1, HEADS, 5, 5)


def test_it_learns():
    ids = torch.randint(VOCABULARY, (4, LENGTH))
    model = GPTModel(VOCABULARY, WIDTH, HEADS, 1, max_len=24, positions="rotary", qk_norm=True)
    assert_learns(model, ids.roll(-1, 1), ids, steps=150, lr=1e-2)


def test_the_module_says_what_it_is():
    assert str(QueryKeyNorm(8, 1e-5)) == "QueryKeyNorm(8, eps=1e-05)"
    assert [name for name, _ in MultiHeadAttention(WIDTH, HEADS).named_parameters() if "norm" in name] == []
