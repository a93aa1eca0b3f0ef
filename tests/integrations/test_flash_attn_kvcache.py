"""``flash_attn_with_kvcache``: the tokens appended, their places, and the keys visible."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import caches, prepare, testing
from fusedattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from tests.conftest import BACKENDS, DEVICE, assert_ratios
from tests.helpers.flash_attn_truth import NoWait, attend, place_of, rotate

pytestmark = pytest.mark.usefixtures("_seed")

BATCH, CAPACITY, HEADS, KV_HEADS, DIM, PAGE = 2, 16, 4, 2, 8, 4
LENGTHS = [3, 10]
# Four pages for each of both sequences, in random order; entries of empty pages are garbage.
TABLE = [[5, 2, 7, -(10**6)], [0, 6, 3, 1]]


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return place_of(request.param, monkeypatch)


def int32(x: Any, device: str) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, device=device)


def truth(q, k_cache, v_cache, k, v, *, lengths, rows, leftpad, cos=None, sin=None, interleaved=True, **options):
    """Compute out, lse and both caches after the call, one sequence at a time."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    ordered = options.get("causal") or options.get("window_size", (-1, -1)) != (-1, -1)
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        query, stop = q[b], length
        if k is not None:
            stop, new = length + k.shape[1], k[b]
            if cos is not None:
                step = torch.arange(query.shape[0], device=q.device) * int(bool(ordered))
                query = rotate(query, cos, sin, length + step, interleaved)
                new = rotate(new, cos, sin, torch.arange(length, stop, device=q.device), interleaved)
            k_cache[row, length:stop], v_cache[row, length:stop] = new, v[b]
        seen = slice(leftpad[b], stop)
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[b]
        out, lse = attend(query[None], k_cache[row, seen][None], v_cache[row, seen][None], alibi_slopes=own, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses), k_cache, v_cache


# By name: number of queries and of new keys; type of the lengths; options.
NEW: dict[str, tuple[int, int | None, str, dict[str, Any]]] = {
    "one query": (1, 1, "tensor", {}),
    "one query, window": (1, 1, "tensor", {"causal": True, "window_size": (4, 0)}),
    "one query, slopes": (1, 1, "tensor", {"alibi_slopes": (HEADS,)}),
    "nothing new": (3, None, "tensor", {"causal": True}),
    "nothing new, full caches": (3, None, "none", {"causal": True, "window_size": (5, 0)}),
    "causal": (4, 4, "tensor", {"causal": True}),
    "not causal": (4, 4, "tensor", {}),
    "fewer new than queries": (5, 2, "tensor", {"causal": True}),
    "more new than queries": (2, 5, "tensor", {"causal": True}),
    "window": (4, 4, "tensor", {"window_size": (3, 1)}),
    "window to the right": (4, 4, "tensor", {"window_size": (-1, 2)}),
    "soft-cap, scale": (4, 4, "tensor", {"causal": True, "softcap": 0.8, "softmax_scale": 0.7}),
    "slopes of each sequence, not causal": (4, 4, "tensor", {"alibi_slopes": (BATCH, HEADS)}),
    "more queries than keys": (8, 1, "tensor", {"causal": True, "alibi_slopes": (BATCH, HEADS)}),
    "int": (4, 4, "int", {"causal": True, "alibi_slopes": (BATCH, HEADS)}),
    "int, window": (1, 1, "int", {"window_size": (4, 0)}),
    "int, nothing new": (1, None, "int", {}),
}


def assert_as_in_truth(
    place: dict[str, Any], held: str, n_queries: int, n_new: int | None, lengths_as: str, options: dict[str, Any],
    *, leftpad: bool = False, rope: bool = False, interleaved: bool = True,
) -> None:  # fmt: skip
    device = place["device"]
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(options["alibi_slopes"]).to(**place)
    rows, in_pages = [2, 0] if held == "rows" else [0, 1], held == "pages"
    lengths = {"tensor": LENGTHS, "int": [6] * BATCH, "none": [CAPACITY] * BATCH}[lengths_as]
    table = [[*TABLE[0][:3], 4], TABLE[1]] if lengths_as == "none" else TABLE  # pages of full caches are all in use
    pads = [4, 5] if leftpad else [0] * BATCH
    q = torch.randn(BATCH, n_queries, HEADS, DIM, **place)
    k_cache, v_cache = torch.randn(2, 3, CAPACITY, KV_HEADS, DIM, **place)
    k, v = (None, None) if n_new is None else torch.randn(2, BATCH, n_new, KV_HEADS, DIM, **place)
    tables = torch.randn(2, CAPACITY + 4, 3, device=device) if rope else (None, None)

    expected = truth(
        *(x if x is None else x.double() for x in (q, k_cache, v_cache, k, v)),
        lengths=lengths, rows=rows, leftpad=pads, cos=tables[0], sin=tables[1], interleaved=interleaved, **options,
    )  # fmt: skip
    # Rows after the last token are not read.
    kept = [x.clone() for x in (k_cache, v_cache)]
    for cache in kept:
        for length, row in zip(lengths, rows, strict=True):
            cache[row, length:] = math.nan
    if in_pages:
        before, kept = kept, [x.new_full((8, PAGE, KV_HEADS, DIM), math.nan) for x in kept]
        for page, cache in zip(kept, before, strict=True):
            for numbers, its_pages in zip(table, cache.unflatten(1, (-1, PAGE)), strict=False):
                for p, tokens in zip(numbers, its_pages, strict=True):
                    if p >= 0:
                        page[p] = tokens
    found = flash_attn_with_kvcache(
        q, *kept, k, v, rotary_cos=tables[0], rotary_sin=tables[1], rotary_interleaved=interleaved,
        cache_seqlens={"tensor": int32(lengths, device), "int": lengths[0], "none": None}[lengths_as],
        cache_batch_idx=int32(rows, device) if held == "rows" else None,
        cache_leftpad=int32(pads, device) if leftpad else None,
        block_table=int32(table, device) if in_pages else None,
        num_splits=3, return_softmax_lse=True, **options,
    )  # fmt: skip
    close = {"rtol": 1e-9, "atol": 1e-10} if place["dtype"] == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close([x.double() for x in found], list(expected[:2]), **close)
    assert found[0].is_contiguous()
    for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        for cache, after in zip(kept, expected[2:], strict=True):
            stop = length + (n_new or 0)
            tokens = cache[int32(table[b], device).clamp(min=0)].flatten(0, 1) if in_pages else cache[row]
            torch.testing.assert_close(tokens[:stop].double(), after[row, :stop], **close)
            assert torch.equal(tokens[:length], (k_cache if cache is kept[0] else v_cache)[row, :length])
            assert tokens[stop : -(-stop // PAGE) * PAGE if in_pages else None].isnan().all()


@pytest.mark.parametrize("held", ["first rows", "rows", "pages"])
@pytest.mark.parametrize("name", NEW)
def test_meaning(name, held, place):
    n_queries, n_new, lengths_as, options = NEW[name]
    assert_as_in_truth(place, held, n_queries, n_new, lengths_as, options)


@pytest.mark.parametrize("held", ["rows", "pages"])
@pytest.mark.parametrize(("lengths_as", "options"), [("tensor", {"causal": True}), ("tensor", {}), ("int", {})])
def test_padding_on_the_left(held, lengths_as, options, place):
    """Less padding than there are tokens, or as much, which leaves nothing visible."""
    assert_as_in_truth(place, held, 2, 1, lengths_as, options, leftpad=True)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("lengths_as", ["tensor", "int"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4, 1)}, {"window_size": (4, -1)}, {}], ids=str)
def test_rotation(options, lengths_as, interleaved, place):
    """All queries have the same position unless a mask orders them."""
    options = {"rope": True, "interleaved": interleaved, "options": options, "leftpad": True}
    assert_as_in_truth(place, "first rows", 4, 4, lengths_as, **options)


class Long(NamedTuple):
    """A longer cache: seqlen_k tokens of room, in pages of `page` tokens, in rows, or the first rows."""

    seqlen_q: int
    seqlen_k: int
    heads: tuple[int, int]
    page: int | None = None
    rows: bool = False
    new: int | None = None
    rotary: float = 0.0
    interleaved: bool = True
    leftpad: bool = False
    num_splits: int = 0
    options: Any = ()  # as of a dict
    slopes: bool = False


CAUSAL, LOCAL = {"causal": True}, {"window_size": (50, 20)}
# After the cases of FlashAttention's own test of this function.
LONG = {
    "one query, new keys": Long(1, 128, (6, 3), new=1, num_splits=1, options=CAUSAL),
    "one query, splits": Long(1, 800, (6, 1), num_splits=3),
    "pages of 256, rotated pairs": Long(3, 512, (6, 3), 256, new=3, rotary=1.0, options=CAUSAL),
    "pages of 16, half rotated": Long(3, 339, (3, 3), 16, new=5, rotary=0.5, interleaved=False, options=LOCAL),
    "pages of 17, splits, slopes": Long(1, 203, (6, 1), 17, new=1, num_splits=3, options=CAUSAL, slopes=True),
    "rows, padding": Long(1, 800, (6, 3), rows=True, new=1, rotary=1.0, leftpad=True, num_splits=3, options=CAUSAL),
    "rows, many queries": Long(64, 339, (6, 1), rows=True, new=64, options=LOCAL, slopes=True),
    "many queries, one position": Long(64, 128, (6, 3), new=3, rotary=0.5),
    "many queries in pages": Long(64, 203, (3, 3), 16, new=64, rotary=1.0, interleaved=False, options=CAUSAL),
    "padding in pages, splits": Long(3, 512, (6, 3), 17, leftpad=True, num_splits=3, options=LOCAL),
}


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_caches(case, place):
    """Longer than a block of keys; memory behind the last token, and in pages of no sequence, is NaN."""
    head_dim, (heads, kv_heads), device = 16, case.heads, place["device"]
    n_new = case.new or 0
    lengths = [case.seqlen_k - n_new, max(case.seqlen_q, case.seqlen_k // 3)]
    rows, pads = [2, 0] if case.rows else [0, 1], [7, 30] if case.leftpad else [0, 0]
    options = dict(case.options)
    if case.slopes:
        options["alibi_slopes"] = torch.rand(heads).to(**place)
    q = torch.randn(BATCH, case.seqlen_q, heads, head_dim, **place)
    k_cache, v_cache = torch.randn(2, 3, case.seqlen_k, kv_heads, head_dim, **place)
    k, v = (None, None) if case.new is None else torch.randn(2, BATCH, n_new, kv_heads, head_dim, **place)
    half = int(case.rotary * head_dim) // 2
    tables = torch.rand(2, case.seqlen_k + case.seqlen_q, half, device=device) if half else (None, None)
    expected = truth(
        *(x if x is None else x.double() for x in (q, k_cache, v_cache, k, v)),
        lengths=lengths, rows=rows, leftpad=pads, cos=tables[0], sin=tables[1], interleaved=case.interleaved, **options,
    )  # fmt: skip

    kept = [x.clone() for x in (k_cache, v_cache)]
    for cache in kept:
        for length, row in zip(lengths, rows, strict=True):
            cache[row, length:] = math.nan
    table, size = None, case.page or case.seqlen_k
    if case.page:
        n_pages = -(-case.seqlen_k // size)
        table = int32((torch.randperm(BATCH * n_pages).view(BATCH, n_pages) + 1).tolist(), device)
        for i, cache in enumerate(kept):
            pages = cache.new_full((BATCH * n_pages + 2, size, kv_heads, head_dim), math.nan)
            padded = F.pad(cache[:BATCH], (0, 0, 0, 0, 0, n_pages * size - case.seqlen_k), value=math.nan)
            pages[table.long()] = padded.unflatten(1, (n_pages, size))
            kept[i] = pages
    found = flash_attn_with_kvcache(
        q, *kept, k, v, rotary_cos=tables[0], rotary_sin=tables[1], rotary_interleaved=case.interleaved,
        cache_seqlens=int32(lengths, device), cache_batch_idx=int32(rows, device) if case.rows else None,
        cache_leftpad=int32(pads, device) if case.leftpad else None, block_table=table, num_splits=case.num_splits,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    close = {"rtol": 1e-9, "atol": 1e-10} if place["dtype"] == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(list(found), list(expected[:2]), check_dtype=False, **close)
    for cache, after in zip(kept, expected[2:], strict=True):
        for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            tokens = cache[row] if table is None else cache[table[b].long()].flatten(0, 1)
            torch.testing.assert_close(
                tokens[: length + n_new], after[row, : length + n_new], check_dtype=False, **close
            )
            assert tokens[length + n_new :].isnan().all()


@pytest.mark.parametrize("num_splits", [-1, 0, 1, 3])
def test_splits(num_splits, monkeypatch):
    """0 and less leave the number to the package."""
    given = []

    def spy(q: Tensor, **options: Any) -> Tensor:
        given.append(options["num_splits"])
        return q

    monkeypatch.setitem(flash_attn_with_kvcache.__wrapped__.__globals__, "attention", spy)
    flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=FILLED, num_splits=num_splits)
    assert given == [None if num_splits < 1 else num_splits]


def test_the_caches_are_not_copied(monkeypatch):
    """Attention gets their own memory, whatever selects from it, and no mask but that of the window."""
    pages = int32([[0, 1], [2, 1]], DEVICE)
    seen = []

    def spy(q: Tensor, *, cache: Any, mask: Any, **_: Any) -> Tensor:
        seen.append((cache.k.data_ptr(), cache.v.data_ptr(), mask.tensors()))
        return q

    monkeypatch.setitem(flash_attn_with_kvcache.__wrapped__.__globals__, "attention", spy)
    k_cache, v_cache = CACHE.clone(), CACHE.clone()
    q = Q.expand(-1, 2, -1, -1)
    for options in ({}, {"cache_batch_idx": FILLED}, {"block_table": pages}, {"cache_leftpad": FILLED}):
        for lengths in (FILLED, 2):
            flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True, **options)
    assert seen == [(k_cache.data_ptr(), v_cache.data_ptr(), {})] * 8


def test_autocast_changes_nothing(place):
    q, k_cache, v_cache = q_and_caches(device=place["device"])
    lengths = int32(LENGTHS, place["device"])
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    with torch.autocast(place["device"], torch.bfloat16):
        found = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU such tokens are an error")
def test_tokens_without_a_place_on_a_gpu():
    """They are not written, and their sequence is NaN."""
    q, k_cache, v_cache = q_and_caches(device=DEVICE)
    new, before = torch.ones(BATCH, 2, KV_HEADS, DIM, device=DEVICE), k_cache.clone()
    lengths = int32([3, CAPACITY - 1], DEVICE)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert torch.equal(k_cache[0, 5:], before[0, 5:])
    assert torch.equal(k_cache[1, :-1], before[1, :-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_budget_in_16_bits(dtype):
    q = torch.randn(BATCH, 1, HEADS, 16, device=DEVICE, dtype=dtype)
    k_cache, v_cache = torch.randn(2, BATCH, 24, KV_HEADS, 16, device=DEVICE, dtype=dtype)
    options = {"lengths": [20, 13], "rows": [0, 1], "leftpad": [0, 0]}
    expected = truth(q.double(), k_cache.double(), v_cache.double(), None, None, **options)[:2]
    eager = truth(q, k_cache, v_cache, None, None, **options)[:2]
    lengths = int32([20, 13], DEVICE)
    found = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True)
    assert_ratios({name: testing.compare(found[i], expected[i], eager[i]) for i, name in enumerate(("out", "lse"))})


def q_and_caches(**place: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(BATCH, 1, HEADS, DIM, **place)
    return q, *torch.randn(2, BATCH, CAPACITY, KV_HEADS, DIM, **place)


def test_without_lse(place):
    q, k_cache, v_cache = q_and_caches(**place)
    q = q.expand(-1, 3, -1, -1).clone()
    for options in ({}, {"softcap": 0.5}):
        options["cache_seqlens"] = int32(LENGTHS, place["device"])
        found = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
        assert found.is_contiguous()
        torch.testing.assert_close(
            found, flash_attn_with_kvcache(q, k_cache, v_cache, **options, return_softmax_lse=True)[0]
        )


def test_a_page_behind_the_last_is_not_looked_up(place):
    """Also if the sequence fills its last page."""
    q, *kept = q_and_caches(**place)
    pages = [x.unflatten(1, (-1, PAGE)).flatten(0, 1) for x in kept]
    table = int32([[0, -(10**6), 10**6, 0], [4, 5, 10**6, -(10**6)]], place["device"])
    lengths = int32([PAGE, 2 * PAGE], place["device"])
    found = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table)
    torch.testing.assert_close(found, flash_attn_with_kvcache(q, *kept, cache_seqlens=lengths))


def test_step_by_step(place):
    """One token at a time gives the same results as all at once."""
    q, k, v = torch.randn(3, BATCH, 6, KV_HEADS, DIM, **place)
    k_cache, v_cache = torch.full((2, BATCH, CAPACITY, KV_HEADS, DIM), math.nan, **place)
    steps = []
    for i in range(6):
        query, key, value = (x[:, i : i + 1] for x in (q, k, v))
        lengths = int32([i] * BATCH, place["device"])
        steps.append(flash_attn_with_kvcache(query, k_cache, v_cache, key, value, cache_seqlens=lengths, causal=True))
    torch.testing.assert_close(torch.cat(steps, dim=1), flash_attn_func(q, k, v, causal=True))


def test_caches_of_any_strides(place):
    """Heads before tokens, as in the static caches of transformers; and more rows than sequences."""
    storage = torch.randn(2, 3, KV_HEADS, CAPACITY, DIM, **place)
    k_cache, v_cache = storage.transpose(2, 3)
    copies = k_cache.contiguous(), v_cache.contiguous()
    q = torch.randn(BATCH, 2, HEADS, DIM, **place)
    k, v = torch.randn(2, BATCH, 2, KV_HEADS, DIM, **place)
    options = {"k": k, "v": v, "cache_seqlens": int32(LENGTHS, place["device"]), "causal": True}
    found = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    torch.testing.assert_close(found, flash_attn_with_kvcache(q, *copies, **options))
    assert torch.equal(k_cache, copies[0])
    assert torch.equal(storage[1].transpose(1, 2), copies[1])


def test_has_no_gradients():
    """As in flash_attn, even if inputs require them; leaves are written to as well."""
    q, k_cache, v_cache = (x.requires_grad_() for x in q_and_caches(device=DEVICE))
    new = torch.randn(BATCH, 1, KV_HEADS, DIM, device=DEVICE, requires_grad=True)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3, return_softmax_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(k_cache[:, 3:4], new)


Q, CACHE = torch.zeros(2, 1, 4, 8, device=DEVICE), torch.zeros(3, 6, 2, 8, device=DEVICE)
NEW_KEY = torch.zeros(2, 1, 2, 8, device=DEVICE)
TABLES, FILLED = torch.zeros(6, 4, device=DEVICE), int32([1, 2], DEVICE)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"q": Q[0]}, ValueError, r"q: got shape \(1, 4, 8\)"),
        ({"q": Q.half()}, TypeError, "k_cache: got torch.float32 on .* allowed is torch.float16"),
        ({"v_cache": CACHE.half()}, TypeError, "v_cache: got torch.float16"),
        ({"k_cache": CACHE[..., :4]}, ValueError, "k: got head_dim 4"),
        ({"k_cache": CACHE.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "k_cache: got strides"),
        ({"v_cache": CACHE[:2]}, ValueError, r"v_cache: got shape \(2, 6, 2, 8\), allowed is that of k_cache"),
        ({"v_cache": CACHE[:, :5]}, ValueError, r"v_cache: got shape \(3, 5, 2, 8\)"),
        ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, ValueError, "k_cache: got 1 rows, allowed are batch = 2"),
        ({"k": NEW_KEY, "cache_seqlens": 1}, ValueError, "v: got None"),
        ({"v": NEW_KEY, "cache_seqlens": 1}, ValueError, "k: got None"),
        ({"k": NEW_KEY, "v": NEW_KEY}, ValueError, "cache_seqlens: got None"),
        ({"k": NEW_KEY[:1], "v": NEW_KEY[:1], "cache_seqlens": 1}, ValueError, r"k: got shape \(1, 1, 2, 8\)"),
        ({"k": NEW_KEY, "v": NEW_KEY[:, :0], "cache_seqlens": 1}, ValueError, r"v: got shape \(2, 0, 2, 8\)"),
        ({"k": NEW_KEY, "v": NEW_KEY.half(), "cache_seqlens": 1}, TypeError, "v: got torch.float16"),
        ({"rotary_cos": TABLES}, ValueError, "rotary_cos, rotary_sin: got one of them"),
        ({"rotary_cos": TABLES, "rotary_sin": TABLES}, ValueError, "rotary_cos: got a tensor without k"),
        ({"k": NEW_KEY, "v": NEW_KEY, "cache_seqlens": 5, "rotary_cos": TABLES[:5], "rotary_sin": TABLES[:5]},
         ValueError, "rotary_cos: got 5 rows, allowed are 6 and more, for tokens at positions up to 5"),
        ({"k": NEW_KEY, "v": NEW_KEY, "cache_seqlens": 1, "rotary_cos": TABLES[:, :0], "rotary_sin": TABLES},
         ValueError, "cos, sin: got shapes"),
        ({"cache_seqlens": 7}, ValueError, r"cache_seqlens: got 7 \.\. 7, allowed are 0 \.\. 6"),
        ({"cache_seqlens": -1}, ValueError, r"cache_seqlens: got -1"),
        ({"k": NEW_KEY, "v": NEW_KEY, "cache_seqlens": 6}, ValueError, r"cache_seqlens: got 6 .*allowed are 0 \.\. 5"),
        ({"k": NEW_KEY.expand(2, 7, 2, 8), "v": NEW_KEY.expand(2, 7, 2, 8), "cache_seqlens": 0},
         ValueError, r"k: got 7 new tokens, allowed are 0 \.\. 6"),
        ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens: got float"),
        ({"cache_seqlens": [1, 2]}, TypeError, "cache_seqlens: got list"),
        ({"cache_seqlens": torch.ones(2, device=DEVICE)}, TypeError, "cache_seqlens: got torch.float32"),
        ({"cache_seqlens": int32([1], DEVICE)}, ValueError, r"cache_seqlens: got shape \(1,\)"),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx: got list"),
        ({"cache_leftpad": 3}, TypeError, "cache_leftpad: got int"),
        ({"alibi_slopes": torch.ones(3, device=DEVICE), "cache_seqlens": FILLED}, ValueError, "slopes"),
        ({"block_table": int32([[0]], DEVICE)}, ValueError, r"block_table: got shape \(1, 1\)"),
        ({"block_table": FILLED[:, None], "cache_batch_idx": FILLED},
         ValueError, "cache_batch_idx: got a tensor together with block_table"),
        ({"window_size": (1.5, 0)}, TypeError, "window_size: got float"),
        ({"softcap": math.nan}, ValueError, "softcap: got nan"),
    ],
)  # fmt: skip
def test_errors(options, error, match):
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": CACHE, "v_cache": CACHE, **options})


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing waits to be checked")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"q": torch.zeros(2, 1, 3, 8)}, "nheads_q = 3 and nheads_kv = 2"),
        ({"alibi_slopes": torch.ones(3)}, r"slopes of shape \(3,\)"),
        ({"alibi_slopes": torch.ones(3), "cache_seqlens": 1}, r"slopes of shape \(3,\)"),
        ({"cache_seqlens": int32([1, 6], "cpu")}, r"cache_seqlens: got 1 \.\. 6, allowed are 0 \.\. 5"),
        ({"cache_seqlens": int32([-1, 2], "cpu")}, r"cache_seqlens: got -1 \.\. 2"),
        ({"cache_batch_idx": int32([0, 3], "cpu")}, r"cache_batch_idx: got 0 \.\. 3, allowed are 0 \.\. 2"),
        ({"block_table": int32([[0], [3]], "cpu")}, r"block_table: got pages 0 \.\. 3, allowed are 0 \.\. 2"),
        ({"cache_batch_idx": int32([1, 1], "cpu")}, r"cache_batch_idx: got \[1, 1\], allowed are different rows"),
        ({"rotary_cos": TABLES[:2], "rotary_sin": TABLES[:2]}, "rotary_cos: got 2 rows, allowed are 3 and more"),
        (
            {"rotary_cos": TABLES[:3], "rotary_sin": TABLES[:3], "q": Q.expand(-1, 2, -1, -1), "causal": True},
            "rotary_cos: got 3 rows, allowed are 4 and more",
        ),
        ({"softmax_scale": math.inf}, "scale: got inf"),
        ({"softcap": math.nan}, "softcap: got nan"),
    ],
)
def test_nothing_is_written_beside_an_error(options, match):
    cache = torch.zeros(2, 3, 6, 2, 8)
    arguments = {"q": Q, "k": NEW_KEY + 1, "v": NEW_KEY + 1, "cache_seqlens": int32([1, 2], "cpu"), **options}
    with pytest.raises(ValueError, match=match):
        flash_attn_with_kvcache(k_cache=cache[0], v_cache=cache[1], **arguments)
    assert (cache == 0).all()


def test_both_caches_in_the_same_memory():
    """Keys would be overwritten by values."""
    cache = torch.zeros(3, 6, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="v: got a tensor, allowed is None if values are features of the keys"):
        flash_attn_with_kvcache(Q, cache, cache, NEW_KEY + 1, NEW_KEY + 1, cache_seqlens=FILLED)
    assert (cache == 0).all()


WAITLESS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "cache_batch_idx": int32([1, 0], DEVICE), "cache_leftpad": int32([1, 0], DEVICE)},
    {"window_size": (2, 1), "block_table": int32([[0, 1], [2, 2]], DEVICE)},
    {"alibi_slopes": torch.ones(4, device=DEVICE)},
]


waitless = pytest.mark.parametrize("options", WAITLESS, ids=lambda options: "-".join(options))


def in_a_cache(options: dict[str, Any], device: str = DEVICE) -> Any:
    q, new = torch.zeros(2, 3, 4, 8, device=device), torch.zeros(2, 3, 2, 8, device=device)
    k_cache, v_cache, tables, filled = (x.clone().to(device) for x in (CACHE, CACHE, TABLES, FILLED))
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, tables, tables, filled, **options)


@waitless
def test_nothing_waits(options, monkeypatch):
    """Tensors of the meta device have no values to wait for."""
    for module in (caches, prepare):
        monkeypatch.setattr(module, "default_backend", lambda device: "triton")
    monkeypatch.setattr(prepare, "reasons_of", lambda *_: [])
    monkeypatch.setattr(caches, "append_reasons", lambda *_: [])
    with NoWait():
        assert in_a_cache(options, "meta").shape == (2, 3, 4, 8)


def test_waiting_is_seen():
    with NoWait(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        int(torch.ones(1))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@waitless
def test_a_gpu_is_not_waited_for(options):
    in_a_cache(options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_a_cache(options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@waitless
def test_compiles_as_one_graph(options, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    q, new = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    lengths = int32([1, 2], "cpu")
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    found = []
    for function in (flash_attn_with_kvcache, compiled):
        cache = torch.linspace(-1, 1, CACHE.numel()).view(CACHE.shape)
        tables = torch.linspace(0, 1, 24).view(6, 4)
        out = function(q, cache, cache.clone(), new, new, tables, tables.flip(0), lengths, **options)
        found.append((out, cache))
    torch.testing.assert_close(*found)
