"""Device helpers shared by every kernel: loading and storing tiles, and products.

Conventions: a tile of rows is ``(BLOCK, BLOCK_D)``, where BLOCK_D is head_dim rounded up to a power of two and
the features beyond HEAD_DIM are zero. ACC is the dtype that sums and exponentials are computed in: float32, or
float64 for float64 inputs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# The interpreter stores bfloat16 as uint16, multiplies the bit patterns as integers, and truncates where hardware
# rounds. Its products are NumPy's, whose order of summation is no GPU's. If INTERPRETED, code here widens and rounds
# bfloat16, and rounds a product once: only the error of the algorithm remains.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Tiles of more features than this leave few registers for anything else.
MOST_FEATURES = 256


class Strided(NamedTuple):
    """A ``(batch, nheads, seqlen, n)`` tensor as a kernel takes it; the last dimension is contiguous."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any


class Head(NamedTuple):
    """The rows of one head of one sequence, `stride` elements apart.

    `ptr` points to row 0. A tensor descriptor addresses it by `batch`, `index` (the head) and `first` (the row).
    """

    ptr: Any
    stride: Any
    batch: Any
    index: Any
    first: Any


@triton.jit
def program_tile(n_tiles, nheads, heads_in_l2, REVERSED: tl.constexpr):
    """(tile, head, batch) of this program in a one-dimensional grid with one program for each tile."""
    return numbered_tile(tl.program_id(0), tl.num_programs(0), n_tiles, nheads, heads_in_l2, REVERSED)


@triton.jit
def numbered_tile(tile_id, n_tile_ids, n_tiles, nheads, heads_in_l2, REVERSED: tl.constexpr):
    """(tile, head, batch) of number `tile_id` of `n_tile_ids`, which programs take in this order.

    `heads_in_l2` heads, whose programs share rows that fit into the L2 cache, run side by side, each with its longest
    tile first, so that the last programs are short. Under a causal mask the last queries have the most work: REVERSED
    starts with them.
    """
    n_heads = n_tile_ids // n_tiles  # of all batches
    first = tile_id // (n_tiles * heads_in_l2) * heads_in_l2
    side_by_side = tl.minimum(heads_in_l2, n_heads - first)
    index = tile_id - first * n_tiles
    tile = index // side_by_side
    if REVERSED:
        tile = n_tiles - 1 - tile
    head_and_batch = first + index % side_by_side
    return tile, head_and_batch % nheads, head_and_batch // nheads


@triton.jit
def head_base(x, batch, head, first):
    """Pointer to row `first` of one head of a :class:`Strided`; int64: tensors may exceed 2^31 elements."""
    head_ptr = x.ptr + tl.cast(batch, tl.int64) * x.stride_b + tl.cast(head, tl.int64) * x.stride_h
    return head_ptr + tl.cast(first, tl.int64) * x.stride_s


@triton.jit
def head_of(x, batch, head, first):
    """One :class:`Head` of a :class:`Strided`, from row `first` on."""
    return Head(head_base(x, batch, head, first), x.stride_s, batch, head, first)


@triton.jit
def load_tile(head, start, readable, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, first=0):
    """Rows ``start + arange(BLOCK)`` of a :class:`Head`, BLOCK_D features from `first`, a multiple of BLOCK_D.

    Rows that are not `readable`, ``(BLOCK,)``, are 0 and not read; None reads all.
    """
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    # The start is added in int64; offsets inside a tile fit in int32.
    ptrs = head.ptr + first + tl.cast(start, tl.int64) * head.stride + (offs[:, None] * head.stride + offs_d[None, :])
    if readable is not None:
        if HEAD_DIM % BLOCK_D == 0:
            return tl.load(ptrs, mask=readable[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=readable[:, None] & (first + offs_d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM % BLOCK_D == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(first + offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    head,
    start,
    n_rows,
    tile,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Write a tile to those rows ``start + arange(BLOCK)`` of a :class:`Head` that are below `n_rows`.

    `tile` has BLOCK_D features, from FIRST on, and is rounded to the dtype of the head.
    """
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    ptr = head.ptr + FIRST
    ptrs = ptr + tl.cast(start, tl.int64) * head.stride + (offs[:, None] * head.stride + offs_d[None, :])
    mask = (start + offs < n_rows)[:, None] & (offs_d < HEAD_DIM - FIRST)[None, :]
    tl.store(ptrs, round_to(tile, ptr.dtype.element_ty), mask=mask)


@triton.constexpr_function
def dtype_of(name):
    """The accumulator dtype by its name: Triton's hooks cannot write down a dtype in a tuple."""
    return tl.float64 if name == "fp64" else tl.float32


@triton.jit
def widen(x, ACC: tl.constexpr):
    """``x`` in ACC."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(ACC)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """``x`` rounded to the nearest value of `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = widen(x, tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def halves(x, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The left and the right half of a tile, for code whose registers cannot hold the whole of it."""
    return tl.split(tl.permute(tl.reshape(x, (BLOCK, 2, BLOCK_D // 2)), (0, 2, 1)))


@triton.jit
def joined(left, right, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of halves."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BLOCK, BLOCK_D))


@triton.jit
def bits_of(x):
    """A 16-bit tile as integers: in this form it stays in registers from one iteration of a loop to the next."""
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True)
    else:
        return x


@triton.jit
def of_bits(x, dtype: tl.constexpr):
    """The inverse of bits_of."""
    if dtype.primitive_bitwidth == 16:
        return x.to(dtype, bitcast=True)
    else:
        return x


@triton.jit
def dot(a, b, ACC: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """``a @ b``, summed in ACC; `acc`, if given, is the first term of each sum."""
    if INTERPRETED:
        if acc is not None:
            acc = acc.to(tl.float64)
        return tl.dot(widen(a, tl.float64), widen(b, tl.float64), acc, out_dtype=tl.float64).to(ACC)
    else:
        if a.dtype == tl.float32 and PRECISION == "ieee":
            # FMAs take whole rows of a and columns of b from registers. Without a barrier the compiler loads those of
            # several products at once, or ahead of the loop, and spills at any tile size.
            tl.debug_barrier()
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def dot_add(a, b, acc, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + a @ b``, summed in ACC, for a sum over many blocks."""
    if a.dtype == tl.float32 and PRECISION == "ieee":
        # One chain of additions through all blocks would round each term at the magnitude of the whole sum.
        if INTERPRETED:
            product = tl.dot(widen(a, tl.float64), widen(b, tl.float64), out_dtype=tl.float64)
            return (acc.to(tl.float64) + product).to(ACC)
        else:
            # The compiler would merge a product and a plain sum into that chain, but not a product and an fma.
            return tl.fma(dot(a, b, ACC, PRECISION), 1.0, acc)
    else:
        return dot(a, b, ACC, PRECISION, acc)


@triton.constexpr_function
def is_wide(dtype, BLOCK_D, PRECISION):
    """Whether tiles are too wide for dot_tiles to multiply at once; TF32 also copies operands, so its limit is half."""
    most = MOST_FEATURES // 2 if dtype == tl.float32 and PRECISION == "tf32" else MOST_FEATURES
    return most < BLOCK_D


@triton.jit
def end_of_pieces(HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """The end of a loop over pieces of WIDTH features, as a number that the compiler does not know."""
    # A grid has one dimension. If the compiler knew it, it would unroll the loop, and run out of registers.
    return tl.num_programs(1) * HEAD_DIM if BLOCK_D > WIDTH else HEAD_DIM


@triton.jit
def dot_in_pieces(
    a,
    a_start,
    a_readable,
    b,
    b_start,
    b_readable,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``a @ b^T`` of two tiles that are used for nothing else, ``(BLOCK_A, BLOCK_B)``, summed in ACC.

    `a` and `b` are each a :class:`Head`; other arguments are those of load_tile. Wide tiles are read in pieces.
    """
    BLOCK_A: tl.constexpr = a_readable.shape[0]
    BLOCK_B: tl.constexpr = b_readable.shape[0]
    # More features also take more registers elsewhere in the program.
    WIDTH: tl.constexpr = BLOCK_D if BLOCK_D <= 128 else 16384 // BLOCK_D
    products = tl.zeros([BLOCK_A, BLOCK_B], ACC)
    for first in tl.range(0, end_of_pieces(HEAD_DIM, BLOCK_D, WIDTH), WIDTH, num_stages=1, disable_licm=True):
        a_tile = load_tile(a, a_start, a_readable, HEAD_DIM, BLOCK_A, WIDTH, first)
        b_tile = load_tile(b, b_start, b_readable, HEAD_DIM, BLOCK_B, WIDTH, first)
        products = dot(a_tile, tl.trans(b_tile), ACC, PRECISION, products)
    return products


@triton.jit
def dot_tiles(
    a_tile,
    b_tile,
    a,
    a_start,
    a_readable,
    b,
    b_start,
    b_readable,
    HEAD_DIM: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``a_tile @ b_tile^T``; wide tiles are read again, in pieces, by the other arguments of dot_in_pieces."""
    if is_wide(a_tile.dtype, a_tile.shape[1], PRECISION):
        return dot_in_pieces(a, a_start, a_readable, b, b_start, b_readable, HEAD_DIM, a_tile.shape[1], ACC, PRECISION)
    else:
        return dot(a_tile, tl.trans(b_tile), ACC, PRECISION)


@triton.jit
def row_dot(a, b, ACC: tl.constexpr):
    """``rowsum(a * b)``, summed in ACC."""
    if INTERPRETED:
        return tl.sum(widen(a, tl.float64) * widen(b, tl.float64), 1).to(ACC)
    else:
        return tl.sum(a.to(ACC) * b.to(ACC), 1)


@triton.jit
def has_nan(x):
    """Whether any element of a tile is NaN."""
    return tl.max((x != x).to(tl.int32)) != 0


@triton.jit
def split_poison(x, ACC: tl.constexpr):
    """A tile of keys or values with 0 for its NaN and Inf, and whether each row had one, ``(BLOCK,)``."""
    finite = tl.abs(widen(x, ACC)) < float("inf")
    return tl.where(finite, x, 0.0), tl.min(finite.to(tl.int32), 1) == 0


def strided(x: torch.Tensor) -> Strided:
    """``x``, ``(batch, nheads, seqlen, n)`` with a contiguous last dimension, for a kernel."""
    return Strided(x, *x.stride()[:3])


@triton.constexpr_function
def block_d(head_dim: int) -> int:
    """Width of a tile that holds head_dim features: a power of two, and at least the 16 that tl.dot needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """ACC for inputs of `dtype`."""
    return tl.float64 if dtype == torch.float64 else tl.float32
