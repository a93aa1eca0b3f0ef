"""Convert padded sequences to packed ones and back, as ``flash_attn.bert_padding`` does; differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor.

    Args:
        input: ``(n, ...)``.
        indices: int32 or int64 ``(z,)``. The gradient of a row that is taken twice is the sum of both gradients.

    Returns:
        ``(z, ...)``.
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor with the given rows, and zeros elsewhere.

    Args:
        values: ``(z, ...)``.
        indices: int32 or int64 ``(z,)``, all different.
        first_axis_dim: the number of rows of the result.

    Returns:
        ``(first_axis_dim, ...)``.
    """
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack sequences, without their padding. Waits for the masks.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask: bool or int ``(batch, seqlen)``, 0 for padding.
        unused_mask: likewise; not 0 for padding that is packed too.

    Returns:
        The packed tokens ``(total, ...)``; their indices in the flattened batch, int64 ``(total,)``; cu_seqlens, int32
        ``(batch + 1,)``; the length of the longest sequence; the number of tokens of each sequence in the attention
        mask, int32 ``(batch,)``.

    Raises:
        ValueError: a mask is not ``(batch, seqlen)``.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    packed = attention_mask != 0
    used_lengths = packed.sum(dim=1, dtype=torch.int32)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        packed = packed | (unused_mask != 0)
    return (*_unpadded(hidden_states, packed, packed.sum(dim=1, dtype=torch.int32)), used_lengths)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """:func:`unpad_input` for rows that each hold several packed sequences, with padding behind the last.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask_in_length: int ``(batch, seqlen)``; in each row the lengths of its sequences, in order, among
            zeros at any places.

    Returns:
        As :func:`unpad_input`, without the last; cu_seqlens is ``(n_sequences + 1,)``.

    Raises:
        ValueError: the mask is not ``(batch, seqlen)``.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    position = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    packed = position < attention_mask_in_length.sum(dim=1)[:, None]
    return _unpadded(hidden_states, packed, attention_mask_in_length[attention_mask_in_length != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back at their places, with zeros for padding.

    Args:
        hidden_states: ``(total, ...)``.
        indices: int32 or int64 ``(total,)``, as :func:`unpad_input` returned it.
        batch, seqlen: sizes of the result.

    Returns:
        ``(batch, seqlen, ...)``.
    """
    tokens = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return tokens.view(batch, seqlen, *hidden_states.shape[1:])


def _unpadded(hidden_states: Tensor, packed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name}: got shape {tuple(mask.shape)}, allowed is (batch, seqlen) = {tuple(hidden_states.shape[:2])}"
        )
