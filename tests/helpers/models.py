"""Small models of transformers, and their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.conftest import DEVICE

VOCAB, BATCH, LENGTH, NEW_TOKENS = 60, 2, 11, 5
PAD, START, END = 0, 1, 2
WIDTH: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
PLAIN = WIDTH | IDS | {"max_position_embeddings": 64}
GROUPED = PLAIN | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager"}  # grouped products have no float64
SEQ2SEQ = IDS | {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": END, "dropout": 0.0,
}  # fmt: skip


# By name: the config, its class of model, and its arguments.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, grouped queries": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "Mistral, windows": ("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "Qwen 2, windows in one layer": (
        "Qwen2Config", "Qwen2ForCausalLM",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "Qwen 3, normalised q and k": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "OLMo 2, normalised across heads": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "OLMo 3, windows, normalised across heads": (
        "Olmo3Config", "Olmo3ForCausalLM",
        GROUPED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Gemma 2, soft-cap and windows": (
        "Gemma2Config", "Gemma2ForCausalLM",
        GROUPED | {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
                   "initializer_range": 0.2},  # scores that reach the cap
    ),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "Granite, a factor of scores": ("GraniteConfig", "GraniteForCausalLM", GROUPED | {"attention_multiplier": 0.5}),
    "Phi, partial rotation": ("PhiConfig", "PhiForCausalLM", GROUPED | {"partial_rotary_factor": 0.5}),
    "gpt-oss, sinks and windows": (
        "GptOssConfig", "GptOssForCausalLM",
        GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2},
    ),
    "GPT-2": (
        "GPT2Config", "GPT2LMHeadModel",
        IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
    ),
    "BERT": ("BertConfig", "BertModel", PLAIN),
    "ModernBERT, windows both ways": (
        "ModernBertConfig", "ModernBertModel", PLAIN | {"local_attention": 6, "global_attn_every_n_layers": 2}
    ),
    "T5, relative bias": (
        "T5Config", "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": END,
            "feed_forward_proj": "gated-gelu",  # the gradient of relu jumps
        },
    ),
    "BART, encoder and decoder": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
}  # fmt: skip


# On a CPU the kernels are interpreted, slowly: most tests run the torch backend there, and some both.
QUICK = "torch" if DEVICE == "cpu" else "triton"


def built(config: str, cls: str, arguments: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """A model in eval(), with its own eager attention unless the arguments name another."""
    made = getattr(transformers, config)(**{"attn_implementation": "eager"} | arguments)
    return getattr(transformers, cls)(made).to(DEVICE, dtype).eval()


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return built(*MODELS[name], dtype)


@pytest.fixture(autouse=True)
def _exact_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep eager attention of transformers from rounding its weights to float32 in a float64 model."""
    softmax = F.softmax

    def exact(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **rest)

    monkeypatch.setattr(F, "softmax", exact)


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Token ids, and a mask of the real ones."""
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), device=DEVICE)
    real = torch.ones(BATCH, LENGTH, dtype=torch.long, device=DEVICE)
    if side == "left":
        real[0, :4] = 0
    elif side == "right":
        real[0, 7:] = 0
    return ids, real


def arguments(model: Any, ids: Tensor, real: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a model, and a mask of its meaningful outputs."""
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": real}
    if not model.config.is_encoder_decoder:
        return given, real.bool()
    given["decoder_input_ids"] = ids[:, :6]
    return given, torch.ones_like(ids[:, :6], dtype=torch.bool)


def outcome(model: Any, given: dict[str, Any], meant: Tensor) -> dict[str, Tensor]:
    """The meaningful outputs, and the gradient of every parameter."""
    model.zero_grad()
    result = model(**given)
    out = (result.logits if "logits" in result else result.last_hidden_state)[meant]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    out.backward(weights)
    return {"output": out.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def trained(model: Any, batches: Iterable[dict[str, Any]]) -> list[float]:
    """The losses of one step of SGD for each batch; all gradients must be finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare in float64, relative to the largest gradient: some (of a key's bias) are 0 by mathematics."""
    assert got.keys() == expected.keys()
    largest = max(x.abs().max().item() for name, x in expected.items() if name != "output")
    for name, x in expected.items():
        scale = x.abs().max().item() if name == "output" else largest
        # Norms round to float32 in between, which turns a difference in the last bit into steps of 1e-7.
        torch.testing.assert_close(got[name], x, rtol=0, atol=1e-6 * scale)
