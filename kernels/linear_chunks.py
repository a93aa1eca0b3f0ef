"""What the kernels of linear attention share: chunks of a sequence, feature maps, sizes of tiles.

A sequence is cut into chunks of CHUNK tokens. A state is ``sum_j phi(k_j) v_j^T`` over the tokens of whole chunks,
``(head_dim, head_dim_v)``, beside the sum of ``phi(k_j)``, ``(head_dim,)``; both in ACC. Between the tokens of one
chunk, products are those of attention without a softmax. (Katharopoulos et al., "Transformers are RNNs", 2020; in
chunks: Hua et al., "Transformer Quality in Linear Time", 2022, section 3.3.)
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.accurate_math import exp2_of_product
from fusedattn.kernels.primitives import (
    INTERPRETED,
    LOG2E,
    accumulator,
    block_d,
    dot,
    has_nan,
    head_base,
    head_of,
    load_tile,
    round_to,
    split_poison,
    widen,
)


class Chunks(NamedTuple):
    """Where the chunks of packed sequences are; None for a batch, whose sequences have equal lengths.

    `cu_ptr`, int32 ``(n + 1,)``: the first token of each sequence. `first_ptr`, int32 ``(n + 1,)``: its first chunk, in
    the numbering of all chunks. `sequence_ptr`, int32 ``(chunks,)``: the sequence of each chunk; chunks beyond the last
    are counted as those of the last sequence, behind its end.
    """

    cu_ptr: Any
    first_ptr: Any
    sequence_ptr: Any


class ChunkCounts(NamedTuple):
    """Chunks of each sequence of a batch, and of all sequences; for packed ones, at least as many as they have."""

    each: int
    all: int


class Span(NamedTuple):
    """A sequence: its index `batch` and first token `first` in tensors, its length, and its first chunk."""

    sequence: Any
    batch: Any
    first: Any
    seqlen: Any
    first_chunk: Any


class LinearTile(NamedTuple):
    """Constants: tokens of a chunk, features of keys and of values rounded up, features of values at a time.

    STATE_PRECISION is that of products with a state, whose operands are ACC: TF32 for 16-bit inputs, whose numbers it
    holds exactly, and which float16 could not hold the range of.
    """

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    CHUNK: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ACC: Any
    PRECISION: Any
    STATE_PRECISION: Any


class FeatureMap(NamedTuple):
    """A feature map: its name, or for one of the user's, "" and ``@triton.jit`` functions."""

    NAME: Any
    FUNCTION: Any
    DERIVATIVE: Any


@triton.jit
def span_of(chunks, sequence, seqlen, n_chunks):
    """The :class:`Span` of a sequence; `seqlen` and `n_chunks` are those of the sequences of a batch."""
    if chunks.cu_ptr is None:
        return Span(sequence, sequence, 0, seqlen, sequence * n_chunks)
    else:
        first = tl.load(chunks.cu_ptr + sequence)
        length = tl.load(chunks.cu_ptr + sequence + 1) - first
        return Span(sequence, 0, first, length, tl.load(chunks.first_ptr + sequence))


@triton.jit
def span_of_chunk(chunks, chunk, seqlen, n_chunks):
    """The :class:`Span` of the sequence of a chunk."""
    if chunks.cu_ptr is None:
        return span_of(chunks, chunk // n_chunks, seqlen, n_chunks)
    else:
        return span_of(chunks, tl.load(chunks.sequence_ptr + chunk), seqlen, n_chunks)


@triton.jit
def rows_of_chunk(span, start, valid_ptr, n_valid, CHUNK: tl.constexpr):
    """Which tokens ``start + arange(CHUNK)`` of a sequence exist and, as keys, are not hidden, bool ``(CHUNK,)``.

    `valid_ptr` is None or a bool ``(batch, n_valid)`` tensor.
    """
    rows = start + tl.arange(0, CHUNK)
    exist = rows < span.seqlen
    if valid_ptr is not None:
        base = valid_ptr + tl.cast(span.batch, tl.int64) * n_valid + span.first
        exist = exist & (tl.load(base + rows, mask=exist, other=0) != 0)
    return exist


@triton.jit
def load_rows(x, span, head, start, readable, tile, FIRST, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """WIDTH features, from FIRST on, of a chunk of a :class:`Strided`; rows that are not `readable` are 0."""
    return load_tile(head_of(x, span.batch, head, span.first), start, readable, HEAD_DIM, tile.CHUNK, WIDTH, FIRST)


@triton.jit
def store_rows(x, span, head, start, values, FIRST, HEAD_DIM: tl.constexpr):
    """Write a tile ``(CHUNK, WIDTH)`` to features from FIRST on of a chunk of a :class:`Strided`, rounded."""
    offs = tl.arange(0, values.shape[0])
    offs_d = FIRST + tl.arange(0, values.shape[1])
    ptrs = head_base(x, span.batch, head, span.first + start) + (offs[:, None] * x.stride_s + offs_d[None, :])
    exist = (start + offs < span.seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptrs, round_to(values, x.ptr.dtype.element_ty), mask=exist)


@triton.jit
def load_numbers(ptr, span, head, nheads, n_rows, start, readable, CHUNK: tl.constexpr):
    """One number for each row of a chunk, of a contiguous ``(batch, nheads, n_rows)`` tensor, 0 if not `readable`."""
    base = (tl.cast(span.batch, tl.int64) * nheads + head) * n_rows + span.first + start
    return tl.load(ptr + base + tl.arange(0, CHUNK), mask=readable, other=0.0)


@triton.jit
def state_pointers(ptr, index, head, nheads, first_v, tile):
    """Pointers to a tile of one of the contiguous states ``(n, nheads, head_dim, head_dim_v)``, and which exist."""
    offs_d = tl.arange(0, tile.BLOCK_D)[:, None]
    offs_v = first_v + tl.arange(0, tile.BLOCK_DV)[None, :]
    base = ptr + (tl.cast(index, tl.int64) * nheads + head) * (tile.HEAD_DIM * tile.HEAD_DIM_V)
    return base + offs_d * tile.HEAD_DIM_V + offs_v, (offs_d < tile.HEAD_DIM) & (offs_v < tile.HEAD_DIM_V)


@triton.jit
def sum_pointers(ptr, index, head, nheads, tile):
    """Pointers to one of the contiguous sums of features ``(n, nheads, head_dim)``, and which exist."""
    offs_d = tl.arange(0, tile.BLOCK_D)
    base = ptr + (tl.cast(index, tl.int64) * nheads + head) * tile.HEAD_DIM
    return base + offs_d, offs_d < tile.HEAD_DIM


@triton.jit
def sum_along(x, axis: tl.constexpr, ACC: tl.constexpr):
    """``sum(x)`` along an axis; NumPy adds rows to one sum in their order, which no GPU does."""
    if INTERPRETED:
        return tl.sum(x.to(tl.float64), axis).to(ACC)
    else:
        return tl.sum(x, axis)


@triton.jit
def sum_seen(weights, rows, tile, ACC: tl.constexpr):
    """``weights @ rows`` for weights that are 0 where a row is behind a query, ACC; the first factor is rounded.

    A NaN or Inf in a row does not reach queries before it, whose weight of 0 it would turn into NaN. Those that see it
    get NaN (docs/decisions/0003).
    """
    acc = _weighted(weights, rows, tile, ACC)
    if has_nan(acc):
        clean, poisoned = split_poison(rows, ACC)
        offs = tl.arange(0, rows.shape[0])
        sees = (offs[:, None] >= offs[None, :]) & poisoned[None, :]
        acc = _weighted(weights, clean, tile, ACC)
        acc = tl.where(tl.max(sees.to(tl.int32), 1)[:, None] != 0, float("nan"), acc)
    return acc


@triton.jit
def _weighted(weights, rows, tile, ACC: tl.constexpr):
    if rows.dtype == tl.float16:
        # Weights are not divided by their sum yet, and may be beyond the range of float16.
        return dot(weights, widen(rows, ACC), ACC, tile.STATE_PRECISION)
    else:
        return dot(round_to(weights, rows.dtype), rows, ACC, tile.PRECISION)


@triton.jit
def features_of(x, readable, feature_map, HEAD_DIM: tl.constexpr, ACC: tl.constexpr):
    """``phi(x)`` of a tile ``(CHUNK, BLOCK_D)`` in the dtype of `x`; 0 in rows that are not `readable`."""
    return round_to(_hidden_as_zero(_mapped(x, feature_map, HEAD_DIM, ACC), readable, HEAD_DIM), x.dtype)


@triton.jit
def through_features(x, gradient, readable, feature_map, HEAD_DIM: tl.constexpr, ACC: tl.constexpr):
    """The gradient of a tile `x` from that of its features, ACC ``(CHUNK, BLOCK_D)``."""
    x = widen(x, ACC)
    if feature_map.NAME == "elu+1":
        found = gradient * tl.where(x > 0.0, 1.0, _exp(tl.where(x > 0.0, 0.0, x)))
    elif feature_map.NAME == "relu":
        found = tl.where(x <= 0.0, 0.0, gradient)
    elif feature_map.NAME == "softmax":
        p = _mapped(x, feature_map, HEAD_DIM, ACC)
        found = p * (gradient - tl.sum(p * gradient, 1)[:, None])
    elif feature_map.NAME == "identity":
        found = gradient
    else:
        found = gradient * feature_map.DERIVATIVE(x)
    return _hidden_as_zero(found, readable, HEAD_DIM)


@triton.jit
def _mapped(x, feature_map, HEAD_DIM: tl.constexpr, ACC: tl.constexpr):
    """``phi(x)`` in ACC, without regard to rows and columns that do not exist."""
    x = widen(x, ACC)
    if feature_map.NAME == "elu+1":
        return tl.where(x > 0.0, x + 1.0, _exp(tl.where(x > 0.0, 0.0, x)))
    elif feature_map.NAME == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif feature_map.NAME == "softmax":
        exist = tl.arange(0, x.shape[1])[None, :] < HEAD_DIM
        x = tl.where(exist, x, float("-inf"))
        powers = _exp(x - tl.max(x, 1)[:, None])
        return powers / tl.sum(powers, 1)[:, None]
    elif feature_map.NAME == "identity":
        return x
    else:
        return feature_map.FUNCTION(x)


@triton.jit
def _exp(x):
    """``exp(x)`` for x at most 0."""
    return exp2_of_product(x, LOG2E)


@triton.jit
def _hidden_as_zero(x, readable, HEAD_DIM: tl.constexpr):
    exist = readable[:, None] & (tl.arange(0, x.shape[1])[None, :] < HEAD_DIM)
    return tl.where(exist, x, 0.0)


NUM_WARPS = 8


def sizes_of(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Tokens of a chunk, and features of values at a time, with which next to no kernel spills registers.

    float32 products by FMAs take more of them.
    """
    if dtype.itemsize == 2:
        return (64, 64) if head_dim <= 128 else (16, 32)
    return (32, 32) if head_dim <= 64 else (16, 32)


@lru_cache(maxsize=1024)
def constants_of(kernel: Any, tile: LinearTile, feature_map: FeatureMap, **switches: bool) -> launcher.KernelConstants:
    """The constants of a launch; `switches` are the constexpr parameters of a kernel besides the two."""
    return launcher.KernelConstants(
        kernel,
        tile=tile,
        feature_map=feature_map,
        **switches,
        num_warps=NUM_WARPS,
        num_stages=1,  # copies ahead would touch registers of products in flight (docs/decisions/0021)
    )


def linear_tile(head_dim: int, head_dim_v: int, dtype: torch.dtype, precision: str) -> LinearTile:
    """The constants of all kernels; `precision` is that of float32 products."""
    chunk, width = sizes_of(head_dim, dtype)
    return LinearTile(
        HEAD_DIM=tl.constexpr(head_dim),
        HEAD_DIM_V=tl.constexpr(head_dim_v),
        CHUNK=tl.constexpr(chunk),
        BLOCK_D=tl.constexpr(block_d(head_dim)),
        BLOCK_DV=tl.constexpr(min(width, block_d(head_dim_v))),
        ACC=tl.constexpr(accumulator(dtype).name),
        PRECISION=tl.constexpr(precision),
        STATE_PRECISION=tl.constexpr("tf32" if dtype.itemsize == 2 else precision),
    )
