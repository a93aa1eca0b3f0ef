"""Models that may choose fused attention by name, messages of fuse for the others, and returned weights."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from torch import Tensor

from fusedattn import fuse, fusion_report
from fusedattn.integrations.transformers import NAME, attention_function, mask_function, register
from fusedattn.integrations.transformers.attention import unknown_arguments
from fusedattn.integrations.transformers.sources import passed_by_name, reasons_by_name
from tests.conftest import BACKENDS, DEVICE
from tests.helpers.models import (
    BATCH,
    EXPERTS,
    GROUPED,
    LENGTH,
    MODELS,
    PLAIN,
    QUICK,
    SEQ2SEQ,
    VOCAB,
    WIDTH,
    _exact_eager,  # noqa: F401  (for every test)
    arguments,
    built,
    make,
    padded,
    trained,
)

pytestmark = pytest.mark.usefixtures("_seed")

IMAGE = WIDTH | {"image_size": 16, "patch_size": 4}
SAM = {
    "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "mlp_dim": 48, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 16,
}  # fmt: skip
SPARSE = PLAIN | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 2, "index_topk": 3, "index_n_heads": 2, "index_head_dim": 16,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager", "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16,
}  # fmt: skip

# They add masks to scores, have a name table of their own, or ignore the name.
UNFIT = [
    "Bloom", "CodeGen", "GPTNeoXJapanese", "XGLM", "Mpt", "MegatronBert", "MPNet", "RoFormer", "RemBert",
    "LayoutLMv3", "Luke", "LED", "Canine", "BigBird", "ConvBert", "Nystromformer", "Tapas", "VisualBert",
    "SqueezeBert", "Longformer", "Git", "Falcon", "GPTJ", "GPTNeo", "Deberta", "DebertaV2", "XLNet", "WavLM",
    "Funnel", "SamVision", "SamHQVision",
]  # fmt: skip


@pytest.mark.parametrize("family", UNFIT)
def test_a_model_that_does_not_look_its_attention_up_is_refused_by_name(family):
    """The refusal comes before any module is built, so the size does not matter."""
    register()
    config = getattr(transformers, f"{family}Config")(attn_implementation=NAME)
    with pytest.raises(ValueError, match=f"attn_implementation: got 'fusedattn', but {family}Model .* attention"):
        getattr(transformers, f"{family}Model")(config)


def test_a_name_given_to_a_model_that_is_there():
    model = transformers.GitModel(transformers.GitConfig(**PLAIN, vision_config=IMAGE, attn_implementation="eager"))
    with pytest.raises(ValueError, match="GitModel computes attention in GitSelfAttention itself"):
        model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"


def test_a_table_of_attentions_without_the_name():
    """GIT's text layers look their attention up in such a table."""
    module = transformers.models.git.modeling_git
    reasons = reasons_by_name(module.GitModel, NAME)
    assert "GitModel chooses its attention among eager" in reasons
    assert reasons_by_name(module.GitModel, "eager") == reasons[:1]


def test_a_class_that_adds_masks_beside_others_that_look_their_attention_up():
    module = transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2
    reason = "PPDocLayoutV2ForObjectDetection computes attention in PPDocLayoutV2ReadingOrderSelfAttention itself"
    assert reasons_by_name(module.PPDocLayoutV2ForObjectDetection, NAME) == [reason]
    assert reasons_by_name(transformers.DetrForObjectDetection, NAME) == []


def test_a_part_is_refused_by_its_own_file():
    """CLAP looks up its text attention by name, but not its audio attention."""
    register()
    text = PLAIN | {"attn_implementation": NAME}
    assert transformers.ClapTextModel(transformers.ClapTextConfig(**text)).config._attn_implementation == NAME
    with pytest.raises(ValueError, match="ClapModel computes attention in ClapAudioSelfAttention itself"):
        transformers.ClapModel(transformers.ClapConfig(text_config=PLAIN, attn_implementation=NAME))


@pytest.mark.parametrize(
    ("config", "cls", "changes", "own"),
    [
        ("SamVisionConfig", "SamVisionModel", SAM, "SamVisionSdpaAttention"),
        ("SamHQVisionConfig", "SamHQVisionModel", SAM, "SamHQVisionSdpaAttention"),
        ("GitConfig", "GitForCausalLM", PLAIN | {"vision_config": IMAGE}, "GitSelfAttention"),
    ],
)
def test_a_model_with_an_attention_of_its_own(config, cls, changes, own):
    """GIT looks up the attention of its vision layers, but adds masks to scores in its text layers."""
    model = getattr(transformers, cls)(getattr(transformers, config)(**changes))
    with pytest.raises(NotImplementedError, match=f"{cls} computes attention in {own} itself"):
        fuse(model)
    assert fusion_report(model) == []


def test_the_report_names_modules_that_stay():
    config = transformers.SamConfig(
        vision_config=SAM,
        prompt_encoder_config={"hidden_size": 32, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 32, "iou_head_hidden_dim": 16},
    )
    (replacement,) = fusion_report(fuse(transformers.SamModel(config)))
    assert "(except SamVisionSdpaAttention, which computes its own)" in str(replacement)


def test_arguments_that_would_be_refused_in_forward_are_refused_before():
    class Inkling2LikeAttention(transformers.models.llama.modeling_llama.LlamaAttention):
        pass

    inkling = transformers.models.inkling2.modeling_inkling2.Inkling2FullAttention
    minimax = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl
    assert unknown_arguments(passed_by_name(inkling)) == ["sinks"]
    assert unknown_arguments(passed_by_name(minimax.MiniMaxM3VLAttention)) == ["block_indices"]
    assert unknown_arguments(passed_by_name(Inkling2LikeAttention)) == []


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_keys_that_an_index_selects(family):
    model = built(f"{family}Config", f"{family}ForCausalLM", SPARSE)
    ids, real = padded("left")
    expected = model(ids, attention_mask=real).logits[real.bool()]
    got = fuse(model, backend=QUICK)(ids, attention_mask=real).logits[real.bool()]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def of_text(model: Any) -> dict[str, Tensor]:
    return arguments(model, *padded("left"))[0]


def of_images(model: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, dtype=torch.float64, device=DEVICE)}


def of_sound(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, 5), device=DEVICE)
    return {"input_features": torch.randn(BATCH, 8, 40, dtype=torch.float64, device=DEVICE), "decoder_input_ids": ids}


def of_speech(model: Any) -> dict[str, Tensor]:
    """Inputs of sound with features as the last dimension."""
    given = of_sound(model)
    return given | {"input_features": given["input_features"].transpose(1, 2)}


CONFORMER = WIDTH | {"model_type": "parakeet_encoder", "num_mel_bins": 8, "subsampling_conv_channels": 8}
NANO = MODELS["GPT-2"][2]
WINDOWS = GROUPED | {"sliding_window": 4}
RECORDED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "GPT2": ("LMHeadModel", NANO, of_text),
    "GPTBigCode": ("ForCausalLM", NANO, of_text),
    "OPT": ("ForCausalLM", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, of_text),
    "StableLm": ("ForCausalLM", GROUPED, of_text),
    "Nemotron": ("ForCausalLM", GROUPED, of_text),
    "Persimmon": ("ForCausalLM", PLAIN, of_text),
    "Llama": ("ForCausalLM", GROUPED, of_text),
    "Bart": ("ForConditionalGeneration", SEQ2SEQ, of_text),
    "Marian": ("MTModel", SEQ2SEQ, of_text),
    "Whisper": (
        "ForConditionalGeneration",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}, of_sound,
    ),
    "Canary": (
        "ForConditionalGeneration",
        {
            "encoder_config": CONFORMER, "vocab_size": VOCAB,
            "decoder_config": PLAIN | {"head_dim": 8, "num_key_value_heads": 4},
        },
        of_speech,
    ),
    "CohereAsr": ("ForConditionalGeneration", PLAIN | {"encoder_config": CONFORMER}, of_speech),
    "GraniteSWA": ("ForCausalLM", WINDOWS, of_text),
    "GptOss": (
        "ForCausalLM",
        WINDOWS | EXPERTS | {"head_dim": 8, "num_local_experts": 2},
        of_text,
    ),
    "SiglipVision": ("Model", IMAGE, of_images),
    "Aimv2Vision": ("Model", IMAGE, of_images),
    "DPT": (
        "Model",
        IMAGE | {"is_hybrid": False, "neck_hidden_sizes": [8] * 4, "backbone_out_indices": [0, 0, 1, 1]}, of_images,
    ),
    "InternVLVision": ("Model", IMAGE | {"image_size": [16, 16], "patch_size": [4, 4]}, of_images),
}  # fmt: skip


def recorded(family: str) -> Any:
    suffix, changes, _ = RECORDED[family]
    model = built(f"{family}Config", family + suffix, changes)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def assert_same_weights(got: Any, expected: Any, real: Tensor | None) -> None:
    names = [name for name in expected if name.endswith("attentions") and expected[name]]
    assert names
    for name in names:
        assert len(got[name]) == len(expected[name]) > 0, name
        for ours, theirs in zip(got[name], expected[name], strict=True):
            rows = torch.ones(theirs.shape[:1] + theirs.shape[2:3], dtype=torch.bool, device=DEVICE)
            if real is not None and real.shape == rows.shape:  # padded queries see nothing
                rows = real.bool()
            torch.testing.assert_close(ours.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", RECORDED)
@pytest.mark.parametrize("asked", ["in the call", "in the config"])
def test_weights_that_are_asked_for_come(family, asked):
    model = recorded(family)
    given = RECORDED[family][2](model)
    if asked == "in the config":  # and in the configs of its parts
        for part in model.modules():
            if isinstance(part, transformers.PreTrainedModel):
                part.config.output_attentions = True
    options = {"output_attentions": True} if asked == "in the call" else {}
    expected = model(**given, **options)
    assert_same_weights(fuse(model, backend=QUICK)(**given, **options), expected, given.get("attention_mask"))
    assert not model(**given, output_attentions=False).get("attentions")


def test_weights_under_torch_compile():
    model = recorded("GPT2").float()
    given = of_text(model)
    expected = model(**given, output_attentions=True, use_cache=False)
    compiled = torch.compile(fuse(model, backend="torch"), backend="eager")
    got = compiled(**given, output_attentions=True, use_cache=False)
    assert_same_weights(got, expected, given["attention_mask"])


def test_one_graph_without_a_model_around_it():
    """Dynamo cannot read a ContextVar of transformers unless the compiled model has set it."""
    q = torch.randn(2, 2, 5, 8, device=DEVICE)
    module = torch.nn.Module()
    module.fusedattn_backend = "torch"
    compiled = torch.compile(lambda x: attention_function(module, x, x, x, None)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attention_function(module, q, q, q, None)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_one_query_is_that_of_all(backend):
    q, k = torch.randn(2, 2, 3, 8, device=DEVICE), torch.randn(2, 2, 5, 8, device=DEVICE)
    module = torch.nn.Module()
    module.fusedattn_backend = backend
    valid = torch.arange(5, device=DEVICE) >= torch.tensor([[2], [0]], device=DEVICE)
    everything = transformers.masking_utils.bidirectional_mask_function
    one, all_ = (mask_function(2, n, 5, mask_function=everything, attention_mask=valid, device=DEVICE) for n in (1, 3))
    assert torch.equal(attention_function(module, q, k, k, one)[0], attention_function(module, q, k, k, all_)[0])


def test_a_prompt_in_chunks_for_a_decoder_that_sees_an_encoder():
    model = recorded("Marian")
    ids, real = padded("left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 2}
    options["attention_mask"] = real  # for the encoder's keys, a chunk gets it as a mask of one query
    expected = model.generate(ids, **options)
    assert torch.equal(fuse(model, backend=QUICK).generate(ids, **options), expected)


def test_bridge_tower():
    """Its cross-attention gets the text mask for one query; its image layers are causal in name only."""
    wide = {"hidden_size": 64}
    parts = {"text_config": PLAIN | wide, "vision_config": IMAGE | wide | {"num_attention_heads": 1}}
    model = built("BridgeTowerConfig", "BridgeTowerModel", WIDTH | wide | {"num_hidden_layers": 1} | parts)
    ids, real = padded("right")
    given = {"input_ids": ids, "attention_mask": real, **of_images(model)}
    expected = model(**given)
    got = fuse(model, backend=QUICK)(**given)
    torch.testing.assert_close(got.text_features[real.bool()], expected.text_features[real.bool()], rtol=0, atol=1e-6)
    torch.testing.assert_close(got.image_features, expected.image_features, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_with_the_lowest_number_for_padding(backend):
    """Rows on the left see nothing but finfo.min in every layer; the loss falls as with eager attention."""
    lowest = torch.finfo(torch.bfloat16).min
    ids, real = padded("left")
    hidden = ~(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril() & real.bool()[:, None, None])
    mask = torch.zeros(hidden.shape, dtype=torch.bfloat16, device=DEVICE).masked_fill(hidden, lowest)
    batches = [{"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(real == 0, -100)}] * 4
    model = make("Llama, grouped queries", torch.bfloat16).train()
    twin = copy.deepcopy(model)
    expected = trained(model, batches)
    assert expected[-1] < expected[0]
    assert trained(fuse(twin, backend=backend), batches) == pytest.approx(expected, abs=0.02)
