"""Caches of keys and values: append to them; :func:`fusedattn.attention` reads them."""

from __future__ import annotations

from torch import Tensor

from fusedattn import backends, call_checks
from fusedattn.kv_cache import KVCache
from fusedattn.support import Backend, default_backend

__all__ = ["KVCache", "append"]


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

    On a GPU this is one kernel; it waits for nothing, and may be captured in a CUDA graph. Without `counted`, the
    lengths are increased before it.

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
    call_checks.check_append(cache, k, v, cu_seqlens, max_seqlen)
    call_checks.check_backend(backend)
    backends.append(cache, k, v, cu_seqlens, max_seqlen, counted, backend or default_backend(k.device))
