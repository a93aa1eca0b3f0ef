"""Attention of e4m3 codes: where they lie, their products, and the weights as codes.

Every 128 tokens of a head share a scale. A tile of queries, and each tile of keys that it visits, lies within one such
block, so its products have one factor.

    q         (batch, nheads_q, 128 * n_blocks, width)         width: head_dim rounded up to a power of two, at least 32
    k         (batch, nheads_kv, 128 * n_blocks, width)
    v         (batch, nheads_kv, head_dim_v, 128 * n_blocks)   transposed: a product takes bytes that it sums together
    scales    (batch, nheads, n_blocks)                        float32; kernels/fp8_codes.py writes all of these

Each of packed sequences begins with a block of its own. Codes of tokens that do not exist, or are padding, are 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.cached import decoded
from fusedattn.kernels.primitives import INTERPRETED, Head, dot, head_base, load_tile
from fusedattn.kernels.quantizing import codes_of, largest_code
from fusedattn.kernels.sequences import with_first

TOKENS = tl.constexpr(128)  # of a block


class Codes(NamedTuple):
    """How codes are made: one scale for a tensor or one for each block, of q and k that are rotated first or not."""

    of_tensor: bool
    rotates: bool


class CodeScales(NamedTuple):
    """Scales of q, k and v, float32, with `n_q` and `n_k` for each head; all None if these are no codes."""

    q_scale_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any
    n_q: Any
    n_k: Any


NO_SCALES = CodeScales(None, None, None, None, None)


class HeadScales(NamedTuple):
    """The scale of a tile of queries, and pointers to those of its keys and values, from the first block on.

    `last` is the start of the last tile that has keys: blocks of a mask may reach further.
    """

    q: Any
    k_ptr: Any
    v_ptr: Any
    last: Any


@triton.jit
def place_of_codes(place, sequences):
    """The :class:`~fusedattn.kernels.sequences.Place` of a sequence in the tensors of codes."""
    first_q = place.first_q
    first_k = place.first_k
    # A sequence may need a block more than its length fills, so each has one to spare.
    if sequences.cu_q_ptr is not None:
        first_q = (first_q // TOKENS + place.sequence) * TOKENS
    if sequences.cu_k_ptr is not None:
        first_k = (first_k // TOKENS + place.sequence) * TOKENS
    return with_first(place, first_q, first_k)


@triton.jit
def scale_pointer(ptr, n, nheads, place, head, first):
    """Pointer to the scale of the block that begins with token `first` of the tensor of codes."""
    return ptr + ((tl.cast(place.batch, tl.int64) * nheads + head) * n + first // TOKENS)


@triton.jit
def scales_of_head(scales, place, nheads_q, nheads_kv, head, head_kv, start_m, BLOCK_N: tl.constexpr):
    """The :class:`HeadScales` of queries from `start_m` on and tiles of BLOCK_N keys, at a place_of_codes."""
    q = tl.load(scale_pointer(scales.q_scale_ptr, scales.n_q, nheads_q, place, head, place.first_q + start_m))
    return HeadScales(
        q,
        scale_pointer(scales.k_scale_ptr, scales.n_k, nheads_kv, place, head_kv, place.first_k),
        scale_pointer(scales.v_scale_ptr, scales.n_k, nheads_kv, place, head_kv, place.first_k),
        tl.maximum(place.seqlen_k - 1, 0) // BLOCK_N * BLOCK_N,
    )


@triton.jit
def with_keys(scales, start_n):
    """`start_n`, or the start of another tile if that from `start_n` on has no keys, and hence no codes to read.

    A sequence without keys has nothing to read in any tile, but all of its queries see nothing and are 0.
    """
    return tl.minimum(start_n, scales.last)


@triton.jit
def scale_of_products(scales, start_n):
    """The factor of the products of codes of the queries and of the keys from `start_n` on: finite, as 0 times it."""
    scale = scales.q * tl.load(scales.k_ptr + with_keys(scales, start_n) // TOKENS)
    return tl.minimum(scale, 3.4028234663852886e38)


@triton.jit
def scale_of_values(scales, start_n):
    """The scale of the values of the keys from `start_n` on."""
    return tl.load(scales.v_ptr + with_keys(scales, start_n) // TOKENS)


@triton.jit
def values_of_head(v, place, head_kv):
    """The :class:`Head` of transposed values, at a place_of_codes: its rows are features."""
    # A row is as long as all tokens: offsets inside a tile need int64.
    stride = tl.cast(v.stride_s, tl.int64)
    return Head(head_base(v, place.batch, head_kv, 0) + place.first_k, stride, place.batch, head_kv, 0)


@triton.jit
def load_values(v, start_n, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The codes of the values of BLOCK keys from `start_n` on, ``(BLOCK, BLOCK_D)``."""
    start_n = tl.multiple_of(start_n, BLOCK)
    features = None
    if HEAD_DIM != BLOCK_D:
        features = tl.arange(0, BLOCK_D) < HEAD_DIM
    return tl.trans(load_tile(v, 0, features, BLOCK, BLOCK_D, BLOCK, start_n))


@triton.jit
def numbers_of(codes):
    """The numbers of e4m3 codes, float32."""
    return decoded(codes.to(tl.int8, bitcast=True), "e4m3", True, tl.float32) * 256.0


@triton.jit
def dot_codes(a, b):
    """``a @ b`` of codes, in float32. Hopper sums such a product with fewer bits: no sum goes on into the next one."""
    if INTERPRETED:
        return dot(numbers_of(a), numbers_of(b), tl.float32, "ieee")
    else:
        return tl.dot(a, b, out_dtype=tl.float32)


@triton.jit
def add_values(acc, p, v_tile, v_scale):
    """``acc + p @ v_tile``: weights of at most 1, relative to the largest of their row so far, and codes of values."""
    LARGEST: tl.constexpr = largest_code("e4m3")
    p = p * LARGEST
    if INTERPRETED:
        p = codes_of(p, "e4m3").to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        p = p.to(tl.float8e4nv)  # to nearest, at most the largest
    return tl.fma(dot_codes(p, v_tile), v_scale * (1.0 / LARGEST), acc)


@triton.jit
def split_poison(codes):
    """Codes of values with 0 for NaN, and whether each row had one, ``(BLOCK,)``."""
    bits = codes.to(tl.int8, bitcast=True)
    poisoned = (bits & 0x7F) == 0x7F
    bits = tl.where(poisoned, 0, bits).to(tl.int8)
    return bits.to(tl.float8e4nv, bitcast=True), tl.max(poisoned.to(tl.int32), 1) != 0
