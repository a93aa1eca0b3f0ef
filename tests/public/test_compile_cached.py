"""``torch.compile`` of caches: appending and attending in one graph, which cannot read lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, attention_varlen, biases, caches, masks
from tests.conftest import BACKENDS, DEVICE

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

BATCH, HEADS, KV_HEADS, CAPACITY, DIM = 3, 4, 2, 12, 8
STOPS = [0, 3, 3, 5]  # of packed queries, of which two more belong to no sequence
Call = Callable[[KVCache, Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rope_of(positions: Tensor | None = None) -> Rope:
    return replace(Rope.from_theta(DIM, 2 * CAPACITY, device=DEVICE), positions_q=positions)


def int32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, device=DEVICE)


def cached(dtype: torch.dtype = torch.float32, *, in_pages: bool = False, **options: Any) -> KVCache:
    """A cache of random tokens, 2 .. 9 of each sequence, NaN behind them."""
    if in_pages:
        table = int32([[4, 1, 0], [2, 8, 3], [7, 5, 6]])
        cache = KVCache.paged(table, 9, CAPACITY // 3, KV_HEADS, DIM, dtype=dtype, **options)
    else:
        cache = KVCache.contiguous(BATCH, KV_HEADS, CAPACITY, DIM, dtype=dtype, device=DEVICE, **options)
    new = torch.randn(2, 17, KV_HEADS, DIM, device=DEVICE)
    caches.append(cache, *new, cu_seqlens=int32([0, 6, 8, 17]))
    return cache


def appended(cache: KVCache, new: Tensor, q: Tensor, **options: Any) -> Any:
    caches.append(cache, new, new + 1, **options)
    return attention(q, cache=cache, mask=masks.window(4, 1), return_lse=True, **options)


def packed(cache: KVCache, q: Tensor, **options: Any) -> Any:
    stops = int32(STOPS)
    bias = biases.alibi(torch.ones(BATCH, HEADS, device=DEVICE) * torch.arange(1, 4, device=DEVICE)[:, None])
    return attention_varlen(
        q, None, None, stops, None, 4, cache=cache, mask=masks.causal(), bias=bias, return_lse=True, **options
    )


CACHES: dict[str, Callable[[], KVCache]] = {
    "plain": cached,
    "pages, padding": lambda: cached(in_pages=True, left_padding=int32([1, 5, 0])),
    "rotated": lambda: cached(rope=rope_of()),
    "8 bits": lambda: cached(torch.int8),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CACHES)
def test_appending(name, backend):
    cache, new, q = CACHES[name](), torch.randn(BATCH, KV_HEADS, 2, DIM), torch.randn(BATCH, HEADS, 3, DIM)
    assert_same(lambda cache, new, q: appended(cache, new, q, backend=backend), cache, new, q)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_queries", ["rope of the cache", "its positions", "rope on reading", "none"])
def test_packed_queries(of_queries, backend):
    """Some queries belong to no sequence, one sequence has none."""
    positions = int32([7, 2, 5, 8, 1, 99, 99])
    of_cache = {"rope of the cache": rope_of(), "its positions": rope_of(positions)}.get(of_queries)
    options = {"rope": rope_of(positions.clamp(max=9))} if of_queries == "rope on reading" else {}
    cache = replace(cached(rope=rope_of()), rope=of_cache)
    if of_queries == "its positions" and DEVICE == "cpu":
        cache = replace(cache, rope=rope_of(positions.clamp(max=9)))  # others are an error there
    q = torch.randn(7, HEADS, DIM)
    assert_same(lambda cache, _, q: packed(cache, q, backend=backend, **options), cache, torch.zeros(()), q)


def assert_same(function: Call, cache: KVCache, *others: Tensor) -> None:
    """A compiled function returns what the function does, and leaves the same in the cache."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = []
    for call in (function, compiled):
        own = replace(cache, **{name: getattr(cache, name).clone() for name in ("k", "v", "lengths")})
        results = call(own, *(x.to(DEVICE) for x in others))
        found.append((*results, own.k, own.v, own.lengths))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[1][0].isfinite().all()
