"""From q, k and v to e4m3 codes and scales, after everything that is done to q and k before their product.

    quantize_fp8    x to codes and scales, laid out as kernels/fp8.py says, or to the largest magnitude of each program
    largest_of_all  these to one number, for scales that all tokens share

Numbers are prepared, rotated and scaled in float32, and rounded once. The scale of a block maps its largest finite
magnitude to the largest code; a NaN or infinity becomes the code of NaN.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher
from fusedattn.kernels.accurate_math import divide
from fusedattn.kernels.configs import rope_rows
from fusedattn.kernels.fp8 import TOKENS, CodeScales, place_of_codes, scale_pointer
from fusedattn.kernels.fp8_configs import LEAST_KEYS
from fusedattn.kernels.masking import load_key_visible
from fusedattn.kernels.primitives import (
    block_d,
    head_base,
    head_of,
    load_tile,
    program_tile,
    strided,
    widen,
)
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.prologue import SIZES, Prologue, rows_of_side
from fusedattn.kernels.qk_norm import NO_NORM, normalize_tile
from fusedattn.kernels.quantizing import SMALLEST_SCALE, codes_of, largest_code
from fusedattn.kernels.replay import scratch
from fusedattn.kernels.rope import rotate_tile, rotation_arguments
from fusedattn.kernels.sequences import place_of


class VisibleKeys(NamedTuple):
    """The parts of a mask that hide keys from all queries, as :class:`~fusedattn.kernels.masking.MaskArguments`."""

    valid_ptr: Any
    key_range_ptr: Any


class KeyRange(NamedTuple):
    """Keys in ``[key_start, key_stop)``."""

    key_start: Any
    key_stop: Any


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _sqrt(n):
    return n**0.5


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr):
    """Sums and differences of the halves of each 2 * HALF features."""
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, N // (2 * HALF), 2, HALF)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, N))


@triton.jit
def hadamard(x, ROWS: tl.constexpr, N: tl.constexpr):
    """``x``, ``(ROWS, N)``, with signs changed, times Sylvester's orthonormal matrix: low_precision.rotated.

    Without the signs, equal features would become one.
    """
    d = tl.arange(0, N)
    x = tl.where(((57 * d * d + 17 * d + 97) % 509 % 2)[None, :] != 0, -x, x)
    for step in tl.static_range(0, _log2(N)):
        x = _butterfly(x, ROWS, N, 1 << step)
    return divide(x, tl.full(x.shape, _sqrt(N), tl.float32))


@triton.jit
def _prepared(
    x, norm, rotation, place, head, first, start, exist, n_positions, OF_QUERIES: tl.constexpr,
    HADAMARD: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(rows from `start` on that `exist`, which of their numbers are finite), float32 ``(ROWS, BLOCK_D)``; others 0."""
    y = load_tile(head_of(x, place.batch, head, first), start, exist, HEAD_DIM, ROWS, BLOCK_D)
    if norm.NORMALIZES:
        rows = start + tl.arange(0, ROWS)
        y = normalize_tile(y, norm, head, first, rows, exist, place.batch, HEAD_DIM, BLOCK_D, ACC)
    if rotation.ROTARY_DIM > 0:
        y = rotate_tile(y, rotation, place, start, n_positions, ROWS, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE=False)
    y = widen(y, ACC)
    if HADAMARD:
        y = hadamard(y, ROWS, BLOCK_D)
    # Positions outside the tables of a rotation make NaN of rows that padding hides, too.
    y = tl.where(exist[:, None], y, 0.0)
    return y, tl.abs(y) < float("inf")


@triton.jit(do_not_specialize=SIZES)
def quantize_fp8(
    x,
    codes,
    scales_ptr,
    largest_ptr,
    whole_ptr,
    keys,
    sequences,
    norm,
    rotation,
    nheads,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_tiles,
    n_scales,
    OF_QUERIES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HADAMARD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program rounds a block of one head. With `whole_ptr` its scale is that of the largest magnitude there.

    With `largest_ptr` it writes its largest magnitude instead.
    """
    tile, head, sequence = program_tile(n_tiles, nheads, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads, seqlen_q, seqlen_k)
    first, seqlen = rows_of_side(place, OF_QUERIES)
    block = tile * TOKENS
    range_of_keys = KeyRange(0, seqlen)
    if keys.key_range_ptr is not None:
        range_ptr = keys.key_range_ptr + tl.cast(sequence, tl.int64) * 3
        range_of_keys = KeyRange(tl.load(range_ptr), tl.load(range_ptr + 1))

    largest = tl.full((), 0.0, tl.float32)
    if whole_ptr is not None:
        largest = tl.load(whole_ptr)
    else:
        for start in tl.range(block, block + TOKENS, ROWS, num_stages=1):
            exist = load_key_visible(keys, place, range_of_keys, start + tl.arange(0, ROWS))
            y, finite = _prepared(
                x, norm, rotation, place, head, first, start, exist, n_positions, OF_QUERIES, HADAMARD, HEAD_DIM,
                ROWS, BLOCK_D, ACC,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(tl.where(finite, tl.abs(y), 0.0)))
    if largest_ptr is not None:
        tl.store(largest_ptr + tl.program_id(0), largest)
    elif block < seqlen:
        scale = tl.math.div_rn(largest, tl.full((), largest_code("e4m3"), tl.float32))
        scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
        of_codes = place_of_codes(place, sequences)
        first_code, _ = rows_of_side(of_codes, OF_QUERIES)
        tl.store(scale_pointer(scales_ptr, n_scales, nheads, of_codes, head, first_code + block), scale)
        divisor = tl.where(scale > 0.0, scale, float("inf"))
        for start in tl.range(block, block + TOKENS, ROWS, num_stages=1):
            exist = load_key_visible(keys, place, range_of_keys, start + tl.arange(0, ROWS))
            y, finite = _prepared(
                x, norm, rotation, place, head, first, start, exist, n_positions, OF_QUERIES, HADAMARD, HEAD_DIM,
                ROWS, BLOCK_D, ACC,
            )  # fmt: skip
            y = tl.where(finite, divide(y, tl.zeros_like(y) + divisor), float("nan"))
            found = codes_of(y, "e4m3").to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            offs_d = tl.arange(0, BLOCK_D)
            offs = tl.arange(0, ROWS)
            start = tl.multiple_of(start, ROWS)
            if TRANSPOSED:
                ptrs = head_base(codes, place.batch, head, 0) + first_code + start
                ptrs += offs_d[:, None].to(tl.int64) * codes.stride_s + offs[None, :]
                tl.store(ptrs, tl.trans(found), mask=(offs_d < HEAD_DIM)[:, None])
            else:
                ptrs = head_base(codes, place.batch, head, first_code) + tl.cast(start, tl.int64) * codes.stride_s
                tl.store(ptrs + offs[:, None] * codes.stride_s + offs_d[None, :], found)


@triton.jit(do_not_specialize=["n"])
def largest_of_all(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The largest of `n` numbers that are not negative, by one program."""
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=1):
        offs = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(x_ptr + offs, mask=offs < n, other=0.0))
    tl.store(out_ptr, tl.max(largest, 0))


NO_HIDDEN_KEYS = VisibleKeys(None, None)


class _Side(NamedTuple):
    """One of q, k and v: its tensor, what is done to it first, and whether its codes are transposed."""

    x: torch.Tensor
    prologue: Prologue
    transposed: bool = False


def code_width(head_dim: int) -> int:
    """The features of codes of q and k."""
    return max(LEAST_KEYS, block_d(head_dim))


def quantized(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CodeScales]:
    """Codes of prepared q and k and of v, and their scales; layouts as in :mod:`fusedattn.kernels.fp8`."""
    sides = (_Side(q, problem.prologue_q), _Side(k, problem.prologue_k), _Side(v, problem.prologue_k.done, True))
    (q, q_scale), (k, k_scale), (v, v_scale) = (_codes(side, problem) for side in sides)
    return q, k, v, CodeScales(q_scale, k_scale, v_scale, q_scale.shape[2], k_scale.shape[2])


def _codes(side: _Side, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    x, prologue = side.x, side.prologue
    batch, nheads, seqlen, head_dim = x.shape
    sequences, shape = prologue.sequences, prologue.shape
    cu_seqlens = sequences.cu_q_ptr if prologue.of_queries else sequences.cu_k_ptr
    n_blocks = -(-seqlen // TOKENS.value) if cu_seqlens is None else seqlen // TOKENS.value + shape.n_sequences
    n_tokens = n_blocks * TOKENS.value
    size = (head_dim, n_tokens) if side.transposed else (n_tokens, code_width(head_dim))
    codes = scratch(x, (batch, nheads, *size), torch.float8_e4m3fn)
    # A multiple of 16, for which Triton compiles nothing again if a length changes.
    scales = scratch(x, (batch, nheads, -(-n_blocks // 16) * 16), torch.float32)
    n_tiles = -(-prologue.longest // TOKENS.value)
    n_programs = n_tiles * nheads * shape.n_sequences
    mask, how = problem.call.mask, problem.codes
    assert how is not None
    norm = NO_NORM if prologue.norm is None else prologue.norm_arguments(x)
    constants = _constants(prologue.of_queries, side.transposed, how.rotates and not side.transposed, head_dim)

    def launch(largest: torch.Tensor | None, whole: torch.Tensor | None) -> None:
        launcher.launch(
            constants,
            n_programs,
            (
                strided(x), strided(codes), scales, largest, whole,
                NO_HIDDEN_KEYS if prologue.of_queries else VisibleKeys(mask.valid_ptr, mask.key_range_ptr),
                sequences, norm, rotation_arguments(prologue.rotation),
            ),
            (nheads, shape.seqlen_q, shape.seqlen_k, prologue.n_positions, n_tiles, scales.shape[2]),
        )  # fmt: skip

    if n_programs == 0:
        return codes, scales
    whole = None
    if how.of_tensor:
        largest, whole = scratch(x, (n_programs,), torch.float32), scratch(x, (1,), torch.float32)
        launch(largest, None)
        launcher.launch(_REDUCTION, 1, (largest, whole), (n_programs,))
    launch(None, whole)
    return codes, scales


_REDUCTION = launcher.KernelConstants(largest_of_all, BLOCK=1024, num_warps=4)


@lru_cache(maxsize=256)
def _constants(of_queries: bool, transposed: bool, hadamard: bool, head_dim: int) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        quantize_fp8,
        OF_QUERIES=of_queries,
        TRANSPOSED=transposed,
        HADAMARD=hadamard,
        HEAD_DIM=head_dim,
        ROWS=rope_rows(head_dim),
        BLOCK_D=block_d(head_dim) if transposed else code_width(head_dim),
        ACC=tl.float32,
        num_warps=4,
    )
