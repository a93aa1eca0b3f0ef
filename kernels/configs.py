"""Launch configurations: one committed table, one lookup, one validity rule; kernels/fp8_configs.py has a forward's.

Nothing is tuned in a user's process. Entries were chosen among configurations that compile without register spills
under Triton 3.6 and 3.7 on the NVIDIA architectures, with the features that need the most registers.
`python -m bench.codegen` compiles them all, with every set of features; docs/codegen.md lists the spills that remain.
The sequence length is not part of the key, so a new length compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from fusedattn.kernels.versions import TRITON_VERSION

Arch = Literal["sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter"]

# The work on each pair besides the products: fields of an Entry.
Work = Literal["streamed", "pairwise", "biased", "scored", "combined"]

# How full blocks are loaded and multiplied: by pointers; by tensor descriptors (sm_90 and later); by descriptors, with
# a block's product of weights and values issued after the next block's product of queries and keys (in no entry:
# docs/decisions/0021).
Style = Literal["pointers", "descriptors", "pipelined"]

# A tile of keys has at most this many features. Those behind them, in the forward, have a tile of their own.
MAX_HEAD_DIM = 512

# Up to this number of queries, times heads that share a KV head, keys are rotated in registers, once for each tile of
# queries; above it, by a kernel of their own, which reads and writes them all. Both cost the same at 441 to 883, by the
# models of docs/performance.md and its sources.
ROTATION_IN_PLACE = 440


@dataclass(frozen=True)
class TileConfig:
    """The queries and keys of one tile, its warps, its pipeline stages and its style.

    Boundary blocks, which take more registers, have at most BOUNDARY keys (or queries, in a walk over queries) and at
    most BOUNDARY_STAGES pipeline stages: with three in the forward, Triton 3.6 serialises wgmma. `persistent` programs
    for each multiprocessor walk over all tiles; with 0 each tile has its own program. With `prerotate_q` a separate
    kernel rotates the queries: a tile that a program rotates stays in registers, and if it is large, too few are left.
    A forward that keeps nothing for a backward has `inference_stages`, if it has shared memory for more than others.
    Only the forward uses these last three.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    style: Style = "pointers"
    BOUNDARY: int = 64
    BOUNDARY_STAGES: int = 2
    persistent: int = 0
    prerotate_q: bool = False
    inference_stages: int = 0

    def __post_init__(self) -> None:
        for name in ("BLOCK_M", "BLOCK_N", "BOUNDARY"):
            block = getattr(self, name)
            if block < 16 or block & (block - 1):
                raise ValueError(f"{name}: got {block}, allowed are powers of two from 16 on")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps: got {self.num_warps}, allowed are 1, 2, 4, 8, 16")
        for name in ("num_stages", "BOUNDARY_STAGES"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed are 1 and more")
        if self.style not in get_args(Style):
            raise ValueError(f"style: got {self.style!r}, allowed are {', '.join(get_args(Style))}")
        for name in ("persistent", "inference_stages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed are 0 and more")

    @cached_property
    def in_order(self) -> tuple[Any, ...]:
        """The values of the fields; they hash faster than the config."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def within(self, block_q: int, block_k: int) -> TileConfig:
        """This config with a tile that divides blocks of `block_q` queries and `block_k` keys, multiples of 16."""
        block_m, block_n = (
            min(tile, block & -block) for tile, block in ((self.BLOCK_M, block_q), (self.BLOCK_N, block_k))
        )
        return replace(self, BLOCK_M=block_m, BLOCK_N=block_n)

    @cached_property
    def boundary_of_keys(self) -> dict[str, int]:
        """The constants for boundary blocks of a kernel that walks over keys."""
        return self._boundary(self.BLOCK_N)

    @cached_property
    def boundary_of_queries(self) -> dict[str, int]:
        """The constants for boundary blocks of a kernel that walks over queries."""
        return self._boundary(self.BLOCK_M)

    def _boundary(self, block: int) -> dict[str, int]:
        return {"BOUNDARY": min(self.BOUNDARY, block), "BOUNDARY_STAGES": min(self.BOUNDARY_STAGES, self.num_stages)}

    @cached_property
    def inference(self) -> TileConfig:
        """The config for a forward that keeps nothing for a backward."""
        return replace(self, num_stages=self.inference_stages) if self.inference_stages else self

    @cached_property
    def rotating(self) -> TileConfig:
        """The config for a forward that rotates keys as it loads them.

        The rotation takes the registers of the style `pipelined` and, with `prerotate_q`, those of rows above 64. By
        pointers it also loads the partners of keys, which takes the registers of half of the rows above 32.
        """
        rows = min(self.BLOCK_M, 64) if self.prerotate_q else self.BLOCK_M
        tile = replace(self, BLOCK_M=rows, BLOCK_N=min(self.BLOCK_N, 32), num_stages=min(self.num_stages, 2))
        if self.style == "pointers":
            return replace(tile, BLOCK_M=min(rows, max(32, rows // 2)))
        return replace(tile, style="descriptors", BOUNDARY=min(self.BOUNDARY, 32), BOUNDARY_STAGES=1)

    @cached_property
    def gathered(self) -> TileConfig:
        """The config for a forward that reads keys from a cache, by a pointer for each row."""
        return replace(
            self.rotating,
            BLOCK_M=min(self.BLOCK_M, 64),
            BLOCK_N=min(self.BLOCK_N, 32),
            num_stages=min(self.num_stages, 2),
            style="pointers",
            BOUNDARY=min(self.BOUNDARY, 32),
            persistent=0,
        )

    @cached_property
    def unpipelined(self) -> TileConfig:
        """This config with one stage in all loops."""
        return replace(self, num_stages=1, BOUNDARY_STAGES=1)

    @cached_property
    def narrow(self) -> TileConfig:
        """This config with at most 16 keys in a tile."""
        return replace(self, BLOCK_N=16, BOUNDARY=16)

    @cached_property
    def unpipelined_boundary(self) -> TileConfig:
        """This config with one stage for boundary blocks."""
        return replace(self, BOUNDARY_STAGES=1)

    def smaller(self, *, by_keys: bool = False) -> TileConfig:
        """This config with half of the tile, at least 16 by 16.

        Rows (keys, with `by_keys`) are kept at 64 if possible: Hopper's matrix instructions take 64 rows.
        """
        rows, columns = (self.BLOCK_N, self.BLOCK_M) if by_keys else (self.BLOCK_M, self.BLOCK_N)
        if rows > 64 or columns == 16:
            rows = max(16, rows // 2)
        else:
            columns //= 2
        block_m, block_n = (columns, rows) if by_keys else (rows, columns)
        return replace(self, BLOCK_M=block_m, BLOCK_N=block_n)


@dataclass(frozen=True)
class KernelConfigs:
    """The configs of the matrix-product kernels at one (architecture, head_dim, dtype).

    `one_pass` is for attention_bwd_dkdv if it accumulates dq too; None if two kernels are better, or one is untried.
    """

    fwd: TileConfig
    dkdv: TileConfig
    dq: TileConfig
    one_pass: TileConfig | None = None

    def __post_init__(self) -> None:
        for name, config in (("dkdv", self.dkdv), ("dq", self.dq)):
            if config.persistent:
                raise ValueError(f"{name}: got persistent={config.persistent}, allowed is 0")

    def within(self, block_q: int, block_k: int) -> KernelConfigs:
        """Each config :meth:`TileConfig.within` a block."""
        tiles = ((field.name, getattr(self, field.name)) for field in fields(self))
        found: dict[str, Any] = {name: x if x is None else x.within(block_q, block_k) for name, x in tiles}
        return KernelConfigs(**found)

    def smaller(self) -> KernelConfigs:
        """The :meth:`TileConfig.smaller` of each config."""
        return KernelConfigs(
            self.fwd.smaller(),
            self.dkdv.smaller(by_keys=True),
            self.dq.smaller(),
            None if self.one_pass is None else self.one_pass.smaller(by_keys=True),
        )


@dataclass(frozen=True)
class FewQueries:
    """The forward of calls in which the queries of all heads that share a KV head fit into one small tile.

    BLOCK_M of `config` is the most rows that such a tile has; a call gets the power of two that it needs, from 16 on.
    Each split of `split` keys has its own program.
    """

    config: TileConfig
    split: int

    def __post_init__(self) -> None:
        if self.config.persistent:
            raise ValueError(f"config: got persistent={self.config.persistent}, allowed is 0")
        block = max(self.config.BLOCK_N, self.config.BOUNDARY)
        if self.split % block:
            raise ValueError(f"split: got {self.split}, allowed are multiples of {block} keys")

    def keys_of(self, n_keys: int, n_splits: int) -> int:
        """The keys of one of at most `n_splits` splits of `n_keys`."""
        block = max(self.config.BLOCK_N, self.config.BOUNDARY)
        return max(1, -(-n_keys // (n_splits * block))) * block


@dataclass(frozen=True)
class Entry:
    """The configs of one (architecture, dtype, head_dim), by the work on each pair.

    `pairwise` serves calls that read or compute a mask for each pair (a boolean one, a tree, documents, a function):
    that takes registers, so tiles may be smaller than the streamed ones, which are its default. `scored` serves calls
    that change scores or drop weights, which takes more; its default is half of the pairwise tiles. `biased` serves
    those of them that need the fewest: with a bias, slopes or sinks and nothing else; its default is the scored tiles.
    `combined` serves calls that do what pairwise and scored ones do; its default is half of the scored tiles.
    `streamed` serves all others.
    """

    streamed: KernelConfigs
    pairwise: KernelConfigs = None  # type: ignore[assignment]
    biased: KernelConfigs = None  # type: ignore[assignment]
    scored: KernelConfigs = None  # type: ignore[assignment]
    combined: KernelConfigs = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.pairwise is None:
            object.__setattr__(self, "pairwise", self.streamed)
        if self.scored is None:
            object.__setattr__(self, "scored", self.pairwise.smaller())
        if self.biased is None:
            object.__setattr__(self, "biased", self.scored)
        if self.combined is None:
            object.__setattr__(self, "combined", self.scored.smaller())


_T = TileConfig


def _by_compiler(older: TileConfig, newer: TileConfig, since: tuple[int, int] = (3, 8)) -> TileConfig:
    """`newer` from Triton `since` on, which takes more registers: docs/decisions/0015 and 0033."""
    return older if since > TRITON_VERSION else newer


# architecture -> itemsize of the dtype -> largest head_dim -> entry.
# fmt: off
TABLE: dict[Arch, dict[int, dict[int, Entry]]] = {
    "sm_80": {
        2: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(128, 64, 8, 3), dkdv=_T(64, 32, 4, 2), dq=_T(32, 32, 4, 1)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 2), dkdv=_T(32, 64, 4, 2), dq=_T(32, 32, 4, 1)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(64, 64, 8, 2), dkdv=_T(32, 64, 8, 2), dq=_T(64, 64, 8, 2)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 1), dkdv=_T(64, 64, 8, 2), dq=_T(32, 64, 8, 2)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(32, 64, 8, 1), dkdv=_T(32, 32, 8, 2), dq=_T(32, 32, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 16, 4, 1), dkdv=_T(32, 32, 8, 2), dq=_T(32, 32, 8, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
        4: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(32, 32, 4, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 32, 8, 1)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(16, 16, 4, 1), dkdv=_T(16, 16, 8, 1), dq=_T(32, 16, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(32, 16, 8, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
    },
    "sm_86": {
        2: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(64, 32, 4, 2), dkdv=_T(32, 64, 4, 1), dq=_T(32, 32, 4, 1)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 2), dkdv=_T(32, 64, 4, 2), dq=_T(32, 64, 8, 1)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(64, 64, 8, 2), dkdv=_T(32, 64, 8, 2), dq=_T(64, 32, 8, 2)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 1), dkdv=_T(64, 32, 8, 2), dq=_T(32, 64, 8, 2)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(64, 32, 8, 1), dkdv=_T(32, 32, 8, 2), dq=_T(32, 32, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 16, 4, 1), dkdv=_T(32, 32, 8, 1), dq=_T(32, 32, 8, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
        4: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(32, 32, 4, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1)),
            ),
            128: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1))),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(16, 16, 16, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 16, 4, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
    },
    "sm_90": {
        2: {
            64: Entry(
                streamed=KernelConfigs(
                    fwd=_T(64, 128, 4, 3, "descriptors", inference_stages=2),
                    dkdv=_by_compiler(
                        _T(128, 64, 4, 2, "descriptors", 32), newer=_T(64, 64, 4, 3, "descriptors", 32), since=(3, 7)
                    ),
                    dq=_T(64, 64, 4, 3, "descriptors"),
                ),
                pairwise=KernelConfigs(
                    fwd=_T(64, 64, 4, 2, BOUNDARY=32), dkdv=_T(64, 128, 8, 2, "descriptors", 32), dq=_T(128, 64, 8, 2)
                ),
                biased=KernelConfigs(
                    fwd=_T(64, 64, 4, 2, "descriptors", 32), dkdv=_T(64, 64, 4, 1, "descriptors", 32),
                    dq=_T(64, 64, 4, 2, "descriptors"),
                ),
                scored=KernelConfigs(
                    fwd=_T(128, 64, 8, 2, BOUNDARY_STAGES=1),
                    dkdv=_T(32, 64, 4, 1),
                    dq=_T(64, 64, 8, 2, BOUNDARY=32, BOUNDARY_STAGES=1),
                ),
                combined=KernelConfigs(
                    fwd=_T(64, 32, 8, 2, BOUNDARY_STAGES=1), dkdv=_T(16, 64, 4, 1), dq=_T(64, 16, 8, 2)
                ),
            ),
            128: Entry(
                streamed=KernelConfigs(
                    fwd=_T(64, 64, 4, 2, "descriptors", 32, inference_stages=3),
                    dkdv=_by_compiler(_T(64, 64, 4, 2, "descriptors", 16), newer=_T(32, 128, 8, 3, "descriptors", 16)),
                    dq=_T(128, 64, 8, 3, "descriptors", 32),
                ),
                pairwise=KernelConfigs(
                    fwd=_by_compiler(_T(64, 32, 4, 1), newer=_T(64, 32, 4, 2, BOUNDARY=16), since=(3, 7)),
                    dkdv=_T(32, 128, 8, 2, "descriptors", 16),
                    dq=_T(64, 32, 4, 2, BOUNDARY=16),
                ),
                biased=KernelConfigs(
                    fwd=_T(64, 32, 4, 2, "descriptors", 16), dkdv=_T(64, 64, 4, 1, "descriptors", 16),
                    dq=_T(64, 32, 4, 2, "descriptors", 32),
                ),
                scored=KernelConfigs(
                    fwd=_by_compiler(_T(64, 32, 8, 3, BOUNDARY_STAGES=1), newer=_T(64, 16, 8, 3)),
                    dkdv=_by_compiler(_T(32, 64, 8, 2, BOUNDARY=16), newer=_T(32, 64, 8, 1, BOUNDARY=16)),
                    dq=_T(64, 32, 8, 1),
                ),
                combined=KernelConfigs(
                    fwd=_T(64, 16, 8, 3, BOUNDARY_STAGES=1), dkdv=_T(16, 64, 8, 2), dq=_T(64, 16, 8, 2)
                ),
            ),
            256: Entry(
                streamed=KernelConfigs(
                    fwd=_T(128, 64, 8, 2, "descriptors", 16, prerotate_q=True),
                    dkdv=_by_compiler(_T(64, 64, 8, 2, "descriptors", 16), newer=_T(32, 64, 8, 3, "descriptors", 16)),
                    dq=_T(128, 32, 8, 2, "descriptors", 16),
                ),
                pairwise=KernelConfigs(
                    fwd=_T(64, 32, 8, 1, BOUNDARY=16, BOUNDARY_STAGES=1),
                    dkdv=_T(32, 32, 8, 2),
                    dq=_T(64, 32, 8, 2, BOUNDARY=16, BOUNDARY_STAGES=1),
                ),
                biased=KernelConfigs(
                    fwd=_T(64, 32, 8, 1, "descriptors", 16), dkdv=_T(32, 64, 8, 1, "descriptors", 16),
                    dq=_T(64, 32, 8, 1, "descriptors", 16),
                ),
                scored=KernelConfigs(
                    fwd=_by_compiler(_T(64, 32, 8, 1, "descriptors", 16), newer=_T(64, 16, 8, 1)),
                    dkdv=_by_compiler(_T(32, 64, 8, 2, BOUNDARY=16), newer=_T(16, 64, 8, 1, "descriptors")),
                    dq=_T(64, 32, 8, 1, BOUNDARY=16),
                ),
                combined=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(32, 16, 8, 1), dq=_T(16, 32, 8, 1)),
            ),
            512: Entry(
                streamed=KernelConfigs(
                    fwd=_T(16, 32, 8, 1),
                    dkdv=_by_compiler(_T(32, 16, 8, 2, "descriptors", 16), newer=_T(16, 16, 8, 1)),
                    dq=_T(64, 32, 8, 1, "descriptors", 16),
                ),
                pairwise=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1)),
                combined=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 64, 8, 1, BOUNDARY=16)),
            ),
        },
        4: {
            64: Entry(
                streamed=KernelConfigs(
                    fwd=_T(32, 32, 8, 1, BOUNDARY=16), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1, BOUNDARY=16)
                ),
                pairwise=KernelConfigs(fwd=_T(32, 32, 8, 1, BOUNDARY=16), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 4, 1)),
                scored=KernelConfigs(fwd=_T(32, 16, 8, 1), dkdv=_T(16, 16, 4, 1), dq=_T(32, 32, 8, 1, BOUNDARY=16)),
                combined=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 4, 1)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(16, 32, 8, 1, BOUNDARY=16), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(16, 16, 4, 1), dkdv=_T(32, 16, 8, 1), dq=_T(16, 16, 4, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 4, 1)),
            ),
            512: Entry(
                streamed=KernelConfigs(fwd=_T(32, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 32, 16, 1, BOUNDARY=16)),
                pairwise=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1)),
            ),
        },
    },
    "sm_100": {
        2: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(64, 64, 4, 2), dkdv=_T(64, 128, 8, 2), dq=_T(128, 64, 8, 2)),
                pairwise=KernelConfigs(fwd=_T(128, 32, 8, 2), dkdv=_T(32, 64, 4, 1), dq=_T(128, 64, 8, 2)),
                combined=KernelConfigs(fwd=_T(64, 16, 8, 2), dkdv=_T(16, 32, 4, 1), dq=_T(64, 16, 8, 2)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(128, 64, 8, 2), dkdv=_T(32, 64, 8, 2), dq=_T(64, 64, 8, 2)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 2), dkdv=_T(32, 64, 8, 1), dq=_T(64, 32, 8, 2)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(64, 32, 8, 2), dkdv=_T(32, 32, 8, 2), dq=_T(32, 32, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(32, 32, 8, 2), dq=_T(16, 16, 4, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
        4: {
            64: Entry(streamed=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1))),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1)),
                pairwise=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1)),
            ),
            256: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 4, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
    },
    "gfx942": {
        2: {
            64: Entry(
                streamed=KernelConfigs(fwd=_T(128, 64, 8, 3), dkdv=_T(32, 64, 4, 2), dq=_T(32, 32, 4, 1)),
                pairwise=KernelConfigs(fwd=_T(128, 64, 4, 3), dkdv=_T(32, 64, 4, 2), dq=_T(32, 32, 4, 1)),
            ),
            128: Entry(
                streamed=KernelConfigs(fwd=_T(64, 64, 8, 2), dkdv=_T(32, 64, 8, 1), dq=_T(64, 32, 8, 2)),
                pairwise=KernelConfigs(fwd=_T(64, 32, 8, 1), dkdv=_T(32, 64, 8, 1), dq=_T(64, 32, 4, 2)),
            ),
            256: Entry(
                streamed=KernelConfigs(fwd=_T(64, 32, 4, 1), dkdv=_T(16, 32, 8, 2), dq=_T(32, 16, 4, 1)),
                pairwise=KernelConfigs(fwd=_T(32, 16, 4, 1), dkdv=_T(16, 32, 8, 2), dq=_T(32, 16, 4, 1)),
            ),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 32, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
        4: {
            64: Entry(streamed=KernelConfigs(fwd=_T(32, 32, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(32, 32, 8, 1))),
            128: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 32, 8, 1), dq=_T(16, 16, 8, 1))),
            256: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 4, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
            512: Entry(streamed=KernelConfigs(fwd=_T(16, 16, 8, 1), dkdv=_T(16, 16, 8, 1), dq=_T(16, 16, 8, 1))),
        },
    },
}
# fmt: on

# attention_bwd_exact_rows, which no 16-bit call needs: largest head_dim -> config, on every architecture.
EXACT_ROWS: dict[int, TileConfig] = {
    64: _by_compiler(_T(16, 64, 8, 1), newer=_T(64, 16, 8, 1)),
    128: _T(16, 16, 8, 1),
    256: _T(16, 16, 4, 1),
    512: _T(16, 16, 8, 1),
}

# Few queries: itemsize of the dtype -> largest head_dim -> config. These need loads in flight: two programs on a
# multiprocessor, or more stages.
_FEW: dict[int, dict[int, TileConfig]] = {
    2: {64: _T(32, 64, 4, 3), 128: _T(32, 32, 4, 4), 256: _T(16, 32, 8, 2), 512: _T(16, 16, 8, 2)},
    4: {64: _T(16, 32, 8, 1), 128: _T(16, 32, 8, 1), 256: _T(16, 16, 8, 1), 512: _T(16, 16, 8, 1)},
}
FEW_QUERIES: dict[Arch, dict[int, dict[int, TileConfig]]] = {
    "sm_80": _FEW,
    "sm_86": _FEW | {2: _FEW[2] | {128: _T(32, 32, 4, 2), 256: _T(16, 16, 8, 2), 512: _T(16, 16, 8, 1)}},
    "sm_90": _FEW | {4: _FEW[4] | {64: _T(16, 16, 4, 1), 256: _T(16, 16, 4, 1)}},
    "sm_100": _FEW | {2: _FEW[2] | {128: _T(32, 32, 8, 4)}},  # with 4 warps it spills
    "gfx942": _FEW | {2: {64: _T(32, 64, 4, 2), 128: _T(32, 32, 4, 2), 256: _T(16, 16, 8, 1), 512: _T(16, 16, 8, 1)}},
}

# The same for calls that read a cache. A load of keys waits for one of their place, so each gets half of the stages.
_FEW_OF_CACHES: dict[int, dict[int, TileConfig]] = {
    2: _FEW[2] | {64: _T(32, 32, 4, 5, BOUNDARY=32), 128: _T(32, 32, 4, 5, BOUNDARY=16)},
    4: _FEW[4] | {64: _T(16, 32, 8, 1, BOUNDARY=16)},
}
FEW_QUERIES_OF_CACHES: dict[Arch, dict[int, dict[int, TileConfig]]] = {
    "sm_80": _FEW_OF_CACHES,
    "sm_86": {
        2: FEW_QUERIES["sm_86"][2] | {64: _FEW_OF_CACHES[2][64], 128: _T(32, 32, 4, 3, BOUNDARY=16)},
        4: _FEW_OF_CACHES[4],
    },
    "sm_90": {2: _FEW_OF_CACHES[2], 4: FEW_QUERIES["sm_90"][4]},
    "sm_100": {
        2: _FEW_OF_CACHES[2] | {128: _T(32, 32, 8, 5, BOUNDARY=16)},
        4: _FEW[4] | {64: _T(16, 32, 4, 1, BOUNDARY=16)},
    },
    "gfx942": FEW_QUERIES["gfx942"],
}

# Keys of a split. A shorter split makes more programs of one sequence. The partial sums of a split of this length take
# less than 4 % of the memory of the keys and values that it reads, in 16 bits and with up to 16 heads that share them.
SPLIT = 512

# Small tiles, so that small inputs still have several blocks and ragged ones, in the styles of the newest targets.
INTERPRETER = KernelConfigs(
    fwd=_T(32, 16, 4, 1, "pipelined"),
    dkdv=_T(16, 32, 4, 1, "descriptors"),
    dq=_T(32, 16, 4, 1, "descriptors"),
    one_pass=_T(32, 32, 4, 1, "descriptors", 16),
)
INTERPRETER_FEW_QUERIES = FewQueries(_T(16, 16, 4, 1, BOUNDARY=16), split=32)


def lookup(arch: Arch, head_dim: int, dtype: torch.dtype, work: Work = "streamed") -> KernelConfigs:
    """The configs of an architecture for inputs of `head_dim` features of `dtype`, by the work on each pair.

    Raises:
        NotImplementedError: head_dim is beyond the table.
    """
    if arch == "interpreter":
        return INTERPRETER
    by_head_dim = TABLE[arch][dtype.itemsize]
    for largest, entry in by_head_dim.items():
        if head_dim <= largest:
            return getattr(entry, work)
    raise NotImplementedError(f"head_dim: got {head_dim}, allowed are 1 .. {max(by_head_dim)}")


def lookup_exact_rows(arch: Arch, head_dim: int) -> TileConfig:
    """The config of attention_bwd_exact_rows; head_dim is one that :func:`lookup` knows."""
    if arch == "interpreter":
        return INTERPRETER.dq
    return next(config for largest, config in EXACT_ROWS.items() if head_dim <= largest)


def lookup_few_queries(
    arch: Arch, head_dim: int, dtype: torch.dtype, work: Work = "streamed", of_cache: bool = False
) -> FewQueries:
    """The forward for few queries; the arguments are those of :func:`lookup`, and whether keys lie in a cache."""
    if arch == "interpreter":
        return INTERPRETER_FEW_QUERIES
    by_head_dim = (FEW_QUERIES_OF_CACHES if of_cache else FEW_QUERIES)[arch][dtype.itemsize]
    config = next(config for largest, config in by_head_dim.items() if head_dim <= largest)
    return FewQueries(config.smaller() if work in ("biased", "scored", "combined") else config, SPLIT)


def has_backward(arch: Arch, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether tiles of the backward fit into the shared memory of an architecture."""
    return not (arch == "sm_86" and dtype.itemsize == 4 and head_dim > 256)


def rope_rows(head_dim: int) -> int:
    """Rows of a program of the rope kernel, which has 4 warps on every architecture.

    A thread holds the row elements, their partners, and both table entries: with 64 rows of 256 float32 features it
    spilled up to 16 KiB.
    """
    return 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
