"""``flash_attn_with_kvcache``: append to a cache of keys and values in place, and attend to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fusedattn.attention import attention
from fusedattn.caches import append
from fusedattn.integrations.flash_attn import paging
from fusedattn.integrations.flash_attn.arguments import (
    NO_WINDOW,
    limits_of,
    options_of,
    whole,
    with_contiguous_features,
)
from fusedattn.integrations.flash_attn.kvcache_checks import (
    check_numbers,
    check_places,
    check_rotation,
    check_tensors,
)
from fusedattn.kv_cache import KVCache
from fusedattn.rope import Rope


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
    ``i + seqlen_k - seqlen_q``. On a GPU this is :func:`fusedattn.caches.append` and :func:`fusedattn.attention` to a
    :class:`fusedattn.KVCache`: the caches are not copied, and nothing waits for a tensor.

    Args:
        q: ``(batch, seqlen_q, nheads, head_dim)``, dtypes as for :func:`flash_attn_func`.
        k_cache: ``(batch_cache, seqlen_cache, nheads_k, head_dim)``, or with `block_table`
            ``(num_blocks, page_block_size, nheads_k, head_dim)``; any strides whose last is 1.
        v_cache: likewise, with ``head_dim_v``.
        k, v: ``(batch, seqlen_new, nheads_k, head_dim)`` and likewise with ``head_dim_v``, in the dtype of the caches,
            or None. They are written into k_cache and v_cache behind the first cache_seqlens tokens; the two caches
            must then be different memory.
        rotary_cos, rotary_sin: floating-point ``(seqlen_rotary, rotary_dim / 2)``, used in float32: other dtypes are
            converted in each call. They rotate k and q at the positions from cache_seqlens on, which k is written to;
            without `causal` and `window_size` all of q at cache_seqlens. Needs k.
        cache_seqlens: the number of tokens in the caches, an int or int32 ``(batch,)``; None for full caches. Needed
            with k.
        cache_batch_idx: int32 ``(batch,)``: the row of the caches for each sequence, all different if k is given;
            None for the first rows.
        cache_leftpad: int32 ``(batch,)``: the number of hidden tokens at the start of a cache.
        block_table: int32 ``(batch, max_num_blocks_per_seq)``: the pages of each sequence in order, of any size;
            not together with `cache_batch_idx`.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flash_attn_func`.
        rotary_interleaved: as `interleaved` of :func:`apply_rotary_emb`.
        num_splits: as for :func:`fusedattn.attention`; 0 and less for None.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out, ``(batch, seqlen_q, nheads, head_dim_v)``; with `return_softmax_lse` also softmax_lse, float32
        ``(batch, nheads, seqlen_q)``. Queries that see nothing have 0 and ``-inf``.

    Raises:
        TypeError, ValueError: an argument is wrong or does not fit, before anything is written; on a CPU also if tokens
            lie outside the caches, their pages or the tables. On a GPU such tokens are not written and the results of
            their sequence are NaN, and so are those of positions outside the tables.
        NotImplementedError: as :func:`fusedattn.attention`.
    """
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_tensors(q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin)
    check_numbers(softmax_scale, options["softcap"])
    options["num_splits"] = max(0, whole("num_splits", num_splits)) or None
    batch, capacity = q.shape[0], k_cache.shape[1]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor together with block_table, allowed is one of them")
        capacity = paging.capacity(block_table, batch, k_cache)
    before, n_new = capacity if cache_seqlens is None else cache_seqlens, 0 if k is None else k.shape[1]
    rows = k_cache.shape[0] if block_table is None else None
    check_places(batch, capacity, n_new, rows, before, cache_batch_idx, cache_leftpad, q.device)
    if block_table is not None:
        paging.check_pages(block_table, before + n_new, k_cache)
    if options["bias"] is not None:
        options["bias"].check(batch, q.shape[2], q.shape[1], capacity)

    if isinstance(before, Tensor):
        starts = before.to(torch.int32).contiguous()
    else:
        starts = torch.full((batch,), before, dtype=torch.int32, device=q.device)
    rope = None
    if rotary_cos is not None and rotary_sin is not None:
        in_order = limits_of(causal, window_size) != (None, None)
        check_rotation(q, rotary_cos, rotary_sin, before, max(n_new, q.shape[1] if in_order else 1))
        is_new = q.shape[1] == n_new and (in_order or n_new == 1)  # each query is a new token, at its position
        positions = None if is_new else _positions_of_queries(starts, q.shape[1], in_order)
        rope = Rope(rotary_cos.float(), rotary_sin.float(), rotary_interleaved, positions)
    cache = KVCache(
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        starts + n_new if n_new else starts,
        block_table=_int32(block_table),
        rows=_int32(cache_batch_idx),
        left_padding=_int32(cache_leftpad),
        rope=rope,
    )
    if k is not None and v is not None:
        append(cache, *(with_contiguous_features(x).transpose(1, 2) for x in (k, v)), counted=True)
    q = with_contiguous_features(q).transpose(1, 2)
    with _without_autocast(q.device):  # which would cast q, but not the cache
        if return_softmax_lse:
            out, lse = attention(q, cache=cache, **options, return_lse=True)
            return out.transpose(1, 2).contiguous(), lse
        return attention(q, cache=cache, **options).transpose(1, 2).contiguous()


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch._C._is_any_autocast_enabled():
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _positions_of_queries(starts: Tensor, seqlen_q: int, in_order: bool) -> Tensor:
    """``(batch, seqlen_q)``: from `starts` on, or all at `starts` if their order does not matter."""
    positions = starts[:, None].expand(-1, seqlen_q)
    if in_order and seqlen_q > 1:
        positions = positions + torch.arange(seqlen_q, dtype=starts.dtype, device=starts.device)
    return positions


def _int32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32).contiguous()
