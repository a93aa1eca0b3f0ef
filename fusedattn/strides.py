"""How the rows of a tensor ``(..., head_dim)`` lie in memory."""

from __future__ import annotations

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
