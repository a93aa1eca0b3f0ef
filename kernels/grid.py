"""The division of a call's forward into programs.

Usually a program owns a tile of queries of one head, and walks over all keys that these see. If all queries of the
heads that share a KV head fit into one small tile, as in a step of generation, it owns them all, and the keys are split
among programs. By default the length of a split depends on the config alone: the result of a sequence depends neither
on the number of programs nor on the lengths of other sequences.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import triton

from fusedattn.kernels.cached import NO_CACHE
from fusedattn.kernels.configs import TileConfig
from fusedattn.kernels.problem import Problem


class Tiling(NamedTuple):
    """The division of a forward into programs.

    Attributes:
        heads: the heads that share a tile: HEADS, a power of two.
        split_keys: the keys of one split; 0 if keys are not split.
        n_tiles: tiles of the queries of a head; with `split_keys`, splits of the keys.
        n_programs: the grid.
    """

    config: TileConfig
    heads: int
    split_keys: int
    n_tiles: int
    n_programs: int


def tiling_of(problem: Problem, *, for_backward: bool) -> Tiling:
    """The tiling of a problem, whose forward keeps results `for_backward` or not."""
    shape, few = problem.shape, problem.few_queries
    if few is not None and shape.max_seqlen_q <= few.config.BLOCK_M:
        group = shape.nheads_q // shape.nheads_kv
        heads = min(_power_of_2(group), few.config.BLOCK_M) if problem.groups_heads else 1
        n_rows = heads * shape.max_seqlen_q
        if n_rows <= few.config.BLOCK_M:
            # Tiles of heads that share a KV head, of all sequences.
            n_groups = shape.n_sequences * shape.nheads_kv * (group if heads == 1 else triton.cdiv(group, heads))
            n_keys = min(shape.max_seqlen_k, problem.band.width + shape.max_seqlen_q - 1)
            split_keys = few.split if problem.num_splits is None else few.keys_of(n_keys, problem.num_splits)
            n_splits = triton.cdiv(n_keys, split_keys)
            config = _with_rows(few.config, max(16, _power_of_2(n_rows)))
            if n_splits > 1:
                return Tiling(config, heads, split_keys, n_splits, n_splits * n_groups)
            return Tiling(config, heads, 0, 1, n_groups)
    config = problem.configs.fwd if for_backward else problem.configs.fwd.inference
    if problem.call.cache is not NO_CACHE:
        config = config.gathered
    elif problem.rotates_in_place:
        config = config.rotating
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    return Tiling(config, 1, 0, n_tiles, n_tiles * shape.nheads_q * shape.n_sequences)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, which is positive."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=256)
def _with_rows(config: TileConfig, n_rows: int) -> TileConfig:
    return replace(config, BLOCK_M=n_rows)
