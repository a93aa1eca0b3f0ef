"""One attention as the host hands it to the launchers of all kernels."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fusedattn.kernels.configs import LAUNCH_OPTIONS, FewQueries, KernelConfigs, TileConfig
from fusedattn.kernels.devices import multiprocessors
from fusedattn.kernels.mask_arguments import Band
from fusedattn.kernels.primitives import LOG2E, accumulator, block_d, is_exact
from fusedattn.kernels.rope import Rotation
from fusedattn.kernels.scores import UNMODIFIED
from fusedattn.kernels.sequences import Shape
from fusedattn.kernels.tile import Call


@dataclass(frozen=True)
class Problem:
    """Everything but q, k, v and what comes out; nothing is empty.

    Attributes:
        sinks: float32 ``(nheads_q,)`` or None; the scores are then modified, if only by their scale.
        scale: of the scores, positive.
        precision: of float32 products, "ieee" or "tf32".
        few_queries: what the forward launches for few of them, or None where it shall not.
        rotates_in_place: the forward turns keys as it loads them, rather than read what was turned and stored before.
        open_order: gradients may be summed in whatever order programs come.
        l2_bytes: of the cache, for the heads that run side by side.
    """

    shape: Shape
    call: Call
    band: Band
    rotation_q: Rotation | None
    rotation_k: Rotation | None
    sinks: torch.Tensor | None
    scale: float
    precision: str
    configs: KernelConfigs
    exact_rows: TileConfig
    few_queries: FewQueries | None
    rotates_in_place: bool
    open_order: bool
    l2_bytes: int

    @property
    def softmax_scale(self) -> float:
        """What is left to scale in the softmax: modified scores have been scaled before."""
        return 1.0 if self.call.score is not UNMODIFIED else self.scale

    @property
    def groups_heads(self) -> bool:
        """Whether heads may share a tile: a function of the user's may ask for the number of one head."""
        return self.call.mask.FUNCTION is None and self.call.score.FUNCTION is None


def _heads_together(problem: Problem, row_bytes: int, of_keys: bool) -> int:
    """How many heads program_tile takes side by side: as many as the L2 cache holds of what their programs share.

    That are keys and values, or, for who walks over queries, q and dout, of `row_bytes` each. Without a diagonal all
    tiles have the same work, and one head after the other needs the least of the cache.
    """
    if not problem.band.has_upper:
        return 1
    shape = problem.shape
    group = shape.nheads_q // shape.nheads_kv
    shared_rows = group * shape.max_seqlen_q if of_keys else shape.max_seqlen_k
    fit = max(1, problem.l2_bytes // max(1, shared_rows * row_bytes))
    # No more than there are: the kernel multiplies this with the number of tiles, in int32.
    fit = min(fit, shape.n_sequences * shape.nheads_kv)
    return fit if of_keys else group * fit


def launch_arguments(
    q: torch.Tensor, v: torch.Tensor, problem: Problem, config: TileConfig, n_tiles: int, *, of_keys: bool = False
) -> dict[str, Any]:
    """Keyword arguments of every kernel that walks over blocks: sizes, constants and launch options.

    A program owns a tile of queries, or, `of_keys`, one of keys.
    """
    shape = problem.shape
    return {
        "nheads_q": shape.nheads_q,
        "nheads_kv": shape.nheads_kv,
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "n_tiles": n_tiles,
        "together": _heads_together(problem, (q.shape[3] + v.shape[3]) * q.itemsize, of_keys),
        **problem.band.sizes,
        "n_positions": 0 if problem.rotation_q is None else problem.rotation_q.n_positions,
        "scale": problem.scale,
        "qk_scale": problem.softmax_scale * LOG2E.value,
        **_constants(q.shape[3], v.shape[3], q.dtype, problem.precision, problem.call.score.UNBOUNDED.value, config),
        **LAUNCH_OPTIONS,
    }


def programs_of(config: TileConfig, n_tiles: int, device: torch.device) -> tuple[int, int | None]:
    """(programs, tiles that they walk over) for so many tiles in all; None where each program has its own.

    They step from tile to tile by their own number, in int32.
    """
    n_programs = min(config.persistent * multiprocessors(device), n_tiles) if config.persistent else n_tiles
    if not config.persistent or n_tiles + n_programs >= 2**31:
        return n_tiles, None
    return n_programs, n_tiles


@lru_cache(maxsize=1024)
def _constants(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, precision: str, unbounded: bool, config: TileConfig
) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_DV": block_d(head_dim_v),
        "ACC": accumulator(dtype),
        "PRECISION": precision,
        "EXACT": unbounded or is_exact(dtype),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
