"""Linear and sparse attention in the reference Transformer, eager and fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusedattn import Rope, fuse, fusion_report, masks, unfuse
from fusedattn.feature_maps import Favor
from fusedattn.linear import reference
from fusedattn.linear.options import LinearOptions
from fusedattn.transformer import GPTModel, LinearAttention, MultiHeadAttention, TopBlockAttention, TransformerBlock
from tests.conftest import BACKENDS, DEVICE
from tests.helpers import quick

pytestmark = pytest.mark.usefixtures("_seed")

VALID = torch.tensor([[True] * 20, [False] * 3 + [True] * 17])


def qkv(heads: int = 4, kv_heads: int = 2, n: int = 20) -> list[Tensor]:
    return [torch.randn(2, h, n, 16, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


def gpt(attention: str | masks.Mask | nn.Module, **options: object) -> GPTModel:
    sizes = {"vocab_size": 29, "d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "max_len": 64}
    return GPTModel(**sizes, attention=attention, positions="rotary", **options).to(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("valid", [None, VALID])
def test_the_layer_is_linear_attention(valid, causal):
    q, k, v = qkv()
    mask = masks.causal() if causal else masks.full()
    mask = mask if valid is None else mask & masks.padding(valid)
    out, weights = LinearAttention()(q, k, v, mask)
    expected, _ = reference.attention(q, k, v, LinearOptions("elu+1", causal, True, valid, None, None))
    torch.testing.assert_close(out, expected)
    assert weights is not None
    seen = mask.dense(20, 20).expand(2, 4, 20, 20)
    assert (weights[~seen] == 0).all()
    torch.testing.assert_close(weights.sum(-1), seen.any(-1).double())


@pytest.mark.parametrize("fused", [False, True])
def test_products_that_add_up_to_0(fused):
    """The query sees nothing, even if its products are not 0."""
    layer = LinearAttention("identity")
    if fused:
        fuse(layer, backend="torch")
    q, k, v = torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0], [0.0, -1.0]]]]), torch.randn(1, 1, 2, 3)
    out, weights = layer(q, k, v)
    assert not out.any()
    assert not weights.any()
    assert not layer(q, k, v, need_weights=False)[0].any()


def test_rope_rotates_before_the_feature_map():
    q, k, v = qkv()
    rope = Rope.from_theta(16, 20)
    out, _ = LinearAttention("relu")(q, k, v, rope=rope)
    torch.testing.assert_close(out, LinearAttention("relu")(*rope.rotate(q, k), v)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", ["elu+1", "softmax", Favor.draw(16, 24, generator=torch.Generator())])
def test_the_twin_has_the_same_results(feature_map, backend):
    layer = LinearAttention(feature_map)
    rope = Rope.from_theta(16, 20)
    mask = masks.causal() & masks.padding(VALID.to(DEVICE))
    inputs = [x.float().to(DEVICE).requires_grad_() for x in qkv()]
    dout = torch.randn(2, 4, 20, 16, device=DEVICE)

    def results() -> list[Tensor]:
        out, weights = layer(*inputs, mask, rope=rope, need_weights=False)
        assert weights is None
        return [out, *torch.autograd.grad(out, inputs, dout)]

    eager = results()
    fuse(layer, backend=backend)
    assert str(fusion_report(layer)[0]).endswith("LinearAttention -> FusedLinearAttention")
    for got, expected in zip(results(), eager, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    unfuse(layer)
    assert type(layer) is LinearAttention


@pytest.mark.parametrize(
    "mask",
    [masks.window(3, 0), masks.causal() & masks.strided(4), masks.boolean(torch.ones(20, 20, dtype=torch.bool))],
    ids=["window", "strided", "boolean"],
)
def test_the_twin_refuses_other_masks(mask):
    layer = fuse(LinearAttention())
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="mask: got another mask than linear attention can have, allowed are"):
        layer(q, k, v, mask, need_weights=False)
    layer(q, k, v, mask)  # the weights are the quadratic matrix: the reference has them


def test_causal_attention_from_other_lengths_is_refused():
    (q, _, _), (_, k, v) = qkv(n=5), qkv()
    with pytest.raises(NotImplementedError, match="as many queries as keys"):
        fuse(LinearAttention())(q, k, v, masks.causal(), need_weights=False)


def losses(model: GPTModel, steps: int) -> list[float]:
    """Train a model to count."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(29, (4, 1), generator=generator)
        ids = ((starts + torch.arange(33)) % 29).to(DEVICE)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@quick.only(backend="torch")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "attention",
    ["linear", masks.strided(6), masks.fixed(6, 2), masks.dilated(4, 0, 2), masks.bigbird(8), TopBlockAttention(8, 2)],
    ids=["linear", "strided", "fixed", "dilated", "bigbird", "top blocks"],
)
def test_a_model_trains_fused_as_eager(attention, backend):
    torch.manual_seed(0)
    eager = gpt(attention)
    torch.manual_seed(0)
    fused = fuse(gpt(attention), backend=backend)
    steps = 20 if backend == "torch" else 2
    expected, got = losses(eager, steps), losses(fused, steps)
    assert expected[-1] < (0.7 if backend == "torch" else 1.0) * expected[0]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_generating_with_a_cache_is_generating_without(fused):
    model = gpt("linear").double()
    if fused:
        fuse(model, backend="torch")
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]], device=DEVICE)
    cached, whole = (model.generate(prompt, 6, temperature=0, use_cache=x) for x in (True, False))
    assert torch.equal(cached, whole)


def test_a_sparse_pattern_takes_no_cache():
    model = gpt(masks.strided(4))
    prompt = torch.tensor([[1, 2, 3]], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"cache: got one with a sparse pattern, allowed is None"):
        model.generate(prompt, 2)
    assert model.generate(prompt, 2, use_cache=False).shape == (1, 5)


def test_wrong_kinds_of_attention():
    with pytest.raises(
        ValueError, match="attention: got 'sparse', allowed are 'softmax', 'linear', a Mask and a module"
    ):
        gpt("sparse")
    with pytest.raises(TypeError, match="attention: got int, allowed are 'softmax', 'linear', a Mask and a module"):
        gpt(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feature_map: got 'exp', allowed are 'elu"):
        LinearAttention("exp")
    with pytest.raises(TypeError, match="feature_map: got int, allowed are a name"):
        LinearAttention(3)  # type: ignore[arg-type]


def test_blocks_take_any_attention():
    """A block and a layer compute heads by the module that they are given."""
    own = LinearAttention("relu")
    block = TransformerBlock(32, 4, attention=own)
    assert block.self_attention.attention is own
    assert MultiHeadAttention(32, 4, attention=own).attention is own
    assert block(torch.randn(2, 5, 32), masks.causal()).shape == (2, 5, 32)
