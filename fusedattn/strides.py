"""How the rows of a tensor ``(..., head_dim)`` lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def has_rows(x: Tensor) -> bool:
    """Whether each row is contiguous and overlaps no other, as with transposed heads."""
    *strides, last = x.stride()
    return last == 1 and min(strides) >= x.shape[3]


def rows_overlap(x: Tensor) -> bool:
    """Whether rows share some of their memory, but not all of it."""
    if x.is_contiguous():
        return False
    return any(size > 1 and 0 < stride < x.shape[3] for size, stride in zip(x.shape[:3], x.stride(), strict=False))


def is_expanded(x: Tensor) -> bool:
    """Whether several elements lie in the same place."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def is_view_of_first_features(x: Tensor, y: Tensor) -> bool:
    """Whether the rows of x are the first elements of those of y."""
    same_start = torch._C._is_alias_of(x, y) and x.storage_offset() == y.storage_offset()  # type: ignore[attr-defined]
    return same_start and x.stride() == y.stride()


def features_overlap(x: Tensor, y: Tensor) -> bool:
    """Whether rows of two tensors of the same strides share memory."""
    if not torch._C._is_alias_of(x, y) or x.stride() != y.stride():  # type: ignore[attr-defined]
        return False
    first, second = sorted((x, y), key=Tensor.storage_offset)
    return second.storage_offset() < first.storage_offset() + first.shape[3]
