"""Tiles through the tensor memory accelerator: one instruction of one thread copies a tile into shared memory.

NVIDIA GPUs from sm_90 on have it. The host describes a tensor (address, shape, strides, shape of a tile), the kernel
asks for a tile by its coordinates. Only tiles are asked for of which all rows exist.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.kernels.configs import Style
from fusedattn.kernels.primitives import block_d, load_tile

ALIGNMENT = 16  # bytes, of addresses and strides
MAX_STRIDE = 2**40  # bytes


def is_describable(x: torch.Tensor) -> bool:
    """Whether the accelerator can address ``x``, ``(batch, nheads, seqlen, n)`` with a contiguous last dimension.

    Its strides and address are ones it knows, and there is something.
    """
    strides = [stride * x.itemsize for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    aligned = all(0 < stride < MAX_STRIDE and stride % ALIGNMENT == 0 for stride in strides)
    return aligned and x.numel() > 0 and x.data_ptr() % ALIGNMENT == 0


def tiles_of(x: torch.Tensor, block: int, style: Style) -> TensorDescriptor | None:
    """``x`` for :func:`full_tile`, in tiles of `block` rows of one head; None where they are loaded by pointers."""
    if style == "pointers" or not is_describable(x):
        return None
    # The stride of a dimension of one element is never used, but must be aligned.
    strides = [stride if size > 1 else block_d(x.shape[3]) for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, block, block_d(x.shape[3])])


@triton.jit
def full_tile(
    x,
    tiles,
    head_ptr,
    batch,
    head,
    first,
    start,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ``start + arange(BLOCK)`` of a sequence that begins at row `first`: ``(BLOCK, BLOCK_D)``. All of them exist.

    `x` is a :class:`Heads`, `head_ptr` the sequence in it; `tiles` is what tiles_of made of it, or None.
    """
    if tiles is not None:
        return tiles.load([batch, head, first + start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        return load_tile(head_ptr, start, x.stride_s, tl.arange(0, BLOCK), False, HEAD_DIM, BLOCK, BLOCK_D)
