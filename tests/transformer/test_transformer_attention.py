"""The attention layers of the reference Transformer against torch's own modules and against literal formulas."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedattn import masks
from fusedattn.rope import Rope
from fusedattn.transformer import (
    MultiHeadAttention,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    SelfAttention,
    scaled_dot_product_attention,
)
from tests.helpers.layers import WIDTH, B, D, H, L, S, complex_rotation, padding, qkv, torch_mha

pytestmark = [pytest.mark.usefixtures("_seed")]


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_torch(kv_heads, scale):
    q, k, v = qkv(kv_heads)
    allowed = torch.rand(B, H, L, S) < 0.7
    allowed[..., 0] = True
    out, weights = scaled_dot_product_attention(q, k, v, allowed, scale=scale)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=kv_heads != H)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))
    assert (weights[~allowed] == 0).all()


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (masks.causal(), torch.ones(L, S, dtype=torch.bool).tril(S - L)),
        (masks.causal("top_left"), torch.ones(L, S, dtype=torch.bool).tril()),
        (masks.causal() & masks.padding(padding()), torch.ones(L, S).bool().tril(S - L) & padding()[:, None, None]),
    ],
    ids=["causal", "top-left", "causal and padding"],
)
def test_attention_masks(mask, visible):
    q, k, v = qkv()
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(weights > 0, visible.expand(B, H, L, S))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=visible))


def test_attention_without_heads_is_one_head():
    q, k, v = (x[:, 0] for x in qkv())
    per_batch = torch.rand(B, L, S) < 0.7
    per_batch[..., 0] = True
    of_padding = masks.padding(padding())
    for mask in (None, per_batch, per_batch[0], of_padding):
        dense = padding()[:, None] if mask is of_padding else mask
        out, weights = scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=dense))
        assert weights.shape == (B, L, S)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_attention_row_that_sees_nothing(dtype):
    q, k, v = qkv(dtype=dtype, requires_grad=True)
    allowed = torch.ones(B, 1, L, S, dtype=torch.bool)
    allowed[0, :, 2] = False
    out, weights = scaled_dot_product_attention(q, k, v, allowed)
    assert out.dtype == weights.dtype == dtype
    assert (out[0, :, 2] == 0).all()
    assert (weights[0, :, 2] == 0).all()
    assert (out[0, :, 1] != 0).any()
    with torch.autograd.detect_anomaly(check_nan=True):
        dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True)
    assert (dq[0, :, 2] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    # The row that sees nothing adds nothing to the keys and values: its gradient alone is exactly zero.
    for grad in torch.autograd.grad(out[0, :, 2].float().sum(), (q, k, v)):
        assert (grad == 0).all()


def test_attention_everything_hidden_or_no_keys():
    q, k, v = qkv()
    out, weights = scaled_dot_product_attention(q, k, v, torch.zeros(L, S, dtype=torch.bool))
    assert (out == 0).all()
    assert (weights == 0).all()
    out, weights = scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])
    assert torch.equal(out, torch.zeros(B, H, L, D))
    assert weights.shape == (B, H, L, 0)


def test_attention_rope_rotates_q_and_k():
    q, k, v = qkv()
    rope = Rope.from_theta(D, 32)
    positions = torch.arange(S)
    rotated_k = complex_rotation(k, positions)
    rotated_q = complex_rotation(q, positions[S - L :])
    out, _ = scaled_dot_product_attention(q, k, v, rope=rope)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(rotated_q, rotated_k, v))


def test_attention_softmax_of_half_is_computed_in_float32():
    q, k, v = qkv(dtype=torch.bfloat16)
    _, weights = scaled_dot_product_attention(q, k, v)
    scores = (q @ k.mT).float() / math.sqrt(D)
    assert torch.equal(weights, scores.softmax(-1).bfloat16())


def test_attention_gradcheck():
    q, k, v = (x[:1, :, :3, :2].clone().requires_grad_() for x in qkv(2, dtype=torch.float64))
    mask = masks.causal()
    assert torch.autograd.gradcheck(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), (q, k, v))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((B, H, L, D), (B, H, S, D), (B, S, D)), "q, k, v"),
        (((L, D), (S, D), (S, D)), "q, k, v"),
        (((B, H, L, D), (B, H, S, D + 1), (B, H, S, D)), "one head_dim"),
        (((B, H, L, D), (B, H, S, D), (B, H, S + 1, D)), "length of k and v"),
        (((B, H, L, D), (B, 3, S, D), (B, 3, S, D)), "divide"),
        (((B, H, L, D), (B + 1, H, S, D), (B + 1, H, S, D)), "one batch"),
    ],
)
def test_attention_rejects_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(*(torch.randn(s) for s in shapes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.zeros(L, S)}, TypeError, "bool"),
        ({"mask": "causal"}, TypeError, "mask"),
        ({"mask": torch.ones(L, S + 1, dtype=torch.bool)}, ValueError, "broadcast to"),
        ({"mask": masks.padding(padding()[:, 1:])}, ValueError, "padding"),
        ({"rope": Rope.from_theta(D, S - 1)}, ValueError, "rows"),
        ({"rope": Rope.from_theta(2 * D, 32)}, ValueError, "rotary_dim"),
    ],
)
def test_attention_rejects_masks_and_rope(options, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*qkv(), **options)


def test_attention_module_equals_function():
    q, k, v = qkv()
    module = ScaledDotProductAttention(scale=0.2)
    assert not list(module.parameters())
    out, weights = module(q, k, v, masks.causal(), rope=Rope.from_theta(D, 16))
    want, want_weights = scaled_dot_product_attention(q, k, v, masks.causal(), scale=0.2, rope=Rope.from_theta(D, 16))
    assert torch.equal(out, want)
    assert torch.equal(weights, want_weights)
    assert module(q, k, v, need_weights=False)[1] is None


def test_attention_dropout_only_in_training_and_unbiased():
    q, k, _ = qkv()
    v = torch.eye(S).expand(B, H, S, S)  # the output is then the dropped weights themselves
    module = ScaledDotProductAttention(dropout=0.25)
    dropped, weights = module(q, k, v)
    kept = dropped != 0
    assert 0.6 < kept.float().mean() < 0.9
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))
    torch.testing.assert_close(module.eval()(q, k, v)[0], weights)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, math.nan])
def test_attention_module_rejects_dropout(dropout):
    with pytest.raises(ValueError, match="dropout"):
        ScaledDotProductAttention(dropout)


def test_multi_head_attention_equals_torch():
    ours = MultiHeadAttention(WIDTH, H)
    theirs = torch_mha(ours)
    query, key, value = torch.randn(B, L, WIDTH), torch.randn(B, S, WIDTH), torch.randn(B, S, WIDTH)
    allowed = torch.rand(L, S) < 0.7
    allowed[:, 0] = True
    out, weights = ours(query, key, value, allowed & padding()[:, None, None], need_weights=True)
    hidden = {"key_padding_mask": ~padding(), "attn_mask": ~allowed}
    want, want_weights = theirs(query, key, value, **hidden, average_attn_weights=False)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights, want_weights)


def test_multi_head_attention_defaults():
    module = MultiHeadAttention(WIDTH, H)
    x, y = torch.randn(B, L, WIDTH), torch.randn(B, S, WIDTH)
    assert torch.equal(module(x), module(x, x, x))
    assert torch.equal(module(x, y), module(x, y, y))
    assert module(x, y).shape == (B, L, WIDTH)
    assert MultiHeadAttention(WIDTH, H, bias=False).out_proj.bias is None


def test_multi_head_attention_hands_views_and_rope_to_its_attention():
    seen: dict[str, Any] = {}

    class Spy(ScaledDotProductAttention):
        def forward(self, q, k, v, mask=None, *, rope=None, qk_norm=None, cache=None, need_weights=True):
            seen.update(q=q, k=k, v=v, mask=mask, rope=rope, cache=cache, need_weights=need_weights)
            return super().forward(q, k, v, mask, rope=rope, need_weights=need_weights)

    rope = RotaryPositionalEmbedding(D, 32)
    module = MultiHeadAttention(WIDTH, H, n_kv_heads=2, rope=rope)
    assert type(module.attention) is ScaledDotProductAttention
    module.attention.__class__ = Spy
    x, mask = torch.randn(B, L, WIDTH), masks.causal()
    out = module(x, mask=mask)
    assert seen["q"].shape == (B, H, L, D)
    assert seen["k"].shape == seen["v"].shape == (B, 2, L, D)
    assert all(seen[name]._is_view() and seen[name].stride(-1) == 1 for name in "qkv")
    torch.testing.assert_close(seen["k"], module.k_proj(x).unflatten(2, (2, D)).transpose(1, 2))  # not rotated
    assert seen["mask"] is mask
    assert seen["rope"].cos is rope.cos
    assert seen["need_weights"] is False
    assert seen["cache"] is None
    q, k = (complex_rotation(seen[name], torch.arange(L)) for name in "qk")
    want = F.scaled_dot_product_attention(q, k, seen["v"], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, module.out_proj(want.permute(0, 2, 1, 3).reshape(B, L, WIDTH)))
    module(x, need_weights=True)
    assert seen["need_weights"] is True


def test_multi_head_attention_blind_query_gives_the_output_bias():
    module = MultiHeadAttention(WIDTH, H)
    x = torch.randn(B, L, WIDTH, requires_grad=True)
    out = module(x, mask=torch.zeros(L, L, dtype=torch.bool))
    torch.testing.assert_close(out, module.out_proj.bias.expand(B, L, WIDTH))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (grad == 0).all()


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"d_model": 30, "n_heads": 4}, "n_heads"),
        ({"d_model": 32, "n_heads": 0}, "n_heads"),
        ({"d_model": 0, "n_heads": 1}, "d_model"),
        ({"d_model": 32, "n_heads": 4, "n_kv_heads": 3}, "n_kv_heads"),
        ({"d_model": 32, "n_heads": 4, "n_kv_heads": 0}, "n_kv_heads"),
        ({"d_model": 32, "n_heads": 4, "dropout": 1.0}, "dropout"),
        ({"d_model": 32, "n_heads": 4, "rope": RotaryPositionalEmbedding(16, 4)}, "rotary_dim"),
    ],
)
def test_multi_head_attention_rejects(kwargs, name):
    with pytest.raises(ValueError, match=name):
        MultiHeadAttention(**kwargs)


def test_multi_head_attention_rejects_inputs():
    with pytest.raises(TypeError, match="rope"):
        MultiHeadAttention(WIDTH, H, rope=Rope.from_theta(D, 8))  # type: ignore[arg-type]
    module = MultiHeadAttention(WIDTH, H)
    with pytest.raises(ValueError, match="query"):
        module(torch.randn(L, WIDTH))
    with pytest.raises(ValueError, match="key"):
        module(torch.randn(B, L, WIDTH), torch.randn(B, S, WIDTH + 1))
    with pytest.raises(ValueError, match="value"):
        module(torch.randn(B, L, WIDTH), value=torch.randn(B, WIDTH))


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_the_literal_formula(causal):
    module = SelfAttention(WIDTH, H)
    values, keys = torch.randn(B, S, WIDTH), torch.randn(B, S, WIDTH)
    query = torch.randn(B, L, WIDTH)
    v = torch.einsum("blhd,ed->blhe", values.reshape(B, S, H, D), module.values.weight)
    k = torch.einsum("blhd,ed->blhe", keys.reshape(B, S, H, D), module.keys.weight)
    q = torch.einsum("blhd,ed->blhe", query.reshape(B, L, H, D), module.queries.weight)
    energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / WIDTH**0.5
    visible = torch.ones(L, S, dtype=torch.bool).tril(S - L if causal else S)
    energy = energy.masked_fill(~visible, -1e20)
    want = module.fc_out(torch.einsum("nhqk,nkhd->nqhd", energy.softmax(dim=3), v).reshape(B, L, WIDTH))
    for mask in (visible, masks.causal() if causal else None):
        torch.testing.assert_close(module(values, keys, query, mask), want)


@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v"),
    [
        (4, 2, 2),  # the query heads of one process, all KV heads
        (8, 1, 1),
        (8, 2, 1),
        (2, 0.5, 0.5),  # more processes than KV heads
    ],
)
def test_shares_of_heads_that_do_not_belong_together_are_refused(of_q: float, of_k: float, of_v: float) -> None:
    module = MultiHeadAttention(64, 8, n_kv_heads=2)
    for name, n in (("q_proj", of_q), ("k_proj", of_k), ("v_proj", of_v)):
        setattr(module, name, torch.nn.Linear(64, int(8 * n)))
    module.out_proj = torch.nn.Linear(int(8 * of_q), 64)
    with pytest.raises(
        ValueError, match=r"q_proj, k_proj, v_proj: got .* allowed are 8 query heads and 2 KV heads of 8"
    ):
        module(torch.randn(1, 3, 64))


def test_a_share_of_the_heads_is_attended_to():
    whole, share = MultiHeadAttention(64, 8, n_kv_heads=2), MultiHeadAttention(64, 8, n_kv_heads=2)
    for name, n in (("q_proj", 32), ("k_proj", 8), ("v_proj", 8)):  # of the second process of two
        projection, part = getattr(whole, name), torch.nn.Linear(64, n)
        part.load_state_dict({key: x[n:] for key, x in projection.state_dict().items()})
        setattr(share, name, part)
    whole.out_proj, share.out_proj = torch.nn.Identity(), torch.nn.Identity()
    x = torch.randn(1, 3, 64)
    torch.testing.assert_close(share(x), whole(x)[..., 32:])


def test_self_attention_structure_and_errors():
    module = SelfAttention(WIDTH, H)
    assert type(module.attention) is ScaledDotProductAttention
    assert module.attention.scale == pytest.approx(WIDTH**-0.5)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "values.weight": (D, D),
        "keys.weight": (D, D),
        "queries.weight": (D, D),
        "fc_out.weight": (WIDTH, WIDTH),
        "fc_out.bias": (WIDTH,),
    }
    with pytest.raises(ValueError, match="heads"):
        SelfAttention(WIDTH, 5)
    x = torch.randn(B, L, WIDTH)
    with pytest.raises(ValueError, match="keys"):
        module(x, x[..., 1:], x)
