"""Code written for flash_attn, that of transformers, with this package in its place."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_flash_attention_utils as utils

from fusedattn.integrations import flash_attn
from fusedattn.integrations.flash_attn import bert_padding
from tests.conftest import DEVICE, INTERPRETING
from tests.helpers.flash_attn_truth import attend
from tests.helpers.models import built

pytestmark = pytest.mark.usefixtures("installed", "_seed")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package as `flash_attn` and make transformers accept it; undo both afterwards."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", bert_padding)
    softmax = F.softmax
    # Eager attention of transformers computes softmax in float32, whatever the dtype of the model.
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *_, **__: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    for name in ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(utils, name, None)
    for name in ("_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(utils, name, None)


DTYPE = torch.float64 if INTERPRETING else torch.float32
CLOSE = {"rtol": 1e-9, "atol": 1e-10} if INTERPRETING else {"rtol": 1e-3, "atol": 1e-4}
CLOSE_FLOATS = {"rtol": 1e-6, "atol": 1e-6}  # for float64 rounded to float32


def logits_and_gradients(model: torch.nn.Module, implementation: str, mask: Tensor | None, **inputs: Tensor) -> Any:
    # Set without the checks of transformers, which refuse flash_attn without a GPU.
    model.config._attn_implementation_internal = implementation
    out = model(**inputs, attention_mask=mask)[0]
    if mask is not None:
        out = out[mask.bool()]
    found = torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)
    return out.detach(), [x for x in found if x is not None]


WIDTH: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def model_of(name: str, **config: Any) -> torch.nn.Module:
    return built(f"{name}Config", f"{name}ForCausalLM" if name != "Bert" else "BertModel", WIDTH | config, DTYPE)


LLAMA = ("Llama", {"num_key_value_heads": 1})
MISTRAL = ("Mistral", {"num_key_value_heads": 1, "sliding_window": 4})
GEMMA = ("Gemma2", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0})
BERT = ("Bert", {"attention_probs_dropout_prob": 0.0})


@pytest.mark.parametrize(
    ("name", "config", "padding"),
    [
        (*LLAMA, None), (*LLAMA, "left"), (*LLAMA, "right"), (*MISTRAL, None), (*MISTRAL, "left"), (*GEMMA, "right"),
        (*BERT, "right"),
    ],
)  # fmt: skip
def test_models_of_transformers(name, config, padding):
    model = model_of(name, **config)
    ids = torch.randint(1, 40, (2, 9), device=DEVICE)
    mask = None
    if padding is not None:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 4) if padding == "left" else slice(5, 9)] = 0
    expected = logits_and_gradients(model, "eager", mask, input_ids=ids)
    found = logits_and_gradients(model, "flash_attention_2", mask, input_ids=ids)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_sequences_packed_by_transformers():
    """Position ids that start again begin another sequence."""
    model = model_of("Llama", num_key_value_heads=1)
    ids = torch.randint(1, 40, (1, 12), device=DEVICE)
    lengths = (5, 1, 6)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    model.config._attn_implementation_internal = "flash_attention_2"
    found = model(input_ids=ids, position_ids=positions).logits
    model.config._attn_implementation_internal = "eager"
    expected = torch.cat([model(input_ids=part).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_generation_by_transformers():
    """Padded on the left, with a cache: one query against many keys, whose positions transformers gives in int32."""
    model = model_of("Llama", num_key_value_heads=1)
    ids = torch.randint(1, 40, (2, 6), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    found = []
    for implementation in ("eager", "flash_attention_2"):
        model.config._attn_implementation_internal = implementation
        found.append(model.generate(ids, attention_mask=mask, **options))
    eager, ours = found
    assert torch.equal(eager.sequences, ours.sequences)
    torch.testing.assert_close(ours.scores, eager.scores, **(CLOSE_FLOATS if INTERPRETING else CLOSE))


def test_paged_caches_of_transformers():
    """The call of its continuous batching: one query per sequence; pages are written and read."""
    lengths, table = [6, 3], torch.tensor([[2, 0], [1, -1]], dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = torch.randn(2, 3, 4, 1, 8, device=DEVICE, dtype=DTYPE)
    q = torch.randn(1, 2, 2, 8, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, 1, 2, 1, 8, device=DEVICE, dtype=DTYPE)
    out = utils._flash_attention_forward(
        q, k, v, None, query_length=1, is_causal=True, attn_implementation="flash_attention_2", block_table=table,
        cu_seq_lens_k=torch.tensor([0, 6, 9], dtype=torch.int32, device=DEVICE), k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        keys, values = (x[table[i].clamp(min=0)].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        assert torch.equal(keys[-1], k[0, i])
        torch.testing.assert_close(out[:, i : i + 1], attend(q[:, i : i + 1], keys[None], values[None])[0], **CLOSE)
