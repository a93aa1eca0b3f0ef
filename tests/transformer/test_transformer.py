"""Positions, blocks, caches and models of the reference Transformer against torch's own and against formulas."""

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    GPTModel,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    PositionalEncoding,
    Residual,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    SwiGLU,
    TokenEmbedding,
    Transformer,
    TransformerBlock,
    TransformerEncoder,
)
from tests.helpers.layers import WIDTH, B, D, H, L, S, assert_learns, complex_rotation, padding, qkv, torch_mha

pytestmark = [pytest.mark.usefixtures("_seed")]


def small_transformer(**kwargs) -> Transformer:
    return Transformer(11, 13, WIDTH, H, 2, 48, max_len=16, **kwargs).eval()


@pytest.mark.parametrize("d_model", [8, 7, 1])
def test_sinusoids(d_model):
    module = PositionalEncoding(d_model, 50)
    x = torch.randn(B, L, d_model)
    added = (module(x, offset=30) - x)[0]
    for p in range(L):
        for j in range(d_model):
            angle = (30 + p) / 10000 ** ((j - j % 2) / d_model)
            want = math.cos(angle) if j % 2 else math.sin(angle)
            assert added[p, j].item() == pytest.approx(want, abs=1e-6)
    assert not module.state_dict()


def test_learned_positions():
    module = LearnedPositionalEncoding(D, 50)
    x = torch.randn(B, L, D)
    torch.testing.assert_close(module(x, 3), x + module.embedding.weight[3 : 3 + L])
    assert module.embedding.weight.shape == (50, D)


@pytest.mark.parametrize("kind", [PositionalEncoding, LearnedPositionalEncoding])
def test_added_positions_limits_dtype_and_dropout(kind):
    module = kind(D, 6)
    x = torch.zeros(B, L, D)
    module(x, offset=1)
    for offset in (2, -1):
        with pytest.raises(ValueError, match="max_len"):
            module(x, offset=offset)
    with pytest.raises(ValueError, match="d_model"):
        module(torch.zeros(B, L, D + 1))
    assert module.half()(x.half()).dtype == torch.float16
    dropping = kind(D, 6, 0.5)
    assert (dropping(x + 10) == 0).any()
    assert not (dropping.eval()(x + 10) == 0).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_equals_complex_multiplication(interleaved):
    module = RotaryPositionalEmbedding(D, 64, theta=500.0, interleaved=interleaved)
    x = torch.randn(B, H, L, D + 2)
    positions = torch.tensor([0, 63, 5, 5, 17])
    got = module(x, positions)
    want = complex_rotation(x[..., :D], positions, theta=500.0, interleaved=interleaved)
    torch.testing.assert_close(got[..., :D], want)
    assert torch.equal(got[..., D:], x[..., D:])
    assert torch.equal(module(x), module(x, torch.arange(L)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_relative_positions(interleaved):
    module = RotaryPositionalEmbedding(D, 200, interleaved=interleaved)
    q, k, _ = qkv()

    def scores(shift: int) -> Tensor:
        rotated_q = module(q, torch.arange(L) + shift)
        return rotated_q @ module(k, torch.arange(S) + shift).mT

    torch.testing.assert_close(scores(0), scores(150), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores(0), q @ k.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rotary_tables_stay_float32(dtype):
    module = RotaryPositionalEmbedding(D, 300)
    cos, sin = module.cos.clone(), module.sin.clone()
    layers = [MultiHeadAttention(WIDTH, H, rope=module) for _ in range(2)]
    nn.ModuleList(layers).to(dtype)
    assert layers[0].q_proj.weight.dtype == dtype
    assert layers[0].rope is layers[1].rope is module
    assert torch.equal(module.cos, cos)  # to the last bit: not rounded and widened again
    assert torch.equal(module.sin, sin)
    assert module(torch.randn(1, 1, 4, D, dtype=dtype)).dtype == dtype
    assert layers[0](torch.randn(1, 4, WIDTH, dtype=dtype)).isfinite().all()
    assert set(dict(module.named_buffers())) == {"cos", "sin"}
    assert not module.state_dict()


def test_rotary_tables_follow_the_device_and_survive_meta():
    module = RotaryPositionalEmbedding(D, 30)
    want = module.cos.clone()
    assert copy.deepcopy(module).to("meta").cos.is_meta
    with torch.device("meta"):
        module = RotaryPositionalEmbedding(D, 30)
    assert module.cos.is_meta
    module.to_empty(device="cpu")
    torch.testing.assert_close(module.cos, want)


def test_rotary_tables_and_errors():
    module = RotaryPositionalEmbedding(D, 8, interleaved=True)
    positions = torch.arange(3)
    rope = module.tables(positions, positions + 1)
    assert rope.interleaved
    assert rope.positions_q is positions
    assert rope.positions_k is not None
    assert rope.positions_k.tolist() == [1, 2, 3]
    assert rope.cos is module.cos
    with pytest.raises(ValueError, match="rotary_dim"):
        RotaryPositionalEmbedding(7, 8)
    for x, where in (
        (torch.randn(B, H, 9, D), None),
        (torch.randn(B, H, 3, D), positions + 6),
        (torch.randn(B, H, 3, D), positions - 1),
        (torch.randn(B, H, 3, D - 2), None),
        (torch.randn(B, 3, D), None),
        (torch.randn(B, H, 4, D), positions),
    ):
        with pytest.raises(ValueError, match="allowed"):
            module(x, where)


@pytest.mark.parametrize(
    ("activation", "f"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_feed_forward(activation, f):
    module = FeedForward(WIDTH, 20, activation=activation)
    x = torch.randn(B, L, WIDTH)
    up, down = module.up_proj, module.down_proj
    want = f(x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    torch.testing.assert_close(module(x), want)


def test_swiglu():
    module = SwiGLU(WIDTH, 20)
    x = torch.randn(B, L, WIDTH)
    gate, up = x @ module.gate_proj.weight.T, x @ module.up_proj.weight.T
    want = (gate * torch.sigmoid(gate) * up) @ module.down_proj.weight.T
    torch.testing.assert_close(module(x), want)
    assert len(list(module.parameters())) == 3


@pytest.mark.parametrize("module", [FeedForward(D, 64, 0.5), SwiGLU(D, 64, 0.5)])
def test_feed_forward_dropout(module):
    x = torch.randn(B, L, D)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_block_formula(norm, activation):
    block = TransformerBlock(WIDTH, H, 48, norm=norm, activation=activation)
    norms = (block.self_attention_residual.norm, block.feed_forward_residual.norm)
    for n in norms:
        nn.init.normal_(n.weight)
        nn.init.normal_(n.bias)
    x, mask = torch.randn(B, L, WIDTH), masks.causal()
    attend, feed = block.self_attention, block.feed_forward
    if norm == "pre":
        y = x + attend(norms[0](x), mask=mask)
        want = y + feed(norms[1](y))
    else:
        y = norms[0](x + attend(x, mask=mask))
        want = norms[1](y + feed(y))
    torch.testing.assert_close(block(x, mask), want)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_drops_the_sublayer_and_never_the_input(norm):
    residual = Residual(D, 0.5, norm)
    residual.norm = nn.Identity()  # type: ignore[assignment]
    x = torch.zeros(B, L, D)
    added = residual(x, lambda y: y + 3.0)
    assert set(added.unique().tolist()) == {0.0, 6.0}
    assert (residual(x + 1.0, torch.zeros_like) == 1.0).all()
    assert (residual.eval()(x, lambda y: y + 3.0) == 3.0).all()


def copy_layer(ours: EncoderLayer | DecoderLayer, theirs: Any) -> None:
    pairs = [(theirs.self_attn, ours.self_attention)]
    norms = [ours.self_attention_residual]
    if isinstance(ours, DecoderLayer):
        pairs.append((theirs.multihead_attn, ours.cross_attention))
        norms.append(ours.cross_attention_residual)
    norms.append(ours.feed_forward_residual)
    for attn, source in pairs:
        attn.load_state_dict(torch_mha(source).state_dict())
    for i, residual in enumerate(norms, start=1):
        nn.init.normal_(residual.norm.weight)
        theirs.get_submodule(f"norm{i}").load_state_dict(residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.up_proj.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.down_proj.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_equals_torch(norm, activation):
    ours = EncoderLayer(WIDTH, H, 48, norm=norm, activation=activation)
    theirs = nn.TransformerEncoderLayer(WIDTH, H, 48, 0.0, activation, batch_first=True, norm_first=norm == "pre")
    copy_layer(ours, theirs)
    x = torch.randn(B, S, WIDTH)
    want = theirs(x, src_key_padding_mask=~padding())
    torch.testing.assert_close(ours(x, masks.padding(padding())), want)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoder_layer_equals_torch(norm):
    ours = DecoderLayer(WIDTH, H, 48, norm=norm)
    theirs = nn.TransformerDecoderLayer(WIDTH, H, 48, 0.0, batch_first=True, norm_first=norm == "pre")
    copy_layer(ours, theirs)
    x, memory = torch.randn(B, L, WIDTH), torch.randn(B, S, WIDTH)
    look_ahead = torch.ones(L, L, dtype=torch.bool).triu(1)
    want = theirs(x, memory, tgt_mask=look_ahead, memory_key_padding_mask=~padding())
    torch.testing.assert_close(ours(x, memory, None, masks.padding(padding())), want)
    torch.testing.assert_close(ours(x, memory, ~look_ahead, padding()[:, None, None]), want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Residual(D, norm="both"), "norm"),
        (lambda: TransformerBlock(WIDTH, H, activation="tanh"), "activation"),
        (lambda: TransformerBlock(WIDTH, H, dropout=1.5), "dropout"),
    ],
)
def test_parts_reject(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_token_embedding():
    module = TokenEmbedding(11, D)
    ids = torch.randint(11, (B, L))
    torch.testing.assert_close(module(ids), module.weight[ids] * math.sqrt(D))
    assert module.half()(ids).dtype == torch.float16
    assert torch.equal(TokenEmbedding(11, D, scaled=False)(ids[:0]), torch.empty(0, L, D))


def test_encoder_is_embedding_positions_layers_norm():
    model = Encoder(11, WIDTH, H, 2, 48, max_len=S)
    ids = torch.randint(11, (B, S))
    x = model.embedding.weight[ids] * math.sqrt(WIDTH)
    x = model.positions(x)
    for layer in model.layers:
        x = layer(x, masks.padding(padding()))
    torch.testing.assert_close(model(ids, padding()), F.layer_norm(x, (WIDTH,)))
    assert isinstance(Encoder(11, WIDTH, H, 1, norm="post").norm, nn.Identity)


def test_transformer_equals_torch_stacks():
    ours = small_transformer(norm="post")
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, H, 48, 0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, H, 48, 0.0, batch_first=True), 2)
    layers = zip((*ours.encoder.layers, *ours.decoder.layers), (*encoder.layers, *decoder.layers), strict=True)
    for a, b in layers:
        copy_layer(a, b)
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))

    def embed(half: Encoder | Decoder, ids: Tensor) -> Tensor:
        return half.positions(half.embedding(ids))

    memory = encoder(embed(ours.encoder, src), src_key_padding_mask=~padding())
    hidden = decoder(
        embed(ours.decoder, tgt),
        memory,
        tgt_mask=torch.ones(L, L, dtype=torch.bool).triu(1),
        memory_key_padding_mask=~padding(),
    )
    want = hidden @ ours.head.weight.T + ours.head.bias
    torch.testing.assert_close(ours(src, tgt, padding()), want)


def test_transformer_does_not_look_ahead():
    model = small_transformer()
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))
    logits = model(src, tgt)
    changed = tgt.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 13
    other = model(src, changed)
    torch.testing.assert_close(other[:, :3], logits[:, :3], atol=1e-6, rtol=0)
    assert (other[:, 3:] != logits[:, 3:]).any(dim=-1).all()


@pytest.mark.parametrize("make_mask", [lambda valid: valid, masks.padding, lambda valid: valid[:, None, None, :]])
def test_transformer_ignores_masked_source(make_mask):
    model = small_transformer()
    valid = padding()
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))
    changed = torch.where(valid, src, (src + 1) % 11)
    logits = model(src, tgt, make_mask(valid))
    assert torch.equal(logits, model(changed, tgt, make_mask(valid)))
    assert not torch.allclose(model(src, tgt)[1], model(changed, tgt)[1])
    # Padding has the same effect as absence.
    torch.testing.assert_close(logits[1:], model(src[1:, : S - 3], tgt[1:]))


def test_decoder_masks_targets_too():
    model = Decoder(13, WIDTH, H, 2, 48, max_len=16)
    memory, ids = torch.randn(B, S, WIDTH), torch.randint(13, (B, L))
    valid = torch.ones(B, L, dtype=torch.bool)
    valid[:, 1] = False
    changed = ids.clone()
    changed[:, 1] = (ids[:, 1] + 1) % 13
    rows = [0, 2, 3, 4]
    assert torch.equal(model(ids, memory, valid)[:, rows], model(changed, memory, valid)[:, rows])
    assert not torch.allclose(model(ids, memory)[:, 2:], model(changed, memory)[:, 2:])


def test_transformer_fully_masked_source_is_finite():
    model = small_transformer()
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))
    loss = model(src, tgt, torch.zeros(B, S, dtype=torch.bool)).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_transformer_encoder_padding_and_mlm_head():
    model = TransformerEncoder(11, WIDTH, H, 2, 48, max_len=S).eval()
    valid = padding()
    ids = torch.randint(11, (B, S))
    changed = torch.where(valid, ids, (ids + 1) % 11)
    hidden = model(ids, valid)
    assert hidden.shape == (B, S, WIDTH)
    assert torch.equal(hidden[valid], model(changed, valid)[valid])
    # Attention is bidirectional.
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 11
    assert (model(changed)[:, 0] != model(ids)[:, 0]).any(dim=-1).all()
    torch.testing.assert_close(model.mlm_logits(hidden), hidden @ model.embedding.weight.T)


def test_a_square_bool_tensor_of_the_padding_shape_is_padding():
    model = TransformerEncoder(11, WIDTH, H, 1, 48, max_len=4).eval()
    ids = torch.randint(11, (4, 4))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(model(ids, mask), model(ids, masks.padding(mask)))
    assert torch.equal(model(ids, mask[None]), model(ids, masks.causal()))


MODELS = {
    "transformer": lambda **kw: Transformer(11, 13, WIDTH, H, 2, 48, 16, **kw),
    "transformer_post": lambda **kw: Transformer(11, 13, WIDTH, H, 1, 48, 16, norm="post", **kw),
    "encoder": lambda **kw: TransformerEncoder(11, WIDTH, H, 2, 48, 16, **kw),
    **{
        f"gpt, {positions}": partial(GPTModel, 11, WIDTH, H, 2, max_len=S, positions=positions, n_kv_heads=2)
        for positions in ("sinusoidal", "learned", "rotary")
    },
}


def run_model(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    if isinstance(model, TransformerEncoder):
        return model.mlm_logits(model(src))
    return model(src) if isinstance(model, GPTModel) else model(src, tgt)


@pytest.mark.parametrize("name", MODELS)
def test_models_gradients_copies_and_casts(name):
    model = MODELS[name](dropout=0.1)
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))
    run_model(model, src, tgt).square().mean().backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        assert p.grad.isfinite().all(), parameter_name
        if not parameter_name.endswith("k_proj.bias") or "rotary" in name:  # softmax ignores a shift of all keys
            assert (p.grad != 0).any(), parameter_name
    model.eval()
    want = run_model(model, src, tgt)
    other = MODELS[name]().eval()
    assert not torch.allclose(run_model(other, src, tgt), want)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run_model(twin, src, tgt), want)
    for dtype in (torch.float16, torch.bfloat16):
        twin = copy.deepcopy(model).to(dtype)
        cast = run_model(twin, src, tgt)
        assert cast.dtype == dtype
        torch.testing.assert_close(cast.float(), want, atol=0.1, rtol=0.1)
        if isinstance(twin, GPTModel):
            assert twin.generate(src[:, :4], 3).dtype == torch.long


@pytest.mark.parametrize("name", MODELS)
def test_models_drop_embeddings_and_weights(name):
    model = MODELS[name](dropout=0.25)
    first: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, ScaledDotProductAttention):
            assert module.dropout_p == 0.25
        if isinstance(module, nn.ModuleList):
            module[0].register_forward_pre_hook(lambda _, args: first.append(args[0]))
    src, tgt = torch.randint(11, (B, S)), torch.randint(13, (B, L))
    run_model(model, src, tgt)
    run_model(model.eval(), src, tgt)
    stacks = len(first) // 2
    assert stacks == (2 if "transformer" in name else 1)
    assert all(0.1 < (x == 0).float().mean() < 0.4 for x in first[:stacks])
    assert not any((x == 0).any() for x in first[stacks:])


def test_every_attention_goes_through_the_swap_point(monkeypatch):
    calls = []
    original = ScaledDotProductAttention.forward

    def spy(self, *args, **kwargs):
        calls.append(kwargs.get("need_weights"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ScaledDotProductAttention, "forward", spy)
    model = small_transformer()
    model(torch.randint(11, (B, S)), torch.randint(13, (B, L)))
    assert calls == [False] * 6  # two encoder layers with one, two decoder layers with two
    assert sum(type(m) is ScaledDotProductAttention for m in model.modules()) == 6


IDS = torch.zeros(1, 2, dtype=torch.long)
TOO_LONG = torch.zeros(1, 17, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TOO_LONG, IDS), ValueError, "max_len"),
        ((IDS, TOO_LONG), ValueError, "max_len"),
        ((IDS[0], IDS), ValueError, "ids"),
        ((IDS.float(), IDS), TypeError, "ids"),
        ((IDS, IDS, torch.ones(1, 2)), TypeError, "bool"),
        ((IDS, IDS, torch.ones(1, 3, dtype=torch.bool)), ValueError, "mask"),
    ],
)
def test_transformer_rejects(arguments, error, message):
    with pytest.raises(error, match=message):
        small_transformer()(*arguments)


def test_transformer_learns_to_copy():
    model = small_transformer().train()
    src = torch.randint(1, 11, (4, 6))
    tgt = torch.cat((torch.zeros(4, 1, dtype=torch.long), src[:, :-1]), dim=1)
    assert_learns(model, src, src, tgt, steps=40, lr=3e-3)
