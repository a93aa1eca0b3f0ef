"""One call of attention, as the host passes it to the launchers of all kernels."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import triton.language as tl

from fusedattn.kernels.configs import MAX_HEAD_DIM, FewQueries, KernelConfigs, TileConfig
from fusedattn.kernels.devices import multiprocessors
from fusedattn.kernels.fp8 import Codes
from fusedattn.kernels.launcher import KernelConstants
from fusedattn.kernels.mask_arguments import BandBounds
from fusedattn.kernels.parameters import Call, Tile
from fusedattn.kernels.primitives import LOG2E, accumulator, block_d
from fusedattn.kernels.prologue import Prologue
from fusedattn.kernels.scores import UNMODIFIED
from fusedattn.kernels.sequences import Shape
from fusedattn.kernels.softmax import exactness


@dataclass(eq=False)
class Problem:
    """Everything that launchers take besides q, k, v and the results; no tensor is empty.

    Attributes:
        sinks: float32 ``(nheads_q,)`` or None; with sinks the scores are modified, if only by their scale.
        scale: of the scores, positive.
        precision: of float32 products, "ieee" or "tf32".
        few_queries: the forward for few queries, or None if it must not be used.
        rotates_in_place: the forward rotates keys as it loads them, rather than read keys that were rotated before.
        nondeterministic: gradients may be summed in any order of programs.
        l2_bytes: of the cache, for the heads that run side by side.
        num_splits: the splits of keys in the forward for few queries, or None for splits of a fixed length.
        async_products: matrix units read tiles asynchronously (kernels/pipelining.py).
        codes: how q, k and v are rounded to e4m3 codes (kernels/fp8.py), or None; then there is no backward.
    """

    shape: Shape
    call: Call
    call_kind: Hashable
    band: BandBounds
    prologue_q: Prologue
    prologue_k: Prologue
    sinks: torch.Tensor | None
    scale: float
    precision: str
    configs: KernelConfigs
    exact_rows: TileConfig
    few_queries: FewQueries | None
    rotates_in_place: bool
    nondeterministic: bool
    l2_bytes: int
    async_products: bool = False
    num_splits: int | None = None
    codes: Codes | None = None

    @property
    def known_call(self) -> tuple[Call, Hashable]:
        """The call and its kind, for all launches."""
        return self.call, self.call_kind

    @cached_property
    def softmax_scale(self) -> float:
        """The scale that the softmax applies: 1 if scores are modified, which scales them before."""
        return 1.0 if self.call.score is not UNMODIFIED else self.scale

    @cached_property
    def qk_scale(self) -> float:
        """`softmax_scale` in base 2."""
        return self.softmax_scale * LOG2E.value

    @property
    def groups_heads(self) -> bool:
        """Whether heads may share a tile: not with a user's function, which may use the number of one head."""
        return self.call.mask.FUNCTION is None and self.call.score.FUNCTION is None


def _heads_in_l2(problem: Problem, row_bytes: int, of_keys: bool) -> int:
    """The number of heads that program_tile runs side by side, so that the rows their programs share fit into L2.

    These are keys and values; for programs that walk over queries, q and dout. A row has `row_bytes`. Without a
    diagonal all tiles have the same work, and one head after the other needs the least cache.
    """
    if not problem.band.has_upper:
        return 1
    shape = problem.shape
    group = shape.nheads_q // shape.nheads_kv
    shared_rows = group * shape.max_seqlen_q if of_keys else shape.max_seqlen_k
    fit = max(1, problem.l2_bytes // max(1, shared_rows * row_bytes))
    # No more than there are: the kernel multiplies this by the number of tiles, in int32.
    fit = min(fit, shape.n_sequences * shape.nheads_kv)
    return fit if of_keys else group * fit


def sizes_of(
    q: torch.Tensor, v: torch.Tensor, problem: Problem, n_tiles: int, *, of_keys: bool = False
) -> tuple[int, ...]:
    """The numbers of a kernel that walks over blocks, except its factors, in the order of its parameters.

    A program owns a tile of queries or, with `of_keys`, a tile of keys.
    """
    shape = problem.shape
    return (
        shape.nheads_q,
        shape.nheads_kv,
        shape.seqlen_q,
        shape.seqlen_k,
        n_tiles,
        _heads_in_l2(problem, (q.shape[3] + v.shape[3]) * q.itemsize, of_keys),
        *problem.band.in_order,
        problem.prologue_q.n_positions,
    )


def programs_of(persistent: int, n_tiles: int, device: torch.device) -> tuple[int, int | None]:
    """(number of programs, number of tiles that they walk over, or None if each program has its own tile).

    Programs step from tile to tile by the number of programs, in int32.
    """
    n_programs = min(persistent * multiprocessors(device), n_tiles) if persistent else n_tiles
    if not persistent or n_tiles + n_programs >= 2**31:
        return n_tiles, None
    return n_programs, n_tiles


_constants: dict[Hashable, KernelConstants] = {}


def constants_of(
    kernel: Any,
    q: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: TileConfig,
    of_tile: Mapping[str, int] = MappingProxyType({}),
    **parameters: Any,
) -> KernelConstants:
    """The constants of a kernel that walks over blocks.

    `of_tile` has fields of its :class:`Tile` that not all kernels have, `parameters` its other constexpr parameters.
    """
    head_dim, head_dim_v, dtype = min(q.shape[3], MAX_HEAD_DIM), v.shape[3], q.dtype
    exact = exactness(dtype, problem.precision, problem.call.score.UNBOUNDED.value)
    key = (
        *(kernel.fn, q.shape[3], head_dim_v, dtype, problem.precision, exact),
        *config.in_order,
        *of_tile.values(),
        *parameters.values(),
    )
    found = _constants.get(key)
    if found is None:
        values = {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_DV": block_d(head_dim_v),
            "ACC": accumulator(dtype).name,
            "PRECISION": problem.precision,
            "EXACT": exact,
            **({"TAIL": q.shape[3] - head_dim} if q.shape[3] > head_dim else {}),
            **of_tile,
        }
        found = _constants[key] = KernelConstants(
            kernel,
            tile=Tile(**{name: tl.constexpr(value) for name, value in values.items()}),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **parameters,
        )
    return found
