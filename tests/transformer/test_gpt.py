"""The decoder-only model: look-ahead, caching, sampling, tying."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import masks
from fusedattn.transformer import GPTModel, RotaryPositionalEmbedding
from tests.helpers.layers import assert_learns

pytestmark = pytest.mark.usefixtures("_seed")

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 17, 32, 4, 2, 24
POSITIONS = ["sinusoidal", "learned", "rotary"]


def small_gpt(**kwargs) -> GPTModel:
    return GPTModel(VOCAB, WIDTH, HEADS, LAYERS, max_len=MAX_LEN, **kwargs).eval()


def sharp_gpt(**kwargs) -> GPTModel:
    """Weights large enough that greedy choices differ from token to token."""
    model = small_gpt(**kwargs)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.4)
    return model


def some_ids(batch=2, seqlen=6) -> Tensor:
    return torch.randint(VOCAB, (batch, seqlen))


def test_gpt_formula():
    model = sharp_gpt(positions="learned", activation="gelu")
    ids = some_ids()
    x = model.embedding.weight[ids] + model.positions.embedding.weight[: ids.shape[1]]
    for block in model.blocks:
        x = block(x, masks.causal())
    want = F.layer_norm(x, (WIDTH,)) @ model.embedding.weight.T
    torch.testing.assert_close(model(ids), want)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gpt_does_not_look_ahead(positions, norm):
    model = sharp_gpt(positions=positions, norm=norm)
    ids = some_ids()
    changed = ids.clone()
    changed[:, 3] = (ids[:, 3] + 1) % VOCAB
    logits, other = model(ids), model(changed)
    torch.testing.assert_close(other[:, :3], logits[:, :3], atol=1e-6, rtol=0)
    assert (other[:, 3:] != logits[:, 3:]).any(dim=-1).all()


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_knows_the_order(positions):
    model = sharp_gpt(positions=positions)
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    last = model(ids)[:, -1]
    assert not torch.allclose(last[0], last[1], atol=1e-3)


@pytest.mark.parametrize("as_value", [False, True])
def test_gpt_padding(as_value):
    model = sharp_gpt(positions="rotary", n_kv_heads=2)
    ids = some_ids()
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, :2] = False  # left-padded
    mask = masks.padding(valid) if as_value else valid
    changed = torch.where(valid, ids, (ids + 1) % VOCAB)
    logits = model(ids, mask)
    assert logits.isfinite().all()
    assert torch.equal(logits[valid], model(changed, mask)[valid])
    # Rotations are relative: the sequence gives the same logits without its padding.
    torch.testing.assert_close(logits[:1, 2:], model(ids[:1, 2:]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_generate_greedy(positions):
    model = sharp_gpt(positions=positions, n_kv_heads=1)
    ids = some_ids()
    before = ids.clone()
    out = model.generate(ids, 8, temperature=0)
    assert torch.equal(ids, before)
    assert torch.equal(out[:, :6], ids)
    assert out.shape == (2, 14)
    assert len(set(out[0, 6:].tolist())) > 1
    # By definition: one full forward per token.
    want = ids
    for _ in range(8):
        want = torch.cat((want, model(want)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(out, want)
    assert torch.equal(model.generate(ids, 8, temperature=0, use_cache=False), want)
    assert torch.equal(model.generate(ids, 8, temperature=0.7, top_k=1), want)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_is_reproducible(use_cache):
    model = small_gpt()
    ids = some_ids()

    def sample(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(ids, 10, use_cache=use_cache, generator=generator)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_generate_samples_the_distribution():
    model = sharp_gpt()
    prompt = some_ids(1, 4)
    n, temperature, top_k = 4000, 2.0, 5
    logits = model(prompt)[0, -1].detach()
    threshold = logits.topk(top_k).values[-1]
    want = (logits.masked_fill(logits < threshold, -math.inf) / temperature).softmax(-1)
    drawn = model.generate(prompt.expand(n, -1), 1, temperature=temperature, top_k=top_k)[:, -1]
    frequency = torch.bincount(drawn, minlength=VOCAB) / n
    assert (frequency[want == 0] == 0).all()
    torch.testing.assert_close(frequency, want, atol=0.04, rtol=0)


def test_generate_runs_in_eval_mode_without_gradients_and_restores_the_mode():
    model = small_gpt(dropout=0.5).train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    ids = some_ids()
    out = model.generate(ids, 6, temperature=0)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(out, model.generate(ids, 6, temperature=0))
    with pytest.raises(IndexError):
        model.generate(torch.full((1, 2), VOCAB), 1)
    assert [m.training for m in model.modules()] == modes


def test_generate_to_the_limit_and_not_at_all():
    model, ids = small_gpt(positions="rotary"), some_ids()
    assert model.generate(ids, MAX_LEN - 6).shape == (2, MAX_LEN)
    unchanged = model.generate(ids, 0)
    assert torch.equal(unchanged, ids)
    assert unchanged.data_ptr() != ids.data_ptr()


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"max_new_tokens": MAX_LEN - 5}, "max_len"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature"),
        ({"max_new_tokens": 1, "temperature": math.nan}, "temperature"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k"),
        ({"max_new_tokens": 1, "top_k": VOCAB + 1}, "top_k"),
        ({"max_new_tokens": 1, "ids": torch.zeros(2, 0, dtype=torch.long)}, "ids"),
        ({"max_new_tokens": 1, "ids": torch.zeros(2, dtype=torch.long)}, "ids"),
    ],
)
def test_generate_rejects(kwargs, name):
    with pytest.raises(ValueError, match=name):
        small_gpt().generate(kwargs.pop("ids", some_ids()), **kwargs)


@pytest.mark.parametrize("positions", POSITIONS)
def test_forward_rejects(positions):
    model = small_gpt(positions=positions)
    with pytest.raises(ValueError, match="max_len"):
        model(some_ids(seqlen=MAX_LEN + 1))
    cache = model.make_cache(2)
    with torch.no_grad():
        model(some_ids(seqlen=MAX_LEN - 1), cache=cache)
    with pytest.raises(ValueError, match="max_len"):
        model(some_ids(seqlen=2), cache=cache)
    with pytest.raises(TypeError, match="bool"):
        model(some_ids(), torch.ones(2, 6))
    with pytest.raises(TypeError, match="ids"):
        model(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"positions": "alibi"}, "positions"),
        ({"norm": "none"}, "norm"),
        ({"activation": "tanh"}, "activation"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"n_heads": 5}, "n_heads"),
        ({"n_heads": 0}, "n_heads"),
        ({"n_heads": 32, "positions": "rotary"}, "rotary_dim"),
    ],
)
def test_gpt_rejects(kwargs, name):
    arguments = {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}
    with pytest.raises(ValueError, match=name):
        GPTModel(**{**arguments, **kwargs})


def test_gpt_ties_embedding_and_head():
    model = small_gpt(positions="rotary")
    ids = torch.zeros(1, 2, dtype=torch.long)  # token 5 is not among the inputs
    before = model(ids)
    with torch.no_grad():
        model.embedding.weight[5] += torch.randn(WIDTH)
    after = model(ids)
    assert not torch.allclose(after[..., 5], before[..., 5])
    assert torch.equal(after[..., :5], before[..., :5])
    assert sum(p.shape[0] == VOCAB for p in model.parameters()) == 1


def test_gpt_initialisation():
    model = GPTModel(500, 128, 4, 8)
    scaled = 0.02 / math.sqrt(16)
    for name, p in model.named_parameters():
        if name.endswith(("out_proj.weight", "down_proj.weight")):
            assert p.std().item() == pytest.approx(scaled, rel=0.1), name
        elif p.dim() == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
        elif name.endswith("proj.bias"):
            assert (p == 0).all(), name
    loss = F.cross_entropy(model(torch.randint(500, (2, 8)))[:, -1], torch.tensor([1, 2]))
    assert loss.item() == pytest.approx(math.log(500), rel=0.1)


def test_gpt_shares_one_rope():
    for model in (original := small_gpt(positions="rotary"), copy.deepcopy(original)):
        assert sum(isinstance(m, RotaryPositionalEmbedding) for m in model.modules()) == 1


def test_gpt_under_autocast_generates():
    model = small_gpt(positions="rotary")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.generate(some_ids(), 4).shape == (2, 10)


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_learns_a_sequence(positions):
    model = small_gpt(positions=positions, dropout=0.0).train()
    sequence = torch.tensor([[1, 2, 3, 1, 4, 5, 1, 6, 7, 1, 2, 3]])
    assert_learns(model, sequence[:, 1:], sequence[:, :-1], steps=100, lr=1e-2)
    assert torch.equal(model.generate(sequence[:, :1], 11, temperature=0), sequence)
