"""Rotary position embedding: the rotation of a tile in registers, and a kernel that rotates a whole tensor.

For the feature pair ``(a, b)`` at one position, with table entries ``c`` and ``s``::

    rotation            a' = a c - b s      b' = b c + a s
    its transpose       a' = a c + b s      b' = b c - a s

The gradient of a rotated tensor is turned back by the transpose. That is the inverse only while
``c^2 + s^2 = 1``, which scaled tables (YaRN, LongRoPE) do not keep.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels.configs import LAUNCH_OPTIONS, rope_rows
from fusedattn.kernels.primitives import (
    accumulator,
    block_d,
    head_base,
    load_tile,
    program_tile,
    store_tile,
    widen,
)


@triton.jit
def rotate_tile(
    x,
    start,
    seqlen,
    batch,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_tb,
    stride_pb,
    n_positions,
    position_offset,
    TRANSPOSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """Rotate the first ROTARY_DIM features of rows ``start + arange(BLOCK)``; ``(BLOCK, BLOCK_D)``, in ACC.

    Rows stand at ``positions[row]``, or at ``row + position_offset``. A position outside the tables makes its
    row NaN: there is no table entry that would be right.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    rows = start + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    exists = (rows >= 0) & (rows < seqlen)
    if HAS_POSITIONS:
        positions = tl.load(positions_ptr + batch.to(tl.int64) * stride_pb + rows, mask=exists, other=0)
    else:
        positions = rows + position_offset
    in_table = (positions >= 0) & (positions < n_positions)
    no_entry = exists & ~in_table

    # Feature d rotates with `partner[d]`, by the angle of pair `pair[d]`; `sign` is that of the sine.
    rotates = offs_d < ROTARY_DIM
    if INTERLEAVED:
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

    table = batch.to(tl.int64) * stride_tb + positions.to(tl.int64)[:, None] * HALF + pair[None, :]
    entry = (exists & in_table)[:, None] & rotates[None, :]
    cos = tl.load(cos_ptr + table, mask=entry, other=1.0)
    if not TRANSPOSE:  # gradients are NaN by themselves then, and 0 for rows that nobody sees
        cos = tl.where(no_entry[:, None] & rotates[None, :], float("nan"), cos)
    cos = cos.to(ACC)
    sin = (tl.load(sin_ptr + table, mask=entry, other=0.0) * sign[None, :]).to(ACC)

    x = widen(x, ACC)
    swapped = tl.gather(x, tl.broadcast_to(partner[None, :], (BLOCK, BLOCK_D)), 1)
    return x * cos + swapped * sin


@triton.jit(do_not_specialize=["seqlen", "n_positions", "position_offset", "n_tiles"])
def _rope(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_xb,
    stride_xh,
    stride_xs,
    stride_ob,
    stride_oh,
    stride_os,
    stride_tb,
    stride_pb,
    nheads,
    seqlen,
    n_positions,
    position_offset,
    n_tiles,
    INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program rotates BLOCK rows of one head."""
    tile, head, batch = program_tile(n_tiles, nheads, REVERSED=False)
    start = tile * BLOCK
    row_exists = start + tl.arange(0, BLOCK) < seqlen
    x = load_tile(
        head_base(x_ptr, batch, head, stride_xb, stride_xh),
        start,
        stride_xs,
        row_exists,
        True,
        HEAD_DIM,
        BLOCK,
        BLOCK_D,
    )
    x = rotate_tile(
        x, start, seqlen, batch, cos_ptr, sin_ptr, positions_ptr, stride_tb, stride_pb, n_positions, position_offset,
        False, INTERLEAVED, HAS_POSITIONS, ROTARY_DIM, BLOCK, BLOCK_D, ACC,
    )  # fmt: skip
    store_tile(
        head_base(out_ptr, batch, head, stride_ob, stride_oh),
        start,
        stride_os,
        seqlen,
        x,
        HEAD_DIM,
        BLOCK,
        BLOCK_D,
    )


@dataclass(frozen=True)
class Rotation:
    """How the rows of one tensor (q or k) are turned.

    Attributes:
        cos, sin: float32 ``(batch or 1, n_positions, rotary_dim / 2)``, contiguous.
        positions: int ``(batch or 1, seqlen)``, contiguous, or None for ``row + offset``.
        offset: position of row 0 when `positions` is None.
        interleaved: pairs ``(2i, 2i + 1)`` rather than ``(i, i + rotary_dim / 2)``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    offset: int
    interleaved: bool

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every kernel that calls :func:`rotate_tile`."""
        n_positions, half = self.cos.shape[-2:]
        return {
            "cos_ptr": self.cos,
            "sin_ptr": self.sin,
            "positions_ptr": self.positions,
            "stride_tb": n_positions * half if self.cos.shape[0] > 1 else 0,
            "stride_pb": _batch_stride(self.positions),
            "n_positions": n_positions,
            "position_offset": self.offset,
            "INTERLEAVED": self.interleaved,
            "HAS_POSITIONS": self.positions is not None,
            "ROTARY_DIM": 2 * half,
        }


# What those arguments are when nothing rotates: ROTARY_DIM == 0 removes the code.
NO_ROTATION: dict[str, Any] = {
    "cos_ptr": None,
    "sin_ptr": None,
    "positions_ptr": None,
    "stride_tb": 0,
    "stride_pb": 0,
    "n_positions": 0,
    "position_offset": 0,
    "INTERLEAVED": False,
    "HAS_POSITIONS": False,
    "ROTARY_DIM": 0,
}


def rotation_arguments(rotation: Rotation | None) -> dict[str, Any]:
    """Keyword arguments for a kernel that may or may not rotate."""
    return NO_ROTATION if rotation is None else rotation.arguments()


def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """A rotated copy of ``x``, ``(batch, nheads, seqlen, head_dim)`` with a contiguous last dimension.

    The copy is contiguous. Computed in float32 (float64 for float64) and rounded once.
    """
    batch, nheads, seqlen, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = rope_rows(head_dim)
    n_tiles = triton.cdiv(seqlen, block)
    _rope[(n_tiles * nheads * batch,)](
        x,
        out,
        stride_xb=x.stride(0),
        stride_xh=x.stride(1),
        stride_xs=x.stride(2),
        stride_ob=out.stride(0),
        stride_oh=out.stride(1),
        stride_os=out.stride(2),
        nheads=nheads,
        seqlen=seqlen,
        n_tiles=n_tiles,
        HEAD_DIM=head_dim,
        BLOCK=block,
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(x.dtype),
        num_warps=4,
        **LAUNCH_OPTIONS,
        **rotation.arguments(),
    )
    return out


def _batch_stride(x: torch.Tensor | None) -> int:
    return x.stride(0) if x is not None and x.shape[0] > 1 else 0
