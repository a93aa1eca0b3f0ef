"""The attention function for transformers alone, with arguments that few models pass."""

from __future__ import annotations

import importlib
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import sliding_window_causal_mask_function

from fusedattn import attention, masks
from fusedattn.integrations.transformers import NAME, TWINS, attention_function, mask_function, register
from fusedattn.integrations.transformers.masks import PreparedMask
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("_seed")

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 5, 7


def operands(seqlen_q: int = SEQLEN_Q, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((HEADS, seqlen_q, 8), (2, SEQLEN_K, 8), (2, SEQLEN_K, 8))
    return [torch.randn(batch, *shape, device=DEVICE).to(dtype) for shape in shapes]


def assert_is(expected: Tensor, *given: Any, **options: Any) -> None:
    """Check that attention_function() returns `expected`, a result of attention()."""
    out, _ = attention_function(nn.Module(), *given, **options)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_float_mask_and_a_position_bias_are_added():
    tensors = operands()
    added, position_bias = (torch.randn(n, HEADS, SEQLEN_Q, SEQLEN_K, device=DEVICE) for n in (BATCH, 1))
    assert_is(attention(*tensors, bias=added + position_bias), *tensors, added, position_bias=position_bias)


def test_a_mask_of_each_head():
    """For a single query, and the same for all queries."""
    visible = torch.rand(BATCH, HEADS, 1, SEQLEN_K, device=DEVICE) < 0.6
    for seqlen_q in (1, SEQLEN_Q):
        tensors = operands(seqlen_q)
        assert_is(attention(*tensors, mask=visible), *tensors, visible)


@pytest.mark.parametrize("dims", [2, 4])
def test_a_mask_of_keys(dims):
    """Padding in two dimensions, or in four that all queries and heads share."""
    tensors = operands()
    valid = torch.rand(BATCH, SEQLEN_K, device=DEVICE) < 0.6
    assert_is(attention(*tensors, mask=masks.padding(valid)), *tensors, valid if dims == 2 else valid[:, None, None])


def test_packed_sequences_inside_of_documents():
    """Documents of the mask and sequences of the offsets: a query sees keys that share both."""
    tensors = operands(batch=1)
    tensors[0] = tensors[0][:, :, :1].expand(-1, -1, SEQLEN_K, -1).clone()
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2]], device=DEVICE)
    stops = torch.tensor([0, 4, SEQLEN_K], dtype=torch.int32, device=DEVICE)
    other = torch.tensor([[0, 0, 0, 0, 1, 1, 1]], device=DEVICE)
    prepared = PreparedMask(masks.causal() & masks.documents(ids), (1, 1, SEQLEN_K, SEQLEN_K), 0)
    visible = (ids[..., None] == ids[:, None]) & (other[..., None] == other[:, None])
    expected = attention(*tensors, mask=masks.causal() & masks.boolean(visible[:, None]))
    assert_is(expected, *tensors, prepared, cu_seq_lens_q=stops, cu_seq_lens_k=stops)


def test_a_window_over_a_mask_that_is_written_out():
    """The mask already has the window, at positions other than the last."""
    tensors = operands(2)
    visible = torch.zeros(BATCH, 1, 2, SEQLEN_K, dtype=torch.bool, device=DEVICE)
    visible[..., 0, :3] = visible[..., 1, 1:4] = True
    assert_is(attention(*tensors, mask=visible), *tensors, visible, sliding_window=3)


@pytest.mark.parametrize("start", [2, 5])
@pytest.mark.parametrize("size", [3, 5])
def test_a_window_over_a_mask_of_other_positions(size, start):
    """Queries in the middle, as with a static cache, and at the end: the mask's own window counts."""
    tensors = operands(2)
    prepared = mask_function(BATCH, 2, SEQLEN_K, start, mask_function=sliding_window_causal_mask_function(8 - size))
    visible = masks.window(7 - size, 0).dense(SEQLEN_K, SEQLEN_K, device=DEVICE)[:, :, start : start + 2]
    assert_is(attention(*tensors, mask=visible), *tensors, prepared, sliding_window=size)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_a_layer_has_its_window_without_a_mask(name):
    """With the rotation inside; masks of transformers have the window too."""
    register()
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_hidden_layers=2, sliding_window=3,
        attn_implementation=NAME,
    )  # fmt: skip
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    layer = TWINS[getattr(module, f"{name}Attention")](config, 0).to(DEVICE).eval()
    x, at = torch.randn(1, 6, 16, device=DEVICE), torch.arange(6, device=DEVICE)[None]
    tables = getattr(module, f"{name}RotaryEmbedding")(config).to(DEVICE)(x, at)
    prepared = mask_function(1, 6, 6, mask_function=sliding_window_causal_mask_function(3))
    torch.testing.assert_close(layer(x, tables, None)[0], layer(x, tables, prepared)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_16_bits(dtype):
    out, weights = attention_function(nn.Module(), *operands(dtype=dtype), None, output_attentions=True)
    assert (out.dtype, weights.dtype) == (dtype, dtype)
