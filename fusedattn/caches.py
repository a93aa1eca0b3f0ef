"""Caches of keys and values: append to them; :func:`fusedattn.attention` reads them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedattn import backends, call_checks
from fusedattn.kv_cache import KVCache
from fusedattn.rope import Rope
from fusedattn.support import Backend, append_reasons, default_backend

__all__ = ["GrowingCache", "KVCache", "append"]


def append(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    counted: bool = False,
    backend: Backend | None = None,
) -> None:
    """Append tokens to the sequences of a cache, in place: rotate, quantise and store their keys and values.

    On a GPU this is one kernel; it waits for nothing and allocates nothing. Without `counted`, ``cache.lengths`` is
    increased in place before it, whoever made this tensor.

    A CUDA graph may capture it. Replays advance: each adds to the lengths that it finds, and appends what k and v then
    hold. Capturing itself runs nothing, so the lengths stay. With `counted`, the graph has to contain the increase,
    ``cache.lengths.add_(n)``, once for all layers. Nothing in a graph notices that the cache is full: count the replays
    on the host; tokens without a place are left out.

    Args:
        cache: the cache. Its lengths change, unless they are `counted`.
        k: ``(batch, nheads_kv, n, head_dim)``: n tokens for each sequence, not rotated, in the dtype of the cache or,
            for codes, in any floating-point dtype. With `cu_seqlens`, ``(total, nheads_kv, head_dim)``: packed tokens.
        v: likewise, with head_dim_v; None if values are features of the keys.
        cu_seqlens: int32 ``(batch + 1,)``: sequence ``i`` gets the tokens ``cu_seqlens[i] .. cu_seqlens[i + 1] - 1``.
        max_seqlen: a number of new tokens that no sequence exceeds (tokens beyond would be left out); by default total.
        counted: lengths count the new tokens already, as in all layers of a model but the first, if layers share them.
        backend: as for :func:`fusedattn.attention`.

    Raises:
        TypeError, ValueError: a tensor does not fit the cache. On a CPU also if a sequence becomes longer than the
            cache, or a page or row is not there: nothing is written then. On a GPU such tokens are left out, and
            attention to the sequence is NaN.
        NotImplementedError: the backend cannot run this.
    """
    backend = _checked(cache, k, v, cu_seqlens, max_seqlen, backend)
    backends.append(cache, k, v, cu_seqlens, max_seqlen, counted, backend)


def _checked(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    backend: Backend | None,
) -> Backend:
    """The backend that appends these, after all checks but those of values."""
    call_checks.check_append(cache, k, v, cu_seqlens, max_seqlen)
    call_checks.check_backend(backend)
    chosen = backend or default_backend(k.device)
    reasons = append_reasons(cache, chosen)
    if reasons:
        raise NotImplementedError(f"append cannot run on backend {chosen!r}: " + "; ".join(reasons))
    return chosen


class GrowingCache:
    """A contiguous cache of sequences of one length, which doubles its memory when it is full.

    Its memory then moves: do not keep `cache` across calls of :meth:`append`, or capture these in a CUDA graph.

    Attributes:
        cache: the :class:`KVCache` to attend to.
        length: the tokens of each sequence.
    """

    def __init__(
        self,
        batch: int,
        nheads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype,
        capacity: int = 256,
        group_size: int | None = None,
        rope: Rope | None = None,
        left_padding: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """An empty cache; the arguments are those of :meth:`KVCache.contiguous`, `capacity` is that of the start."""
        self.cache: KVCache = KVCache.contiguous(
            batch, nheads_kv, capacity, head_dim, head_dim_v, dtype=dtype, group_size=group_size, rope=rope,
            left_padding=left_padding, device=device,
        )  # fmt: skip
        self.length: int = 0

    def append(self, k: Tensor, v: Tensor, *, backend: Backend | None = None) -> None:
        """Append ``(batch, nheads_kv, n, head_dim)`` and v, likewise, as :func:`append` does."""
        chosen = _checked(self.cache, k, v, None, None, backend)
        length = self.length + k.shape[2]
        if length > self.cache.capacity:
            self._grow(max(length, 2 * self.cache.capacity))
        backends.append(self.cache, k, v, None, None, False, chosen)
        self.length = length

    def _grow(self, capacity: int) -> None:
        cache = self.cache

        def moved(x: Tensor) -> Tensor:
            new = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
            new[:, :, : self.length] = x[:, :, : self.length]
            return new

        k_scale, v_scale = (None if x is None else moved(x) for x in (cache.k_scale, cache.v_scale))
        self.cache = replace(cache, k=moved(cache.k), v=moved(cache.v), k_scale=k_scale, v_scale=v_scale)
