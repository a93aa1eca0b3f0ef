"""Attention to a cache on a CPU: which calls read the cache where it lies, and in which tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention_varlen, biases, caches, masks, reference_cached
from fusedattn.backends.torch import cache_tiles, cached
from fusedattn.testing import triton_functions
from tests.conftest import torch_attention as attention
from tests.helpers import quick
from tests.helpers.cache_model import DIM, HEADS_Q, LAYOUTS, Model, append, assert_attends, assert_results, cache_in

N = 40


@pytest.fixture(autouse=True)
def _drawn(_seed: None) -> None:
    """Every test draws the same numbers."""


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache can be neither written out nor attended to sequence by sequence."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the whole cache may be copied")

    monkeypatch.setattr(KVCache, "dense", refused)
    monkeypatch.setattr(reference_cached, "attention", refused)


def filled(layout: str, dtype: torch.dtype = torch.float32, **options: Any) -> KVCache:
    """Three sequences of `N` tokens."""
    cache = cache_in(layout, 3, N, dtype=dtype, **options)
    source = torch.float32 if cache.format else dtype
    k, v = (torch.randn(3, 2, N, n).to(source) for n in (cache.head_dim, cache.head_dim_v))
    caches.append(cache, k, v, backend="torch")
    return cache


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "a window": {"mask": masks.window(9, 0)},
    "padding": {"mask": masks.padding(torch.rand(3, 64) < 0.5)},
    "pairs": {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "prefix_lm": {"mask": masks.prefix_lm(torch.tensor([1, 2, 3]))},
    "alibi": {"bias": biases.alibi(torch.rand(HEADS_Q))},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(HEADS_Q)},
    "lse": {"return_lse": True},
}


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_copy(layout, name):
    cache = filled(layout)
    options = dict(CALLS[name])
    if name == "padding":
        options["mask"] = masks.padding(options["mask"].valid[:, : cache.capacity])
    for n in (1, cached.MOST_QUERIES):
        attention(torch.randn(3, HEADS_Q, n, DIM), cache=cache, **options)


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_no_copy_of_other_dtypes(dtype):
    cache = filled("pages of 16", dtype)
    q = torch.randn(3, HEADS_Q, 1, DIM).to(dtype if cache.format is None else torch.bfloat16)
    attention(q, cache=cache, mask=masks.causal())


@pytest.mark.usefixtures("no_copy")
def test_no_copy_of_others():
    """Left padding, a ring, rotated keys, one head_dim for all, packed queries."""
    q = torch.randn(3, HEADS_Q, 2, DIM)
    rope = Rope.from_theta(DIM, 200)
    padding = torch.tensor([0, 3, 50], dtype=torch.int32)
    attention(q, cache=filled("contiguous", left_padding=padding))
    attention(q, cache=filled("pages of 16", overwrites=True, n_sinks=2, rope=rope))
    attention(q, cache=filled("rows", head_dim_v=DIM))
    stops = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    attention_varlen(
        torch.randn(6, HEADS_Q, DIM), None, None, stops, None, cache=filled("pages of 17"), backend="torch"
    )


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": triton_functions.score_function(HEADS_Q, torch.Generator())},
        {"dropout_p": 0.1},
        {"rope": Rope.from_theta(DIM, 64)},
        {"sinks": torch.full((HEADS_Q,), torch.inf)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_the_other_way(options):
    with pytest.raises(AssertionError, match="may be copied"):
        attention(torch.randn(3, HEADS_Q, 1, DIM), cache=filled("contiguous"), **options)


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_numbers_that_are_not_finite_go_the_other_way(of, poison, softcap):
    """Wherever they are: torch's kernel makes 0 of a row of NaN, and of a score of -inf."""
    for head in range(2):
        for token in (0, 21, N - 1):
            cache, q = filled("contiguous", head_dim_v=DIM), torch.randn(3, HEADS_Q, 1, DIM)
            if of == "q":
                q[2, head, 0, 3] = poison
            else:
                getattr(cache, of)[2, head, token, 3] = poison
            with pytest.raises(AssertionError, match="may be copied"):
                attention(q, cache=cache, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_autocast(dtype):
    """The products of wide numbers stay wide."""
    cache, q = filled("pages of 16", dtype), torch.randn(3, HEADS_Q, 1, DIM, dtype=torch.bfloat16)
    expected = attention(q, cache=cache, softcap=2.0, return_lse=True)
    with torch.autocast("cpu"):
        actual = attention(q.float(), cache=cache, softcap=2.0, return_lse=True)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of", ["k", "v"])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_the_only_key(of, poison, n):
    """If a query sees one key alone, its scores are all NaN."""
    cache = cache_in("contiguous", 1, N, head_dim_v=DIM)
    k, v = torch.randn(1, 2, n, DIM), torch.randn(1, 2, n, DIM)
    (k if of == "k" else v)[0, 1, -1, 5] = poison
    model = Model(1)
    model.append(0, k[0], v[0])
    caches.append(cache, k, v, backend="torch")
    for mask in (masks.window(0, 0), masks.causal(), masks.window(1, 0)):
        for n_queries in (1, 2):
            assert_attends(cache, model, "torch", torch.float32, n_queries, mask=mask)


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("head_dim_v", [DIM, DIM + 8])
def test_hidden_numbers_are_not_read(head_dim_v):
    """Tokens before a window or behind it, and padding."""
    padding = torch.tensor([4, 5, 6], dtype=torch.int32)
    cache = filled("contiguous", head_dim_v=head_dim_v, left_padding=padding)
    cache.k[:, :, :4], cache.v[:, :, :4] = torch.nan, torch.inf
    assert attention(torch.randn(3, HEADS_Q, 3, DIM), cache=cache).isfinite().all()
    cache = filled("pages of 16", head_dim_v=head_dim_v)
    rows, slots, _ = cache.place(torch.arange(30).expand(3, 30))
    cache.k[rows, :, slots], cache.v[rows, :, slots] = torch.nan, torch.inf
    assert attention(torch.randn(3, HEADS_Q, 3, DIM), cache=cache, mask=masks.window(7, 0)).isfinite().all()


def tiles(cache: KVCache, x: Tensor, sequence: int, start: int, stop: int) -> list[Tensor]:
    own = cache_tiles.sequences(cache, together=False)[sequence]
    return [tile.clone() for (tile,) in own.tiles((x,), start, stop)]


@pytest.mark.parametrize("layout", ["contiguous", "token-major", "rows"])
def test_one_view_of_adjacent_tokens(layout):
    cache = filled(layout)
    own = cache_tiles.sequences(cache, together=False)[1]
    ((view,),) = own.tiles((cache.k,), 3, 30)
    assert view.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()
    assert view.shape == (1, 2, 27, DIM)


def test_one_view_of_adjacent_pages():
    """If the tokens of all heads lie together, 5 pages in order and one elsewhere are a view and a copy."""
    table = torch.tensor([[7, 2, 3, 4, 5, 0]], dtype=torch.int32)
    cache = KVCache.paged(table, 8, 16, 2, DIM, dtype=torch.float32, lengths=torch.tensor([96], dtype=torch.int32))
    k = torch.randn(8, 16, 2, DIM).transpose(1, 2)
    cache = replace(cache, k=k)
    own = cache_tiles.sequences(cache, together=False)[0]
    ((view,),) = own.tiles((k,), 16, 80)
    assert view.data_ptr() == k[2].data_ptr()
    assert torch.equal(view[0], torch.cat([k[p] for p in (2, 3, 4, 5)], dim=1))
    assert torch.equal(torch.cat(tiles(cache, k, 0, 0, 96), dim=2)[0], torch.cat(list(k[table[0]]), dim=1))


@pytest.mark.parametrize("copied", [1, 16, 40, 1000])
@pytest.mark.parametrize("layout", ["pages of 16", "pages of 17"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_tiles_are_all_tokens_in_order(layout, copied, is_flat, monkeypatch):
    monkeypatch.setattr(cache_tiles, "COPIED", copied)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cache = cache_in(layout, 3, 100, overwrites=True, n_sinks=3)
    model = Model(3, cache.capacity, 3)
    append(cache, model, [60, cache.capacity, 3 * cache.capacity + 40], "torch", torch.float32)
    k = cache.k.transpose(1, 2).contiguous().transpose(1, 2) if is_flat else cache.k
    for i in range(3):
        n = len(model.kept(i))
        expected, _ = model.keys_and_values(i)
        for start, stop in ((0, n), (2, n - 1), (17, 18), (30, 53)):
            found = tiles(cache, k, i, start, stop)
            assert torch.equal(torch.cat(found, dim=2), expected[:, :, start:stop])
            size = cache.k.shape[2]
            assert is_flat or all(tile.shape[2] <= max(copied, size) for tile in found)


def in_order_of(x: Tensor, order: str) -> Tensor:
    """The same numbers, ``(rows, heads, slots, ...)``, in other memory."""
    if order == "expanded":
        return x[:1].expand_as(x)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if order == "token-major" else x.contiguous()


@quick.pairwise()
@pytest.mark.parametrize("of_v", ["head-major", "token-major"])
@pytest.mark.parametrize("of_k", ["head-major", "token-major"])
@pytest.mark.parametrize("of_scale", [None, "head-major", "token-major", "given", "given, expanded"])
@pytest.mark.parametrize("heads", [1, 2])
def test_tensors_in_order_of_their_own(heads, of_scale, of_k, of_v, monkeypatch):
    """Some are views of many adjacent pages, and others must be copied a few at a time."""
    monkeypatch.setattr(cache_tiles, "COPIED", 48)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    n_pages, size = 20, 16
    dtype = torch.float32 if of_scale is None else torch.int8
    table = torch.cat((torch.arange(8), 8 + torch.randperm(12))).int()[None]
    lengths = torch.tensor([n_pages * size - 5], dtype=torch.int32)
    cache = KVCache.paged(table, n_pages, size, heads, DIM, dtype=dtype, lengths=lengths)
    k, v = (in_order_of(torch.randn(cache.k.shape).mul(40).to(dtype), order) for order in (of_k, of_v))
    scales = None
    if of_scale is not None:
        scales = torch.rand(n_pages, heads, size, 1)
        scales = scales[:, :, 0, 0] if of_scale.startswith("given") else in_order_of(scales, of_scale)
        scales = scales[:1].expand_as(scales) if "expanded" in of_scale else scales
    cache = replace(cache, k=k, v=v, k_scale=scales, v_scale=scales)
    keys, values, _ = cache.dense()
    q, n = torch.randn(1, HEADS_Q, 2, DIM) / 40, int(lengths)
    out, lse = attention(q, cache=cache, return_lse=True, backend="torch")
    assert_results([(out, lse)], q, keys[:, :, :n], values[:, :, :n])


@pytest.mark.parametrize("head_dim_v", [DIM, DIM + 8])
def test_many_tiles(head_dim_v, monkeypatch):
    """Their results are merged, also where a query sees nothing of a tile, or of all."""
    monkeypatch.setattr(cache_tiles, "COPIED", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cache = cache_in("pages of 16", 3, 80, head_dim_v=head_dim_v)
    model = Model(3)
    new = [(torch.randn(2, n, DIM), torch.randn(2, n, head_dim_v)) for n in (77, 2, 33)]
    for i, (k, v) in enumerate(new):
        model.append(i, k, v)
    k, v = (torch.cat(x, dim=1).transpose(0, 1) for x in zip(*new, strict=True))
    caches.append(cache, k, v, cu_seqlens=torch.tensor([0, 77, 79, 112], dtype=torch.int32), backend="torch")
    pairs = torch.rand(3, HEADS_Q, 4, 80) < 0.1
    for mask in (masks.full(), masks.causal(), masks.window(20, 0), masks.boolean(pairs)):
        assert_attends(
            cache, model, "torch", torch.float32, 4, mask=mask,
            of_sequence=lambda i, n, mask=mask: (
                {} if mask.allowed is None else {"mask": masks.boolean(pairs[i : i + 1, ..., :n])}
            ),
        )  # fmt: skip
