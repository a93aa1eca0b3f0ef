"""``fuse()``: the model stays the same object, and computes the same results."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedattn import attention, fuse, fusion_report, masks, unfuse
from fusedattn.fusion import Replacement
from fusedattn.integrations.modules import FusedScaledDotProductAttention
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
from tests.conftest import DEVICE, INTERPRETING
from tests.helpers import quick
from tests.helpers.accuracy import MODEL_FACTOR, mean_error
from tests.helpers.copies import through_pickle, through_torch_save

pytestmark = [pytest.mark.usefixtures("_seed")]

WIDTH, HEADS, LAYERS, VOCAB = 32, 4, 1, 13
BATCH, LENGTH, OTHER = 2, 9, 6

# The gradient of relu jumps at 0, so a rounding error before it may become a large one.
SMOOTH: dict[str, Any] = {"activation": "gelu"}


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (BATCH, length))


def hidden(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDTH)


def valid(length: int = LENGTH) -> Tensor:
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[0, length - 3 :] = False
    return real


def stack(cls: type[nn.Module], **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: cls(VOCAB, WIDTH, HEADS, LAYERS, 48, max_len=16, **SMOOTH, **kwargs)


# By name: functions that make the model and its arguments.
EXAMPLES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "MultiHeadAttention": (lambda: MultiHeadAttention(WIDTH, HEADS), lambda: (hidden(),)),
    "MultiHeadAttention, cross": (lambda: MultiHeadAttention(WIDTH, HEADS), lambda: (hidden(), hidden(OTHER))),
    "MultiHeadAttention, GQA": (
        lambda: MultiHeadAttention(WIDTH, HEADS, n_kv_heads=2),
        lambda: (hidden(), None, None, masks.causal() & masks.padding(valid())),
    ),
    "MultiHeadAttention, RoPE": (
        lambda: MultiHeadAttention(WIDTH, HEADS, n_kv_heads=1, rope=RotaryPositionalEmbedding(6, 16, interleaved=True)),
        lambda: (hidden(), None, None, masks.causal()),
    ),
    "SelfAttention": (
        lambda: SelfAttention(WIDTH, HEADS),
        lambda: (hidden(), hidden(), hidden(), valid()[:, None, None, :]),
    ),
    "TransformerBlock, pre": (
        lambda: TransformerBlock(WIDTH, HEADS, norm="pre", activation="swiglu"),
        lambda: (hidden(), masks.causal()),
    ),
    "TransformerBlock, post": (
        lambda: TransformerBlock(WIDTH, HEADS, norm="post", **SMOOTH),
        lambda: (hidden(), masks.causal("top_left")),
    ),
    "EncoderLayer": (lambda: EncoderLayer(WIDTH, HEADS, **SMOOTH), lambda: (hidden(), masks.padding(valid()))),
    "DecoderLayer": (
        lambda: DecoderLayer(WIDTH, HEADS, **SMOOTH),
        lambda: (hidden(OTHER), hidden(), None, masks.padding(valid())),
    ),
    "Encoder": (stack(Encoder), lambda: (ids(), valid())),
    "Decoder": (stack(Decoder), lambda: (ids(OTHER), hidden(), None, valid())),
    "Transformer": (
        lambda: Transformer(VOCAB, VOCAB, WIDTH, HEADS, LAYERS, 48, max_len=16, **SMOOTH),
        lambda: (ids(), ids(OTHER), valid()),
    ),
    "TransformerEncoder": (stack(TransformerEncoder), lambda: (ids(), valid())),
    "GPTModel, sinusoidal": (stack(GPTModel, positions="sinusoidal"), lambda: (ids(), valid())),
    "GPTModel, learned": (stack(GPTModel, positions="learned"), lambda: (ids(), valid())),
    "GPTModel, rotary": (stack(GPTModel, positions="rotary", n_kv_heads=2), lambda: (ids(), valid())),
}

examples = pytest.mark.parametrize("name", EXAMPLES)


def cast(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(DEVICE, dtype if x.is_floating_point() else None)
        return x.to(DEVICE) if isinstance(x, masks.Mask) else x

    return tuple(one(x) for x in arguments)


def example(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    make, arguments = EXAMPLES[name]
    return make().to(DEVICE, dtype), cast(arguments(), dtype)


def outcome(model: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter under a fixed random gradient of the output."""
    model.zero_grad()
    out = model(*arguments)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    out.backward(weights)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


@quick.every(2)
@pytest.mark.skipif(not INTERPRETING, reason="float64 runs in the interpreter only")
@examples
def test_a_fused_model_computes_the_same_function(name):
    """In float64, which hides no difference behind rounding: the output and all gradients, in train() and in eval()."""
    model, arguments = example(name, torch.float64)
    expected = outcome(model, arguments)
    fuse(model, backend="triton")
    got = outcome(model.train(), arguments)
    assert got.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(got[key], x, rtol=1e-9, atol=1e-11 * max(1.0, x.abs().max().item()))
    with torch.no_grad():
        assert torch.equal(model.eval()(*arguments), got["output"])


@quick.every(5)
@examples
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_model_is_as_accurate(name, dtype):
    """Errors relative to the reference in float64, averaged over the output and all gradients."""
    model, arguments = example(name, dtype)
    truth = outcome(copy.deepcopy(model).double(), cast(arguments, torch.float64))
    eager = outcome(model, arguments)
    got = outcome(fuse(model, backend="triton"), arguments)
    # Without rotation, a key's bias shifts all scores of a row equally: its gradient is 0.
    assert mean_error(got, truth, 1e-9) <= MODEL_FACTOR * mean_error(eager, truth, 1e-9)


@examples
def test_fuse_and_unfuse_leave_the_model_alone(name):
    model, arguments = example(name, torch.float32)
    expected = outcome(model, arguments)
    names = [n for n, _ in model.named_modules()]
    modules = list(model.modules())
    state = model.state_dict()
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    keys = {id(m): set(m.__dict__) for m in modules}
    text = repr(model)

    assert fuse(model, backend="triton") is model
    assert [n for n, _ in model.named_modules()] == names
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert model.state_dict().keys() == state.keys()
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert all(m.training for m in model.modules())
    cores = [m for m in modules if isinstance(m, ScaledDotProductAttention)]
    assert cores
    assert all(type(m) is FusedScaledDotProductAttention for m in cores)
    model.load_state_dict(state)

    assert unfuse(model) is model
    assert repr(model) == text
    assert {id(m): set(m.__dict__) for m in modules} == keys
    assert all(type(m) is ScaledDotProductAttention for m in cores)
    got = outcome(model, arguments)
    assert all(torch.equal(got[key], x) for key, x in expected.items())
    assert unfuse(model) is model


def small(**kwargs: Any) -> TransformerBlock:
    return TransformerBlock(WIDTH, HEADS, **kwargs).to(DEVICE)


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that collects the keyword arguments of each call of attention() by a fused module."""
    from fusedattn.integrations import modules

    calls: list[dict[str, Any]] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(modules, "attention", spy)
    return calls


def test_the_kernels_run_in_a_fused_model_and_only_there(monkeypatch):
    calls = calls_of(monkeypatch)
    model, x = small(), hidden().to(DEVICE)
    model(x)
    assert calls == []
    fuse(model, backend="triton")(x)
    assert [c["backend"] for c in calls] == ["triton"]
    fuse(model, backend="torch")(x)
    assert [c["backend"] for c in calls] == ["triton", "torch"]
    fuse(model)(x)
    assert calls[-1]["backend"] is None
    assert [c["deterministic"] for c in calls] == [True] * 3
    fuse(model, deterministic=False)(x)
    assert calls[-1]["deterministic"] is False
    unfuse(model)(x)
    assert len(calls) == 4
    with pytest.raises(TypeError, match="deterministic: got str, allowed is a bool"):
        fuse(model, deterministic="no")


def test_weights_come_from_the_reference(monkeypatch):
    calls = calls_of(monkeypatch)
    model, x = MultiHeadAttention(WIDTH, HEADS).to(DEVICE), hidden().to(DEVICE)
    expected, expected_weights = model(x, need_weights=True)
    out, weights = fuse(model, backend="triton")(x, need_weights=True)
    assert torch.equal(out, expected)
    assert torch.equal(weights, expected_weights)
    assert calls == []


def test_attention_without_heads():
    """Three-dimensional inputs have one head, and so has a three-dimensional mask."""
    core = ScaledDotProductAttention(scale=0.3).to(DEVICE)
    q, k, v = (torch.randn(2, n, 8, device=DEVICE) for n in (5, 7, 7))
    some = torch.rand(2, 5, 7, device=DEVICE) < 0.7
    some_padding = masks.padding(torch.rand(2, 7, device=DEVICE) < 0.7)
    for mask in (None, some, some[0], masks.causal(), some_padding):
        expected, _ = core(q, k, v, mask, need_weights=False)
        fused = fuse(copy.deepcopy(core), backend="triton")
        out, weights = fused(q, k, v, mask, need_weights=False)
        assert weights is None
        torch.testing.assert_close(out, expected)


def test_an_optimizer_made_before_goes_on():
    model, x = small(), hidden().to(DEVICE)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, twin)]
    losses = []
    for step in range(4):
        if step == 2:
            fuse(model, backend="triton")
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            loss = m(x, masks.causal()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-4)
    assert losses[-1] < losses[0]


def test_hooks_stay():
    model, x = small(), hidden().to(DEVICE)
    core = model.self_attention.attention
    seen = []
    core.register_forward_pre_hook(lambda *_: seen.append("before"))
    core.register_forward_hook(lambda *_: seen.append("after"))
    core.register_full_backward_hook(lambda *_: seen.append("backward"))
    fuse(model, backend="triton")(x.requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]
    unfuse(model)(x).sum().backward()
    assert seen == ["before", "after", "backward"] * 2


def test_shared_modules():
    block = small()
    model = nn.Sequential(block, block, nn.ModuleDict({"again": block})["again"])
    expected = model(hidden_x := hidden().to(DEVICE))
    fuse(model, backend="triton")
    assert model[0] is model[1] is model[2]
    assert [r.name for r in fusion_report(model)] == ["0.self_attention.attention"]
    torch.testing.assert_close(model(hidden_x), expected, atol=1e-5, rtol=1e-5)


def test_the_model_itself_may_be_attention():
    core = ScaledDotProductAttention()
    assert fuse(core) is core
    assert isinstance(core, FusedScaledDotProductAttention)
    assert fusion_report(core) == [Replacement("", "ScaledDotProductAttention", "FusedScaledDotProductAttention")]
    assert str(fusion_report(core)[0]).startswith("(the model itself): ")
    assert fuse(core, backend="torch") is core
    assert core.backend == "torch"


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_of_a_fused_model(copied):
    model, x = fuse(small(rope=RotaryPositionalEmbedding(8, 16)), backend="triton"), hidden().to(DEVICE)
    twin = copied(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert fusion_report(twin) == fusion_report(model)
    assert twin.self_attention.attention.backend == "triton"
    assert torch.equal(twin(x), model(x))
    unfuse(twin)
    assert len(fusion_report(model)) == 1


def test_a_report_names_fused_modules(caplog):
    model = GPTModel(VOCAB, WIDTH, HEADS, 2, max_len=16)
    assert fusion_report(model) == []
    with caplog.at_level(logging.INFO, logger="fusedattn"):
        fuse(model)
    names = [f"blocks.{i}.self_attention.attention" for i in range(2)]
    assert [r.name for r in fusion_report(model)] == names
    assert str(fusion_report(model)[0]) == f"{names[0]}: ScaledDotProductAttention -> FusedScaledDotProductAttention"
    assert [r.getMessage() for r in caplog.records] == [f"fused {r}" for r in fusion_report(model)]
    unfuse(model)
    assert fusion_report(model) == []


def subclass_of(cls: type[nn.Module], *arguments: Any) -> nn.Module:
    return type("Subclass", (cls,), {})(*arguments)


def patched() -> ScaledDotProductAttention:
    core = ScaledDotProductAttention()
    core.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return core


def test_a_refusal_lists_every_reason_and_changes_nothing():
    parts = nn.Sequential(
        subclass_of(ScaledDotProductAttention),
        subclass_of(FusedScaledDotProductAttention),
        subclass_of(nn.MultiheadAttention, 8, 2),
        patched(),
    )
    model = nn.Sequential(ScaledDotProductAttention(), parts)
    types = [type(m) for m in model.modules()]
    with pytest.raises(NotImplementedError) as caught:
        fuse(model)
    for i in range(2):
        assert f"1.{i}: Subclass is a subclass" in str(caught.value)
    assert "1.2: Subclass is a subclass of MultiheadAttention" in str(caught.value)
    assert "1.3: its forward was replaced" in str(caught.value)
    assert [type(m) for m in model.modules()] == types
    assert "backend" not in model[0].__dict__


def test_dropout():
    """None in eval(); in training each call drops other weights, and the same seed drops the same."""
    model, x = small(dropout=0.5).eval(), hidden().to(DEVICE)
    expected = model(x)
    torch.testing.assert_close(fuse(model, backend="triton")(x), expected, atol=1e-5, rtol=1e-5)
    core = next(m for m in model.modules() if type(m) is FusedScaledDotProductAttention).train()  # nothing else drops
    torch.manual_seed(5)
    first, second = model(x), model(x)
    assert not torch.allclose(first, expected, atol=1e-3)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(model(x), first)
    core.eval()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@quick.covering()
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate(positions, use_cache):
    """Greedy decoding gives the same tokens, with a cache and without."""
    model = GPTModel(VOCAB, WIDTH, HEADS, 1, max_len=16, positions=positions, n_kv_heads=2).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.4)  # far enough apart that rounding does not decide the token
    prompt = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], device=DEVICE)
    expected = model.generate(prompt, 6, temperature=0, use_cache=use_cache)
    logits = model(expected)
    fuse(model, backend="triton")
    assert torch.equal(model.generate(prompt, 6, temperature=0, use_cache=use_cache), expected)
    torch.testing.assert_close(model(expected), logits, atol=1e-4, rtol=1e-4)


def test_a_cache_filled_in_pieces():
    model = fuse(GPTModel(VOCAB, WIDTH, HEADS, 1, max_len=16, positions="rotary").to(DEVICE), backend="triton")
    tokens = ids().to(DEVICE)
    cache = model.make_cache(BATCH)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([4, 1, 3, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-5, rtol=1e-5)


def test_a_batch_member_that_is_all_padding():
    model = fuse(TransformerEncoder(VOCAB, WIDTH, HEADS, 1, 48, max_len=16).to(DEVICE), backend="triton")
    real = valid().to(DEVICE)
    real[1] = False
    out = model(ids().to(DEVICE), real)
    assert out.isfinite().all()
    out.sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), name


def test_moving_and_casting_a_fused_model():
    model = fuse(small(rope=RotaryPositionalEmbedding(8, 16)), backend="triton")
    x = hidden().to(DEVICE)
    expected = model(x)
    for dtype in (torch.float16, torch.bfloat16):
        out = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        tolerance = 30 * torch.finfo(dtype).eps
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert math.isfinite(model(x).sum().item())
