"""The blocks that kernels visit: checked against ``dense()``, block by block, and counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import masks, reference_varlen
from fusedattn.backends.triton import launching
from fusedattn.backends.triton.operands import constants_of
from fusedattn.kernels.configs import TileConfig
from fusedattn.kernels.mask_arguments import BandBounds, key_range
from fusedattn.kernels.masking import (
    any_keys,
    boundary_queries,
    bounds_of,
    key_blocks,
    query_blocks,
    tile_visited,
)
from fusedattn.kernels.parameters import Numbers
from fusedattn.kernels.primitives import program_tile
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.sequences import NOT_PACKED, Sequences, Shape, place_of, with_head
from fusedattn.masks import Band, Mask
from fusedattn.options import Options, Packed
from fusedattn.shard import Shard
from fusedattn.testing import triton_functions
from tests.conftest import DEVICE
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

TILES = [(16, 16), (32, 16), (16, 32), (16, 64)]
NHEADS, GROUP = 4, 2


@triton.jit
def write_key_blocks(
    counts_ptr, starts_ptr, visited_ptr, call, nheads, seqlen_q, seqlen_k, n_tiles, n_key_tiles,
    lower_start, upper_start, lower_end, upper_end,
    RUN: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For each tile of queries: counts and starts of full and boundary blocks, and the tiles of a grid it visits."""
    tile, head, sequence = program_tile(n_tiles, nheads, 1, REVERSED=False)
    pid = tl.program_id(0)
    place = place_of(call.sequences, sequence, head, nheads, seqlen_q, seqlen_k)
    bounds = bounds_of(call.mask, place, Numbers(lower_start, upper_start, lower_end, upper_end, 0, 1.0, 1.0))
    start_m = tile * BLOCK_M
    for i in range(0, n_key_tiles):
        seen = tile_visited(call.mask, place, bounds, start_m, i * BLOCK_N, BLOCK_M, BLOCK_N)
        tl.store(visited_ptr + pid * n_key_tiles + i, seen.to(tl.int32))
    if start_m < place.seqlen_q:
        blocks = key_blocks(call.mask, place, bounds, start_m, BLOCK_M, BLOCK_N, RUN * BLOCK_N)
        tl.store(counts_ptr + pid * 2, blocks.n_full)
        tl.store(counts_ptr + pid * 2 + 1, blocks.n_boundary)
        for i in range(0, tl.minimum(blocks.n_full + blocks.n_boundary, MOST)):
            tl.store(starts_ptr + pid * MOST + i, any_keys(i, blocks, call.mask, place, start_m, BLOCK_N))


@triton.jit
def write_query_blocks(
    counts_ptr, starts_ptr, call, nheads_q, seqlen_q, seqlen_k, n_tiles,
    lower_start, upper_start, lower_end, upper_end,
    GROUP: tl.constexpr, RUN: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for every tile of keys, and for each query head of its group."""
    tile, head_kv, sequence = program_tile(n_tiles, nheads_q // GROUP, 1, REVERSED=False)
    first_place = place_of(call.sequences, sequence, head_kv * GROUP, nheads_q, seqlen_q, seqlen_k)
    bounds = bounds_of(call.mask, first_place, Numbers(lower_start, upper_start, lower_end, upper_end, 0, 1.0, 1.0))
    start_n = tile * BLOCK_N
    if start_n < first_place.seqlen_k:
        blocks = query_blocks(call.mask, first_place, bounds, GROUP, start_n, BLOCK_M, BLOCK_N, RUN * BLOCK_M)
        for head in range(head_kv * GROUP, head_kv * GROUP + GROUP):
            at = (sequence * nheads_q + head) * n_tiles + tile
            place = with_head(first_place, head)
            tl.store(counts_ptr + at * 2, blocks.n_full)
            tl.store(counts_ptr + at * 2 + 1, blocks.n_boundary)
            for i in range(0, tl.minimum(blocks.n_full, MOST)):
                tl.store(starts_ptr + at * MOST + i, blocks.start + (blocks.n_left + i) * BLOCK_M)
            for i in range(0, tl.minimum(blocks.n_boundary, MOST - blocks.n_full)):
                start_m = boundary_queries(i, blocks, call.mask, place, start_n, BLOCK_M)
                tl.store(starts_ptr + at * MOST + blocks.n_full + i, start_m)


@dataclass(frozen=True)
class Visit:
    """The blocks that one tile of queries or keys visits, by their starts, and the tiles of a grid that it visits."""

    sequence: int
    head: int
    start: int
    full: list[int]
    boundary: list[int]
    grid: list[bool]


def problem_of(mask: Mask, batch: int, seqlen_q: int, seqlen_k: int, packed: Packed | None = None) -> Problem:
    """The launchers' input for a call with this mask."""
    q = torch.zeros((), device=DEVICE).expand(batch, NHEADS, seqlen_q, 16)
    k = torch.zeros((), device=DEVICE).expand(batch, NHEADS // GROUP, seqlen_k, 16)
    return launching.problem_of(q, k, k, constants_of(Options(mask, packed=packed), keep_residual=False))


def visits(
    problem: Problem,
    block_m: int,
    block_n: int,
    *,
    by_query: bool,
    heads: int = NHEADS,
    grid: bool = False,
    run: int = 1,
) -> list[Visit]:
    """The visits of each tile of the first heads, in all sequences; `grid` adds tiles of a grid, for queries only.

    Full blocks come in runs of `run`.
    """
    shape = problem.shape
    n_m, n_n = -(-shape.max_seqlen_q // block_m), -(-shape.max_seqlen_k // block_n)
    size, n_tiles, n_others = (block_m, n_m, n_n) if by_query else (block_n, n_n, n_m)
    most = n_others + 8
    n = shape.n_sequences * heads * n_tiles
    counts = torch.zeros(n, 2, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(n, most, dtype=torch.int32, device=DEVICE)
    n_grid = n_n if grid else 0
    shown = torch.zeros(n, n_grid, dtype=torch.int32, device=DEVICE)
    sizes = problem.band.sizes
    if n > 0 and by_query:
        write_key_blocks[(n,)](
            counts, starts, shown, problem.call, heads, shape.seqlen_q, shape.seqlen_k, n_m, n_grid, **sizes,
            RUN=run, MOST=most, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
    elif n > 0:
        group = min(GROUP, heads)
        write_query_blocks[(n // group,)](
            counts, starts, problem.call, heads, shape.seqlen_q, shape.seqlen_k, n_n, **sizes,
            GROUP=group, RUN=run, MOST=most, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
    found = []
    for i, (n_full, n_boundary) in enumerate(counts.tolist()):
        assert n_full + n_boundary <= most, "more blocks than there are"
        blocks = starts[i, : n_full + n_boundary].tolist()
        where = (i // n_tiles // heads, i // n_tiles % heads, i % n_tiles * size)
        found.append(Visit(*where, blocks[:n_full], blocks[n_full:], (shown[i] != 0).tolist()))
    return found


def check_visits(
    problem: Problem,
    dense_of: Callable[[int], Tensor],
    block_m: int,
    block_n: int,
    *,
    by_query: bool,
    sharp: bool,
    heads: int,
    what: str,
    run: int = 1,
) -> None:
    """Full blocks are fully visible, and unvisited blocks are hidden; with `sharp`, no block is visited in vain.

    `dense_of` gives the mask of a sequence, ``(nheads or 1, seqlen_q, seqlen_k)``.
    """
    size, step = (block_m, block_n) if by_query else (block_n, block_m)
    for visit in visits(problem, block_m, block_n, by_query=by_query, heads=heads, grid=by_query, run=run):
        dense = dense_of(visit.sequence)
        dense = dense[visit.head if dense.shape[0] > 1 else 0]
        dense = dense if by_query else dense.mT
        if visit.start >= dense.shape[0]:
            continue  # packed: this sequence has no such tile
        at = f"{what}: {'queries' if by_query else 'keys'} of {block_m} x {block_n}: {visit}"
        rows, n_others = dense[visit.start : visit.start + size], dense.shape[1]
        visited = torch.zeros(n_others, dtype=torch.bool)
        for block in (*visit.full, *visit.boundary):
            inside = slice(max(block, 0), max(block + step, 0))
            assert not visited[inside].any(), f"{at}: visited twice"
            visited[inside] = True
        assert len(visit.full) % run == 0, f"{at}: a run is not complete"
        assert visit.full == [visit.full[0] + i * step for i in range(len(visit.full))], f"{at}: a run has gaps"
        for block in visit.full:
            assert 0 <= block <= n_others - step, f"{at}: full block {block} reaches out"
            assert rows[:, block : block + step].all(), f"{at}: full block {block} has hidden pairs"
            # The kernels read all rows of a full block, so a tile of keys with full blocks must be whole.
            assert by_query or visit.start + size <= dense.shape[0], f"{at}: full, but ragged"
        seen = rows.any(0)
        assert not seen[~visited].any(), f"{at}: visible, but not visited"
        if by_query:
            for i, shown in enumerate(visit.grid):
                in_tile = slice(i * step, (i + 1) * step)
                assert shown or not seen[in_tile].any(), f"{at}: tile {i} of the grid is visible, but not visited"
                # Blocks are counted from the first visible key, so the last one may reach into a tile.
                nearby = slice(max((i - 1) * step + 1, 0), (i + 1) * step)
                assert not shown or not sharp or seen[nearby].any(), f"{at}: tile {i} of the grid is visited in vain"
        # If some keys of the tile are hidden, the others may see less.
        cut = not by_query and not rows.any(1).all()
        if sharp and not cut:
            places = seen.nonzero()[:, 0].tolist()
            span = places[-1] - places[0] + 1 if places else 0
            n_visited = len(visit.full) + len(visit.boundary)
            assert n_visited == -(-span // step), f"{at}: visits {n_visited} blocks for {span} in a row"
            for block in visit.boundary:
                assert seen[max(block, 0) : block + step].any(), f"{at}: block {block} is visited in vain"
            if by_query or visit.start + size <= dense.shape[0]:
                n_all = int(rows.all(0).sum())
                assert len(visit.full) >= (n_all // (step * run) - 1) * run, f"{at}: {n_all} in a row are fully visible"


LENGTHS = (
    (1, 1), (1, 40), (40, 1), (16, 32), (33, 33), (50, 70), (70, 50), (64, 100), (31, 95), (17, 0), (20, 34), (46, 62),
)  # fmt: skip


def valid_keys(padding: str, seqlen_k: int, generator: torch.Generator) -> Tensor:
    positions = torch.arange(seqlen_k)
    length = int(torch.randint(0, seqlen_k + 1, (), generator=generator))
    return {
        "right": positions < length,
        "left": positions >= length,
        "left, whole tiles": positions >= 32,
        "uneven": torch.rand(seqlen_k, generator=generator) < 0.6,
        "none valid": positions < 0,
    }[padding]


@quick.only(block_m=16, block_n=16)
@pytest.mark.parametrize("by_query", [True, False], ids=["key_blocks", "query_blocks"])
@pytest.mark.parametrize(("block_m", "block_n", "run"), [*((*tile, 1) for tile in TILES), (32, 16, 2), (16, 16, 4)])
def test_blocks(block_m, block_n, run, by_query):
    """Every combination of causal mask and padding."""
    generator = torch.Generator().manual_seed(block_m * block_n)
    paddings = (None, "right", "left", "left, whole tiles", "uneven", "none valid")
    cases = itertools.product(LENGTHS, (None, "bottom_right", "top_left"), paddings, (False, True))
    for (seqlen_q, seqlen_k), causal, padding, boolean in cases:
        if boolean and (seqlen_q, seqlen_k) != (50, 70):
            continue
        mask = masks.full() if causal is None else masks.causal(causal)
        if padding is not None:
            mask = mask & masks.padding(valid_keys(padding, seqlen_k, generator)[None])
        if boolean:
            mask = mask & masks.boolean(torch.rand(seqlen_q, seqlen_k, generator=generator) < 0.5)
        dense = mask.dense(seqlen_q, seqlen_k)[0]
        check_visits(
            problem_of(mask.to(DEVICE), 1, seqlen_q, seqlen_k), lambda _, dense=dense: dense, block_m, block_n,
            by_query=by_query, sharp=not boolean and padding != "uneven", heads=1, run=run,
            what=f"seqlen {seqlen_q}, {seqlen_k}, causal={causal}, padding={padding}, boolean={boolean}",
        )  # fmt: skip
        if padding == "none valid" or (padding == "left, whole tiles" and not by_query):
            hidden = [
                visit
                for visit in visits(problem_of(mask.to(DEVICE), 1, seqlen_q, seqlen_k), block_m, block_n,
                                    by_query=by_query, heads=1)
                if padding == "none valid" or visit.start + block_n <= 32
            ]  # fmt: skip
            assert all(visit.full + visit.boundary == [] for visit in hidden), "a tile of padding visits blocks"


@dataclass(frozen=True)
class Kind:
    """A kind of mask of two sequences and NHEADS heads, given (generator, seqlen_q, seqlen_k).

    Attributes:
        heads: how many heads to check; all if they differ.
        sharp: no block is visited in vain. `sharp_alone`: only without padding and with seqlen_q == seqlen_k.
    """

    make: Callable[[torch.Generator, int, int], Mask]
    heads: int = 1
    sharp: bool = False
    sharp_alone: bool = False


def lengths_of(generator: torch.Generator, seqlen_k: int) -> Tensor:
    return torch.randint(-3, seqlen_k + 3, (2,), generator=generator)


def packed_ids(generator: torch.Generator, seqlen: int) -> Tensor:
    return (torch.rand(2, seqlen, generator=generator) < 0.04).cumsum(-1)


def blocks_of(
    generator: torch.Generator, n: int, m: int, block_q: int, block_k: int, batch: int, heads: int, share: float = 0.5
) -> Mask:
    size = (batch, heads, -(-n // block_q), -(-m // block_k))
    return masks.block_sparse(torch.rand(size, generator=generator) < share, (block_q, block_k))


def documents_in_any_order(g: torch.Generator, n: int, m: int) -> Mask:
    return masks.documents(*(torch.randint(-1, 4, (2, length), generator=g) for length in (n, m)))


KINDS: dict[str, Kind] = {
    "window": Kind(lambda g, n, m: masks.window(9, 4), sharp=True),
    "window, wide": Kind(lambda g, n, m: masks.window(40, 0), sharp=True),
    "window of one": Kind(lambda g, n, m: masks.window(0, 0), sharp=True),
    "window, left": Kind(lambda g, n, m: masks.window(17, None), sharp=True),
    "window, top-left": Kind(lambda g, n, m: masks.window(3, 20, "top_left"), sharp=True),
    "window beside the diagonal": Kind(
        lambda g, n, m: Mask(bands=frozenset({Band(-3, 30, "bottom_right")})), sharp=True,
    ),
    "window, causal from the other corner": Kind(lambda g, n, m: masks.window(9, 9) & masks.causal("top_left")),
    "prefix": Kind(lambda g, n, m: masks.prefix_lm(lengths_of(g, m)), sharp=True),
    "prefix, top-left": Kind(lambda g, n, m: masks.prefix_lm(lengths_of(g, m), "top_left"), sharp=True),
    "prefix, window": Kind(lambda g, n, m: masks.prefix_lm(lengths_of(g, m)) & masks.window(20, None)),
    "prefix, causal": Kind(lambda g, n, m: masks.prefix_lm(lengths_of(g, m), "top_left") & masks.causal()),
    "documents": Kind(lambda g, n, m: masks.documents(packed_ids(g, n), packed_ids(g, m))),
    "documents, shared": Kind(
        lambda g, n, m: masks.documents(*(2 * [packed_ids(g, n)] if n == m else [packed_ids(g, n), packed_ids(g, m)])),
        sharp_alone=True,
    ),
    "documents in any order": Kind(documents_in_any_order),
    "documents, causal": Kind(lambda g, n, m: masks.documents(packed_ids(g, n), packed_ids(g, m)) & masks.causal()),
    "documents, window": Kind(lambda g, n, m: documents_in_any_order(g, n, m) & masks.window(20, 5)),
    "layout": Kind(lambda g, n, m: blocks_of(g, n, m, 16, 16, 1, 1)),
    "layout per head": Kind(lambda g, n, m: blocks_of(g, n, m, 16, 32, 1, NHEADS), heads=NHEADS),
    "layout per batch and head": Kind(lambda g, n, m: blocks_of(g, n, m, 32, 16, 2, NHEADS), heads=NHEADS),
    "layout per batch, large": Kind(lambda g, n, m: blocks_of(g, n, m, 48, 64, 2, 1)),
    "layout, almost empty": Kind(lambda g, n, m: blocks_of(g, n, m, 16, 16, 2, NHEADS, 0.1), heads=NHEADS),
    "layout, causal": Kind(lambda g, n, m: blocks_of(g, n, m, 16, 16, 1, 1, 0.8) & masks.causal()),
    "layout, window": Kind(lambda g, n, m: blocks_of(g, n, m, 16, 32, 1, 1, 0.8) & masks.window(20, 3)),
    "layout, documents": Kind(
        lambda g, n, m: blocks_of(g, n, m, 16, 16, 1, 1, 0.8) & masks.documents(packed_ids(g, n), packed_ids(g, m))
    ),
    "function": Kind(lambda g, n, m: triton_functions.mask_function(2, NHEADS, g), heads=2),
    "function, window": Kind(lambda g, n, m: triton_functions.mask_function(2, NHEADS, g) & masks.window(9, 4)),
    "tree": Kind(lambda g, n, m: masks.tree(torch.rand(2, NHEADS, n, n, generator=g) < 0.6), heads=2),
    "tree, window": Kind(lambda g, n, m: masks.tree(torch.rand(n, n, generator=g) < 0.6) & masks.window(20, None)),
    "tree, documents": Kind(
        lambda g, n, m: (
            masks.tree(torch.rand(n, 1, generator=g) < 0.6) & masks.documents(packed_ids(g, n), packed_ids(g, m))
        )
    ),
    "boolean, prefix": Kind(
        lambda g, n, m: masks.boolean(torch.rand(n, m, generator=g) < 0.5) & masks.prefix_lm(lengths_of(g, m))
    ),
}  # fmt: skip
SHORT = ((1, 40), (40, 1), (33, 33), (35, 35), (50, 70), (70, 50), (31, 95), (17, 0))

by_direction = pytest.mark.parametrize("by_query", [True, False], ids=["key_blocks", "query_blocks"])


def tiles_for(mask: Mask, tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tiles that a call with this mask would use instead."""
    if mask.layout is None:
        return tiles
    block_q, block_k = mask.layout.block_q, mask.layout.block_k
    within = [TileConfig(*tile, 4, 1).within(block_q, block_k) for tile in tiles]
    return sorted({(tile.BLOCK_M, tile.BLOCK_N) for tile in within})


@quick.every(2, name=lambda name: name.startswith(("window", "prefix", "documents")))
@by_direction
@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_other_masks(name, by_query):
    """Alone and with padding; sequences and heads differ."""
    kind, generator = KINDS[name], torch.Generator().manual_seed(len(name))
    for (seqlen_q, seqlen_k), padding in itertools.product(SHORT, (None, "right", "left", "uneven")):
        if padding is not None and (seqlen_q, seqlen_k) not in ((33, 33), (50, 70)):
            continue
        mask = kind.make(generator, seqlen_q, seqlen_k)
        if padding is not None:
            valid = [valid_keys(padding, seqlen_k, generator) for _ in range(2)]
            mask = mask & masks.padding(torch.stack(valid))
        dense = mask.dense(seqlen_q, seqlen_k, batch=2, nheads=NHEADS).expand(2, -1, -1, -1)
        problem = problem_of(mask.to(DEVICE), 2, seqlen_q, seqlen_k)
        sharp = (kind.sharp and padding != "uneven") or (kind.sharp_alone and not padding and seqlen_q == seqlen_k)
        for block_m, block_n in tiles_for(mask, TILES[1:3]):
            check_visits(
                problem, lambda i, dense=dense: dense[i], block_m, block_n, by_query=by_query, sharp=sharp,
                heads=kind.heads, what=f"seqlen {seqlen_q}, {seqlen_k}, padding={padding}",
            )  # fmt: skip


PACKED_KINDS = {
    "full": lambda g, n, m: masks.full(),
    "causal": lambda g, n, m: masks.causal(),
    "window, top-left": lambda g, n, m: masks.window(20, 3, "top_left") & masks.causal(),
    "documents": lambda g, n, m: masks.full(),
    "documents in order": lambda g, n, m: masks.full(),
    "documents, causal, padding": lambda g, n, m: masks.causal(),
    "prefix, padding": lambda g, n, m: masks.prefix_lm(torch.randint(-2, m + 2, (4,), generator=g)),
    "layout, window": lambda g, n, m: blocks_of(g, n, m, 16, 32, 4, NHEADS) & masks.window(20, None),
    "tree": lambda g, n, m: masks.tree(torch.rand(4, NHEADS, n, n, generator=g) < 0.6),
    "function": lambda g, n, m: triton_functions.mask_function(4, NHEADS, g),
    "boolean, causal": lambda g, n, m: (
        masks.boolean(torch.rand(4, 1, n, m, generator=g) < 0.5) & masks.causal("top_left")
    ),
}


@by_direction
@pytest.mark.parametrize("name", PACKED_KINDS)
def test_blocks_of_packed_sequences(name, by_query):
    """Each as if it were alone; one sequence is empty, and rows follow the last one."""
    generator = torch.Generator().manual_seed(len(name))
    lengths_q, lengths_k, behind = (33, 0, 20, 50), (33, 7, 61, 18), 5
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(lengths)]) for lengths in (lengths_q, lengths_k))
    total_q, total_k = int(cu_q[-1]) + behind, int(cu_k[-1]) + behind
    mask = PACKED_KINDS[name](generator, max(lengths_q), max(lengths_k))
    if "documents" in name:
        ids = [torch.randint(0, 3, (1, total), generator=generator) for total in (total_q, total_k)]
        if "causal" in name:
            ids = [x.sort()[0] for x in ids]
        if "order" in name:  # the document of all queries ends inside the keys of a sequence
            ids = [torch.zeros(1, total_q).int(), torch.arange(total_k)[None] // 80]
        mask = mask & masks.documents(*ids)
    if "padding" in name:
        mask = mask & masks.padding(torch.rand(1, total_k, generator=generator) < 0.8)
    packed = Packed(cu_q.int().to(DEVICE), cu_k.int().to(DEVICE), max(lengths_q), max(lengths_k))
    problem = problem_of(mask.to(DEVICE), 1, total_q, total_k, packed)
    assert problem.shape.n_sequences == 4

    def dense_of(i: int) -> Tensor:
        queries, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        own = reference_varlen._mask_of(mask, i, queries, keys)
        return own.dense(lengths_q[i], lengths_k[i], batch=1, nheads=NHEADS, shard=Shard(i))[0]

    sharp = name in ("full", "causal")
    heads = NHEADS if name in ("layout, window", "tree", "function") else 1
    for block_m, block_n in tiles_for(mask, TILES[1:3]):
        check_visits(
            problem, dense_of, block_m, block_n, by_query=by_query, sharp=sharp, heads=heads, what=name,
        )  # fmt: skip


@quick.covering()
@by_direction
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("layout")])
def test_only_visible_blocks_of_a_layout_are_visited(name, by_query):
    """Exactly the visible blocks of the tile's own head, which bands reduce further."""
    kind, generator = KINDS[name], torch.Generator().manual_seed(0)
    for seqlen_q, seqlen_k in ((70, 150), (150, 70)):
        mask = kind.make(generator, seqlen_q, seqlen_k)
        block_q, block_k = mask.layout.block_q, mask.layout.block_k
        n_q, n_k = mask.layout.blocks.shape[2:]
        pairs = mask.layout.dense(torch.arange(n_q * block_q), torch.arange(n_k * block_k))
        distance = torch.arange(n_k * block_k) - torch.arange(n_q * block_q)[:, None]
        lower, upper = mask.band(seqlen_q, seqlen_k)
        pairs = pairs if lower is None else pairs & (distance >= lower)
        pairs = pairs if upper is None else pairs & (distance <= upper)
        shown = pairs.unflatten(3, (n_k, block_k)).unflatten(2, (n_q, block_q)).any(-1).any(3).expand(2, NHEADS, -1, -1)
        problem = problem_of(mask.to(DEVICE), 2, seqlen_q, seqlen_k)
        for block_m, block_n in tiles_for(mask, TILES):
            for visit in visits(problem, block_m, block_n, by_query=by_query, grid=by_query):
                own = shown[visit.sequence, visit.head]
                row = own[visit.start // block_q] if by_query else own[:, visit.start // block_k]
                size, step, length = (block_k, block_n, n_k * block_k) if by_query else (block_q, block_m, seqlen_q)
                expected = [
                    start
                    for block in row.nonzero()[:, 0].tolist()
                    for start in range(block * size, (block + 1) * size, step)
                ]
                # If other heads of the group visit more, this one gets blocks beyond the last query.
                assert [start for start in visit.boundary if start < length] == [
                    start for start in expected if start < length
                ]
                assert visit.full == []
                in_grid = [i * step for i, seen in enumerate(visit.grid) if seen]
                assert not by_query or in_grid == [start for start in expected if start < seqlen_k]


def test_hidden_keys_visit_no_block_of_a_layout():
    valid = torch.arange(70) >= 32
    mask = masks.block_sparse(torch.ones(5, 5, dtype=torch.bool), 16) & masks.padding(valid[None])
    for visit in visits(problem_of(mask.to(DEVICE), 1, 70, 70), 16, 16, by_query=False):
        assert len(visit.full + visit.boundary) == (0 if visit.start < 32 else 5)


N_BLOCKS = 32  # of 16 queries or keys
AT = torch.arange(16 * N_BLOCKS, device=DEVICE)[None]
TRIANGLE, HALF_TRIANGLE = N_BLOCKS * (N_BLOCKS + 1) // 2, N_BLOCKS // 2 * (N_BLOCKS // 2 + 1) // 2

# A mask, and how many blocks may be visited and need mask arithmetic; other tests see that none is missing.
WORK = {
    "full": (masks.full(), N_BLOCKS**2, 0),
    "causal": (masks.causal(), TRIANGLE, N_BLOCKS),
    "half padded": (masks.padding(AT < 256), N_BLOCKS**2 // 2, 0),
    "half padded to the left": (masks.padding(AT >= 256), N_BLOCKS**2 // 2, 0),
    "causal, half padded": (masks.causal() & masks.padding(AT < 256), TRIANGLE - HALF_TRIANGLE, N_BLOCKS),
    "causal, half padded to the left": (masks.causal() & masks.padding(AT >= 256), HALF_TRIANGLE, N_BLOCKS),
    "window": (masks.window(63, 0), 5 * N_BLOCKS, 2 * N_BLOCKS),
    "documents": (masks.documents(AT // 128), N_BLOCKS**2 // 4, 0),
    "a document without keys": (
        masks.documents(torch.where(AT % 16 < 8, 0, 1 + AT // 16), 1 + AT // 16),
        N_BLOCKS,
        N_BLOCKS,
    ),
    "documents, causal": (masks.documents(AT // 128) & masks.causal(), 4 * 8 * 9 // 2, N_BLOCKS),
    "interleaved documents": (masks.documents((AT // 128).fmod(2)), N_BLOCKS**2, N_BLOCKS**2),
    "prefix": (masks.prefix_lm(AT[0, 256:257]), N_BLOCKS**2 // 2 + 16 * 17 // 2, N_BLOCKS),
}


@by_direction
@pytest.mark.parametrize("name", WORK)
def test_work_is_proportional_to_visible_pairs(name, by_query):
    mask, visited, boundary = WORK[name]
    tiles = visits(problem_of(mask, 1, AT.numel(), AT.numel()), 16, 16, by_query=by_query, heads=1)
    n_boundary = sum(len(x.boundary) for x in tiles)
    assert n_boundary <= boundary
    assert n_boundary + sum(len(x.full) for x in tiles) <= visited


@by_direction
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(16, 512), (32, 512), (17, 512), (20, 509), (64, 64), (40, 24)])
def test_a_tree_leaves_blocks_of_older_keys_full(seqlen_q, seqlen_k, padded, by_query):
    """Only blocks with one of the newest keys read its mask; here it hides everything that it may."""
    older, first = max(seqlen_k - seqlen_q, 0), 37 if padded else 0
    mask = masks.tree(torch.zeros(seqlen_q, seqlen_q, dtype=torch.bool, device=DEVICE))
    if padded:
        mask = mask & masks.padding(torch.arange(seqlen_k, device=DEVICE)[None] >= first)
    for visit in visits(problem_of(mask, 1, seqlen_q, seqlen_k), 16, 16, by_query=by_query, heads=1):
        if by_query:
            start = min(first, seqlen_k)
            n_full = max(older - start, 0) // 16
            assert visit.full == [start + 16 * i for i in range(n_full)]
            assert visit.boundary == list(range(start + 16 * n_full, seqlen_k, 16))
        else:
            is_full = first <= visit.start and visit.start + 16 <= older
            assert len(visit.full) == (seqlen_q // 16 if is_full else 0)
            assert len(visit.full + visit.boundary) == (0 if visit.start + 16 <= first else -(-seqlen_q // 16))


@pytest.mark.parametrize("seqlen_k", [0, 1, 5, 1023, 1024, 1025, 2500])
def test_key_range(seqlen_k):
    rows = [torch.zeros(seqlen_k), torch.ones(seqlen_k)]
    for first, last in ((0, 0), (0, 3), (1, 4), (seqlen_k - 2, seqlen_k - 1), (1000, 1030)):
        row = torch.zeros(seqlen_k)
        row[max(first, 0) : last + 1] = 1
        rows.append(row)
        rows.append(row.clone())
        rows[-1][max(first, 0) + 1 : last] = 0  # a gap, if there is space for one
    rows += [(torch.rand(seqlen_k) < p).float() for p in (0.01, 0.5, 0.99)]
    valid = torch.stack(rows).to(torch.uint8)
    n = len(valid)
    got = key_range(valid.to(DEVICE), NOT_PACKED, Shape(n, 1, 1, 1, seqlen_k, 1, seqlen_k)).cpu()
    # The same rows as one packed sequence.
    stops = torch.arange(n + 1, dtype=torch.int32, device=DEVICE) * seqlen_k
    packed = Shape(n, 1, 1, 1, n * seqlen_k, 1, seqlen_k)
    assert torch.equal(key_range(valid.to(DEVICE).view(1, -1), Sequences(stops, stops), packed).cpu(), got)
    for row, (start, stop, contiguous) in zip(valid, got.tolist(), strict=True):
        (seen,) = row.nonzero(as_tuple=True)
        if len(seen) == 0:
            assert (start, stop) == (0, 0)
            continue
        assert (start, stop) == (int(seen[0]), int(seen[-1]) + 1)
        assert contiguous == (len(seen) == stop - start)


def test_bounds_of_any_size_fit_into_int32():
    bounds = BandBounds(lower_start=-(2**40), upper_start=2**40, lower_end=None, upper_end=3).in_order
    assert all(-(2**31) <= bound < 2**31 for bound in bounds)
    assert bounds[3] == 3
