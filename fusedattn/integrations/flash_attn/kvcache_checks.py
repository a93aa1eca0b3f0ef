"""Checks of ``flash_attn_with_kvcache``, made before it writes anything."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import call_checks
from fusedattn.integrations.flash_attn.arguments import check_shape
from fusedattn.integrations.flash_attn.layers.rotary import check_tables
from fusedattn.readable import can_read


def check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless these tensors fit each other; rows and lengths are not checked."""
    check_shape("q", q, "(batch, seqlen_q, nheads, head_dim)")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_shape(name, cache, "(batch_cache or num_blocks, seqlen_cache or page_block_size, nheads_k, head_dim)")
        if cache.stride(-1) != 1:
            raise ValueError(f"{name}: got strides {cache.stride()}, allowed are any whose last is 1")
        if cache.dtype != q.dtype or cache.device != q.device:
            raise TypeError(f"{name}: got {cache.dtype} on {cache.device}, allowed is {q.dtype} on {q.device}, as q is")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {tuple(v_cache.shape)}, allowed is that of k_cache, {tuple(k_cache.shape)}, but for "
            "head_dim"
        )
    # Without rows: the caches may have a different number.
    call_checks.check_qkv(*(x[:0].transpose(1, 2) for x in (q, k_cache, v_cache)))
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: got None, allowed is a tensor, as the other one of k and v is")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos, rotary_sin: got one of them, allowed are both and neither")
    if k is None or v is None:
        if rotary_cos is not None:
            raise ValueError(
                "rotary_cos: got a tensor without k, allowed is None, as nothing is appended at a position"
            )
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: got None, allowed is where to write k and v, an int or a tensor")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_shape(name, x, "(batch, seqlen_new, nheads_k, head_dim)")
        allowed = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(x.shape) != allowed:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, allowed is (batch, seqlen_new, nheads_k, head_dim) = {allowed}"
            )
        if x.dtype != cache.dtype or x.device != cache.device:
            raise TypeError(f"{name}: got {x.dtype} on {x.device}, allowed is {cache.dtype} on {cache.device}")


def check_numbers(softmax_scale: float | None, softcap: float | None) -> None:
    """Raise TypeError or ValueError unless these are numbers that :func:`fusedattn.attention` takes."""
    if softmax_scale is not None:
        call_checks.check_scale(softmax_scale)
    if softcap is not None:
        call_checks.check_softcap(softcap)


def check_places(
    batch: int,
    capacity: int,
    n_new: int,
    rows: int | None,
    cache_seqlens: int | Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    device: torch.device,
) -> None:
    """Raise TypeError or ValueError unless all sequences and new tokens lie in the caches of `capacity` tokens.

    On a GPU values are not checked, so that nothing waits. `rows` is the number of caches, None if they are paged.
    """
    by_sequence = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    for name, x in by_sequence.items():
        if x is None or (isinstance(x, int) and name == "cache_seqlens"):
            continue
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, allowed is a torch.int32 tensor")
        if tuple(x.shape) != (batch,) or x.device != device:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)} on {x.device}, allowed is (batch,) = {(batch,)} on {device}"
            )
    if n_new > capacity:
        raise ValueError(
            f"k: got {n_new} new tokens, allowed are 0 .. {capacity}, the tokens that a cache has room for"
        )
    _check_range("cache_seqlens", cache_seqlens, capacity - n_new)
    if cache_batch_idx is not None and rows is not None:
        _check_range("cache_batch_idx", cache_batch_idx, rows - 1)
        if n_new and can_read(cache_batch_idx) and cache_batch_idx.unique().numel() < batch:
            raise ValueError(
                f"cache_batch_idx: got {cache_batch_idx.tolist()}, allowed are different rows where k is written"
            )
    elif rows is not None and batch > rows:
        raise ValueError(f"k_cache: got {rows} rows, allowed are batch = {batch} and more")


def check_rotation(q: Tensor, cos: Tensor, sin: Tensor, cache_seqlens: int | Tensor, n_tokens: int) -> None:
    """Raise TypeError or ValueError unless the tables fit q and have rows for `n_tokens` from cache_seqlens on.

    On a GPU values are not checked.
    """
    check_tables(cos, sin, q)
    first = cache_seqlens
    if isinstance(first, Tensor):
        if not can_read(first) or first.numel() == 0:
            return
        first = int(first.max())
    if first + n_tokens > cos.shape[0]:
        raise ValueError(
            f"rotary_cos: got {cos.shape[0]} rows, allowed are {first + n_tokens} and more, for tokens at positions up "
            f"to {first + n_tokens - 1}"
        )


def _check_range(name: str, x: int | Tensor, highest: int) -> None:
    if isinstance(x, Tensor):
        if not can_read(x) or x.numel() == 0:
            return
        low, high = int(x.min()), int(x.max())
    else:
        low = high = x
    if not 0 <= low <= high <= highest:
        raise ValueError(f"{name}: got {low} .. {high}, allowed are 0 .. {highest}")
