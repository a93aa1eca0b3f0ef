"""Appending where values cannot be read first: under a compiler, or on another device than the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, attention, caches, call_checks, kv_cache, prepare, reference_cached, support
from fusedattn.backends.torch import cached
from tests.helpers.cache_model import CACHED, cache_in, device_of

backends = pytest.mark.parametrize("backend", CACHED)
HEADS, DIM, SLOTS = 2, 16, 4


@pytest.fixture(autouse=True)
def _fresh_dynamo(_seed: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ints(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def contiguous(**options: Tensor) -> KVCache:
    """Two sequences of 3 and 2 tokens of 4, and a row that belongs to neither."""
    k, v = torch.randn(2, 3, HEADS, SLOTS, DIM).unbind()
    return KVCache(k, v, ints(3, 2), **options)


def paged(table: Tensor) -> KVCache:
    """Two sequences of 2 tokens in pages of 2."""
    k, v = torch.randn(2, 6, HEADS, 2, DIM).unbind()
    return KVCache(k, v, ints(2, 2), block_table=table)


# Two tokens are appended to each of two sequences. Those of the first have no place, but for this (row, slot).
WITHOUT_PLACE: dict[str, tuple[Callable[[], KVCache], list[tuple[int, int]]]] = {
    "full": (contiguous, [(0, 3)]),
    "longer than the cache": (lambda: replace(contiguous(), lengths=ints(9, 2)), []),
    "a negative row": (lambda: contiguous(rows=ints(-1, 1)), []),
    "a row behind the last": (lambda: contiguous(rows=ints(3, 1)), []),
    "a page that is not there": (lambda: paged(ints(5, -1, 1, 2).view(2, 2)), []),
    "a page behind the last": (lambda: paged(ints(5, 6, 1, 2).view(2, 2)), []),
}
layouts = pytest.mark.parametrize("name", WITHOUT_PLACE)
forms = pytest.mark.parametrize("form", [torch.float32, torch.int8])


def filled(name: str, form: torch.dtype) -> KVCache:
    cache = WITHOUT_PLACE[name][0]()
    if form == torch.float32:
        return cache
    k, v = (x.mul(40).to(form) for x in (cache.k, cache.v))
    k_scale, v_scale = torch.rand(2, *k.shape[:3], 1).unbind()
    return replace(cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def append(cache: KVCache) -> None:
    new = torch.tensor([7.0, 9.0])[:, None].expand(2, HEADS, 2, DIM).contiguous()
    caches.append(cache, new, 2 * new, backend="torch")


def assert_written(cache: KVCache, before: KVCache, name: str) -> None:
    """Fail unless the tokens are where they have a place, and nothing else has changed."""
    rows, slots, exists = cache.place(torch.tensor([[2, 3]] * 2))
    assert exists[1].all()
    places = {*WITHOUT_PLACE[name][1], *zip(rows[1].tolist(), slots[1].tolist(), strict=True)}
    for of in ("k", "v", "k_scale", "v_scale"):
        x, was = getattr(cache, of), getattr(before, of)
        if x is not None:
            changed = (x != was).any(dim=3).any(dim=1).nonzero().tolist()
            assert set(map(tuple, changed)) == places, of
    if cache.format is None:
        for row, slot in WITHOUT_PLACE[name][1]:
            assert (cache.k[row, :, slot] == 7.0).all()


def copied(cache: KVCache) -> KVCache:
    fields = ("k", "v", "lengths", "k_scale", "v_scale")
    tensors = ((of, getattr(cache, of)) for of in fields)
    return replace(cache, **{of: None if x is None else x.clone() for of, x in tensors})


@forms
@layouts
def test_tokens_without_a_place_under_a_compiler(name, form):
    """They are left out, and attention to their sequence is NaN."""
    cache = filled(name, form)
    before, q = copied(cache), torch.randn(2, HEADS, 1, DIM)

    def run() -> Tensor:
        append(cache)
        return attention(q, cache=cache, backend="torch")

    out = torch.compile(run, backend="eager", fullgraph=True)()
    assert_written(cache, before, name)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@forms
@layouts
def test_tokens_without_a_place_on_another_device(name, form, monkeypatch):
    """They are left out; the eager attention reads the lengths, and so can refuse them."""
    for module in (call_checks, kv_cache, prepare, reference_cached):
        monkeypatch.setattr(module, "can_read", lambda x: False)
    monkeypatch.setattr(cached, "_is_short", lambda *_: False)  # as on another device
    cache = filled(name, form)
    before = copied(cache)
    append(cache)
    assert_written(cache, before, name)
    with pytest.raises(ValueError, match=r"^(lengths|rows|block_table): got"):
        attention(torch.randn(2, HEADS, 1, DIM), cache=cache, backend="torch")


def test_no_token_has_a_place():
    """Then nothing is written at all."""
    cache = contiguous(rows=ints(-1, 3))
    before = copied(cache)

    def run() -> None:
        append(cache)

    torch.compile(run, backend="eager", fullgraph=True)()
    assert torch.equal(cache.k, before.k)
    assert torch.equal(cache.v, before.v)


def test_a_compiler_needs_values_for_memory_of_values():
    cache = KVCache(torch.zeros(2, HEADS, SLOTS, DIM), torch.zeros(2, HEADS, SLOTS, 8), ints(0, 0))
    k = torch.ones(2, HEADS, 1, DIM)
    with pytest.raises(Exception, match="v: got None"):
        torch.compile(lambda: caches.append(cache, k, backend="torch"), backend="eager", fullgraph=True)()
    assert cache.lengths.tolist() == [0, 0]


def test_a_backend_that_cannot_run(monkeypatch):
    """Nothing has changed, also in a cache that grows."""
    monkeypatch.setattr(support, "interpreting", lambda: False)
    monkeypatch.setattr(support, "HAS_TRITON", False)
    cache, growing = contiguous(), caches.GrowingCache(2, HEADS, DIM, dtype=torch.float32, capacity=1)
    new, memory = torch.ones(2, HEADS, 2, DIM), growing.cache
    for append in (lambda **x: caches.append(cache, new, new, **x), lambda **x: growing.append(new, new, **x)):
        with pytest.raises(NotImplementedError, match="append cannot run on backend 'triton': backend: got 'triton'"):
            append(backend="triton")
    assert cache.lengths.tolist() == [3, 2]
    assert growing.cache is memory
    assert memory.lengths.tolist() == [0, 0]


@backends
def test_tokens_of_the_cache_itself(backend):
    """New tokens may be views of its memory."""
    cache = cache_in("contiguous", 2, 8, HEADS, DIM, DIM, device=device_of(backend))
    k, v = torch.randn(2, 2, HEADS, 4, DIM, device=cache.k.device).unbind()
    caches.append(cache, k, v, backend=backend)
    caches.append(cache, cache.k[:2, :, 1:4], cache.v[:2, :, :3], backend=backend)
    assert torch.equal(cache.k[:2, :, 4:7], k[:, :, 1:])
    assert torch.equal(cache.v[:2, :, 4:7], v[:, :, :3])


@backends
def test_overwritten_numbers_have_no_gradients(backend):
    """Autograd notices that numbers which a backward needs have changed."""
    device = device_of(backend)
    cache = KVCache.contiguous(1, 1, 4, DIM, dtype=torch.float32, overwrites=True, device=device)
    new = torch.randn(1, 1, 4, DIM, device=device)
    caches.append(cache, new, new, backend=backend)
    q = torch.randn(1, 1, 1, DIM, device=device, requires_grad=True)
    out = attention(q, cache.k, cache.v, backend=backend)
    caches.append(cache, new[:, :, :2], new[:, :, :2], backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
