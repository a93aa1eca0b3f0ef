"""Append to a cache by a kernel, as a PyTorch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.backends.triton import ops
from fusedattn.backends.triton.operands import AppendTensors
from fusedattn.kv_cache import KVCache


@torch.library.custom_op("fusedattn::cache_append", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def cache_append(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tensors: list[Tensor | None],
    n_sinks: int,
    interleaved: bool,
    max_seqlen: int,
) -> None:
    """Write new tokens, ``(batch, nheads_kv, n, head_dim)``, into the memory of a cache.

    `v`, `v_cache` and `v_scale` are None if values are features of the keys. `tensors` are :class:`AppendTensors`.
    `n_sinks` is -1 unless tokens are overwritten.
    """
    from fusedattn.backends.triton import append_launching

    memory = k_cache, v_cache, k_scale, v_scale
    append_launching.append(k, v, memory, AppendTensors(*tensors), n_sinks, interleaved, max_seqlen)  # type: ignore[arg-type]


@cache_append.register_fake
def _cache_append_fake(*_: object) -> None:
    return None


def append(cache: KVCache, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    """Write the newest tokens of each sequence, which `cache.lengths` counts; packed ones have no batch."""
    if cu_seqlens is not None:
        k, v = k.transpose(0, 1)[None], None if v is None else v.transpose(0, 1)[None]
    rope = cache.rope
    tensors = AppendTensors(
        cache.lengths,
        cache.block_table,
        cache.rows,
        None if rope is None else rope.cos,
        None if rope is None else rope.sin,
        None if rope is None else rope.positions_k,
        cu_seqlens,
    )
    of_values = (None, None) if v is None else (cache.v, cache.v_scale)
    memory = cache.k, of_values[0], cache.k_scale, of_values[1]
    numbers = (
        cache.n_sinks if cache.overwrites else -1,
        rope is not None and rope.interleaved,
        k.shape[2] if max_seqlen is None else max_seqlen,
    )
    if torch.compiler.is_compiling() or ops.is_observed((k, v, *memory)):
        cache_append(k, v, *memory, list(tensors), *numbers)
        return
    from fusedattn.backends.triton import append_launching

    append_launching.append(k, v, memory, tensors, *numbers)
    torch.autograd.graph.increment_version([x for x in memory if x is not None])  # what torch does for operators
