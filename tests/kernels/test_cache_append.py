"""The kernel that appends to a cache: it writes the new tokens, each once, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, caches, reference_cached
from tests.conftest import DEVICE, DTYPES, INTERPRETING
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.cache_model import DIM, DIM_V, HEADS, LAYOUTS, cache_in, capacity_of, pages_of, tokens
from tests.helpers.cached_eager import FORMATS, NUMBERS

pytestmark = pytest.mark.usefixtures("_seed")

MEMORY = ("k", "v", "k_scale", "v_scale")


def checked() -> Any:
    return checked_accesses() if INTERPRETING else nullcontext()


def new_cache(layout: str, n: int, batch: int, form: str, dtype: torch.dtype, **options: Any) -> KVCache:
    """An empty cache for `n` tokens of each sequence, whose memory is no number."""
    codes, group, given = FORMATS.get(form, (dtype, None, False))
    cache = cache_in(layout, batch, n, HEADS, DIM, DIM_V, dtype=codes, device=DEVICE, group_size=group)
    if given:
        scales = 0.1 + torch.rand(2, *cache.k.shape[:2], device=DEVICE) / 50
        cache = replace(cache, k_scale=scales[0].contiguous(), v_scale=scales[1].contiguous())
    return replace(cache, **options)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of each element, ``(*shape, itemsize)``."""
    return x.contiguous().view(torch.uint8).view(*x.shape, x.element_size())


def written(before: Tensor, after: Tensor) -> Tensor:
    """Which elements have changed."""
    return (as_bytes(before) != as_bytes(after)).any(dim=-1)


def snapshot(cache: KVCache) -> dict[str, Tensor]:
    return {name: x.clone() for name in MEMORY if (x := getattr(cache, name)) is not None}


def packed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and cu_seqlens of the new tokens of each sequence."""
    k, v = (torch.cat(x, dim=1).transpose(0, 1).to(DEVICE) for x in zip(*parts, strict=True))
    stops = torch.tensor([0, *(k.shape[1] for k, _ in parts)]).cumsum(0).int().to(DEVICE)
    return k, v, stops


def new_tokens(n: int, cache: KVCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(HEADS, n, d).to(dtype) for d in (cache.head_dim, cache.head_dim_v))  # type: ignore[return-value]


def places(cache: KVCache, sequence: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(row, slot) of tokens, in plain integers."""
    found = []
    ring = cache.capacity - cache.n_sinks
    for t in numbers:
        at = cache.n_sinks + (t - cache.n_sinks) % ring if cache.overwrites and t >= cache.n_sinks else t
        if cache.block_table is not None:
            size = cache.k.shape[2]
            found.append((int(cache.block_table[sequence, at // size]), at % size))
        else:
            found.append((sequence if cache.rows is None else int(cache.rows[sequence]), at))
    return found


def assert_appends(cache: KVCache, counts: Sequence[int], dtype: torch.dtype) -> None:
    """Append that many tokens to each sequence, and compare the whole memory with that of the definition."""
    k, v, stops = packed([new_tokens(n, cache, dtype) for n in counts])
    before = snapshot(cache)
    eager = replace(cache, **{name: x.clone() for name, x in before.items()}, lengths=cache.lengths + stops.diff())
    reference_cached.append(eager, k, v, stops)
    with checked():
        caches.append(cache, k, v, cu_seqlens=stops, backend="triton")
    assert torch.equal(cache.lengths, eager.lengths)
    for name in before:
        found, expected = as_bytes(getattr(cache, name)), as_bytes(getattr(eager, name))
        assert torch.equal(found, expected), name
        if before[name].dim() == 2:  # given scales
            continue
        changed = written(before[name], getattr(cache, name)).any(dim=-1).any(dim=1)  # (rows, slots)
        allowed = set()
        for i, n in enumerate(counts):
            length = int(cache.lengths[i])
            allowed |= set(places(cache, i, range(length - n, length)))
        assert {tuple(x) for x in changed.nonzero().tolist()} <= allowed


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [NUMBERS, *FORMATS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_scales(layout, form, dtype):
    """The bytes are those of the definition; every other byte stays; steps end before, at and behind a page."""
    size = pages_of(layout) or 17
    n = capacity_of(layout, 2 * size + 1)
    cache = new_cache(layout, n, 4, form, dtype)
    for counts in ([0, 1, size - 1, size], [1, size, 1, size + 1], [n - 1, 0, 2, 0]):
        assert_appends(cache, counts, dtype)


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("n_sinks", [0, 3])
@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4", "int8, given"])
@pytest.mark.parametrize("layout", ["contiguous", "rows", "pages of 16"])
def test_a_ring(layout, form, n_sinks):
    """Tokens that later ones of the same call overwrite are not stored: each element is written once."""
    n = capacity_of(layout, 20)
    cache = new_cache(layout, n, 3, form, torch.float32, overwrites=True, n_sinks=n_sinks)
    for counts in ([1, n, 2 * n + 5], [n - 1, n + 1, 1], [3 * n, 0, 7]):
        assert_appends(cache, counts, torch.float32)


SIZES = [1.0, 1e-6, 1e4, 1e-30, 1e-42, 3e38]


@quick.covering()
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
def test_sizes(form, size):
    """Numbers of any size, zeros, and tokens that are not finite: the bytes of the definition."""
    cache = new_cache("pages of 16", 48, 2, form, torch.float32)
    k, v = (torch.rand(2, HEADS, 40, d) * 2 - 1 for d in (cache.head_dim, cache.head_dim_v))
    for x in (k, v):
        x *= size
        x[:, :, 3], x[0, 0, :, 1] = 0.0, 0.0
        x[1, :, 7, 2], x[1, 0, 8, :3], x[0, :, 9, 0] = torch.nan, torch.inf, -torch.inf
        x[0, :, 11, 0] = size * 1000.0 if size < 1e30 else 1.0
    eager = replace(cache, **snapshot(cache), lengths=cache.lengths + 40)
    reference_cached.append(eager, k.to(DEVICE), v.to(DEVICE), None)
    with checked():
        caches.append(cache, k.to(DEVICE), v.to(DEVICE), backend="triton")
    for name in MEMORY:
        found, expected = getattr(cache, name), getattr(eager, name)
        if found.dtype.is_floating_point:
            spoiled = expected.float().isnan()
            assert torch.equal(found.float().isnan(), spoiled), name
            found, expected = found.float().masked_fill(spoiled, 0.0), expected.float().masked_fill(spoiled, 0.0)
        assert torch.equal(found, expected), name


@contextmanager
def unchecked() -> Iterator[None]:
    """Lengths, rows and block tables are not read before a launch, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "check_values", lambda *_: None)
        patch.setattr(reference_cached, "check_room", lambda *_: None)
        yield


GARBAGE = (-(2**31), -1, 10**6, 2**31 - 1)


@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4, groups of 4", "int8, given"])
def test_tokens_without_a_page_are_left_out(form):
    """Wherever an entry of the table leads; tokens of the same sequence that have a page are stored."""
    cache = new_cache("pages of 16", 64, 4, form, torch.float32)
    table = cache.block_table
    for i, row in enumerate(GARBAGE):
        table[i, 1] = row
    k, v, stops = packed([new_tokens(40, cache, torch.float32) for _ in range(4)])
    before = snapshot(cache)
    with unchecked(), checked():
        caches.append(cache, k, v, cu_seqlens=stops, backend="triton")
    eager = replace(cache, block_table=table.clone(), **{name: x.clone() for name, x in before.items()})
    used = set(table[:, [0, 2]].flatten().tolist())
    spare = min(row for row in range(len(cache.k)) if row not in used)
    eager.block_table[:, 1] = spare
    reference_cached.append(eager, k, v, stops)
    for name, x in before.items():
        found, expected = as_bytes(getattr(cache, name)), as_bytes(getattr(eager, name)).clone()
        if x.dim() == 4:
            others = [row for row in range(len(x)) if row not in used]
            assert torch.equal(found[others], as_bytes(x)[others]), name
            expected[others] = as_bytes(x)[others]
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("rows", [[-1, 3], [5, 0], [2**31 - 1, -(2**31)]], ids=str)
def test_tokens_without_a_row_are_left_out(rows):
    cache = new_cache("rows", 8, 2, NUMBERS, torch.float32)
    cache = replace(cache, rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    k, v = (x.to(DEVICE) for x in tokens(3, torch.float32, (2,)))
    before = snapshot(cache)
    with unchecked(), checked():
        caches.append(cache, k, v, backend="triton")
    for name, x in (("k", k), ("v", v)):
        expected = before[name].clone()
        for i, row in enumerate(rows):
            if 0 <= row < len(expected):
                expected[row, :, :3] = x[i]
        assert torch.equal(as_bytes(getattr(cache, name)), as_bytes(expected)), name


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("n_sinks", [None, 0, 3])
@pytest.mark.parametrize("layout", ["contiguous", "pages of 16"])
@pytest.mark.parametrize("length", [15, 16, 40, 3, -1, -7, 2**31 - 100], ids=str)
def test_lengths_beyond_the_cache(length, layout, n_sinks):
    """Tokens before the first are left out, and those behind the last slot, unless they overwrite others."""
    options = {} if n_sinks is None else {"overwrites": True, "n_sinks": n_sinks}
    cache = new_cache(layout, 16, 2, NUMBERS, torch.float32, **options)
    k, v = (x.to(DEVICE) for x in tokens(6, torch.float32, (2,)))
    before = snapshot(cache)
    cache.lengths.copy_(torch.tensor([length, 9]))
    with unchecked(), checked():
        caches.append(cache, k, v, counted=True, backend="triton")
    for name, x in (("k", k), ("v", v)):
        expected = before[name].clone()
        for i, n in enumerate((length, 9)):
            for j in range(6):
                if n - 6 + j >= 0 and (n_sinks is not None or n - 6 + j < 16):
                    ((row, slot),) = places(cache, i, [n - 6 + j])
                    expected[row, :, slot] = x[i, :, j]
        assert torch.equal(as_bytes(getattr(cache, name)), as_bytes(expected)), name
