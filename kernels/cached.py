"""Keys and values in a cache: where they lie, and the numbers of their codes.

Key ``j`` of a sequence lies in a slot of a row: of a page, with a block table; in a ring, where later tokens overwrite
earlier ones, behind the slots of its sinks. The codes of a token are multiplied as they are; its scale then multiplies
scores or weights.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels.primitives import round_to


class Scales(NamedTuple):
    """Factors of codes, float32 ``(n_rows, heads, slots)``, with a stride of 0 if a row has one for all of its slots.

    If GROUP is not 0, each slot has one for each GROUP of features instead, in order. Those of GIVEN scales are not
    written when tokens are appended.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    GROUP: Any
    GIVEN: Any


class CacheArguments(NamedTuple):
    """A cache as the kernels read it.

    `table_ptr` is int32 ``(sequences, max_pages)``, for pages of PAGE slots, or None. `rows_ptr` is int32
    ``(sequences,)``, or None. `first_ptr`, int32 ``(sequences,)``, has the tokens at the start that no query sees, or
    is None. `n_rows` limits the entries of the table and of `rows_ptr`. `ring` slots, or None, follow N_SINKS slots
    that are not overwritten. FORMAT is that of the codes, "" for numbers, and None without a cache.
    """

    table_ptr: Any
    table_stride: Any
    rows_ptr: Any
    first_ptr: Any
    n_rows: Any
    ring: Any
    k_scale: Scales | None
    v_scale: Scales | None
    N_SINKS: Any
    PAGE: Any
    FORMAT: Any


NO_CACHE = CacheArguments(None, None, None, None, None, None, None, None, None, None, None)


@triton.jit
def row_of(cache, place):
    """(row, whether there is such a row) of a sequence without pages."""
    if cache.rows_ptr is not None:
        row = tl.load(cache.rows_ptr + place.sequence)
        exists = (row >= 0) & (row < cache.n_rows)
        return tl.where(exists, row, 0), exists
    else:
        return place.sequence, place.sequence >= 0


@triton.jit
def slots_of(cache, place, keys, readable):
    """(row, slot, whether they have a place) of `keys`, ``(BLOCK,)``, that are `readable`; the row may be a scalar."""
    if cache.ring is not None:
        tokens = tl.where(keys < cache.N_SINKS, keys, keys + place.dropped)
    else:  # tokens without a place were left out
        tokens = keys
        readable = readable & (place.dropped == 0)
    return place_in_cache(cache, place, tokens, readable)


@triton.jit
def place_in_cache(cache, place, tokens, exist):
    """(row, slot, whether they have a place) of `tokens` of a sequence, ``(BLOCK,)``, that `exist`.

    Tokens that later ones of the sequence have overwritten have none.
    """
    slots = tokens
    if cache.ring is not None:
        behind = tokens - cache.N_SINKS
        slots = tl.where(behind < 0, tokens, cache.N_SINKS + behind % cache.ring)
        exist = exist & (tokens >= 0) & ((behind < 0) | (behind >= place.dropped))
    else:
        exist = exist & (tokens >= 0) & (tokens < place.seqlen_k)
    if cache.table_ptr is not None:
        entries = cache.table_ptr + tl.cast(place.sequence, tl.int64) * cache.table_stride + slots // cache.PAGE
        row = tl.load(entries, mask=exist, other=0)
        return row, slots % cache.PAGE, exist & (row >= 0) & (row < cache.n_rows)
    else:
        row, row_exists = row_of(cache, place)
        return row, slots, exist & row_exists


@triton.jit
def slot_pointers(x, head, row, slots):
    """Pointers to slots of one head, ``(BLOCK,)``, of a :class:`Strided` or of :class:`Scales`; `row` may be a scalar.

    In int64: the memory of a cache may exceed 2^31 elements.
    """
    head_ptr = x.ptr + tl.cast(head, tl.int64) * x.stride_h
    return head_ptr + (tl.cast(row, tl.int64) * x.stride_b + slots.to(tl.int64) * x.stride_s)


@triton.jit
def load_cached(
    x, scale, cache, place, head_kv, keys, readable, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    dtype: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """BLOCK_D features, from FIRST on, of `keys` of a :class:`Strided`, keys or values, as numbers of `dtype`.

    The tile is ``(BLOCK, BLOCK_D)``; keys that are not `readable` are 0. FIRST is a multiple of BLOCK_D. Numbers of
    codes still lack their factor, which load_factors returns, except for that of a group of features.
    """
    row, slots, exists = slots_of(cache, place, keys, readable)
    ptrs = slot_pointers(x, head_kv, row, slots)
    PER_ELEMENT: tl.constexpr = 2 if cache.FORMAT == "int4" else 1
    offs = tl.arange(0, BLOCK_D // PER_ELEMENT)
    offs += FIRST // PER_ELEMENT
    mask = exists[:, None]
    if HEAD_DIM % BLOCK_D != 0:
        mask = mask & (offs < HEAD_DIM // PER_ELEMENT)[None, :]
    codes = tl.load(ptrs[:, None] + offs[None, :], mask=mask, other=0)
    if cache.FORMAT == "":
        return codes
    elif cache.FORMAT == "int4":
        low = (codes & 15).to(tl.float32) - 8.0
        high = (codes >> 4).to(tl.float32) - 8.0
        numbers = tl.reshape(tl.join(low, high), (keys.shape[0], BLOCK_D))
        if scale.GROUP > 0:
            N_GROUPS: tl.constexpr = BLOCK_D // scale.GROUP
            groups = FIRST // scale.GROUP + tl.arange(0, N_GROUPS)
            ptrs = slot_pointers(scale, head_kv, row, slots)[:, None] + groups[None, :]
            factors = tl.load(ptrs, mask=exists[:, None] & (groups * scale.GROUP < HEAD_DIM)[None, :], other=0.0)
            numbers = tl.reshape(numbers, (keys.shape[0], N_GROUPS, scale.GROUP)) * factors[:, :, None]
            numbers = tl.reshape(numbers, (keys.shape[0], BLOCK_D))
        # Features beyond the last have codes of 0, which are not 0 here.
        of_features = FIRST + tl.arange(0, BLOCK_D) < HEAD_DIM
        return round_to(tl.where(exists[:, None] & of_features[None, :], numbers, 0.0), dtype)
    else:
        return decoded(codes, cache.FORMAT, scale.GIVEN, dtype)


@triton.jit
def load_factors(scale, cache, place, head_kv, keys, readable, ACC: tl.constexpr):
    """The factors of scores or weights of `keys`, ``(BLOCK,)``; NaN for a `readable` key without a place."""
    row, slots, exists = slots_of(cache, place, keys, readable)
    lost = tl.where(readable & ~exists, float("nan"), 1.0).to(ACC)
    if scale is None or scale.GROUP > 0:
        return lost
    else:
        factors = tl.load(slot_pointers(scale, head_kv, row, slots), mask=exists, other=0.0).to(ACC) * lost
        if cache.FORMAT == "e4m3" or cache.FORMAT == "e5m2":
            factors *= 256.0  # decoded() leaves it out
        return factors


@triton.jit
def first_visible(cache, place):
    """The first key of a sequence that is not hidden as padding."""
    first = 0
    if cache.first_ptr is not None:
        first = tl.maximum(tl.load(cache.first_ptr + place.sequence) - tl.maximum(place.dropped, 0), 0)
    return first


@triton.jit
def decoded(codes, FORMAT: tl.constexpr, HAS_NAN: tl.constexpr, dtype: tl.constexpr):
    """The numbers of int8 codes of 8 bits in `dtype`, which holds all of them; those of floating-point codes over 256.

    A shift puts the bits of a floating-point code where those of a wider format are; the bias of the exponent then
    differs, which a product makes good. Over 256, they are far from the largest float16, which a rotation may exceed.
    """
    if FORMAT == "int8":
        numbers = codes.to(tl.float32)
    else:
        E5M2: tl.constexpr = FORMAT == "e5m2"
        if dtype == tl.float16:
            bits = codes.to(tl.int16)  # the sign fills the upper byte
            if E5M2:
                numbers = (bits << 8).to(tl.float16, bitcast=True) * 0.00390625
            else:
                numbers = ((bits << 7) & -0x4080).to(tl.float16, bitcast=True)
        else:
            bits = codes.to(tl.int32)
            if E5M2:
                numbers = ((bits << 21) & -0x70200000).to(tl.float32, bitcast=True) * 2.0**104
            else:
                numbers = ((bits << 20) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**112
        if HAS_NAN:
            magnitude = codes.to(tl.int32) & 0x7F
            if E5M2:
                numbers = tl.where(magnitude == 0x7C, numbers * float("inf"), numbers)
            numbers = tl.where(magnitude > (0x7C if E5M2 else 0x7E), float("nan"), numbers)
    return round_to(numbers, dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Codes as the kernels take them: floating-point ones as their bits, with a sign."""
    return x.view(torch.int8) if x.dtype.itemsize == 1 and x.dtype.is_floating_point else x


def cache_arguments(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    table: torch.Tensor | None,
    rows: torch.Tensor | None,
    left_padding: torch.Tensor | None,
    n_sinks: int,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> CacheArguments:
    """A cache for the kernels.

    Args:
        k, v: its memory, ``(n_rows, nheads_kv, n_slots, ...)``.
        table, rows, left_padding: int32 ``(batch, max_pages)``, ``(batch,)`` and ``(batch,)``, or None.
        n_sinks: the slots before a ring; -1 if nothing is overwritten.
        scales: those of keys and of values, ``(n_rows, nheads_kv, n_slots, n)`` or ``(n_rows, nheads_kv)``.
    """
    n_slots = k.shape[2] * (1 if table is None else table.shape[1])
    return CacheArguments(
        table_ptr=table,
        table_stride=None if table is None else table.stride(0),
        rows_ptr=rows,
        first_ptr=left_padding,
        n_rows=None if table is None and rows is None else k.shape[0],  # Triton would compile for a batch of 1 again
        ring=None if n_sinks < 0 else n_slots - n_sinks,
        k_scale=_scales(scales[0], 2 * k.shape[3]),
        v_scale=_scales(scales[1], 2 * v.shape[3]),
        N_SINKS=tl.constexpr(max(0, n_sinks)),
        PAGE=tl.constexpr(0 if table is None else k.shape[2]),
        FORMAT=tl.constexpr(_FORMATS.get(k.dtype, "")),
    )


_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8", torch.uint8: "int4"}


def _scales(scale: torch.Tensor | None, head_dim: int) -> Scales | None:
    """Scales for a kernel; if there are several for each token, codes have 4 bits, and a head `head_dim` of them."""
    if scale is None:
        return None
    n, stride_s = (scale.shape[3], scale.stride(2)) if scale.dim() == 4 else (1, 0)
    group = 0 if n == 1 else head_dim // n
    is_given = tl.constexpr(scale.dim() == 2)
    return Scales(scale, scale.stride(0), scale.stride(1), stride_s, tl.constexpr(group), is_given)
