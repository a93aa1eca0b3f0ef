"""Rotary position embedding: the rotation of a tile in registers.

For the feature pair ``(a, b)`` at one position, with table entries ``c`` and ``s``::

    rotation            a' = a c - b s      b' = b c + a s
    its transpose       a' = a c + b s      b' = b c - a s

The gradient of a rotated tensor is rotated back by the transpose, which is the inverse only if ``c^2 + s^2 = 1``:
scaled tables (YaRN, LongRoPE) do not keep that.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels.primitives import halves, joined, widen


class RotationArguments(NamedTuple):
    """A :class:`Rotation` as kernels take it; ROTARY_DIM == 0 if nothing rotates.

    FROM_START: without positions, the last query has that of the last token of its sequence, though a cache may have
    dropped some; otherwise that of the last key.
    """

    cos_ptr: Any
    sin_ptr: Any
    positions_ptr: Any
    stride_tb: Any
    stride_pb: Any
    INTERLEAVED: Any
    FROM_START: Any
    ROTARY_DIM: Any


NO_ROTATION = RotationArguments(None, None, None, None, None, tl.constexpr(False), tl.constexpr(False), tl.constexpr(0))


@triton.jit
def _rotate_pairs(
    a,
    b,
    rotation,
    table,
    entry,
    no_entry,
    TRANSPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Rotate the pairs of two ``(BLOCK, PAIRS)`` tiles; `table`, ``(BLOCK, 1)``, is the offset of the first entry."""
    if BLOCK * PAIRS >= 8192 and HALVES:
        # Registers cannot hold all table entries of a large tile. Halved only once: in quarters, that of dq spills.
        HALF: tl.constexpr = PAIRS // 2
        a0, a1 = halves(a, BLOCK, PAIRS)
        b0, b1 = halves(b, BLOCK, PAIRS)
        a0, b0 = _rotate_pairs(a0, b0, rotation, table, entry, no_entry, TRANSPOSE, BLOCK, HALF, False, ACC)
        a1, b1 = _rotate_pairs(a1, b1, rotation, table + HALF, entry, no_entry, TRANSPOSE, BLOCK, HALF, False, ACC)
        return joined(a0, a1, BLOCK, PAIRS), joined(b0, b1, BLOCK, PAIRS)
    else:
        pairs = table + tl.arange(0, PAIRS)[None, :]
        cos = tl.load(rotation.cos_ptr + pairs, mask=entry, other=1.0)
        sin = tl.load(rotation.sin_ptr + pairs, mask=entry, other=0.0).to(ACC)
        if TRANSPOSE:
            sin = -sin
        else:  # gradients are NaN already, or 0 for rows that are not seen
            cos = tl.where(no_entry, float("nan"), cos)
        cos = cos.to(ACC)
        return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotate_tile(
    x,
    rotation,
    place,
    start,
    n_positions,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    HEADS: tl.constexpr = 1,
):
    """Rotate the first ROTARY_DIM features of rows ``start + arange(BLOCK)``; ``(BLOCK, BLOCK_D)``, in ACC.

    Rows are queries or keys of `place`. Positions are given; otherwise keys count from 0, and the last query has the
    position of the last key. A position outside the tables makes its row NaN, because no table entry would be right.
    With HEADS each row is repeated HEADS times, one copy after the other (kernels/grouped_heads.py).
    """
    if OF_QUERIES:
        first = place.first_q
        seqlen = place.seqlen_q
        position_offset = place.seqlen_k - place.seqlen_q
        if rotation.FROM_START:
            position_offset += place.dropped
    else:
        first = place.first_k
        seqlen = place.seqlen_k
        position_offset = 0
    HALF: tl.constexpr = rotation.ROTARY_DIM // 2
    rows = start + tl.arange(0, BLOCK) // HEADS
    exists = (rows >= 0) & (rows < seqlen)
    if rotation.positions_ptr is not None:
        positions_row = rotation.positions_ptr + tl.cast(place.batch, tl.int64) * rotation.stride_pb + first
        positions = tl.load(positions_row + rows, mask=exists, other=0)
    else:
        positions = rows + position_offset
    in_table = (positions >= 0) & (positions < n_positions)
    table = tl.cast(place.sequence, tl.int64) * rotation.stride_tb + positions.to(tl.int64)[:, None] * HALF
    entry = (exists & in_table)[:, None]
    no_entry = (exists & ~in_table)[:, None]
    x = widen(x, ACC)
    if rotation.ROTARY_DIM == BLOCK_D:
        # One thread has both features of a pair: it loads half of the table entries, and exchanges nothing.
        if rotation.INTERLEAVED:
            a, b = tl.split(tl.reshape(x, (BLOCK, HALF, 2)))
        else:
            a, b = halves(x, BLOCK, BLOCK_D)
        a, b = _rotate_pairs(a, b, rotation, table, entry, no_entry, TRANSPOSE, BLOCK, HALF, True, ACC)
        if rotation.INTERLEAVED:
            return tl.reshape(tl.join(a, b), (BLOCK, BLOCK_D))
        else:
            return joined(a, b, BLOCK, BLOCK_D)
    else:
        # Feature d rotates with `partner[d]`, by the angle of pair `pair[d]`; `sign` is that of the sine.
        offs_d = tl.arange(0, BLOCK_D)
        rotates = offs_d < rotation.ROTARY_DIM
        if rotation.INTERLEAVED:
            pair = offs_d // 2
            partner = tl.where(rotates, offs_d ^ 1, offs_d)
            is_first = offs_d % 2 == 0
        else:
            pair = offs_d % HALF
            partner = tl.where(offs_d < HALF, offs_d + HALF, tl.where(rotates, offs_d - HALF, offs_d))
            is_first = offs_d < HALF
        if TRANSPOSE:
            sign = tl.where(is_first, 1.0, -1.0)
        else:
            sign = tl.where(is_first, -1.0, 1.0)
        entry = entry & rotates[None, :]
        cos = tl.load(rotation.cos_ptr + table + pair[None, :], mask=entry, other=1.0)
        if not TRANSPOSE:
            cos = tl.where(no_entry & rotates[None, :], float("nan"), cos)
        cos = cos.to(ACC)
        sin = (tl.load(rotation.sin_ptr + table + pair[None, :], mask=entry, other=0.0) * sign[None, :]).to(ACC)
        swapped = tl.gather(x, tl.broadcast_to(partner[None, :], (BLOCK, BLOCK_D)), 1)
        return x * cos + swapped * sin


@dataclass(frozen=True)
class Rotation:
    """The rotation of the rows of one tensor, q or k.

    Attributes:
        cos, sin: float32 ``(batch or 1, n_positions, rotary_dim / 2)``, contiguous.
        positions: int ``(batch or 1, seqlen)``, contiguous, or None: then keys count from 0, and the last query has the
            position of the last key.
        interleaved: pairs ``(2i, 2i + 1)`` rather than ``(i, i + rotary_dim / 2)``.
        from_start: see FROM_START of :class:`RotationArguments`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    interleaved: bool
    from_start: bool = False

    @cached_property
    def arguments(self) -> RotationArguments:
        """The rotation as kernels take it."""
        n_positions, half = self.cos.shape[-2:]
        return RotationArguments(
            self.cos,
            self.sin,
            self.positions,
            n_positions * half if self.cos.shape[0] > 1 else 0,
            _batch_stride(self.positions),
            tl.constexpr(self.interleaved),
            tl.constexpr(self.from_start),
            tl.constexpr(2 * half),
        )


def rotation_arguments(rotation: Rotation | None) -> RotationArguments:
    """The rotation, or none, as kernels take it."""
    return NO_ROTATION if rotation is None else rotation.arguments


def _batch_stride(x: torch.Tensor | None) -> int:
    return x.stride(0) if x is not None and x.shape[0] > 1 else 0
