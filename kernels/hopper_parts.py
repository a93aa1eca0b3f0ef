"""The parts that the kernels for Hopper share: rings of tiles in shared memory, which one warp fills and groups of four
warps read; the layouts of products; stores from them."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedattn.kernels.descriptors import strides_of
from fusedattn.kernels.primitives import head_base

# Triton 3.8 has other names.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

MOST_REGISTERS = 168  # of a thread, as a kernel begins: 12 warps take all that a multiprocessor has
REGISTERS = 240, 24  # of a thread that multiplies, and of one that requests tiles


@triton.constexpr_function
def layout_of(n):
    """The layout of a product of 64 rows and `n` columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@triton.constexpr_function
def operand_of(n):
    """The layout of a left operand in registers, of a product of `n` columns."""
    return gl.DotOperandLayout(operand_index=0, parent=layout_of(n), k_width=2)


@gluon.jit
def store_rows(x, batch, head, first, start, rows, exist, tile, column=0):
    """Write those of some `rows`, ``(ROWS,)``, near `start`, of a head from row `first` on, that `exist`.

    `tile` has their columns from `column` on.
    """
    columns = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, tile.type.layout))
    ptr = head_base(x, batch, head, first) + tl.cast(start, tl.int64) * x.stride_s + column
    # Columns come last: their places are constants in the instructions.
    ptrs = (ptr + (rows - start) * x.stride_s)[:, None] + columns[None, :]
    gl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=exist[:, None])


class Ring(NamedTuple):
    """Tiles ``(n, rows, head_dim)``, and for each an mbarrier that says it is full, and one that it may be filled."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def tiles_in_shared(boxes, n: gl.constexpr):
    """Shared memory for n tiles of the size of `boxes`, ``(n, rows, head_dim)``."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = boxes.block_type.shape
    return gl.allocate_shared_memory(boxes.dtype, [n, shape[2], shape[3]], LAYOUT)


@gluon.jit
def ring_of(boxes, n: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """An empty :class:`Ring` of n tiles of the size of `boxes`, each of which READERS groups of warps read.

    Tiles that are filled once have 0 readers, and no use for `empty`. A tile is full after a request and, with two
    WRITERS, one more arrival.
    """
    tiles = tiles_in_shared(boxes, n)
    full = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(full.index(i), count=WRITERS)
    empty = full
    if READERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(n):
            mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, full, empty)


@gluon.jit
def request(boxes, batch, head, row, ring, slot):
    """Ask the tensor memory accelerator for a tile, which arrives on ``ring.full``; rows that do not exist are 0."""
    mbarrier.expect(ring.full.index(slot), boxes.block_type.nbytes)
    _load(boxes, [batch, head, row, 0], ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def store_box(boxes, batch, head, row, tile, values):
    """Have the tensor memory accelerator store values, from shared memory that :func:`end_stores` waits for."""
    end_stores()
    tile.store(values)
    fence_async_shared()
    _store(boxes, [batch, head, row, 0], tile)


@gluon.jit
def end_stores():
    """Wait until the stores that this group of warps requested have read shared memory."""
    tma.store_wait(0)


def boxes_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A ``(batch, nheads, seqlen, head_dim)`` tensor in boxes of `rows` rows of one head; strides are checked."""
    # The constructor would check all this again.
    boxes = object.__new__(TensorDescriptor)
    vars(boxes).update(_defaults(), base=x, shape=list(x.shape), strides=strides_of(x))
    boxes.block_shape = [1, 1, rows, x.shape[3]]
    return boxes


@lru_cache
def _defaults() -> dict[str, Any]:
    """The attributes of a descriptor, with their defaults."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    empty = torch.empty(1, 1, 16, 64, dtype=torch.float16)
    return vars(TensorDescriptor(empty, [1, 1, 16, 64], [1024, 1024, 64, 1], [1, 1, 16, 64], layout))
