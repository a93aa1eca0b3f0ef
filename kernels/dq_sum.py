"""dq as a sum that programs of different keys add to, in any order, and its conversion to dq.

    dq_total = ds k                         attention_bwd_dkdv, which has the tiles of keys and ds
    dq       = scale * R_q^T dq_total       attention_bwd_dq_sum, one program per tile of queries

dq_total is contiguous ``(batch, nheads_q, seqlen_q, head_dim)``, float32 (float64 for float64), and 0 at first. If
there is a tensor memory accelerator, it adds full blocks, in the L2 cache. Other blocks are added atomically, element
by element: on an H200, an addition by the accelerator to a tile that ends outside of the tensor was an illegal
instruction. Only the next kernel reads dq_total.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.kernels import launcher
from fusedattn.kernels.configs import Style, rope_rows
from fusedattn.kernels.descriptors import tiles_of
from fusedattn.kernels.primitives import (
    INTERPRETED,
    accumulator,
    block_d,
    dot,
    dtype_of,
    head_base,
    head_of,
    load_tile,
    program_tile,
    store_tile,
    strided,
)
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.rope import rotate_tile, rotation_arguments
from fusedattn.kernels.sequences import place_of, row_base

# Triton's interpreter has no addition by a descriptor.
HAS_REDUCTIONS = not INTERPRETED.value


@triton.jit
def add_rows(dq_total, place, start, row_seen, x, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add a tile, element by element, to those rows ``start + arange(BLOCK)`` that are `row_seen`."""
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    ptr = head_base(dq_total, place.batch, place.head, place.first_q)
    ptrs = ptr + tl.cast(start, tl.int64) * dq_total.stride_s + (offs[:, None] * dq_total.stride_s + offs_d[None, :])
    tl.atomic_add(ptrs, x, mask=row_seen[:, None] & (offs_d < HEAD_DIM)[None, :], sem="relaxed")


@triton.jit
def add_dq(dq_total, tiles, place, start_m, row_seen, k, ds, BLOCK: tl.constexpr, tile):
    """Add the contribution of a tile of keys to dq of queries ``start_m + arange(BLOCK)``.

    `ds` is transposed, ``(BLOCK_N, BLOCK)``, and 0 for hidden pairs; `k` is finite. With `tiles`, all rows exist.
    """
    # Only k is transposed before the product: it was loaded, while ds comes from a product (see attention_bwd).
    dq = tl.trans(dot(tl.trans(k), ds, dtype_of(tile.ACC), tile.PRECISION))
    if tiles is not None:
        tiles.atomic_add([place.batch, place.head, place.first_q + start_m, 0], dq.reshape(1, 1, BLOCK, tile.BLOCK_D))
    else:
        add_rows(dq_total, place, start_m, row_seen, dq, tile.HEAD_DIM, BLOCK, tile.BLOCK_D)


@triton.jit(do_not_specialize=["nheads_q", "seqlen_q", "seqlen_k", "n_positions", "n_tiles"])
def attention_bwd_dq_sum(
    dq_total,
    shift_ptr,
    dq_out,
    sequences,
    rotation,
    nheads_q,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_tiles,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    tile, head, sequence = program_tile(n_tiles, nheads_q, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    stats = row_base(place)
    shift = tl.load(shift_ptr + stats + offs_m, mask=offs_m < place.seqlen_q, other=float("inf"))
    seen = shift != float("inf")  # a row of scores of -inf sees nothing, whatever its keys are
    total_head = head_of(dq_total, place.batch, head, place.first_q)
    dq = load_tile(total_head, start_m, seen, HEAD_DIM, BLOCK_M, BLOCK_D)
    if rotation.ROTARY_DIM > 0:
        dq = rotate_tile(
            dq, rotation, place, start_m, n_positions, BLOCK_M, BLOCK_D, ACC, OF_QUERIES=True, TRANSPOSE=True
        )
    dq_head = head_of(dq_out, place.batch, head, place.first_q)
    store_tile(dq_head, start_m, place.seqlen_q, dq * scale, HEAD_DIM, BLOCK_M, BLOCK_D)


def zeros(q: torch.Tensor) -> torch.Tensor:
    """A dq_total of 0, for queries `q`."""
    return torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def reductions_of(dq_total: torch.Tensor, block: int, style: Style) -> TensorDescriptor | None:
    """A descriptor that adds `block` rows of one head at a time; None if elements are added one by one."""
    head_dim = dq_total.shape[3]
    return tiles_of(dq_total, block, style) if HAS_REDUCTIONS and head_dim == block_d(head_dim) else None


def launch(dq_total: torch.Tensor, shift: torch.Tensor, dq: torch.Tensor, problem: Problem) -> None:
    """Fill `dq` from `dq_total`."""
    shape, head_dim = problem.shape, dq.shape[3]
    block = rope_rows(head_dim)
    n_tiles = triton.cdiv(shape.max_seqlen_q, block)
    prologue = problem.prologue_q
    launcher.launch(
        _constants(head_dim, dq.dtype),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (strided(dq_total), shift, strided(dq), problem.call.sequences, rotation_arguments(prologue.rotation)),
        (shape.nheads_q, shape.seqlen_q, shape.seqlen_k, prologue.n_positions, n_tiles, problem.scale),
    )


@lru_cache(maxsize=1024)
def _constants(head_dim: int, dtype: torch.dtype) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        attention_bwd_dq_sum,
        HEAD_DIM=head_dim,
        BLOCK_M=rope_rows(head_dim),
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(dtype),
        num_warps=4,
    )
