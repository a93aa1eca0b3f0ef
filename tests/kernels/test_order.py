"""The order in which programs take tiles: each tile once, the longest first, and few heads at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from fusedattn import masks
from fusedattn.backends.triton import launching
from fusedattn.backends.triton.operands import constants_of
from fusedattn.kernels import configs, devices
from fusedattn.kernels import problem as kernel_problem
from fusedattn.kernels.primitives import program_tile
from fusedattn.kernels.problem import programs_of, sizes_of
from fusedattn.options import Options
from tests.conftest import DEVICE


@triton.jit
def write_places(places_ptr, n_tiles, nheads, heads_in_l2, REVERSED: tl.constexpr):
    """(tile, head, batch) of each program."""
    tile, head, batch = program_tile(n_tiles, nheads, heads_in_l2, REVERSED)
    ptr = places_ptr + tl.program_id(0) * 3
    tl.store(ptr, tile)
    tl.store(ptr + 1, head)
    tl.store(ptr + 2, batch)


def places(n_tiles: int, nheads: int, batch: int, heads_in_l2: int, reverse: bool) -> list[tuple[int, ...]]:
    n = n_tiles * nheads * batch
    found = torch.zeros(n, 3, dtype=torch.int32, device=DEVICE)
    write_places[(n,)](found, n_tiles, nheads, heads_in_l2, REVERSED=reverse)
    return [tuple(place) for place in found.tolist()]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("heads_in_l2", [1, 2, 4, 5, 6, 100])
@pytest.mark.parametrize(("n_tiles", "nheads", "batch"), [(1, 1, 1), (5, 3, 2), (4, 2, 1), (1, 6, 2), (7, 1, 3)])
def test_order(n_tiles, nheads, batch, heads_in_l2, reverse):
    found = places(n_tiles, nheads, batch, heads_in_l2, reverse)
    assert sorted(found) == sorted(itertools.product(range(n_tiles), range(nheads), range(batch)))
    heads = [head + nheads * sequence for _, head, sequence in found]
    for first in range(0, nheads * batch, heads_in_l2):
        # One group of heads after another; within a group, every head's first tile comes before any second tile.
        part = found[first * n_tiles : (first + heads_in_l2) * n_tiles]
        group = range(first, min(first + heads_in_l2, nheads * batch))
        assert set(heads[first * n_tiles : (first + heads_in_l2) * n_tiles]) == set(group)
        tiles = [tile for tile, _, _ in part]
        assert tiles == sorted(tiles, reverse=reverse)


def test_persistent_programs(monkeypatch):
    """As many as the multiprocessors hold, or as there are tiles; none if an index would exceed int32."""
    tile = configs.TileConfig(32, 16, 4, 1, persistent=2)
    monkeypatch.setattr(kernel_problem, "multiprocessors", lambda device: 5)
    device = torch.device(DEVICE)
    assert programs_of(0, 7, device) == (7, None)
    assert programs_of(tile.persistent, 7, device) == (7, 7)
    assert programs_of(tile.persistent, 1000, device) == (10, 1000)
    assert programs_of(tile.persistent, 2**31 - 11, device) == (10, 2**31 - 11)
    assert programs_of(tile.persistent, 2**31 - 10, device) == (2**31 - 10, None)


def test_heads_side_by_side_fit_into_the_cache():
    """Query heads that share a KV head count once; without a diagonal there is nothing to balance."""
    q, k = (torch.zeros((), dtype=torch.float16, device=DEVICE).expand(2, n, 100, 64) for n in (8, 2))

    def heads_in_l2(problem: kernel_problem.Problem, of_keys: bool) -> int:
        return sizes_of(q, k, problem, 4, of_keys=of_keys)[5]

    found = {}
    for name, mask in (("causal", masks.causal()), ("full", masks.full()), ("window", masks.window(3, 0))):
        constants = constants_of(Options(mask), keep_residual=False)
        problem = launching.problem_of(q, k, k, constants)
        for of_keys in (False, True):
            found[name, of_keys] = heads_in_l2(problem, of_keys)
    l2 = devices.L2_BYTES[devices.arch_of(q.device)]
    of_kv_head = 100 * (64 + 64) * 2  # keys and values
    assert found["full", False] == found["full", True] == 1
    assert found["causal", False] == found["window", False] == 4 * min(4, max(1, l2 // of_kv_head))
    assert found["causal", True] == min(4, max(1, l2 // (4 * of_kv_head)))  # q and dout of four heads
    for of_keys in (False, True):  # at most all heads, however short the sequences
        short = replace(problem, l2_bytes=2**40)
        assert heads_in_l2(short, of_keys) == (4 if of_keys else 16)
