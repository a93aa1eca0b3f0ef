"""Problems of caches: keys and values are appended to a cache, and attention reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusedattn import caches
from fusedattn.attention import attention
from fusedattn.kv_cache import KVCache
from fusedattn.support import Backend
from fusedattn.testing import budget
from fusedattn.testing.budget import Ratios, Results
from fusedattn.testing.cases import CODES, Inputs

PAGE_SIZE = 16


def run_cached(inputs: Inputs, backend: Backend, *, return_lse: bool = True) -> Results:
    """Out, and lse if asked for, of a case that has a cache, in the shapes of :func:`fusedattn.attention`.

    The keys and values before those of the queries are appended first, the others by a second call. Keys are rotated
    when they are appended, those of codes when they are read.
    """
    cache = empty_cache(inputs)
    before = max(0, inputs.k.shape[2] - inputs.q.shape[2])
    for tokens in (slice(None, before), slice(before, None)):
        k, v = (x[:, :, tokens].detach() for x in (inputs.k, inputs.v))
        if k.shape[2]:
            caches.append(cache, k, None if inputs.latent else v, backend=backend)
    options = inputs.options | {"return_lse": return_lse}
    if cache.rope is not None:
        del options["rope"]
    with torch.no_grad():
        found: Any = attention(inputs.q, cache=cache, backend=backend, **options)
    return dict(zip(("out", "lse"), found, strict=True)) if return_lse else {"out": found}


def check_cached(
    inputs: Inputs, backend: Backend, eager: Callable[[Inputs], Results] = budget.baseline
) -> dict[str, Ratios]:
    """Measure :func:`run_cached` against the error budget; the truth is attention to the keys and values themselves."""
    actual = run_cached(inputs, backend)
    return budget.compare_results(actual, budget.golden(inputs), eager(inputs), inputs.q.dtype)


def empty_cache(inputs: Inputs) -> KVCache:
    """A cache with room for the keys and values of a case; its pages lie in memory from the last to the first."""
    batch, nheads_kv, seqlen_k, head_dim = inputs.k.shape
    options: dict[str, Any] = {
        "nheads_kv": nheads_kv,
        "head_dim": head_dim,
        "head_dim_v": inputs.v.shape[3],
        "dtype": inputs.k.dtype if inputs.codes is None else CODES[inputs.codes],
        "rope": inputs.rope if inputs.codes is None else None,
    }
    if inputs.cache == "contiguous":
        cache = KVCache.contiguous(batch, capacity=seqlen_k, device=inputs.k.device, **options)
    else:
        n_pages = -(-seqlen_k // PAGE_SIZE)
        table = torch.arange(batch * n_pages, dtype=torch.int32, device=inputs.k.device).flip(0).view(batch, n_pages)
        cache = KVCache.paged(table, batch * n_pages, PAGE_SIZE, **options)
    return replace(cache, v=cache.k[..., : cache.v.shape[3]], v_scale=cache.k_scale) if inputs.latent else cache
