"""The least time of a kernel for a problem: how often its loops run, with programs that fill the GPU in turns.

Full and boundary blocks of a tile are counted as in kernels/masking.py, for a causal mask aligned to the end. Also
here: the cost of a separate rotation of the keys, and from which size on it pays.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from bench.codegen.hardware import Machine

ITEMSIZE = 2  # bytes of an element


@dataclass(frozen=True)
class Workload:
    """One call of attention(); `group` query heads share each of `nheads_kv` heads of keys."""

    batch: int
    nheads_kv: int
    group: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def nheads_q(self) -> int:
        return self.nheads_kv * self.group

    @property
    def operations(self) -> float:
        """Operations of the forward by the usual count: 4 head_dim for each pair, half of that with a causal mask."""
        pairs = self.batch * self.nheads_q * self.seqlen_q * self.seqlen_k
        return 4 * self.head_dim * pairs / (2 if self.causal else 1)

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and out, each moved once."""
        rows = self.nheads_q * 2 * self.seqlen_q + self.nheads_kv * 2 * self.seqlen_k
        return self.batch * rows * self.head_dim * ITEMSIZE


@dataclass(frozen=True)
class Kernel:
    """The results of the model for one config.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        boundary: size of a boundary block along the axis that a program walks over.
        ctas: programs on a multiprocessor at a time.
        full_clocks, boundary_clocks: from one iteration of a program to its next, with all `ctas` running.
        by_keys: a program owns a tile of keys and walks over the queries of all heads of its group.
        start_clocks: of a tile besides its iterations; None if that is only to wait for memory twice, for the tile and
            for its result.
    """

    block_m: int
    block_n: int
    boundary: int
    ctas: int
    full_clocks: float
    boundary_clocks: float
    by_keys: bool = False
    start_clocks: float | None = None


@dataclass(frozen=True)
class Estimate:
    """The least seconds, the full waves of programs, and the share of the time for which a place is occupied."""

    seconds: float
    waves: float
    filled: float


def blocks(kernel: Kernel, problem: Workload) -> Iterator[tuple[int, int]]:
    """(full, boundary) iterations of the program of each tile, in the order of the tiles."""
    shift = problem.seqlen_k - problem.seqlen_q  # query r sees keys up to r + shift
    if not kernel.by_keys:
        for start in range(0, problem.seqlen_q, kernel.block_m):
            last = min(start + kernel.block_m, problem.seqlen_q) - 1
            seen_by_all, seen_by_any = (
                min(max(row + shift + 1, 0), problem.seqlen_k) if problem.causal else problem.seqlen_k
                for row in (start, last)
            )
            full = seen_by_all // kernel.block_n
            yield full, -(-(seen_by_any - full * kernel.block_n) // kernel.boundary)
        return
    for start in range(0, problem.seqlen_k, kernel.block_n):
        last = min(start + kernel.block_n, problem.seqlen_k) - 1
        any_from, all_from = (
            min(max(key - shift, 0), problem.seqlen_q) if problem.causal else 0 for key in (start, last)
        )
        # Blocks of queries count from the last one.
        whole = last - start + 1 == kernel.block_n
        full = (problem.seqlen_q - all_from) // kernel.block_m if whole else 0
        rest = problem.seqlen_q - full * kernel.block_m - any_from
        yield problem.group * full, problem.group * -(-rest // kernel.boundary)


def estimate(kernel: Kernel, problem: Workload, machine: Machine) -> Estimate:
    """The estimate of one launch. Each place on the GPU takes the next program when it is free, in launch order.

    Besides its iterations, a program needs its `start_clocks`.
    """
    heads = problem.batch * (problem.nheads_kv if kernel.by_keys else problem.nheads_q)
    start = 2 * machine.hbm_latency if kernel.start_clocks is None else kernel.start_clocks
    tiles = [
        start + full * kernel.full_clocks + boundary * kernel.boundary_clocks
        for full, boundary in blocks(kernel, problem)
    ]
    if problem.causal and not kernel.by_keys:
        tiles.reverse()  # the longest first
    places = machine.multiprocessors * kernel.ctas
    done = [0.0] * places
    for _ in range(heads):
        for clocks in tiles:
            heapq.heappush(done, heapq.heappop(done) + clocks)
    busy, end = heads * sum(tiles), max(done)
    seconds = max(machine.seconds(end), problem.bytes / machine.hbm_bytes_per_second)
    return Estimate(seconds, heads * len(tiles) / places, busy / (places * end) if end else 1.0)


def rotation_seconds(problem: Workload, machine: Machine) -> float:
    """The seconds to read and write the keys once: the least time to rotate them in a separate kernel."""
    rows = problem.batch * problem.nheads_kv * problem.seqlen_k
    return 2 * rows * problem.head_dim * ITEMSIZE / machine.hbm_bytes_per_second


def rotation_break_even(block_m: int, block_n: int, extra_clocks: float, head_dim: int, machine: Machine) -> float:
    """The seqlen_q * group from which on rotating the keys once is faster than `extra_clocks` in each iteration.

    In the loop, each block of keys is rotated once per tile of queries, on one multiprocessor; in a separate kernel,
    once, at the speed of memory.
    """
    once = 2 * block_n * head_dim * ITEMSIZE / machine.hbm_bytes_per_second
    each = machine.seconds(extra_clocks) / machine.multiprocessors
    return block_m * once / each
