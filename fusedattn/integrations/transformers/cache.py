"""A cache for models of transformers that keeps keys and values in the memory of a :class:`fusedattn.KVCache`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fusedattn.biases import Bias
from fusedattn.caches import append
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Documents, Mask

_LAYER = "_fusedattn_layer"  # an attribute of the keys that a layer returns


class PreallocatedCache(Cache):
    """A cache of fixed memory: ``model.generate(..., past_key_values=PreallocatedCache(max_cache_len))``.

    New tokens are written behind the others, without copying these. Attention named ``fusedattn`` reads the memory
    directly; any other gets views of the tokens, unless these are stored as codes. Every layer keeps all tokens, also
    if its model has a sliding window.

    Args:
        max_cache_len: the tokens of a sequence that there is room for.
        dtype: of the codes, as for :meth:`fusedattn.KVCache.contiguous`; None stores keys and values as they are.
        group_size: likewise.
    """

    def __init__(self, max_cache_len: int, *, dtype: torch.dtype | None = None, group_size: int | None = None) -> None:
        make = functools.partial(PreallocatedLayer, max_cache_len, dtype, group_size)
        super().__init__(layer_class_to_replicate=make)


class PreallocatedLayer(CacheLayerMixin):
    """The cache of one layer; its memory is allocated when the first tokens come.

    Attributes:
        cache: the memory; None before the first tokens.
        length: the tokens of each sequence, which the lengths of `cache` say on the device.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, max_cache_len: int, dtype: torch.dtype | None = None, group_size: int | None = None) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.code_dtype = dtype
        self.group_size = group_size
        self.cache: KVCache | None = None
        self.length: int = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for tensors of this batch, heads, dtype and device."""
        self._allocated(key_states, value_states)

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> KVCache:
        batch, nheads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cache = KVCache.contiguous(
            batch,
            nheads,
            self.max_cache_len,
            head_dim,
            value_states.shape[3],
            dtype=self.code_dtype or key_states.dtype,
            group_size=self.group_size,
            device=key_states.device,
        )
        self.is_initialized = True
        return self.cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``(batch, nheads_kv, n, head_dim)``; returns views of all tokens, in the order of their arrival.

        Raises:
            ValueError: the cache is full.
        """
        cache = self.cache or self._allocated(key_states, value_states)
        length = self.length + key_states.shape[2]
        if length > self.max_cache_len:
            raise ValueError(f"max_cache_len: got {self.max_cache_len}, allowed are {length} tokens and more")
        key_states, value_states = (x if x.stride(-1) == 1 else x.contiguous() for x in (key_states, value_states))
        append(cache, key_states, value_states)
        self.length = length
        return self._views(cache)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys with that many new ones, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """The tokens of each sequence."""
        return self.length

    def get_max_length(self) -> int:
        """The tokens that there is room for."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        """Forget all tokens, in the same memory."""
        self._cut(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, allowed are 0 and negative numbers")
        self._cut(max(self.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those of these numbers, in the same memory."""
        if self.cache is not None:
            for x in _memory(self.cache).values():
                x.copy_(x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, in new memory."""
        if self.cache is not None:
            self._take(self.cache, torch.arange(self.cache.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these sequences, in new memory."""
        if self.cache is not None:
            self._take(self.cache, torch.arange(self.cache.batch, device=self.device)[indices.to(self.device)])

    def offload(self) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError("offloading: got True, allowed with a PreallocatedCache is False")

    def _cut(self, length: int) -> None:
        self.length = length
        if self.cache is not None:
            self.cache.lengths.fill_(length)
            self._views(self.cache)

    def _take(self, cache: KVCache, sequences: Tensor) -> None:
        memory: dict[str, Any] = {name: x.index_select(0, sequences) for name, x in _memory(cache).items()}
        self.cache = replace(cache, lengths=cache.lengths[sequences], **memory)
        self._views(self.cache)

    def _views(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """All tokens; the keys lead back to this layer."""
        keys, values = cache.k[:, :, : self.length], cache.v[:, :, : self.length]
        setattr(keys, _LAYER, self)
        self.keys, self.values = keys, values
        return keys, values


def _memory(cache: KVCache) -> dict[str, Tensor]:
    """The tensors that have a row for each sequence."""
    named = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    return {name: x for name, x in named.items() if x is not None}


def cache_of(key: Tensor, value: Tensor) -> KVCache | None:
    """The cache whose tokens these are, if a layer returned them and has not changed since."""
    layer: PreallocatedLayer | None = getattr(key, _LAYER, None)
    return layer.cache if layer is not None and key is layer.keys and value is layer.values else None


def over_capacity(mask: Mask, bias: Bias | None, n_keys: int, cache: KVCache) -> dict[str, Any]:
    """A mask and bias of `n_keys` tokens as attention to a cache takes them: with columns for its whole capacity.

    What the columns behind the tokens say has no effect.
    """
    missing = cache.capacity - n_keys

    def widened(x: Tensor) -> Tensor:
        return F.pad(x, (0, missing))

    def widened_pairs(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dim() == 0 or x.shape[-1] == 1 else widened(x)

    valid, documents = mask.valid, mask.documents
    mask = replace(
        mask,
        valid=None if valid is None else widened(valid),
        allowed=widened_pairs(mask.allowed),
        documents=None if documents is None else Documents(documents.q, widened(documents.k)),
    )
    return {"mask": mask, "bias": None if bias is None else replace(bias, tensor=widened_pairs(bias.tensor))}
