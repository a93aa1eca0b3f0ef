"""The two backends: the Triton kernels, and torch's own functions. Neither imports the other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fusedattn import reference_cached, reference_varlen
from fusedattn.backends.torch import cached, largest
from fusedattn.backends.triton import appending, autograd
from fusedattn.kv_cache import KVCache
from fusedattn.options import Options
from fusedattn.reference_varlen import Results
from fusedattn.support import Backend


def append(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    counted: bool,
    backend: Backend,
) -> None:
    """Append checked tokens to a cache; arguments are those of :func:`fusedattn.caches.append`."""
    reference_cached.check_room(cache, k, cu_seqlens, counted)
    if not counted:
        if cu_seqlens is None:
            cache.lengths.add_(k.shape[2])
        else:
            cache.lengths.add_(cu_seqlens[1:]).sub_(cu_seqlens[:-1])
    if backend == "triton":
        appending.append(cache, k, v, cu_seqlens, max_seqlen)
    else:
        reference_cached.append(cache, k, v, cu_seqlens)


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, backend: Backend) -> Results:
    """``(out, lse, largest)`` of prepared arguments; lse and largest may be None if `options` do not ask for them.

    Args:
        q, k, v: ``(batch, nheads, seqlen, head_dim)``; packed sequences are a batch of 1.
        options: of the call.
        backend: the backend to run.
    """
    if backend == "triton":
        return autograd.attention(q, k, v, options)
    if options.qk_norm is not None:
        q = options.qk_norm.of_queries(q)
        k = k if options.cache is not None else options.qk_norm.of_keys(k)
        options = replace(options, qk_norm=None)
    if options.cache is not None:
        return cached.attention(q, options)
    if options.packed is not None:
        return reference_varlen.attention(q, k, v, options, attend=largest.attention)
    return largest.attention(q, k, v, options)
