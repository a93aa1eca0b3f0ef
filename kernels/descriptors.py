"""Tiles through the tensor memory accelerator: one instruction of one thread copies a tile into shared memory.

NVIDIA GPUs from sm_90 on have it. The host describes a tensor (address, shape, strides, shape of a tile); the kernel
asks for a tile by its coordinates, and only if all rows of the tile exist.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.kernels.configs import Style
from fusedattn.kernels.primitives import block_d, load_tile

ALIGNMENT = 16  # bytes, of addresses and strides
MAX_STRIDE = 2**37  # elements of up to 8 bytes each: 2^40 bytes


def strides_of(x: torch.Tensor) -> list[int] | None:
    """The strides of ``x`` for a descriptor, or None if one of them is not allowed."""
    (batch, nheads, seqlen, _), (stride_b, stride_h, stride_s, _) = x.shape, x.stride()
    # The stride of a dimension of one element is never used, but must be aligned.
    if batch == 1:
        stride_b = ALIGNMENT
    if nheads == 1:
        stride_h = ALIGNMENT
    if seqlen == 1:
        stride_s = ALIGNMENT
    aligned = (stride_b | stride_h | stride_s) * x.itemsize % ALIGNMENT == 0
    allowed = stride_b > 0 and stride_h > 0 and stride_s > 0 and (stride_b | stride_h | stride_s) < MAX_STRIDE
    return [stride_b, stride_h, stride_s, 1] if aligned and allowed else None


def is_addressable(x: torch.Tensor) -> bool:
    """Whether a descriptor can have the address and the strides of ``x``."""
    return x.data_ptr() % ALIGNMENT == 0 and strides_of(x) is not None


def tiles_of(x: torch.Tensor, block: int, style: Style) -> TensorDescriptor | None:
    """``x`` for :func:`full_tile`, in tiles of `block` rows of one head; None if they are loaded by pointers."""
    if style == "pointers" or x.numel() == 0 or x.data_ptr() % ALIGNMENT:
        return None
    strides = strides_of(x)
    if strides is None:
        return None
    # The constructor would check all this again.
    tiles = object.__new__(TensorDescriptor)
    vars(tiles).update(_defaults(), base=x, shape=list(x.shape), strides=strides)
    tiles.block_shape = [1, 1, block, block_d(x.shape[3])]
    return tiles


@lru_cache
def _defaults() -> dict[str, Any]:
    """The attributes of a descriptor, with their defaults."""
    return vars(TensorDescriptor(torch.empty(16, 16), [16, 16], [16, 1], [16, 16]))


@triton.jit
def full_tile(head, tiles, start, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``start + arange(BLOCK)`` of a :class:`Head`, ``(BLOCK, BLOCK_D)``; all of them exist.

    `tiles` is the result of tiles_of for the tensor, or None.
    """
    if tiles is not None:
        return tiles.load([head.batch, head.index, head.first + start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        return load_tile(head, start, None, HEAD_DIM, BLOCK, BLOCK_D)
