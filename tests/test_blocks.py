"""Which blocks are visited: checked against ``dense()``, block by block, and counted."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from fusedattn import masks
from fusedattn.kernels.masking import key_blocks, key_range, query_blocks
from fusedattn.masks import Mask
from tests.conftest import DEVICE

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]


@triton.jit
def write_blocks(
    out_ptr, seqlen_q, key_start, key_stop, contiguous, diagonal,
    IS_CAUSAL: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The three results of BLOCKS, key_blocks or query_blocks, for every tile of BLOCK rows."""
    tile = tl.program_id(0)
    first, second, third = BLOCKS(
        tile * BLOCK, seqlen_q, key_start, key_stop, contiguous, diagonal, IS_CAUSAL, HAS_ALLOWED, BLOCK_M, BLOCK_N
    )
    tl.store(out_ptr + tile * 3, first)
    tl.store(out_ptr + tile * 3 + 1, second)
    tl.store(out_ptr + tile * 3 + 2, third)


def visits(
    mask: Mask, batch: int, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, *, by_query: bool
) -> list[tuple[int, list[int], list[int]]]:
    """For each tile (of queries, or of keys): its start, and the starts of its full and of its boundary blocks."""
    start, stop, contiguous = 0, seqlen_k, 1
    if mask.valid is not None:
        start, stop, contiguous = key_range(mask.valid.to(torch.uint8))[batch].tolist()
    diagonal = mask.diagonal(seqlen_q, seqlen_k)
    block, blocks = (block_m, key_blocks) if by_query else (block_n, query_blocks)
    n_tiles = -(-(seqlen_q if by_query else seqlen_k) // block)
    out = torch.empty(n_tiles, 3, dtype=torch.int32, device=DEVICE)
    write_blocks[(n_tiles,)](
        out, seqlen_q, start, stop, contiguous, diagonal or 0,
        IS_CAUSAL=diagonal is not None, HAS_ALLOWED=mask.allowed is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK=block, BLOCKS=blocks,
    )  # fmt: skip
    tiles = []
    for tile, (a, b, c) in enumerate(out.tolist()):
        if by_query:
            full, boundary = list(range(a, b, block_n)), list(range(b, c, block_n))
        else:
            boundary = [a + i * block_m for i in range(b)]
            full = [a + (b + i) * block_m for i in range(c)]
        tiles.append((tile * block, full, boundary))
    return tiles


def block_cases() -> list[tuple[int, int, str | None, str | None, bool]]:
    lengths = (
        (1, 1),
        (1, 40),
        (40, 1),
        (16, 32),
        (33, 33),
        (50, 70),
        (70, 50),
        (64, 100),
        (31, 95),
        (17, 0),
        (20, 34),
        (46, 62),
    )
    return [
        (q, k, causal, padding, boolean)
        for (q, k), causal, padding in itertools.product(
            lengths,
            (None, "bottom_right", "top_left"),
            (None, "right", "left", "left, whole tiles", "uneven", "none valid"),
        )
        for boolean in ((False, True) if (q, k) == (50, 70) else (False,))
    ]


@pytest.mark.parametrize("by_query", [True, False], ids=["key_blocks", "query_blocks"])
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 16), (16, 32), (16, 64)])
def test_blocks(block_m, block_n, by_query):
    """Full blocks are fully visible, what is not visited is hidden, and nothing is visited in vain."""
    generator = torch.Generator().manual_seed(block_m * block_n)
    for seqlen_q, seqlen_k, causal, padding, boolean in block_cases():
        what = f"seqlen {seqlen_q}, {seqlen_k}, causal={causal}, padding={padding}, boolean={boolean}"
        mask = masks.full() if causal is None else masks.causal(causal)
        positions = torch.arange(seqlen_k)
        length = int(torch.randint(0, seqlen_k + 1, (), generator=generator))
        valid = {
            "right": positions < length,
            "left": positions >= length,
            "left, whole tiles": positions >= 32,
            "uneven": torch.rand(seqlen_k, generator=generator) < 0.6,
            "none valid": positions < 0,
        }.get(padding or "")
        if valid is not None:
            mask = mask & masks.padding(valid[None].to(DEVICE))
        if boolean:
            mask = mask & masks.boolean((torch.rand(seqlen_q, seqlen_k, generator=generator) < 0.5).to(DEVICE))
        dense = mask.dense(seqlen_q, seqlen_k, device=DEVICE)[0, 0].cpu()
        size, step = (block_m, block_n) if by_query else (block_n, block_m)
        if not by_query:
            dense = dense.mT
        for start, full, boundary in visits(mask, 0, seqlen_q, seqlen_k, block_m, block_n, by_query=by_query):
            rows = dense[start : start + size]
            visited = torch.zeros(dense.shape[1], dtype=torch.bool)
            for block in (*full, *boundary):
                inside = slice(max(block, 0), max(block + step, 0))
                assert not visited[inside].any(), f"{what}: {start}: visited twice"
                visited[inside] = True
            for block in full:
                assert 0 <= block <= dense.shape[1] - step, f"{what}: {start}: full block {block} reaches out"
                assert rows[:, block : block + step].all(), f"{what}: {start}: full block {block} has hidden pairs"
                # The kernels read all rows of a full block, also of a tile that reaches beyond the last one.
                assert by_query or start + size <= dense.shape[0], f"{what}: {start}: full, but ragged"
            assert not rows[:, ~visited].any(), f"{what}: {start}: visible, but not visited"
            if not by_query and valid is not None and padding != "uneven" and not valid[start : start + size].any():
                assert full + boundary == [], f"{what}: {start}: a tile of padding visits blocks"
            cut = not by_query and not rows.any(-1).all()  # some of the keys are hidden: the others may see less
            if not boolean and padding != "uneven" and not cut:
                for block in boundary:
                    seen = rows[:, max(block, 0) : block + step]
                    assert seen.any(), f"{what}: {start}: block {block} is visited in vain"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_makes_less_work(side, causal):
    """Half of the keys hidden: half of the blocks visited, and as many without mask arithmetic as could be."""
    seqlen, block = 512, 16
    valid = torch.arange(seqlen, device=DEVICE) < 256 if side == "right" else torch.arange(seqlen, device=DEVICE) >= 256
    mask = masks.causal() if causal else masks.full()
    for by_query in (True, False):

        def count(m: Mask, by_query: bool = by_query) -> tuple[int, int]:
            tiles = visits(m, 0, seqlen, seqlen, block, block, by_query=by_query)
            return sum(len(full) + len(boundary) for _, full, boundary in tiles), sum(len(b) for _, _, b in tiles)

        everything, _ = count(mask)
        visited, boundary = count(mask & masks.padding(valid[None]))
        n = seqlen // block
        if not causal:
            assert (everything, visited, boundary) == (n * n, n * n // 2, 0)
        else:
            assert everything == n * (n + 1) // 2
            half = n // 2 * (n // 2 + 1) // 2
            assert visited == (half if side == "left" else everything - half)
            assert boundary <= n


@pytest.mark.parametrize("seqlen_k", [0, 1, 5, 1023, 1024, 1025, 2500])
def test_key_range(seqlen_k):
    rows = [torch.zeros(seqlen_k), torch.ones(seqlen_k)]
    for first, last in ((0, 0), (0, 3), (1, 4), (seqlen_k - 2, seqlen_k - 1), (1000, 1030)):
        row = torch.zeros(seqlen_k)
        row[max(first, 0) : last + 1] = 1
        rows.append(row)
        rows.append(row.clone())
        rows[-1][max(first, 0) + 1 : last] = 0  # a gap, where there is room for one
    rows += [(torch.rand(seqlen_k) < p).float() for p in (0.01, 0.5, 0.99)]
    valid = torch.stack(rows).to(torch.uint8)
    got = key_range(valid.to(DEVICE)).cpu()
    for row, (start, stop, contiguous) in zip(valid, got.tolist(), strict=True):
        (seen,) = row.nonzero(as_tuple=True)
        if len(seen) == 0:
            assert (start, stop) == (0, 0)
            continue
        assert (start, stop) == (int(seen[0]), int(seen[-1]) + 1)
        assert contiguous == (len(seen) == stop - start)
