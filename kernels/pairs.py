"""Pairs of a query and a key: a block of them, and tensors with an element for each, such as masks and biases."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# A kernel's offsets inside one tile are int32: a tensor whose rows lie further apart than this is copied first.
MAX_ROW_STRIDE = 2**31 // 512


class Pairs(NamedTuple):
    """A ``(sequences, nheads_q, seqlen_q, seqlen_k)`` tensor; strides are 0 where it is broadcast."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_q: Any
    stride_k: Any


class Block(NamedTuple):
    """The pairs of queries `rows`, from `start_m` on, with `keys`, from `start_n` on.

    `rows` is ``(M, 1)`` and `keys` ``(1, N)``, or, in a transposed block, ``(1, M)`` and ``(N, 1)``.
    """

    start_m: Any
    start_n: Any
    rows: Any
    keys: Any


@triton.jit
def pair_pointers(x, place, block):
    """Pointers to a block of a :class:`Pairs`: one head may exceed 2^31 elements, so the corner is in int64."""
    matrix = x.ptr + tl.cast(place.sequence, tl.int64) * x.stride_b + tl.cast(place.head, tl.int64) * x.stride_h
    corner = matrix + tl.cast(block.start_m, tl.int64) * x.stride_q + tl.cast(block.start_n, tl.int64) * x.stride_k
    return corner + (block.rows - block.start_m) * x.stride_q + (block.keys - block.start_n) * x.stride_k


def pairs(x: torch.Tensor) -> Pairs:
    """A tensor of four dimensions, those of length 1 broadcast; copied if a tile would span too much memory."""
    if max(x.stride()[2:]) > MAX_ROW_STRIDE:
        # Contiguous or, if its rows are too long for that, transposed.
        x = x.contiguous() if x.shape[3] <= MAX_ROW_STRIDE else x.mT.contiguous().mT
    return Pairs(x, *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))
