"""fuse() and unfuse(): the same model, computing the same, in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedattn
from fusedattn import fuse, fusion_report, masks, testing, unfuse
from fusedattn.modules import FusedScaledDotProductAttention
from fusedattn.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    GPTModel,
    MultiHeadAttention,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    SelfAttention,
    Transformer,
    TransformerBlock,
    TransformerEncoder,
)
from tests.conftest import DEVICE

D, HEADS, LENGTH = 32, 4, 21
VALID = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13]])
Call = Callable[[nn.Module], Tensor]


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def vectors(model: nn.Module, length: int = LENGTH) -> Tensor:
    x = torch.randn(2, length, D, generator=torch.Generator().manual_seed(2))
    return x.to(DEVICE, next(model.parameters()).dtype)


def padding() -> masks.Mask:
    return masks.padding(VALID.to(DEVICE))


# Every attention-bearing model of the reference, and a call that exercises its masks.
MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "self attention": (lambda: MultiHeadAttention(D, HEADS), lambda m: m(vectors(m))),
    "causal, grouped, rotary": (
        lambda: MultiHeadAttention(D, HEADS, n_kv_heads=2, rope=RotaryPositionalEmbedding(8, 64)),
        lambda m: m(vectors(m), mask=masks.causal() & padding()),
    ),
    "cross attention": (
        lambda: MultiHeadAttention(D, HEADS),
        lambda m: m(vectors(m, 9), vectors(m), mask=padding()),
    ),
    "shared projections": (
        lambda: SelfAttention(D, HEADS),
        lambda m: m(vectors(m), vectors(m), vectors(m), masks.causal()),
    ),
    "pre-norm block": (lambda: TransformerBlock(D, HEADS, 48), lambda m: m(vectors(m), masks.causal())),
    "post-norm block": (
        lambda: TransformerBlock(D, HEADS, 48, norm="post", activation="swiglu"),
        lambda m: m(vectors(m), padding()),
    ),
    "encoder layer": (lambda: EncoderLayer(D, HEADS, 48), lambda m: m(vectors(m), padding())),
    "decoder layer": (
        lambda: DecoderLayer(D, HEADS, 48),
        lambda m: m(vectors(m, 9), vectors(m), memory_mask=padding()),
    ),
    "encoder": (lambda: Encoder(50, D, HEADS, 1, 48, 64), lambda m: m(ids(), padding())),
    "decoder": (lambda: Decoder(50, D, HEADS, 1, 48, 64), lambda m: m(ids(9), vectors(m))),
    "encoder-decoder": (
        lambda: Transformer(50, 50, D, HEADS, 1, 48, 64),
        lambda m: m(ids(), ids(9), src_mask=VALID.to(DEVICE)),
    ),
    "encoder-only": (lambda: TransformerEncoder(50, D, HEADS, 1, 48, 64), lambda m: m(ids(), VALID.to(DEVICE))),
    **{
        f"GPT, {kind}": (
            lambda kind=kind: GPTModel(50, D, HEADS, 2, 48, 64, positions=kind, n_kv_heads=2),
            lambda m: m(ids(), VALID.to(DEVICE)),
        )
        for kind in ("sinusoidal", "learned", "rotary")
    },
}


def build(name: str) -> tuple[Any, Call]:
    make, call = MODELS[name]
    torch.manual_seed(0)
    return make().to(DEVICE), call


def results(model: nn.Module, call: Call, weights: Tensor) -> dict[str, Tensor]:
    """The output and the gradient of every parameter, for a fixed gradient of the output."""
    model.zero_grad()
    out = call(model)
    out.backward(weights.to(out.dtype))
    return {"output": out.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_units_of_size(results: dict[str, Tensor], truth: dict[str, Tensor]) -> Tensor:
    """All gradients in one row, each tensor divided by its true size.

    Together, because a single bias of 32 numbers, whose errors come through layers that are eager in both models, has
    a mean error that is luck. The bias of the keys is left out: softmax does not see it, its gradient is 0.
    """
    return torch.cat(
        [
            (results[name].double() / gradient.pow(2).mean().sqrt()).flatten()
            for name, gradient in truth.items()
            if name != "output" and gradient.abs().max() > 1e-9
        ]
    )


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "train") for name in MODELS), ("GPT, rotary", "eval"), ("encoder-decoder", "eval")]
)
def test_fused_computes_what_the_reference_computes(name: str, mode: str) -> None:
    model, call = build(name)
    model.train(mode == "train")
    weights = torch.randn(call(model).shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    eager = results(model, call, weights)
    truth = results(copy.deepcopy(model).double(), call, weights)
    fused = results(fuse(copy.deepcopy(model), backend="triton"), call, weights)
    assert fused.keys() == truth.keys()
    assert set(truth) == {"output"} | {name for name, _ in model.named_parameters()}
    testing.assert_within_budget(fused["output"], truth["output"], eager["output"], "output")
    gradients = (in_units_of_size(x, truth) for x in (fused, truth, eager))
    testing.assert_within_budget(*gradients, "gradients")  # type: ignore[misc]


def test_the_model_stays_the_same_object_with_the_same_parameters() -> None:
    model, call = build("GPT, rotary")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    core = next(m for m in model.modules() if isinstance(m, ScaledDotProductAttention))
    core.register_forward_hook(lambda *_: calls.append(1))
    keys, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]

    assert fuse(model, backend="triton") is model
    assert list(model.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(type(m) is not ScaledDotProductAttention for m in model.modules())
    before = model.embedding.weight.detach().clone()
    call(model).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.embedding.weight)
    assert calls == [1]

    assert unfuse(model) is model
    assert fusion_report(model) == []
    assert all(type(m) is not FusedScaledDotProductAttention for m in model.modules())
    assert "backend" not in core.__dict__


def test_the_report_names_what_was_replaced() -> None:
    model = fuse(build("decoder layer")[0])
    report = fusion_report(model)
    assert len(report) == 2
    for replacement in report:
        assert type(model.get_submodule(replacement.name)) is FusedScaledDotProductAttention
        assert "ScaledDotProductAttention -> FusedScaledDotProductAttention" in str(replacement)


def test_fusing_twice_shared_modules_and_the_root() -> None:
    core = ScaledDotProductAttention()
    assert fuse(core, backend="torch") is core
    assert fuse(core, backend="triton").backend == "triton"
    assert "(the model itself)" in str(fusion_report(core)[0])
    attention = MultiHeadAttention(D, HEADS)
    both = nn.ModuleList([attention, attention])
    fuse(both)
    assert type(attention.attention) is FusedScaledDotProductAttention


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_fused_model_can_be_copied_and_pickled(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, call = build("GPT, learned")
    twin = duplicate(fuse(model, backend="triton"))
    torch.testing.assert_close(call(twin), call(model), rtol=0, atol=0)


def test_weights_on_request_are_the_reference_ones() -> None:
    model, _ = build("self attention")
    x = vectors(model)
    expected = model(x, mask=masks.causal(), need_weights=True)
    fuse(model, backend="triton")
    for a, b in zip(model(x, mask=masks.causal(), need_weights=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_generation_with_and_without_a_cache(positions: str) -> None:
    model = build(f"GPT, {positions}")[0]
    prompt = ids(6)
    expected = model.generate(prompt, 4, temperature=0.0)
    fuse(model, backend="triton")
    for use_cache in (True, False):
        assert torch.equal(model.generate(prompt, 4, temperature=0.0, use_cache=use_cache), expected)


class OwnAttention(ScaledDotProductAttention):
    """A user's variant."""


def _patched() -> nn.Module:
    core = ScaledDotProductAttention()
    core.forward = lambda *args, **kwargs: None  # type: ignore[assignment]
    return core


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OwnAttention, ("OwnAttention", "subclass")),
        (_patched, ("forward was replaced",)),
        (lambda: nn.MultiheadAttention(D, HEADS), ("torch.nn.MultiheadAttention",)),
        (lambda: ScaledDotProductAttention(dropout=0.1), ("dropout_p = 0.1", "eval()")),
    ],
)
def test_what_cannot_be_replaced_faithfully_is_refused(make: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    good = MultiHeadAttention(D, HEADS)
    model = nn.ModuleDict({"good": good, "bad": make()})
    with pytest.raises(NotImplementedError) as error:
        fuse(model)
    assert all(word in str(error.value) for word in ("bad", *words))
    assert type(good.attention) is ScaledDotProductAttention  # nothing was changed


def test_dropout_is_refused_when_training_starts_after_fusing() -> None:
    model = MultiHeadAttention(D, HEADS, dropout=0.1).to(DEVICE).eval()
    fuse(model)(vectors(model))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        model.train()(vectors(model))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="model: got int"):
        fuse(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="without attention of fusedattn"):
        fuse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="backend"):
        fuse(MultiHeadAttention(D, HEADS), backend="cuda")  # type: ignore[arg-type]
    assert fusedattn.unfuse(nn.Linear(2, 2)) is not None
