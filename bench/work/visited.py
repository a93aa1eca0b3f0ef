"""The blocks of keys that a tile of queries visits, by kernels/masking.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.backends.triton import launching
from fusedattn.backends.triton.operands import constants_of
from fusedattn.kernels.masking import any_keys, bounds_of, key_blocks
from fusedattn.kernels.parameters import Numbers
from fusedattn.kernels.sequences import place_of
from fusedattn.masks import Mask
from fusedattn.options import Options
from fusedattn.pattern_blocks import blocks_and_rule
from fusedattn.shard import WHOLE
from fusedattn.support import interpreting


class Block(NamedTuple):
    """Keys ``start_n + arange(BLOCK_N)`` of the tile of queries that begins at `start_m`."""

    start_m: int
    start_n: int
    is_full: bool


@triton.jit
def _write_key_blocks(
    counts_ptr, starts_ptr, call, seqlen_q, seqlen_k, lower_start, upper_start, lower_end, upper_end,
    MOST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = place_of(call.sequences, 0, 0, 1, seqlen_q, seqlen_k)
    bounds = bounds_of(call.mask, place, Numbers(lower_start, upper_start, lower_end, upper_end, 0, 1.0, 1.0))
    start_m = tile * BLOCK_M
    blocks = key_blocks(call.mask, place, bounds, start_m, BLOCK_M, BLOCK_N, BLOCK_N)
    tl.store(counts_ptr + tile * 2, blocks.n_full)
    tl.store(counts_ptr + tile * 2 + 1, blocks.n_boundary)
    for i in range(0, blocks.n_full + blocks.n_boundary):
        tl.store(starts_ptr + tile * MOST + i, any_keys(i, blocks, call.mask, place, start_m, BLOCK_N))


def visited(mask: Mask, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> list[Block]:
    """Blocks of `block_n` keys that tiles of `block_m` queries visit, full ones of a tile first."""
    device = "cpu" if interpreting() else "cuda"
    x = torch.zeros((), device=device).expand(1, 1, max(seqlen_q, seqlen_k), 16)
    q, k = x[:, :, :seqlen_q], x[:, :, :seqlen_k]
    mask = mask.to(device)
    pattern = None if mask.pattern is None else blocks_and_rule(mask, 1, seqlen_q, seqlen_k, WHOLE, q.device)
    problem = launching.problem_of(q, k, k, constants_of(Options(mask), keep_residual=False, pattern=pattern))
    n_tiles, most = -(-seqlen_q // block_m), -(-seqlen_k // block_n) + 2
    counts = torch.zeros(n_tiles, 2, dtype=torch.int32, device=device)
    starts = torch.zeros(n_tiles, most, dtype=torch.int32, device=device)
    _write_key_blocks[(n_tiles,)](
        counts, starts, problem.call, seqlen_q, seqlen_k, **problem.band.sizes,
        MOST=most, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return [
        Block(tile * block_m, start_n, i < n_full)
        for tile, (n_full, n_boundary) in enumerate(counts.tolist())
        for i, start_n in enumerate(starts[tile, : n_full + n_boundary].tolist())
    ]
