"""Masks of transformers: the package's version of each equals the mask that transformers itself writes out."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import AttentionMaskInterface, BertConfig, Gemma2Config, LlamaConfig
from transformers import masking_utils as hf
from transformers.cache_utils import DynamicCache, StaticCache

from fusedattn.integrations.transformers import NAME, mask_function, register
from fusedattn.integrations.transformers.masks import PreparedMask
from tests.conftest import DEVICE

BATCH = 2


def ids_of(positions: int) -> Tensor:
    """Sequence numbers, one sequence after another; they differ between batches."""
    return (torch.arange(positions) // torch.tensor([[3], [4]])).to(DEVICE)


def positions_in(ids: Tensor) -> Tensor:
    at = torch.arange(ids.shape[1], device=DEVICE)
    return torch.stack([at - torch.searchsorted(row, row) for row in ids])


def valid_of(n: int) -> Tensor:
    return (torch.arange(n, device=DEVICE) % 3 > 0).expand(BATCH, -1)


KNOWN = {
    "causal": lambda n: hf.causal_mask_function,
    "bidirectional": lambda n: hf.bidirectional_mask_function,
    "window": lambda n: hf.sliding_window_causal_mask_function(3),
    "window both ways": lambda n: hf.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda n: hf.chunked_causal_mask_function(4, torch.tensor([0, 3], device=DEVICE)),
    "padding": lambda n: hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(valid_of(n))),
    "packed": lambda n: hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids_of(n))),
    "packed, positions of each": lambda n: hf.packed_sequence_compatibility_function(
        hf.sliding_window_causal_mask_function(3), positions_in(ids_of(n)), ids_of(n)
    ),
    "nested": lambda n: hf.and_masks(hf.and_masks(hf.causal_mask_function), hf.sliding_window_causal_mask_function(5)),
}  # fmt: skip

UNKNOWN = {
    "either": lambda n: hf.or_masks(hf.causal_mask_function, hf.sliding_window_overlay(2)),
    "blocks": lambda n: hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids_of(n))),
    "of one's own": lambda n: hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0),
    "positions of each, alone": lambda n: hf.remap_positions_for_packed_sequence(
        hf.causal_mask_function, positions_in(ids_of(n))
    ),
    "packed twice": lambda n: hf.and_masks(
        hf.packed_sequence_mask_function(ids_of(n)), hf.packed_sequence_mask_function(ids_of(n).flip(0))
    ),
    "chunks of a packed sequence": lambda n: hf.packed_sequence_compatibility_function(
        hf.chunked_causal_mask_function(2, torch.tensor([0, 1], device=DEVICE)), positions_in(ids_of(n)), ids_of(n)
    ),
    "padding of a packed sequence": lambda n: hf.packed_sequence_compatibility_function(
        hf.padding_mask_function(valid_of(n)), positions_in(ids_of(n)), ids_of(n)
    ),
}


def dense(mask: Tensor | PreparedMask | None, q_length: int, kv_length: int) -> Tensor:
    if mask is None:
        return torch.ones(BATCH, 1, q_length, kv_length, dtype=torch.bool, device=DEVICE)
    if isinstance(mask, PreparedMask):
        assert mask.shape == (BATCH, 1, q_length, kv_length)
        mask = mask.mask.dense(q_length, kv_length, batch=BATCH, nheads=1, device=DEVICE)
    return mask.expand(BATCH, 1, q_length, kv_length)


lengths = st.integers(1, 9)
offsets = st.integers(0, 6)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@settings(max_examples=25)
@given(q_length=lengths, kv_length=lengths, q_offset=offsets, kv_offset=offsets, padded=st.integers(0, 15))
def test_masks_are_those_that_transformers_writes_out(name, q_length, kv_length, q_offset, kv_offset, padded):
    function = {**KNOWN, **UNKNOWN}[name](20)
    spans = (BATCH, q_length, kv_length, q_offset, kv_offset, function)
    # A padding mask may end before the keys do; the keys after it are hidden.
    valid = (
        torch.rand(BATCH, padded, generator=torch.Generator().manual_seed(padded)).to(DEVICE) < 0.7 if padded else None
    )
    mask = mask_function(*spans, attention_mask=valid, device=DEVICE)
    assert isinstance(mask, PreparedMask) == (name in KNOWN)
    expected = hf.sdpa_mask(*spans, attention_mask=valid, allow_is_causal_skip=False, device=DEVICE)
    assert torch.equal(dense(mask, q_length, kv_length), expected)


def test_an_offset_that_is_a_tensor():
    """Static caches pass one; its value is not read."""
    mask = mask_function(BATCH, 1, 8, torch.tensor(3, device=DEVICE), device=DEVICE)
    assert isinstance(mask, Tensor)
    assert mask[0, 0, 0].tolist() == [True] * 4 + [False] * 4


def test_aligned_masks_have_no_numbers_in_them():
    """With a growing cache the mask is always the same: under torch.compile, numbers would cause recompilation."""
    for q_length, kv_length in ((1, 5), (1, 6), (4, 9)):
        mask = mask_function(BATCH, q_length, kv_length, kv_length - q_length, device=DEVICE)
        assert {(b.left, b.right, b.align) for b in mask.mask.bands} == {(None, 0, "bottom_right")}


def test_a_prepared_mask_passes_for_a_mask():
    mask = mask_function(BATCH, 3, 5, 2, attention_mask=torch.ones(BATCH, 5, dtype=torch.bool), device="cpu")
    assert (mask.shape, mask.ndim, mask.dim(), mask.dtype) == ((BATCH, 1, 3, 5), 4, 4, torch.bool)
    assert mask.contiguous() is mask.to() is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved.mask.valid.device.type == "meta"
    assert mask_function(BATCH, 3, 5, attention_mask=mask) is mask


def test_the_masks_that_models_ask_for():
    """The functions that models call, with an empty, a half full and a static cache."""
    register()
    assert AttentionMaskInterface()[NAME] is mask_function
    options = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    real = torch.tensor([[False, False, True, True, True], [True] * 5], device=DEVICE)
    for config, create in (
        (LlamaConfig(**options), hf.create_causal_mask),
        (Gemma2Config(**options, sliding_window=3, head_dim=8), hf.create_sliding_window_causal_mask),
        (BertConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=16), hf.create_bidirectional_mask),
    ):
        is_causal = create is not hf.create_bidirectional_mask
        for filled, cache in ((0, None), (2, DynamicCache(config=config)), (2, StaticCache(config, max_cache_len=8))):
            if cache is not None:
                if not is_causal:
                    continue
                for layer in range(2):
                    states = torch.zeros(BATCH, 1, filled, 8, device=DEVICE)
                    cache.update(states, states, layer)
            embeds = torch.zeros(BATCH, 5 - filled, 16, device=DEVICE)
            masks = []
            for implementation in ("sdpa", NAME):
                config._attn_implementation = implementation
                given = {"allow_is_causal_skip": False} if is_causal else {"allow_is_bidirectional_skip": False}
                masks.append(
                    create(config=config, inputs_embeds=embeds, attention_mask=real, past_key_values=cache, **given)
                )
            expected, mask = masks
            assert torch.equal(dense(mask, *expected.shape[2:]), expected), (config, filled, cache)
