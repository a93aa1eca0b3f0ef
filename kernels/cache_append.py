"""Append tokens to a cache: rotate their keys, quantise keys and values, and store both where they belong.

    k, v    (batch, nheads_kv, n, head_dim)    new tokens, or packed ones in a batch of 1
    grid    (tiles of tokens * nheads_kv * sequences,)

New tokens are the last of their sequence, as queries are in attention; a :class:`Place` calls them queries here.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.cached import CacheArguments, place_in_cache, slot_pointers
from fusedattn.kernels.configs import rope_rows
from fusedattn.kernels.primitives import (
    accumulator,
    block_d,
    dtype_of,
    head_of,
    load_tile,
    program_tile,
    round_to,
    strided,
    widen,
)
from fusedattn.kernels.quantizing import encoded, scales_of
from fusedattn.kernels.rope import RotationArguments, rotate_tile
from fusedattn.kernels.sequences import Sequences, Shape, place_of


class TokenTile(NamedTuple):
    """Constants: BLOCK tokens of HEAD_DIM and HEAD_DIM_V features, BLOCK_D and BLOCK_DV rounded up."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ACC: Any


@triton.jit
def _store(x, into, scale, cache, head, row, slots, stored, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile of tokens, ``(BLOCK, BLOCK_D)``, to slots of a cache, as numbers or as codes with their scales."""
    BLOCK: tl.constexpr = x.shape[0]
    PER_ELEMENT: tl.constexpr = 2 if cache.FORMAT == "int4" else 1
    WIDTH: tl.constexpr = BLOCK_D // PER_ELEMENT
    if cache.FORMAT == "":
        codes = round_to(x, into.ptr.dtype.element_ty)
    else:
        x = x.to(tl.float32)
        ptrs = slot_pointers(scale, head, row, slots)
        if scale.GIVEN:
            factors = tl.load(ptrs, mask=stored, other=0.0)
            codes = encoded(x, factors[:, None], cache.FORMAT)
        elif scale.GROUP > 0:
            N_GROUPS: tl.constexpr = BLOCK_D // scale.GROUP
            groups = tl.arange(0, N_GROUPS)
            grouped = tl.reshape(x, (BLOCK, N_GROUPS, scale.GROUP))
            factors = scales_of(grouped, cache.FORMAT)
            there = stored[:, None] & (groups * scale.GROUP < HEAD_DIM)[None, :]
            tl.store(ptrs[:, None] + groups[None, :], factors, mask=there)
            codes = tl.reshape(encoded(grouped, factors[:, :, None], cache.FORMAT), (BLOCK, BLOCK_D))
        else:
            factors = scales_of(x, cache.FORMAT)
            tl.store(ptrs, factors, mask=stored)
            codes = encoded(x, factors[:, None], cache.FORMAT)
        if cache.FORMAT == "int4":
            low, high = tl.split(tl.reshape(codes, (BLOCK, WIDTH, 2)))
            codes = low | (high << 4)
        codes = codes.to(into.ptr.dtype.element_ty)
    offs = tl.arange(0, WIDTH)
    ptrs = slot_pointers(into, head, row, slots)
    mask = stored[:, None] & (offs < HEAD_DIM // PER_ELEMENT)[None, :]
    tl.store(ptrs[:, None] + offs[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["nheads", "seqlen_q", "seqlen_k", "n_positions", "n_tiles"])
def cache_append(
    k,
    v,
    k_cache,
    v_cache,
    cache,
    sequences,
    rotation,
    nheads,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_tiles,
    tile,
):
    ACC: tl.constexpr = dtype_of(tile.ACC)
    number, head, sequence = program_tile(n_tiles, nheads, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads, seqlen_q, seqlen_k)
    start = number * tile.BLOCK
    if start >= place.seqlen_q:
        return
    rows = start + tl.arange(0, tile.BLOCK)
    exist = rows < place.seqlen_q
    tokens = place.seqlen_k + place.dropped - place.seqlen_q + rows
    row, slots, stored = place_in_cache(cache, place, tokens, exist)
    k_tile = load_tile(
        head_of(k, place.batch, head, place.first_q), start, exist, tile.HEAD_DIM, tile.BLOCK, tile.BLOCK_D
    )
    if rotation.ROTARY_DIM > 0:
        k_tile = rotate_tile(
            k_tile, rotation, place, start, n_positions, tile.BLOCK, tile.BLOCK_D, ACC, OF_QUERIES=True, TRANSPOSE=False
        )
    k_tile = widen(k_tile, ACC)
    _store(k_tile, k_cache, cache.k_scale, cache, head, row, slots, stored, tile.HEAD_DIM, tile.BLOCK_D)
    if v is not None:
        v_head = head_of(v, place.batch, head, place.first_q)
        v_tile = load_tile(v_head, start, exist, tile.HEAD_DIM_V, tile.BLOCK, tile.BLOCK_DV)
        v_tile = widen(v_tile, ACC)
        _store(v_tile, v_cache, cache.v_scale, cache, head, row, slots, stored, tile.HEAD_DIM_V, tile.BLOCK_DV)


def launch(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    cache: CacheArguments,
    sequences: Sequences,
    rotation: RotationArguments,
    n_positions: int,
    shape: Shape,
    head_dims: tuple[int, int],
) -> None:
    """Write k and v into the memory of a cache; layouts as in the module docstring.

    `shape` calls the new tokens queries; `head_dims` are the features of keys and of values.
    """
    constants = _constants(*head_dims, k.dtype, shape.max_seqlen_q == 1)
    n_tiles = triton.cdiv(shape.max_seqlen_q, constants.named["tile"].BLOCK.value)
    launcher.launch(
        constants,
        n_tiles * shape.nheads_kv * shape.n_sequences,
        (
            strided(k),
            None if v is None else strided(v),
            strided(k_cache),
            None if v_cache is None else strided(v_cache),
            cache,
            sequences,
            rotation,
        ),
        (shape.nheads_kv, shape.seqlen_q, shape.seqlen_k, n_positions, n_tiles),
    )


@lru_cache(maxsize=1024)
def _constants(head_dim: int, head_dim_v: int, dtype: torch.dtype, is_one: bool) -> launcher.KernelConstants:
    tile = TokenTile(
        HEAD_DIM=tl.constexpr(head_dim),
        HEAD_DIM_V=tl.constexpr(head_dim_v),
        BLOCK=tl.constexpr(1 if is_one else rope_rows(max(head_dim, head_dim_v))),
        BLOCK_D=tl.constexpr(block_d(head_dim)),
        BLOCK_DV=tl.constexpr(block_d(head_dim_v)),
        ACC=tl.constexpr(accumulator(dtype).name),
    )
    return launcher.KernelConstants(cache_append, tile=tile, num_warps=4)
