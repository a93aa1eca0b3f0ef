"""What a tile may see: the key blocks a query tile visits, the query blocks a key tile visits, and the mask.

This file is the only place that computes either, for the forward and both backward kernels. A tile's blocks
come in two runs: *full* blocks, in which every pair is visible and no mask arithmetic is done, and *boundary*
blocks, where :func:`visible` decides pair by pair. Blocks in neither run are not visited at all.

Key blocks are counted from the first visible key of the batch and query blocks end at the last query, so that
the ragged block always falls on the side of the diagonal, which is masked anyway.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels.configs import LAUNCH_OPTIONS

RANGE_BLOCK = 1024


@triton.jit
def load_key_range(key_range_ptr, batch, seqlen_k, HAS_PADDING: tl.constexpr):
    """(start, stop, contiguous): all visible keys of the batch lie in [start, stop), with or without gaps."""
    if HAS_PADDING:
        base = key_range_ptr + batch.to(tl.int64) * 3
        return tl.load(base), tl.load(base + 1), tl.load(base + 2)
    else:
        return 0, seqlen_k, 1


@triton.jit
def key_blocks(
    start_m,
    seqlen_q,
    key_start,
    key_stop,
    contiguous,
    diagonal,
    IS_CAUSAL: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(start, full_stop, stop) for queries ``start_m + arange(BLOCK_M)``.

    Blocks at ``start, start + BLOCK_N, ...`` are full below `full_stop` and boundary blocks from there to `stop`.
    """
    stop = key_stop
    full_stop = key_stop
    if IS_CAUSAL:
        stop = tl.minimum(stop, tl.minimum(start_m + BLOCK_M, seqlen_q) + diagonal)
        full_stop = tl.minimum(full_stop, start_m + diagonal + 1)
    if HAS_ALLOWED:
        n_full = 0
    else:
        n_full = tl.maximum(full_stop - key_start, 0) // BLOCK_N * contiguous
    return key_start, key_start + n_full * BLOCK_N, stop


@triton.jit
def query_blocks(
    start_n,
    seqlen_q,
    key_start,
    key_stop,
    contiguous,
    diagonal,
    IS_CAUSAL: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(start, n_boundary, n_full) for keys ``start_n + arange(BLOCK_N)``.

    Of the blocks at ``start, start + BLOCK_M, ...``, which end at `seqlen_q`, the first `n_boundary` are boundary
    blocks and the other `n_full` full. `start` may be negative: the first block then reaches before row 0.
    """
    first = 0
    first_full = 0
    if IS_CAUSAL:
        first = tl.maximum(start_n - diagonal, 0)
        first_full = tl.maximum(start_n + BLOCK_N - 1 - diagonal, 0)
    keys_hidden = (start_n + BLOCK_N <= key_start) | (start_n >= key_stop)
    n_blocks = tl.where(keys_hidden, 0, tl.cdiv(tl.maximum(seqlen_q - first, 0), BLOCK_M))
    keys_full = (start_n >= key_start) & (start_n + BLOCK_N <= key_stop) & (contiguous != 0)
    if HAS_ALLOWED:
        n_full = 0
    else:
        n_full = tl.where(keys_full, tl.minimum(tl.maximum(seqlen_q - first_full, 0) // BLOCK_M, n_blocks), 0)
    return seqlen_q - n_blocks * BLOCK_M, n_blocks - n_full, n_full


@triton.jit
def load_key_visible(offs_n, key_start, key_stop, valid_ptr, HAS_PADDING: tl.constexpr):
    """Which of the keys `offs_n` any query may see, ``(BLOCK_N,)``: inside the range, and valid."""
    inside = (offs_n >= key_start) & (offs_n < key_stop)
    if HAS_PADDING:
        inside = inside & (tl.load(valid_ptr + offs_n, mask=inside, other=0) != 0)
    return inside


@triton.jit
def visible(
    start_m,
    start_n,
    offs_m,
    offs_n,
    query_exists,
    key_visible,
    diagonal,
    allowed_ptr,
    stride_aq,
    stride_ak,
    IS_CAUSAL: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
):
    """Whether query ``offs_m`` sees key ``offs_n``, pairwise: ``(M, 1)`` with ``(1, N)``, or transposed.

    `query_exists` and `key_visible` have the shapes of `offs_m` and `offs_n`.
    """
    pairs = query_exists & key_visible
    if IS_CAUSAL:
        pairs = pairs & (offs_n <= offs_m + diagonal)
    if HAS_ALLOWED:
        # A materialised mask may exceed 2^31 elements within one head: the tile's corner is added in int64.
        corner = allowed_ptr + tl.cast(start_m, tl.int64) * stride_aq + tl.cast(start_n, tl.int64) * stride_ak
        inside = (offs_m - start_m) * stride_aq + (offs_n - start_n) * stride_ak
        pairs = pairs & (tl.load(corner + inside, mask=pairs, other=0) != 0)
    return pairs


@triton.jit
def _key_range(valid_ptr, key_range_ptr, seqlen_k, BLOCK: tl.constexpr):
    """One program per batch: reduce ``valid`` to (first visible, last visible + 1, no gaps)."""
    batch = tl.program_id(0)
    row = valid_ptr + batch.to(tl.int64) * seqlen_k
    first = seqlen_k
    stop = 0
    count = 0
    for start in range(0, seqlen_k, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        seen = tl.load(row + offs, mask=offs < seqlen_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, offs, seqlen_k), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen, offs + 1, 0), 0))
        count += tl.sum(seen.to(tl.int32), 0)
    base = key_range_ptr + batch.to(tl.int64) * 3
    tl.store(base, tl.minimum(first, stop))  # nothing visible: the empty range [0, 0)
    tl.store(base + 1, stop)
    tl.store(base + 2, (count == stop - first).to(tl.int32))


def key_range(valid: torch.Tensor) -> torch.Tensor:
    """The visible range of each batch, computed on the device: no synchronisation.

    Args:
        valid: uint8 ``(batch, seqlen_k)``, contiguous.

    Returns:
        int32 ``(batch, 3)``: first visible key, last visible key + 1, and 1 where there is no gap between.
    """
    batch, seqlen_k = valid.shape
    out = torch.empty(batch, 3, dtype=torch.int32, device=valid.device)
    _key_range[(batch,)](valid, out, seqlen_k, BLOCK=RANGE_BLOCK, num_warps=4, **LAUNCH_OPTIONS)
    return out


@dataclass(frozen=True)
class DeviceMask:
    """A mask as the kernels read it.

    Attributes:
        diagonal: query ``i`` sees keys ``j <= i + diagonal``; None when not causal.
        valid: uint8 ``(batch, seqlen_k)``, contiguous, or None.
        key_range: what :func:`key_range` made of `valid`, or None.
        allowed: uint8 ``(batch, nheads_q, seqlen_q, seqlen_k)``, any strides (0 where broadcast), or None.
    """

    diagonal: int | None
    valid: torch.Tensor | None
    key_range: torch.Tensor | None
    allowed: torch.Tensor | None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every kernel that masks."""
        strides = (0, 0, 0, 0) if self.allowed is None else self.allowed.stride()
        return {
            "key_range_ptr": self.key_range,
            "valid_ptr": self.valid,
            "allowed_ptr": self.allowed,
            **dict(zip(("stride_ab", "stride_ah", "stride_aq", "stride_ak"), strides, strict=True)),
            "diagonal": self.diagonal or 0,
            "IS_CAUSAL": self.diagonal is not None,
            "HAS_PADDING": self.valid is not None,
            "HAS_ALLOWED": self.allowed is not None,
        }
