"""More families of transformers, without an adapter of their own, and what users do to a fused model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fusedattn import fuse, fusion_report, unfuse
from fusedattn.integrations.transformers import NAME, attention_function, mask_function, register
from tests.conftest import DEVICE
from tests.helpers.models import (
    EXPERTS,
    GROUPED,
    MODELS,
    PLAIN,
    QUICK,
    SEQ2SEQ,
    VOCAB,
    WIDTH,
    _exact_eager,  # noqa: F401  (for every test)
    arguments,
    assert_same,
    built,
    make,
    outcome,
    padded,
    trained,
)

pytestmark = pytest.mark.usefixtures("_seed")

LATENT = PLAIN | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
VISION = WIDTH | {"image_size": 16, "patch_size": 4}
CONVOLUTIONS = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer", "mask_time_prob": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip

T5_GEMMA = GROUPED | {"sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8}

# By name: the config, the class of the model, and arguments. No dropout stays on in eval().
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", GROUPED | EXPERTS | {"num_local_experts": 2}),
    "DeepSeek V2, values of another width": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    "DeepSeek V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "Llama 4, chunks": (
        "Llama4TextConfig", "Llama4ForCausalLM",
        GROUPED | EXPERTS | {
            "num_hidden_layers": 4, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2,
            "intermediate_size_mlp": 48, "moe_layers": [],
        },
    ),
    "OPT": ("OPTConfig", "OPTForCausalLM", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", PLAIN | {"hidden_act": "gelu"}),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", GROUPED),
    "Phi 3": ("Phi3Config", "Phi3ForCausalLM", GROUPED | {"sliding_window": 4}),
    "OLMo 2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "Cohere 2, windows": ("Cohere2Config", "Cohere2ForCausalLM", GROUPED | {"sliding_window": 4}),
    "SmolLM 3, some layers without positions": ("SmolLM3Config", "SmolLM3ForCausalLM", GROUPED),
    "Gemma 3n, shared keys": (
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        GROUPED | {
            "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 4, "intermediate_size": [48] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
        },
    ),
    "Recurrent Gemma, a window beside recurrences": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM",
        GROUPED | {
            "num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "lru_width": 32,
            "attention_window_size": 4, "head_dim": 8,
        },
    ),
    "DiffLlama, two attentions each": ("DiffLlamaConfig", "DiffLlamaForCausalLM", GROUPED),
    "ALBERT": ("AlbertConfig", "AlbertModel", PLAIN | {"embedding_size": 16}),
    "XLM-R": ("XLMRobertaConfig", "XLMRobertaModel", PLAIN),
    "Marian": ("MarianConfig", "MarianMTModel", SEQ2SEQ),
    "Pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", SEQ2SEQ),
    "mBART": ("MBartConfig", "MBartForConditionalGeneration", SEQ2SEQ),
    # Its encoder sees sliding_window keys on either side, and also passes that number on.
    "T5Gemma, windows both ways": (
        "T5GemmaConfig", "T5GemmaForConditionalGeneration",
        {"encoder": dict(T5_GEMMA), "decoder": dict(T5_GEMMA), "vocab_size": VOCAB, "attn_implementation": "eager"},
    ),
}  # fmt: skip

GENERATING = [name for name in TEXT if name.startswith(("Llama 4", "DeepSeek V2", "Cohere", "Phi", "OPT", "Marian"))]


@pytest.mark.parametrize("name", TEXT)
def test_a_family_computes_the_same(name):
    model = built(*TEXT[name])
    given, meant = arguments(model, *padded("left"))
    expected = outcome(model, given, meant)
    fuse(model, backend=QUICK)
    assert_same(outcome(model, given, meant), expected)
    unfuse(model)
    assert model.config._attn_implementation == "eager"
    assert_same(outcome(model, given, meant), expected)


@pytest.mark.parametrize("name", GENERATING)
def test_a_family_generates_the_same(name):
    """Longer than its window, after padding of most of a row."""
    model = built(*TEXT[name])
    ids = torch.randint(3, VOCAB, (2, 11), device=DEVICE)
    real = (torch.arange(11, device=DEVICE) >= torch.tensor([[9], [0]], device=DEVICE)).long()
    options: dict[str, Any] = {"attention_mask": real, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    assert torch.equal(fuse(model, backend=QUICK).generate(ids, **options), expected)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, dtype=torch.float64, device=DEVICE)


def test_vision_and_sound():
    """Models without a mask, and a bidirectional audio model with padding."""
    sound = torch.randn(2, 800, dtype=torch.float64, device=DEVICE)
    real = (torch.arange(800, device=DEVICE) < torch.tensor([[400], [800]], device=DEVICE)).long()
    whisper = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
    spectrum = torch.randn(2, 8, 40, dtype=torch.float64, device=DEVICE)
    asked = torch.randint(3, VOCAB, (2, 5), device=DEVICE)
    both = {"text_config": PLAIN, "vision_config": VISION, "projection_dim": 16}
    for config, cls, changes, given, key in (
        ("ViTConfig", "ViTModel", VISION, {"pixel_values": images()}, "last_hidden_state"),
        ("Dinov2Config", "Dinov2Model", VISION, {"pixel_values": images()}, "last_hidden_state"),
        ("CLIPConfig", "CLIPModel", both, {"pixel_values": images(), "input_ids": asked}, "logits_per_text"),
        ("Wav2Vec2Config", "Wav2Vec2Model", PLAIN | CONVOLUTIONS,
         {"input_values": sound, "attention_mask": real}, "last_hidden_state"),
        ("WhisperConfig", "WhisperForConditionalGeneration", whisper,
         {"input_features": spectrum, "decoder_input_ids": asked}, "logits"),
    ):  # fmt: skip
        model = built(config, cls, changes)
        expected = model(**given)[key]
        got = fuse(model, backend=QUICK)(**given)[key]
        short = (slice(1, None),) if cls == "Wav2Vec2Model" else ()
        torch.testing.assert_close(got[short], expected[short], rtol=0, atol=1e-6, msg=lambda m, cls=cls: f"{cls}: {m}")


def test_images_among_words():
    """Tokens of an image see each other; other tokens are causal, with windows and padding."""
    text = GROUPED | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    special = {"image_token_index": 59, "boi_token_index": 58, "eoi_token_index": 57}
    parts = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4}
    model = built("Gemma3Config", "Gemma3ForConditionalGeneration", parts | special)
    ids = torch.randint(3, 50, (2, 14), device=DEVICE)
    ids[:, 6:10] = 59
    real = (torch.arange(14, device=DEVICE) >= torch.tensor([[3], [0]], device=DEVICE)).long()
    given = {"input_ids": ids, "attention_mask": real, "pixel_values": images(), "token_type_ids": (ids == 59).long()}
    expected = outcome(model, given, real.bool())
    plain = model(**{**given, "token_type_ids": torch.zeros_like(ids)}).logits[real.bool()]
    assert (plain - expected["output"]).abs().max() > 1e-3
    assert_same(outcome(fuse(model, backend=QUICK), given, real.bool()), expected)


REFUSED = {
    "Bloom": ("BloomConfig", "BloomModel", {"n_layer": 1, "n_head": 4}),
    "Falcon": ("FalconConfig", "FalconModel", {"num_hidden_layers": 1, "num_attention_heads": 4}),
    "GPT-J": ("GPTJConfig", "GPTJModel", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}),
    "DeBERTa": ("DebertaV2Config", "DebertaV2Model", {"num_hidden_layers": 1, "num_attention_heads": 4}),
    "Longformer": (
        "LongformerConfig", "LongformerModel",
        {"num_hidden_layers": 1, "num_attention_heads": 4, "attention_window": 4},
    ),
    "BLIP": ("BlipTextConfig", "BlipTextModel", {"num_hidden_layers": 1, "num_attention_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_its_own_softmax_is_refused(name):
    config, cls, changes = REFUSED[name]
    model = built(config, cls, {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48} | changes)
    classes = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(NotImplementedError, match=f"{cls} does not choose its attention by attn_implementation"):
        fuse(nn.Sequential(nn.MultiheadAttention(32, 4), model))
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert model.config._attn_implementation == "eager"
    assert fusion_report(model) == []


WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_p": 0.9},
    "beams, sampled": {"do_sample": True, "num_beams": 2},
    "several of each": {"do_sample": True, "num_return_sequences": 3},
    "static cache and beams": {"cache_implementation": "static", "disable_compile": True, "num_beams": 2},
    "the prompt in chunks": {"prefill_chunk_size": 4},
    "from the prompt": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(way):
    writer = make("Mistral, windows")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None} | WAYS[way]
    ids, real = padded("left")
    if way in ("from the prompt", "assisted"):
        ids, real = ids[1:], real[1:]
    if way == "assisted":
        options["assistant_model"] = make("Mistral, windows")

    def written() -> Tensor:
        torch.manual_seed(3)
        return writer.generate(ids, attention_mask=real, **options)

    expected = written()
    fuse(writer, backend=QUICK)
    if way == "assisted":
        fuse(options["assistant_model"], backend=QUICK)
    assert torch.equal(written(), expected)


def test_embeddings_and_a_second_turn():
    model = make("Llama, grouped queries")
    ids, real = padded("left")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

    def turns() -> list[Tensor]:
        embeds = model.get_input_embeddings()(ids)
        first = model.generate(ids, attention_mask=real, return_dict_in_generate=True, **options)
        longer = torch.cat((first.sequences, ids[:, :3]), 1)
        more = torch.cat((real, real.new_ones(2, longer.shape[1] - real.shape[1])), 1)
        cache = first.past_key_values
        second = model.generate(longer, attention_mask=more, past_key_values=cache, **options)
        return [model.generate(inputs_embeds=embeds, attention_mask=real, **options), second]

    expected = turns()
    fuse(model, backend=QUICK)
    for got, wanted in zip(turns(), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.filterwarnings(
    "ignore:.*torch.utils.checkpoint", "ignore:.*use_reentrant", "ignore:.*gradient_checkpointing_enable"
)
@pytest.mark.parametrize("kind", ["plain", "checkpointing, reentrant", "checkpointing", "a copy"])
def test_a_few_steps_of_training(kind):
    real = (torch.arange(7, device=DEVICE) < torch.tensor([[4], [7]], device=DEVICE)).long()
    steps = torch.randint(3, VOCAB, (3, 2, 7), device=DEVICE)
    batches = [{"input_ids": x, "attention_mask": real, "labels": x.masked_fill(real == 0, -100)} for x in steps]
    model = make("Llama, grouped queries").train()
    expected = trained(copy.deepcopy(model), batches)
    if kind.startswith("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in kind})
    fuse(model, backend=QUICK)
    assert trained(copy.deepcopy(model) if kind == "a copy" else model, batches) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("extra", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}], ids=str)
def test_the_collator_that_packs(extra):
    """Its one row has the loss of its sequences."""
    rows = [torch.randint(3, VOCAB, (n,)).tolist() for n in (4, 1, 6)]
    batch = transformers.DataCollatorWithFlattening(**extra)([{"input_ids": r, "labels": r} for r in rows])
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()}
    model = make("Llama, grouped queries")
    alone = [torch.tensor([r], device=DEVICE) for r in rows if len(r) > 1]
    total = sum(model(r, labels=r).loss * (r.shape[1] - 1) for r in alone)
    loss = fuse(model, backend=QUICK)(**given, use_cache=False).loss
    torch.testing.assert_close(loss, total / sum(r.shape[1] - 1 for r in alone), rtol=0, atol=1e-6)


def test_moves_after_fusing():
    """Another dtype, tied weights, a state from elsewhere, and a move from meta to a device."""
    tied = "LlamaConfig", "LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}
    model = fuse(built(*tied), backend=QUICK)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = built(*tied)
    model.load_state_dict(other.state_dict())
    ids, _ = padded("no")
    torch.testing.assert_close(model(ids, use_cache=False).logits, other(ids).logits, rtol=0, atol=1e-6)
    lower = model.to(torch.bfloat16)(ids, use_cache=False).logits
    assert lower.dtype == torch.bfloat16
    torch.testing.assert_close(lower, other.to(torch.bfloat16)(ids).logits, rtol=0, atol=0.05)
    with torch.device("meta"):
        empty = fuse(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attn_implementation="eager")))
    assert len(fusion_report(empty.to_empty(device=DEVICE))) == 3


def test_one_part_by_its_name():
    """Each part of a composite model has its own implementation."""
    register()
    text, vision = GROUPED | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    parts = {"text_config": text, "vision_config": vision, "image_token_index": 59}
    model = built("LlavaConfig", "LlavaForConditionalGeneration", parts)
    ids, real = padded("left")
    ids = ids.clamp(max=50)
    expected = model(ids, attention_mask=real).logits[real.bool()]
    model.set_attn_implementation({"text_config": NAME, "vision_config": "eager"})
    assert model.config.text_config._attn_implementation == NAME
    assert model.config.vision_config._attn_implementation == "eager"
    torch.testing.assert_close(model(ids, attention_mask=real).logits[real.bool()], expected, rtol=0, atol=1e-6)


def test_a_model_without_attention():
    model = transformers.MambaModel(transformers.MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="without known attention"):
        fuse(model)


def test_a_prepared_mask_is_a_tensor():
    valid = torch.tensor([[True, True, False], [True, True, True]])
    mask = mask_function(2, 3, 3, attention_mask=valid)
    dense = mask.dense()
    assert torch.equal(dense, torch.ones(3, 3, dtype=torch.bool).tril() & valid[:, None, None])
    assert torch.equal(mask[:, :, :2], dense[:, :, :2])
    assert torch.equal(~mask, ~dense)
    assert torch.equal(mask & valid[:, None, None], dense)
    assert torch.equal(mask.repeat(1, 2, 1, 1), dense.repeat(1, 2, 1, 1))
    assert torch.equal(torch.cat((mask, mask), dim=-1), torch.cat((dense, dense), dim=-1))
    assert torch.equal(torch.zeros(()).masked_fill(mask, 1.0), dense.float())
    assert mask.device == torch.device("cpu")
    assert copy.copy(mask).mask is mask.mask
    scores = torch.zeros(2, 1, 3, 3)
    for add in (lambda: scores + mask, lambda: mask + scores, lambda: torch.add(scores, mask)):
        with pytest.raises(NotImplementedError, match="adds it to its scores"):
            add()


def test_a_mask_of_another_size_is_refused():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"attention_mask: got one of \(seqlen_q, seqlen_k\) \(3, 4\)"):
        attention_function(torch.nn.Module(), q, k, k, mask_function(1, 3, 4, 1))


def test_outputs_are_contiguous_and_inputs_need_not_be():
    q, k, v = (torch.randn(2, 3, 5, 8).mT.contiguous().mT for _ in range(3))
    out, _ = attention_function(torch.nn.Module(), q, k, v, None)
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v).transpose(1, 2))


def test_unfuse_restores_every_part():
    model = make("Llama, grouped queries")
    for parts in ((model.model, model), (model.model,)):
        for part in parts:
            fuse(part)
        unfuse(model)
        assert model.config._attn_implementation == "eager"
    config, cls, changes = MODELS["GPT-2"]
    composite = transformers.VisionEncoderDecoderModel(
        encoder=built("ViTConfig", "ViTModel", VISION | {"attn_implementation": "sdpa"}),
        decoder=built(config, cls, changes | {"add_cross_attention": True}),
    )

    def implementations() -> list[str]:
        return [part.config._attn_implementation for part in (composite.encoder, composite.decoder)]

    assert implementations() == ["sdpa", "eager"]
    fuse(composite)
    assert implementations() == ["fusedattn"] * 2
    unfuse(composite)
    assert implementations() == ["sdpa", "eager"]


OLD = """
import sys, types
import torch
old = types.ModuleType("transformers")
old.__version__ = "4.57.6"
old.PreTrainedModel = type("PreTrainedModel", (torch.nn.Module,), {})
sys.modules["transformers"] = old
import fusedattn
print(len(fusedattn.fusion_report(fusedattn.fuse(torch.nn.MultiheadAttention(8, 2)))))
try:
    fusedattn.fuse(torch.nn.ModuleList([old.PreTrainedModel(), torch.nn.MultiheadAttention(8, 2)]))
except NotImplementedError as error:
    print(error)
"""


def test_beside_an_old_transformers():
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, timeout=300)
    first, second = done.stdout.splitlines()
    assert first == "1", done.stderr
    assert "transformers: got 4.57.6, allowed are 5.4 and newer" in second


TWO_HEADS = WIDTH | {"num_attention_heads": 2}


def outputs_of(model: Any, implementation: str, given: dict[str, Any], name: str) -> Tensor:
    if implementation == NAME:
        fuse(model, backend=QUICK)
    else:
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        found: Tensor = model(**given)[name]
    return found


@pytest.mark.skipif(not hasattr(transformers, "NemotronAsrStreamingEncoder"), reason="newer than this transformers")
def test_eager_attention_that_inverts_its_mask_is_no_measure():
    """Nemotron's streaming encoder inverts a mask of 0 and -inf by testing for 0. Its sdpa attention is right."""
    changes = TWO_HEADS | {"num_key_value_heads": 2, "num_mel_bins": 16, "subsampling_conv_channels": 8}
    model = built("NemotronAsrStreamingEncoderConfig", "NemotronAsrStreamingEncoder", changes)
    real = torch.ones(2, 64, dtype=torch.bool, device=DEVICE)
    real[1, 40:] = False
    given = {"input_features": torch.randn(2, 64, 16, dtype=torch.float64, device=DEVICE), "attention_mask": real}
    found = {name: outputs_of(model, name, given, "last_hidden_state") for name in ("eager", "sdpa", NAME)}
    torch.testing.assert_close(found[NAME], found["sdpa"])
    assert not torch.allclose(found["eager"][1], found["sdpa"][1], atol=0.1)


@pytest.mark.parametrize(("dtype", "measure"), [(torch.float32, "eager"), (torch.float64, "sdpa")])
def test_embeddings_behind_queries_that_see_nothing(dtype, measure):
    """Aimv2, padded on the left; in float64 its eager attention makes such queries NaN, and everything after them."""
    text = TWO_HEADS | {"vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 49}
    parts = {"text_config": text, "vision_config": TWO_HEADS | {"image_size": 8, "patch_size": 4}, "projection_dim": 16}
    model = built("Aimv2Config", "Aimv2Model", parts, dtype)
    ids = torch.randint(0, 49, (2, 7), device=DEVICE)
    ids[:, -1] = 49
    real = torch.ones_like(ids)
    real[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": real, "pixel_values": torch.randn(2, 3, 8, 8, device=DEVICE).to(dtype)}
    found = {name: outputs_of(model, name, given, "text_embeds") for name in (measure, NAME)}
    torch.testing.assert_close(found[NAME], found[measure], atol=1e-5, rtol=1e-4)
    assert found[NAME].isfinite().all()
