"""Attention to a cache by eager PyTorch: the truth in float64, and the error that it has in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import KVCache, reference_cached, testing
from fusedattn.options import Options, Packed

FORMATS: dict[str, tuple[torch.dtype, int | None, bool]] = {  # dtype of the codes, group_size, given scales
    "e4m3": (torch.float8_e4m3fn, None, False),
    "e5m2": (torch.float8_e5m2, None, False),
    "int8": (torch.int8, None, False),
    "int4": (torch.uint8, None, False),
    "int4, groups of 4": (torch.uint8, 4, False),
    "e4m3, given": (torch.float8_e4m3fn, None, True),
    "e5m2, given": (torch.float8_e5m2, None, True),
    "int8, given": (torch.int8, None, True),
}
NUMBERS = "numbers"


def numbers_of(cache: KVCache, dtype: torch.dtype) -> KVCache:
    """The same tokens as numbers of another dtype, one row for each sequence."""
    k, v, _ = cache.dense()
    padding = cache.left_padding
    if padding is not None:
        padding = (padding - (cache.lengths - cache.kept())).clamp(min=0)
    return KVCache(k.to(dtype), v.to(dtype), cache.kept().clone(), left_padding=padding)


def by_eager(inputs: testing.Inputs, cache: KVCache, packed: Packed | None = None) -> dict[str, Tensor]:
    """Out and lse by eager PyTorch, in the dtype of q."""
    named = dict(inputs.options)
    scale = named.pop("scale")
    scale = inputs.q.shape[3] ** -0.5 if scale is None else scale
    options = Options(**named, scale=scale, cache=cache, return_lse=True, packed=packed)
    out, lse, _ = reference_cached.attention(inputs.q, options)
    assert lse is not None
    return {"out": out, "lse": lse}
