"""Tensors with an element for each pair of a query and a key, or broadcast to that: boolean masks and biases."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# A kernel's offsets inside one tile are int32: what lies further apart than this is copied together first.
MAX_ROW_STRIDE = 2**31 // 512


class Pairs(NamedTuple):
    """A ``(sequences, nheads_q, seqlen_q, seqlen_k)`` tensor; strides are 0 where it is broadcast."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_q: Any
    stride_k: Any


@triton.jit
def pair_pointers(x, place, start_m, start_n, rows, keys):
    """Pointers to pairs of a :class:`Pairs`: one head may exceed 2^31 elements, so the tile's corner is in int64."""
    matrix = x.ptr + tl.cast(place.sequence, tl.int64) * x.stride_b + tl.cast(place.head, tl.int64) * x.stride_h
    corner = matrix + tl.cast(start_m, tl.int64) * x.stride_q + tl.cast(start_n, tl.int64) * x.stride_k
    return corner + (rows - start_m) * x.stride_q + (keys - start_n) * x.stride_k


def pairs(x: torch.Tensor) -> Pairs:
    """A tensor of four dimensions, those of length 1 broadcast; copied where a tile would span too much memory."""
    if max(x.stride()[2:]) > MAX_ROW_STRIDE:
        # Contiguous, or, where its rows are too long for that, transposed.
        x = x.contiguous() if x.shape[3] <= MAX_ROW_STRIDE else x.mT.contiguous().mT
    return Pairs(x, *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))
