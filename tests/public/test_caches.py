"""Caches of keys and values, in every layout, compared with a list of tokens for each sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedattn import Rope, attention, attention_varlen, caches, masks
from tests.conftest import DTYPES
from tests.helpers import quick
from tests.helpers.cache_model import (
    CACHED,
    DIM,
    DIM_V,
    HEADS,
    HEADS_Q,
    LAYOUTS,
    Model,
    append,
    assert_attends,
    assert_holds,
    assert_results,
    cache_in,
    capacity_of,
    device_of,
    pages_of,
    rotated,
    tokens,
)  # fmt: skip

backends = pytest.mark.parametrize("backend", CACHED)


@pytest.fixture(autouse=True)
def _drawn(_seed: None) -> None:
    """Every test draws the same numbers."""


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("head_dim_v", [DIM, DIM_V])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@backends
def test_lengths(layout, dtype, seqlen_q, head_dim_v, backend):
    """Sequences that end before, at and behind a page; unused slots are NaN, unused pages any number."""
    size = pages_of(layout) or 17
    full = capacity_of(layout, 2 * size + 1)
    lengths = [0, 1, size - 1, size, size + 1, full]
    cache = cache_in(layout, 6, full, head_dim_v=head_dim_v, dtype=dtype, device=device_of(backend), used=lengths)
    model = Model(6)
    for steps in (
        [0, 1, 3, size // 2, size, full - 9],
        [0, 0, size - 4, 1, 0, 8],
        [0, 0, 0, size - 1 - size // 2, 1, 1],
    ):
        append(cache, model, steps, backend, dtype)
        assert_holds(cache, model)
    assert cache.lengths.tolist() == lengths
    assert_attends(cache, model, backend, dtype, seqlen_q, mask=masks.causal())


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("head_dim_v", [DIM, DIM_V])
@pytest.mark.parametrize("n_sinks", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@backends
def test_a_ring(layout, n_sinks, head_dim_v, backend):
    """Over several wraps, by steps that end anywhere and some that are longer than the ring."""
    dtype = torch.float32
    capacity = capacity_of(layout, 20)
    cache = cache_in(layout, 3, 20, head_dim_v=head_dim_v, device=device_of(backend), overwrites=True, n_sinks=n_sinks)
    model = Model(3, capacity, n_sinks)
    for steps in ([1, 7, 0], [2, capacity - 7, 5], [0, 1, capacity], [3 * capacity + 2, 5, 2 * capacity], [1, 19, 1]):
        append(cache, model, steps, backend, dtype)
        assert_holds(cache, model)
        assert_attends(cache, model, backend, dtype)
    assert_attends(cache, model, backend, dtype, 2, mask=masks.window(5, 0))
    assert_attends(cache, model, backend, dtype, 3, mask=masks.causal())


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "pages of 16"])
@backends
def test_left_padding(layout, ring, backend):
    """Padding is never seen, not even one that is NaN, nor one that is longer than the sequence."""
    padding = [0, 3, 25, 40]
    cache = cache_in(
        layout, 4, 32, device=device_of(backend), overwrites=ring,
        left_padding=torch.tensor(padding, dtype=torch.int32, device=device_of(backend)),
    )  # fmt: skip
    model = Model(4, 32 if ring else None)
    k, v = tokens(5, torch.float32, (4,))
    k[1:, :, :3], v[1:, :, 1:3] = torch.nan, torch.inf
    for i in range(4):
        model.append(i, k[i], v[i])
    caches.append(cache, k.to(cache.k.device), v.to(cache.k.device), backend=backend)
    for steps in ([20] * 4, [3, 1, 4, 2], *([[10] * 4, [1] * 4] if ring else [])):
        append(cache, model, steps, backend, torch.float32)
        visible = cache.dense()[2]
        for i in range(4):
            shown = [t >= padding[i] for t in model.kept(i)]
            assert visible[i].tolist() == shown + [False] * (32 - len(shown))

        def valid(i: int, n: int, bands: masks.Mask) -> dict[str, Any]:
            shown = torch.tensor([[t >= padding[i] for t in model.kept(i)]])
            return {"mask": bands & masks.padding(shown)}

        for bands in (masks.full(), masks.causal()):
            assert_attends(
                cache, model, backend, torch.float32, 3, mask=bands,
                of_sequence=lambda i, n, bands=bands: valid(i, n, bands),
            )  # fmt: skip


ROPES = {
    "half": (DIM, False, 1),
    "interleaved": (DIM, True, 1),
    "partial": (8, False, 1),
    "partial, interleaved": (8, True, 1),
    "tables of each sequence": (DIM, False, 2),
}


def rope_of(name: str, device: str) -> Rope:
    rotary_dim, interleaved, n_tables = ROPES[name]
    tables = [Rope.from_theta(rotary_dim, 64, theta) for theta in (100.0, 30.0)[:n_tables]]
    cos, sin = (torch.stack([getattr(t, x) for t in tables]) for x in ("cos", "sin"))
    if n_tables == 1:
        cos, sin = cos[0], sin[0]
    return Rope(cos, sin, interleaved=interleaved).to(device)


def rope_of_sequence(rope: Rope, i: int) -> Rope:
    rope = rope.to("cpu")
    return rope if rope.cos.dim() == 2 else Rope(rope.cos[i], rope.sin[i], interleaved=rope.interleaved)


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
@pytest.mark.parametrize("name", ROPES)
@backends
def test_rope_on_appending(name, given, backend):
    """Keys are rotated once, at the number of their token or a position that is given; queries at the end."""
    device = device_of(backend)
    rope = rope_of(name, device)
    cache = cache_in("pages of 16", 2, 40, device=device, rope=rope)
    model, unrotated = Model(2), Model(2)
    places: list[list[int]] = [[], []]
    for counts in ([3, 1], [20, 0], [1, 30]):
        new = [tokens(n, torch.float32) for n in counts]
        for i, (k, v) in enumerate(new):
            first = len(places[i])
            at = [(5 * (first + t) + i) % 60 if given else first + t for t in range(counts[i])]
            places[i] += at
            model.append(i, rotated(k, rope.to("cpu"), at, i), v)
            unrotated.append(i, k, v)
        own = cache
        if given:
            packed = [at for i in range(2) for at in places[i][len(places[i]) - counts[i] :]]
            own = replace(cache, rope=rope.at(None, torch.tensor(packed, device=device)))
        k, v = (torch.cat(x, dim=1).transpose(0, 1).to(device) for x in zip(*new, strict=True))
        stops = torch.tensor([0, *counts], device=device).cumsum(0).int()
        caches.append(own, k, v, cu_seqlens=stops, backend=backend)
    stored = cache.dense()[0].cpu()
    q = torch.randn(2, HEADS_Q, 2, DIM)
    at_q = torch.tensor([[7, 50], [3, 12]], device=device) if given else None
    out, lse = attention(
        q.to(device), cache=replace(cache, rope=rope.at(at_q, None)), mask=masks.causal(), return_lse=True,
        backend=backend,
    )  # fmt: skip
    for i in range(2):
        k, v = model.keys_and_values(i)
        n = k.shape[2]
        torch.testing.assert_close(stored[i : i + 1, :, :n].double(), k, rtol=0, atol=5e-7)
        at = [n - 2, n - 1] if at_q is None else at_q[i].tolist()
        own = rope_of_sequence(rope, i)
        own = own.at(torch.tensor(at), torch.tensor(places[i]))
        rows = slice(i, i + 1)
        expected = unrotated.keys_and_values(i)
        assert_results([(out[rows], lse[rows])], q[rows], *expected, f"sequence {i}", mask=masks.causal(), rope=own)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)], ids=str)
@backends
def test_given_positions_of_padded_tokens(shape, backend):
    device = device_of(backend)
    rope = rope_of("half", device)
    positions = torch.randint(0, 64, shape, device=device)
    cache = cache_in("rows", 2, 8, device=device, rope=rope.at(None, positions))
    k, v = tokens(3, torch.float32, (2,))
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    stored = cache.dense()[0].cpu()
    for i in range(2):
        at = positions.expand(2, 3)[i].tolist()
        expected = rotated(k[i], rope.to("cpu"), at)
        torch.testing.assert_close(stored[i, :, :3].double(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", ROPES)
@backends
def test_rope_on_reading(name, backend):
    """Positions count the tokens that are kept, also those of a ring."""
    device = device_of(backend)
    rope = rope_of(name, device)
    cache = cache_in("pages of 17", 2, 34, device=device, overwrites=True, n_sinks=2)
    model = Model(2, 34, 2)
    append(cache, model, [20, 50], backend, torch.float32)

    def own(i: int, n: int) -> dict[str, Any]:
        return {"rope": rope_of_sequence(rope, i)}

    assert_attends(cache, model, backend, torch.float32, 3, rope=rope, mask=masks.causal(), of_sequence=own)
    at_q, at_k = torch.randint(0, 64, (2, 3)), torch.randint(0, 64, (2, 34))
    given = rope.at(at_q.to(device), at_k.to(device))
    assert_attends(
        cache, model, backend, torch.float32, 3, rope=given,
        of_sequence=lambda i, n: {"rope": own(i, n)["rope"].at(at_q[i], at_k[i, :n])},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@backends
def test_packed_queries(dtype, backend):
    """Some sequences have no query, some queries no sequence."""
    device, counts = device_of(backend), [3, 0, 1, 5]
    cache = cache_in("pages of 16", 4, 40, dtype=dtype, device=device)
    model = Model(4)
    append(cache, model, [20, 3, 0, 33], backend, dtype)
    q = torch.randn(sum(counts) + 2, HEADS_Q, DIM).to(dtype)
    stops = torch.tensor([0, *counts]).cumsum(0).int()
    out, lse = attention_varlen(
        q.to(device), None, None, stops.to(device), None, cache=cache, mask=masks.causal(), return_lse=True,
        backend=backend,
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((11, HEADS_Q, DIM_V), (HEADS_Q, 11))
    seen = [(0, slice(0, 3)), (3, slice(4, 9))]
    for i, rows in seen:
        found = out[rows].transpose(0, 1)[None], lse[:, rows][None]
        assert_results(
            [found], q[rows].transpose(0, 1)[None], *model.keys_and_values(i), f"sequence {i}", mask=masks.causal()
        )
    for rows in (slice(3, 4), slice(9, 11)):  # of an empty sequence, and of none
        assert not out[rows].any()
        assert (lse[:, rows] == -torch.inf).all()


@quick.covering()
@pytest.mark.parametrize("layout", LAYOUTS)
@backends
def test_tokens_one_by_one(layout, backend):
    """A prompt and then one token at a time give the same as causal attention to all."""
    device, n = device_of(backend), 20
    cache = cache_in(layout, 2, n, device=device)
    q, (k, v) = torch.randn(2, HEADS_Q, n, DIM), tokens(n, torch.float32, (2,))
    outs, lses = [], []
    for rows in (slice(0, 15), *(slice(t, t + 1) for t in range(15, n))):
        caches.append(cache, k[:, :, rows].to(device), v[:, :, rows].to(device), backend=backend)
        out, lse = attention(
            q[:, :, rows].to(device), cache=cache, mask=masks.causal(), return_lse=True, backend=backend
        )
        outs.append(out)
        lses.append(lse)
    assert_results([(torch.cat(outs, dim=2), torch.cat(lses, dim=2))], q, k, v, layout, mask=masks.causal())


@backends
def test_lengths_of_layers(backend):
    """The second layer appends to lengths that the first has increased."""
    device = device_of(backend)
    first = cache_in("rows", 2, 8, device=device)
    second = replace(first, k=first.k.clone(), v=first.v.clone())
    k, v = tokens(3, torch.float32, (2,))
    for cache, counted in ((first, False), (second, True)):
        caches.append(cache, k.to(device), v.to(device), counted=counted, backend=backend)
    assert first.lengths.tolist() == [3, 3]
    for x, y in zip(first.dense(), second.dense(), strict=True):
        assert torch.equal(x, y)


@backends
def test_values_that_are_features_of_keys(backend):
    """As in multi-head latent attention; one head for all queries."""
    device = device_of(backend)
    memory = torch.full((2, 1, 40, DIM), torch.nan, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    cache = caches.KVCache(memory, memory[..., :12], lengths)
    model = Model(2)
    for n in (17, 1):
        k = torch.randn(2, 1, n, DIM)
        caches.append(cache, k.to(device), backend=backend)
        for i in range(2):
            model.append(i, k[i], k[i, ..., :12])
    assert_holds(cache, model)
    assert_attends(cache, model, backend, torch.float32)


@pytest.mark.parametrize("nheads_kv", [1, 2, 4])
@backends
def test_groups_of_heads(nheads_kv, backend):
    """Query head h attends with head ``h // group``: the keys of one head are NaN."""
    device = device_of(backend)
    cache = cache_in("pages of 16", 1, 20, nheads_kv, device=device)
    k, v = torch.randn(1, nheads_kv, 18, DIM), torch.randn(1, nheads_kv, 18, DIM_V)
    k[0, -1, 3] = torch.nan
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    out = attention(torch.randn(1, HEADS_Q, 1, DIM, device=device), cache=cache, backend=backend)
    group = HEADS_Q // nheads_kv
    assert out.isnan().any(dim=-1)[0, :, 0].tolist() == [h // group == nheads_kv - 1 for h in range(HEADS_Q)]


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of", ["k", "v"])
@pytest.mark.parametrize("layout", ["contiguous", "pages of 17"])
@backends
def test_numbers_that_are_not_finite(layout, of, poison, backend):
    """They reach the queries that see them, and no others."""
    device = device_of(backend)
    cache = cache_in(layout, 3, 34, device=device)
    model = Model(3)
    append(cache, model, [30, 12, 34], backend, torch.float32)
    for i, t in ((0, 3), (1, 11), (2, 33)):
        k, v = model.tokens[i][t]
        x = (k if of == "k" else v).clone()
        x[1, 5] = poison
        model.tokens[i][t] = (x, v) if of == "k" else (k, x)
        row, slot = (int(x) for x in (y[i, 0] for y in cache.place(torch.full((3, 1), t, device=device))[:2]))
        getattr(cache, of)[row, :, slot] = x.to(device)
    for mask in (masks.full(), masks.causal(), masks.window(4, 0)):
        assert_attends(cache, model, backend, torch.float32, 3, mask=mask)


@pytest.mark.parametrize("batch", [0, 2])
@backends
def test_nothing(batch, backend):
    """No sequence, no token, no query."""
    device = device_of(backend)
    cache = cache_in("contiguous", batch, 8, device=device)
    k, v = tokens(0, torch.float32, (batch,))
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    assert cache.lengths.tolist() == [0] * batch
    for n in (0, 2):
        q = torch.randn(batch, HEADS_Q, n, DIM, device=device)
        out, lse = attention(q, cache=cache, return_lse=True, backend=backend)
        assert torch.equal(out, torch.zeros(batch, HEADS_Q, n, DIM_V, device=device))
        assert torch.equal(lse, torch.full((batch, HEADS_Q, n), -torch.inf, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
@pytest.mark.parametrize("capacity", [0, 3])
@backends
def test_growing(capacity, dtype, backend):
    """The memory doubles when it is full, or more if that is too little; tokens and scales stay."""
    device = device_of(backend)
    growing = caches.GrowingCache(2, HEADS, DIM, DIM_V, dtype=dtype, capacity=capacity, device=device)
    fixed = caches.KVCache.contiguous(2, HEADS, 40, DIM, DIM_V, dtype=dtype, device=device)
    capacities = []
    for n in (2, 1, 1, 9, 1):
        k, v = (x.to(device) for x in tokens(n, torch.float32, (2,)))
        growing.append(k, v, backend=backend)
        caches.append(fixed, k, v, backend=backend)
        capacities.append(growing.cache.capacity)
    assert capacities == ([2, 4, 4, 13, 26] if capacity == 0 else [3, 3, 6, 13, 26])
    assert growing.length == 14
    for x, y in zip(growing.cache.dense(), fixed.dense(), strict=True):
        assert torch.equal(x, y[:, :, :26] if y.dim() == 4 else y[:, :26])
