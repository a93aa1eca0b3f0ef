"""``flash_attn_with_kvcache``: append to a cache of keys and values in place, and attend to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedattn import biases, masks
from fusedattn.attention import attention
from fusedattn.integrations.flash_attn import paging
from fusedattn.integrations.flash_attn.arguments import (
    NO_WINDOW,
    limits_of,
    options_of,
    with_contiguous_features,
)
from fusedattn.integrations.flash_attn.kvcache_checks import check_places, check_tensors
from fusedattn.integrations.flash_attn.layers.rotary import apply_rotary_emb


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache, and attend to it. Has no gradients.

    ``seqlen_k`` of a sequence is its cache_seqlens plus the number of new keys, and query ``i`` stands at key
    ``i + seqlen_k - seqlen_q``. On a GPU nothing waits for a tensor.

    Args:
        q: ``(batch, seqlen_q, nheads, head_dim)``, dtypes as for :func:`flash_attn_func`.
        k_cache: ``(batch_cache, seqlen_cache, nheads_k, head_dim)``, or with `block_table`
            ``(num_blocks, page_block_size, nheads_k, head_dim)``; any strides whose last is 1.
        v_cache: likewise, with ``head_dim_v``.
        k, v: ``(batch, seqlen_new, nheads_k, head_dim)`` and likewise with ``head_dim_v``, in the dtype of the caches,
            or None. They are written into k_cache and v_cache behind the first cache_seqlens tokens.
        rotary_cos, rotary_sin: ``(seqlen_rotary, rotary_dim / 2)``, to rotate k and q at the positions from
            cache_seqlens on, which k is written to; without `causal` and `window_size` all of q at cache_seqlens.
            Needs k.
        cache_seqlens: the number of tokens in the caches, an int or int32 ``(batch,)``; None for full caches. Needed
            with k. An int is cheaper: the tokens behind it are cut off rather than masked.
        cache_batch_idx: int32 ``(batch,)``: the row of the caches for each sequence, all different if k is given;
            None for the first rows. These rows are copied to be read.
        cache_leftpad: int32 ``(batch,)``: the number of hidden tokens at the start of a cache.
        block_table: int32 ``(batch, max_num_blocks_per_seq)``: the pages of each sequence in order, of any size;
            not together with `cache_batch_idx`. The pages are copied to be read: all of the table if cache_seqlens is
            a tensor.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flash_attn_func`. If cache_seqlens is
            a tensor, `causal` or a window with several queries stores a bool tensor
            ``(batch, 1, seqlen_q, seqlen_cache)``, and slopes store a float32 tensor
            ``(batch, nheads, seqlen_q, seqlen_cache)``.
        rotary_interleaved: as `interleaved` of :func:`apply_rotary_emb`.
        num_splits: no effect: a hint for the kernels of ``flash_attn``.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out, ``(batch, seqlen_q, nheads, head_dim_v)``; with `return_softmax_lse` also softmax_lse, float32
        ``(batch, nheads, seqlen_q)``. Queries that see nothing have 0 and ``-inf``.

    Raises:
        TypeError, ValueError: a tensor is wrong or does not fit, before anything is written; on a CPU also if tokens
            lie outside the caches, their pages or the tables. On a GPU torch's own assertion fails for tokens behind
            the end of a cache, and positions outside the tables are NaN. For numbers, as :func:`fusedattn.attention`.
        NotImplementedError: as :func:`fusedattn.attention`.
    """
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_tensors(q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin)
    batch, capacity = q.shape[0], k_cache.shape[1]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor together with block_table, allowed is one of them")
        capacity = paging.capacity(block_table, batch, k_cache)
    before, n_new = capacity if cache_seqlens is None else cache_seqlens, 0 if k is None else k.shape[1]
    rows = k_cache.shape[0] if block_table is None else None
    check_places(batch, capacity, n_new, rows, before, cache_batch_idx, cache_leftpad, q.device)
    length = before + n_new
    if block_table is not None:
        paging.check_pages(block_table, length, k_cache)
    if options["bias"] is not None:
        options["bias"].check(batch, q.shape[2], q.shape[1], capacity)

    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            q, k = _rotated(q, k, rotary_cos, rotary_sin, rotary_interleaved, before, limits_of(causal, window_size))
        slots = _slots(before, k, k_cache, cache_batch_idx, block_table)
        k_cache[slots], v_cache[slots] = k, v

    if isinstance(length, int):
        if cache_leftpad is not None:
            key = torch.arange(length, device=q.device)
            options["mask"] &= masks.padding(key >= cache_leftpad[:, None])
    else:
        limits = limits_of(causal, window_size)
        options |= _aligned(q, capacity, length, cache_leftpad, limits, options["bias"])
    keys, values = (_read(x, batch, length, cache_batch_idx, block_table) for x in (k_cache, v_cache))
    q, keys, values = (x.transpose(1, 2) for x in (with_contiguous_features(q), keys, values))
    attend = partial(attention, q, keys, values, **options)
    if return_softmax_lse:
        out, lse = attend(return_lse=True)
        return out.transpose(1, 2).contiguous(), lse
    return attend().transpose(1, 2).contiguous()


def _rotated(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    before: int | Tensor,
    limits: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor]:
    """q and k rotated at the positions behind the cache; q at the first of them if its order does not matter."""
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=before)
    if limits != (None, None):
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=before), k
    # (batch, seqlen_q, nheads, head_dim) as one token with seqlen_q * nheads heads
    token = apply_rotary_emb(q.flatten(1, 2)[:, None], cos, sin, interleaved, seqlen_offsets=before)
    return token.reshape(q.shape), k


def _slots(
    before: int | Tensor, k: Tensor, cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The places of the new tokens in a cache: indices of its first two dimensions, int64 ``(batch, seqlen_new)``."""
    starts = before[:, None].long() if isinstance(before, Tensor) else before
    positions = (starts + torch.arange(k.shape[1], device=k.device)).expand(k.shape[0], -1)
    if block_table is not None:
        return paging.slots(block_table, cache.shape[1], positions)
    rows = torch.arange(k.shape[0], device=k.device) if cache_batch_idx is None else cache_batch_idx.long()
    return rows[:, None].expand_as(positions), positions


def _read(
    cache: Tensor, batch: int, length: int | Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """``(batch, length or capacity, nheads, head_dim)``; a view, unless rows or pages are selected."""
    stop = length if isinstance(length, int) else None
    if block_table is None:
        return cache[slice(batch) if cache_batch_idx is None else cache_batch_idx.long(), :stop]
    if stop is not None:
        block_table = block_table[:, : -(-stop // cache.shape[1])]
    return paging.padded(cache, block_table, length)[:, :stop]


def _aligned(
    q: Tensor,
    capacity: int,
    length: Tensor,
    leftpad: Tensor | None,
    limits: tuple[int | None, int | None],
    bias: biases.Bias | None,
) -> dict[str, Any]:
    """Mask and bias over whole caches, in which sequences have different lengths."""
    seqlen_q, (left, right) = q.shape[1], limits
    key = torch.arange(capacity, device=q.device)
    valid = key < length[:, None]
    if leftpad is not None:
        valid = valid & (key >= leftpad[:, None])
    position = length[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device)
    distance = key - position[..., None]  # (batch, seqlen_q, capacity)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen = distance >= -left
    if right is not None:
        seen = seen & (distance <= right)
    if seqlen_q == 1:
        mask = masks.padding(valid & seen[:, 0])
    elif left is None and right is None:
        mask = masks.padding(valid)
    else:
        mask = masks.padding(valid) & masks.boolean(seen[:, None])
    if bias is None or bias.slopes is None:
        return {"mask": mask}
    slopes = bias.slopes[..., None, None]  # (nheads, 1, 1) or (batch, nheads, 1, 1)
    return {"mask": mask, "bias": biases.tensor(-slopes * distance[:, None].abs())}
