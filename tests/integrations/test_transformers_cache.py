"""Models of transformers with a preallocated cache, compared with the same models and their own cache."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fusedattn import KVCache, fuse
from fusedattn.integrations.transformers import PreallocatedCache
from fusedattn.integrations.transformers import attention as module_of_attention
from tests.conftest import BACKENDS, DEVICE
from tests.helpers import quick
from tests.helpers.models import (
    BATCH,
    LENGTH,
    NEW_TOKENS,
    PAD,
    QUICK,
    VOCAB,
    _exact_eager,  # noqa: F401  (for every test)
    make,
    padded,
)

pytestmark = pytest.mark.usefixtures("_seed")

LLAMA = "Llama, grouped queries"
CAUSAL = [
    LLAMA, "Mistral, windows", "Qwen 2, windows in one layer", "Gemma 2, soft-cap and windows", "Gemma 3",
    "gpt-oss, sinks and windows", "Phi, partial rotation", "GPT-2",
]  # fmt: skip
CAPACITY = LENGTH + 8


@pytest.fixture
def seen(monkeypatch) -> list[KVCache | None]:
    """The cache of every call of attention."""
    found: list[KVCache | None] = []
    original = module_of_attention.attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs.get("cache"))
        return original(*args, **kwargs)

    monkeypatch.setattr(module_of_attention, "attention", spy)
    return found


def in_steps(model: Any, ids: Tensor, real: Tensor, cache: Any, steps: tuple[int, ...] = (6, 1, 3, 1)) -> Tensor:
    """The logits of all tokens, computed in steps with a cache."""
    logits, start = [], 0
    with torch.no_grad():
        for n in steps:
            given = {"input_ids": ids[:, start : start + n], "attention_mask": real[:, : start + n]}
            logits.append(model(**given, past_key_values=cache, use_cache=True).logits)
            start += n
    return torch.cat(logits, dim=1)


def generated(model: Any, ids: Tensor, real: Tensor, **options: Any) -> Tensor:
    return model.generate(
        ids, attention_mask=real, max_new_tokens=NEW_TOKENS, pad_token_id=PAD, **{"do_sample": False} | options
    )


@quick.covering(pairs=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_as_with_its_own_cache(name, side, backend, seen):
    """Logits in steps, and generated tokens; attention reads the memory, which stays where it is."""
    model = make(name)
    ids, real = padded(side)
    expected, tokens = in_steps(model, ids, real, DynamicCache()), generated(model, ids, real)
    fuse(model, backend=backend)
    cache = PreallocatedCache(CAPACITY)
    got = in_steps(model, ids, real, cache)
    torch.testing.assert_close(got[real.bool()], expected[real.bool()], atol=1e-9, rtol=1e-9)
    assert seen
    assert all(isinstance(x, KVCache) for x in seen)
    assert len({x.k.data_ptr() for x in seen}) == len(cache.layers) == 2
    assert cache.layers[1].cache.lengths.tolist() == [LENGTH] * BATCH
    assert cache.layers[1].cache.capacity == CAPACITY
    cache.reset()
    assert torch.equal(generated(model, ids, real, past_key_values=cache), tokens)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention_gets_the_tokens(attention):
    model = make(LLAMA)
    model.set_attn_implementation(attention)
    ids, real = padded("left")
    want = in_steps(model, ids, real, DynamicCache())
    got = in_steps(model, ids, real, PreallocatedCache(CAPACITY))
    torch.testing.assert_close(got[real.bool()], want[real.bool()], atol=1e-12, rtol=1e-12)


def test_beams_and_drafts():
    """Beams reorder sequences, and drafts from the prompt are cut off again."""
    model = make(LLAMA)
    ids, real = padded("none")
    beams, drafts = {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}
    want = generated(model, ids, real, **beams), generated(model, ids[:1], real[:1], **drafts)
    fuse(model, backend=QUICK)
    assert torch.equal(generated(model, ids, real, **beams, past_key_values=PreallocatedCache(CAPACITY)), want[0])
    drafted = generated(model, ids[:1], real[:1], **drafts, past_key_values=PreallocatedCache(CAPACITY + 4))
    assert torch.equal(drafted, want[1])


def test_changes_of_a_cache():
    """Copies, repeated, chosen and cut sequences hold what the model's own cache holds then."""
    model = fuse(make(LLAMA), backend=QUICK)
    ids, real = padded("none")
    mine, own = PreallocatedCache(CAPACITY), DynamicCache()
    for cache in (mine, own):
        in_steps(model, ids, real, cache, (LENGTH,))
    kept = copy.deepcopy(mine)
    for change in (
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.reorder_cache(torch.tensor([5, 0, 0, 1, 3, 2], device=DEVICE)),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 3, 4], device=DEVICE)),
        lambda cache: cache.crop(-2),
        lambda cache: cache.crop(0),
    ):
        for cache in (mine, own):
            change(cache)
        assert mine.get_seq_length() == own.get_seq_length()
        for ours, theirs in zip(mine.layers, own.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
            assert ours.cache.lengths.tolist() == [theirs.keys.shape[2]] * theirs.keys.shape[0]
    more = torch.randint(3, VOCAB, (3, 2), device=DEVICE)
    with torch.no_grad():
        got, want = (model(more, past_key_values=cache).logits for cache in (mine, own))
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    assert kept.get_seq_length() == LENGTH
    with torch.no_grad():  # the copy shares nothing with the original
        got = model(ids[:, :1], past_key_values=kept).logits
        want = model(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "group_size", "bound"), [(torch.int8, None, 0.02), (torch.uint8, 8, 0.3)])
def test_codes(dtype, group_size, bound, seen):
    """Logits near those without codes, in a cache that holds no numbers."""
    model = make(LLAMA, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0) if p.dim() == 2 else None
    ids, real = padded("left")
    want = in_steps(model, ids, real, DynamicCache())
    cache = PreallocatedCache(CAPACITY, dtype=dtype, group_size=group_size)
    got = in_steps(fuse(model, backend=QUICK), ids, real, cache)
    assert all(x.k.dtype == dtype for x in seen)
    error = (got - want)[real.bool()].abs().max() / want.std()
    assert 1e-5 < error < bound


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_weights(dtype):
    model = make(LLAMA, torch.float32)
    ids, real = padded("left")
    own, cache = DynamicCache(), PreallocatedCache(CAPACITY, dtype=dtype)
    with torch.no_grad():
        want = model(ids, attention_mask=real, past_key_values=own, output_attentions=True).attentions
        fuse(model, backend=QUICK)
        got = model(ids, attention_mask=real, past_key_values=cache, output_attentions=True).attentions
    tolerance = 1e-5 if dtype is None else 1e-2
    for a, b in zip(got, want, strict=True):
        rows = real.bool()[:, None, :, None].expand_as(a)
        torch.testing.assert_close(a[rows], b[rows], atol=tolerance, rtol=tolerance)


def test_what_is_refused():
    model = fuse(make(LLAMA), backend=QUICK)
    ids, real = padded("none")
    cache = PreallocatedCache(LENGTH)
    in_steps(model, ids, real, cache, (LENGTH,))
    with torch.no_grad(), pytest.raises(ValueError, match=f"max_cache_len: got {LENGTH}"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == LENGTH
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(3)
    with pytest.raises(NotImplementedError, match="offloading"):
        cache.layers[0].offload()
    with pytest.raises(NotImplementedError, match="requires_grad"):
        model(ids, past_key_values=PreallocatedCache(LENGTH))
