"""Everything that is done to q and k before their product: the norm (kernels/qk_norm.py), then the rotation.

attention_fwd prepares its tile of queries itself, and keys if queries are few. Otherwise a kernel here prepares a whole
tensor: keys are read by many programs, and the backward reads both many times. For a norm across heads, another kernel
sums the squares of each token first.

    qk_prologue        x to y                                  (batch, nheads, seqlen, head_dim)
    qk_prologue_bwd    dy to dx, and parts of dweight          (parts * sequences, nheads, head_dim), summed by torch
    qk_norm_rows       x to r, or dy to c                      (batch, seqlen)

Without a norm, the kernels of the backward rotate dq and dk back themselves; with one, they write dy.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.configs import rope_rows
from fusedattn.kernels.primitives import (
    accumulator,
    block_d,
    head_of,
    load_tile,
    program_tile,
    store_tile,
    strided,
    widen,
)
from fusedattn.kernels.qk_norm import (
    NO_NORM,
    Norm,
    NormArguments,
    factors_from,
    factors_of,
    load_weights,
    normalize_tile,
    squares_of,
    unnormalized,
    weight_terms,
)
from fusedattn.kernels.rope import NO_ROTATION, Rotation, rotate_tile, rotation_arguments
from fusedattn.kernels.sequences import Sequences, Shape, place_of

# Parts into which the rows of a head are split, over all sequences: each has a program, and sums for dweight.
PARTS = 256

SIZES = ("nheads", "seqlen_q", "seqlen_k", "n_positions", "n_tiles")


@triton.jit
def rows_of_side(place, OF_QUERIES: tl.constexpr):
    """(first row, number of rows) of the queries or keys of a sequence."""
    if OF_QUERIES:
        return place.first_q, place.seqlen_q
    else:
        return place.first_k, place.seqlen_k


@triton.jit(do_not_specialize=SIZES)
def qk_prologue(
    x,
    out,
    sequences,
    norm,
    rotation,
    nheads,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_tiles,
    OF_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    """One program prepares BLOCK rows of one head, of queries or of keys; with TRANSPOSE it rotates gradients back."""
    tile, head, sequence = program_tile(n_tiles, nheads, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads, seqlen_q, seqlen_k)
    first, seqlen = rows_of_side(place, OF_QUERIES)
    start = tile * BLOCK
    rows = start + tl.arange(0, BLOCK)
    exist = rows < seqlen
    y = load_tile(head_of(x, place.batch, head, first), start, exist, HEAD_DIM, BLOCK, BLOCK_D)
    if norm.NORMALIZES:
        y = normalize_tile(y, norm, head, first, rows, exist, place.batch, HEAD_DIM, BLOCK_D, ACC)
    if rotation.ROTARY_DIM > 0:
        y = rotate_tile(y, rotation, place, start, n_positions, BLOCK, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE)
    store_tile(head_of(out, place.batch, head, first), start, seqlen, y, HEAD_DIM, BLOCK, BLOCK_D)


@triton.jit
def _load_gradient(
    dy, rotation, place, head, first, start, exist, n_positions, OF_QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of normalised rows: dy, rotated back."""
    g = load_tile(head_of(dy, place.batch, head, first), start, exist, HEAD_DIM, BLOCK, BLOCK_D)
    if rotation.ROTARY_DIM > 0:
        g = rotate_tile(g, rotation, place, start, n_positions, BLOCK, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE=True)
    return widen(g, ACC)


@triton.jit(do_not_specialize=[*SIZES, "n_parts"])
def qk_prologue_bwd(
    x,
    dy,
    dx,
    dweight_ptr,
    c_ptr,
    sequences,
    norm,
    rotation,
    nheads,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_parts,
    OF_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program takes every n_parts-th tile of the rows of one head, and sums what they add to dweight."""
    part, head, sequence = program_tile(n_parts, nheads, 1, REVERSED=False)
    place = place_of(sequences, sequence, head, nheads, seqlen_q, seqlen_k)
    first, seqlen = rows_of_side(place, OF_QUERIES)
    dweight = tl.zeros([BLOCK_D], ACC)
    for start in tl.range(part * BLOCK, seqlen, n_parts * BLOCK, num_stages=1):
        rows = start + tl.arange(0, BLOCK)
        exist = rows < seqlen
        g = _load_gradient(
            dy, rotation, place, head, first, start, exist, n_positions, OF_QUERIES, HEAD_DIM, BLOCK, BLOCK_D, ACC
        )
        x_tile = load_tile(head_of(x, place.batch, head, first), start, exist, HEAD_DIM, BLOCK, BLOCK_D)
        r = factors_of(x_tile, norm, first, rows, exist, place.batch, ACC)
        c = None
        if c_ptr is not None:
            c = tl.load(c_ptr + tl.cast(place.batch, tl.int64) * norm.stride_rb + first + rows, mask=exist, other=0.0)
        terms = weight_terms(g, x_tile, r, ACC)
        dweight += tl.sum(terms, 0)
        dx_tile = unnormalized(g, x_tile, terms, r, c, norm, head, HEAD_DIM, BLOCK_D, ACC)
        store_tile(head_of(dx, place.batch, head, first), start, seqlen, dx_tile, HEAD_DIM, BLOCK, BLOCK_D)
    if dweight_ptr is not None:
        offs_d = tl.arange(0, BLOCK_D)
        of_part = (tl.cast(sequence, tl.int64) * n_parts + part) * nheads + head
        tl.store(dweight_ptr + of_part * HEAD_DIM + offs_d, dweight, mask=offs_d < HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def qk_norm_rows(
    x,
    dy,
    out_ptr,
    sequences,
    norm,
    rotation,
    nheads,
    seqlen_q,
    seqlen_k,
    n_positions,
    n_tiles,
    OF_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program sums BLOCK tokens over all heads: squares to r or, if dy is given, terms to c."""
    tile, _, sequence = program_tile(n_tiles, 1, 1, REVERSED=False)
    place = place_of(sequences, sequence, 0, nheads, seqlen_q, seqlen_k)
    first, seqlen = rows_of_side(place, OF_QUERIES)
    start = tile * BLOCK
    rows = start + tl.arange(0, BLOCK)
    exist = rows < seqlen
    total = tl.zeros([BLOCK], ACC)
    small = tl.zeros([BLOCK], ACC)
    for head in tl.range(0, nheads, num_stages=1):
        x_tile = load_tile(head_of(x, place.batch, head, first), start, exist, HEAD_DIM, BLOCK, BLOCK_D)
        if dy is None:
            squares, small_squares = squares_of(x_tile, ACC)
            total += squares
            small += small_squares
        else:
            g = _load_gradient(
                dy, rotation, place, head, first, start, exist, n_positions, OF_QUERIES, HEAD_DIM, BLOCK, BLOCK_D, ACC
            )
            terms = weight_terms(g, x_tile, factors_of(x_tile, norm, first, rows, exist, place.batch, ACC), ACC)
            if norm.weight_ptr is not None:
                terms = terms * load_weights(norm, head, HEAD_DIM, BLOCK_D, ACC)[None, :]
            total += tl.sum(terms, 1)
    if dy is None:
        total = factors_from(total, small, norm)
    else:
        total *= norm.share
    tl.store(out_ptr + tl.cast(place.batch, tl.int64) * norm.stride_rb + first + rows, total, mask=exist)


@dataclass(eq=False)  # not frozen, as Options
class Prologue:
    """What is done to one tensor, the queries or the keys of an attention of this `shape`.

    `n_positions` are the rows of the tables of the rotation, 0 without one; no sequence is longer than `longest`.
    """

    norm: Norm | None
    rotation: Rotation | None
    n_positions: int
    longest: int
    of_queries: bool
    sequences: Sequences
    shape: Shape
    _norm_arguments: NormArguments | None = field(default=None, init=False)

    @property
    def done(self) -> "Prologue":
        """That of tensors that are prepared: nothing."""
        return replace(self, norm=None, rotation=None)

    def norm_arguments(self, x: torch.Tensor) -> NormArguments:
        """The norm of x as kernels take it; the first time, launches the kernel that sums across heads."""
        assert self.norm is not None
        if self._norm_arguments is None:
            r = _of_tokens(x) if self.norm.across_heads else None
            self._norm_arguments = self.norm.arguments(x.shape[1], x.shape[3], r)
            if r is not None:
                self._launch_rows(x, None, r, self._norm_arguments._replace(r_ptr=None))
        return self._norm_arguments

    def prepared(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """A prepared copy of ``x``, ``(batch, nheads, seqlen, head_dim)`` with a contiguous last dimension.

        The copy is contiguous, computed in float32 (float64 for float64) and rounded once. With `back`, ``x`` is the
        gradient of a rotated tensor, and is itself rotated back.
        """
        if self.norm is None and self.rotation is None:
            return x
        out = x if back else replay.scratch(x, x.shape, x.dtype)
        n_tiles = -(-self.longest // rope_rows(x.shape[3]))
        launcher.launch(
            _constants(qk_prologue, x.shape[3], x.dtype, self.of_queries, TRANSPOSE=back),
            n_tiles * x.shape[1] * self.shape.n_sequences,
            (
                strided(x), strided(out), self.sequences,
                NO_NORM if self.norm is None else self.norm_arguments(x),
                NO_ROTATION if self.rotation is None else self.rotation.arguments,
            ),
            (x.shape[1], self.shape.seqlen_q, self.shape.seqlen_k, self.n_positions, n_tiles),
        )  # fmt: skip
        return out

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, *, needs_weight: bool
    ) -> torch.Tensor | None:
        """Fill `dx`, the gradient of ``x``, from that of the prepared copy; the gradient of the weight, or None."""
        norm = self.norm_arguments(x)
        c = None
        if norm.r_ptr is not None:
            c = _of_tokens(x)
            self._launch_rows(x, dy, c, norm)
        nheads, head_dim, n_sequences = x.shape[1], x.shape[3], self.shape.n_sequences
        n_tiles = -(-self.longest // rope_rows(head_dim))
        n_parts = max(1, min(n_tiles, PARTS // n_sequences))
        dweight = None
        if needs_weight:
            dtype = torch.promote_types(x.dtype, torch.float32)
            dweight = x.new_empty((n_sequences * n_parts, nheads, head_dim), dtype=dtype)
        launcher.launch(
            _constants(qk_prologue_bwd, head_dim, x.dtype, self.of_queries),
            n_parts * nheads * n_sequences,
            (
                strided(x), strided(dy), strided(dx), dweight, c, self.sequences, norm,
                rotation_arguments(self.rotation),
            ),
            (nheads, self.shape.seqlen_q, self.shape.seqlen_k, self.n_positions, n_parts),
        )  # fmt: skip
        if dweight is None or self.norm is None or self.norm.weight is None:
            return None
        return dweight.sum(0).sum_to_size(self.norm.weight.shape).to(self.norm.weight.dtype)

    def _launch_rows(self, x: torch.Tensor, dy: torch.Tensor | None, out: torch.Tensor, norm: NormArguments) -> None:
        n_tiles = -(-self.longest // rope_rows(x.shape[3]))
        launcher.launch(
            _constants(qk_norm_rows, x.shape[3], x.dtype, self.of_queries),
            n_tiles * self.shape.n_sequences,
            (
                strided(x), None if dy is None else strided(dy), out, self.sequences, norm,
                rotation_arguments(self.rotation),
            ),
            (x.shape[1], self.shape.seqlen_q, self.shape.seqlen_k, self.n_positions, n_tiles),
        )  # fmt: skip


def _of_tokens(x: torch.Tensor) -> torch.Tensor:
    """A number for each token of x, ``(batch, seqlen)``."""
    return replay.scratch(x, (x.shape[0], x.shape[2]), torch.promote_types(x.dtype, torch.float32))


@lru_cache(maxsize=1024)
def _constants(
    kernel: Any, head_dim: int, dtype: torch.dtype, of_queries: bool, **parameters: bool
) -> launcher.KernelConstants:
    return launcher.KernelConstants(
        kernel,
        OF_QUERIES=of_queries,
        HEAD_DIM=head_dim,
        BLOCK=rope_rows(head_dim),
        BLOCK_D=block_d(head_dim),
        ACC=accumulator(dtype),
        num_warps=4,
        **parameters,
    )
