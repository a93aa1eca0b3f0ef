"""Grids of problems that serving libraries test their paged kernels with, and eager PyTorch written as they write it.

vLLM's unified attention: packed queries of prompts and of single tokens, pages anywhere in a pool, windows, soft caps,
sinks, fp8 with scales. FlashInfer's batch decoding and prefill: pages listed by `indptr`, `indices`, `last_page_len`,
heads before or behind the tokens of a page, memory with gaps, rotation on reading, log-sum-exp; and cascades, where
sequences share a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, attention_varlen, caches, masks, merge, testing
from tests.conftest import assert_ratios
from tests.helpers import quick
from tests.helpers.cache_model import CACHED, device_of

backends = pytest.mark.parametrize("backend", CACHED)


@pytest.fixture(autouse=True)
def _drawn(_seed: None) -> None:
    """Every test draws the same numbers."""


@dataclass
class Paged:
    """Pages, and the sequences in them.

    Attributes:
        k, v: the numbers in all pages, ``(n_pages, nheads_kv, page_size, head_dim)``; float64 of what a cache holds.
        table: ``(batch, max_pages)``.
        query_lens, kv_lens: of each sequence; the queries are its newest tokens.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    theta: float | None = None

    def keys_and_values(self, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(nheads_kv, kv_len, head_dim)``."""
        size, n = self.k.shape[2], self.kv_lens[i]
        pages = self.table[i, : -(-n // size)].long()
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :n].to(dtype) for x in (self.k, self.v))
        return k, v

    def by_eager(self, q: Tensor) -> dict[str, Tensor]:
        """Out and lse of packed queries ``(total, nheads_q, head_dim)``, in their dtype, by all scores."""
        wide = torch.promote_types(q.dtype, torch.float32)
        outs, lses = [], []
        for i, queries in enumerate(q.split(list(self.query_lens))):
            k, v = self.keys_and_values(i, q.dtype)
            own = queries.transpose(0, 1)
            n_queries, n = own.shape[1], k.shape[1]
            if self.theta is not None:
                own, k = rotated(own, range(n - n_queries, n), self.theta), rotated(k, range(n), self.theta)
            k, v = (x.repeat_interleave(own.shape[0] // x.shape[0], dim=0) for x in (k, v))
            scores = (torch.einsum("hqd,hkd->hqk", own, k) * own.shape[2] ** -0.5).to(wide)
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            behind = torch.arange(n - n_queries, n)[:, None] - torch.arange(n)
            hidden = (behind < 0) & self.causal
            if self.window is not None:
                hidden = hidden | (behind >= self.window)
            scores = scores.masked_fill(hidden, -torch.inf)
            lse = scores.logsumexp(dim=-1)
            if self.sinks is not None:
                lse = torch.logaddexp(lse, self.sinks.to(wide)[:, None])
            weights = torch.exp(scores - lse[..., None]).to(q.dtype)
            outs.append(torch.einsum("hqk,hkd->qhd", weights, v))
            lses.append(lse)
        return {"out": torch.cat(outs), "lse": torch.cat(lses, dim=1)}

    def assert_right(self, q: Tensor, out: Tensor, lse: Tensor, what: object = "") -> None:
        """Fail if packed results exceed the error budget."""
        q, found = q.cpu(), {"out": out.cpu(), "lse": lse.cpu()}
        truth, eager = self.by_eager(q.double()), self.by_eager(q)
        assert_ratios({name: testing.compare(x, truth[name], eager[name]) for name, x in found.items()}, what)

    def options(self, device: str) -> dict[str, Any]:
        """Those of this package."""
        mask = masks.causal() if self.causal else masks.full()
        if self.window is not None:
            mask = mask & masks.window(self.window - 1, None)
        rope = None if self.theta is None else Rope.from_theta(self.k.shape[3], max(self.kv_lens), self.theta)
        options = {"mask": mask, "rope": rope, "sinks": self.sinks}
        moved = {name: x if x is None else x.to(device) for name, x in options.items()}
        return moved | {"softcap": self.soft_cap, "return_lse": True}

    def attend(self, q: Tensor, cache: KVCache, backend: str) -> tuple[Tensor, Tensor]:
        """Out and lse of packed queries; of single ones by the call without `cu_seqlens`."""
        options = self.options(str(q.device)) | {"cache": cache, "backend": backend}
        if set(self.query_lens) == {1}:
            out, lse = attention(q[:, :, None], **options)
            return out[:, :, 0], lse[:, :, 0].T
        stops = torch.tensor([0, *itertools.accumulate(self.query_lens)], dtype=torch.int32, device=q.device)
        out, lse = attention_varlen(q, None, None, stops, None, max(self.query_lens), **options)
        return out, lse


def rotated(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """``(nheads, n, head_dim)`` with halves as real and imaginary parts, rotated in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[2] // 2
    angles = torch.tensor(positions)[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = (y.float().to(wide) for y in (angles.cos(), angles.sin()))
    a, b = x.to(wide).split(half, dim=2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=2).to(x.dtype)


def lengths(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# vLLM: (queries, tokens) of each sequence.
PROMPTS = {"mixed": [(1, 1328), (5, 18), (129, 463)], "single": [(1, 523), (1, 37), (1, 2011)]}
SMALL = {"mixed": [(1, 133), (5, 18), (29, 63)], "single": [(1, 53), (1, 7), (1, 201)]}
HEADS = [(4, 4), (8, 2), (5, 1)]
FP8 = [None, torch.float8_e4m3fn, torch.float8_e5m2]


def packed_case(i: int, name: str, large: bool) -> dict[str, Any]:
    """The `i`-th of 12 that together have every value of every axis, and many of the pairs."""
    windows = [None, 64, 128, 256] if large else [None, 7, 16, 40]
    return {
        "seq_lens": (PROMPTS if large else SMALL)[name],
        "heads": HEADS[i % 3],
        "head_dim": ((128, 256) if large else (16, 32))[i // 2 % 2],
        "page_size": (16, 32)[i // 3 % 2],
        "window": windows[i % 4],
        "soft_cap": (None, 50.0)[i // 4 % 2],
        "codes": FP8[i // 4 % 3],
        "sinks": i % 5 == 1,
        "dtype": (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)[(i // 2 + i // 6) % 4],
        "n_pages": 2048 if large else 200,
    }


CASES = [
    pytest.param(packed_case(i, name, large), large, id=f"{name}-{'large' if large else 'small'}-{i}")
    for large in (False, True)
    for name in PROMPTS
    for i in range(large, 12, 5 if large else 1)
]


@quick.only(large=False)
@pytest.mark.parametrize(("case", "large"), CASES)
@backends
def test_unified_attention(case, large, backend):
    """Prompts, pieces of prompts and single tokens in one call; pages are drawn from a pool, and may be shared."""
    (nheads_q, nheads_kv), head_dim, device = case["heads"], case["head_dim"], device_of(backend)
    query_lens, kv_lens = zip(*case["seq_lens"], strict=True)
    size, n_pages = case["page_size"], case["n_pages"]
    numbers = torch.randn(2, n_pages, size, nheads_kv, head_dim).to(case["dtype"]).transpose(2, 3)
    scales: dict[str, Tensor] = {}
    if case["codes"] is not None:
        codes = (numbers.float() / torch.tensor([0.5, 0.25]).view(2, 1, 1, 1, 1)).to(case["codes"])
        k_scale, v_scale = (torch.full((n_pages, nheads_kv), x, device=device) for x in (0.5, 0.25))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        stored, numbers = codes, codes.double() * torch.tensor([0.5, 0.25]).view(2, 1, 1, 1, 1)
    else:
        stored = numbers
    table = torch.randint(0, n_pages, (len(kv_lens), -(-max(kv_lens) // size)), dtype=torch.int32)
    problem = Paged(
        *numbers.double(), table, query_lens, kv_lens, window=case["window"], soft_cap=case["soft_cap"],
        sinks=torch.randn(nheads_q) if case["sinks"] else None,
    )  # fmt: skip
    q = torch.randn(sum(query_lens), nheads_q, head_dim).to(case["dtype"]).to(device)
    k, v = stored.to(device)
    cache = KVCache(k, v, lengths(kv_lens, device), table.to(device), **scales)
    problem.assert_right(q, *problem.attend(q, cache, backend), case)


def table_of(indptr: Sequence[int], indices: Sequence[int], last_page_len: Sequence[int], size: int) -> tuple[Any, Any]:
    """A block table and lengths, from pages that are listed one sequence after the other."""
    own = [indices[start:stop] for start, stop in itertools.pairwise(indptr)]
    width = max(map(len, own))
    table = torch.tensor([[*pages, *[-1] * (width - len(pages))] for pages in own], dtype=torch.int32)
    return table, [(len(pages) - 1) * size + last for pages, last in zip(own, last_page_len, strict=True)]


def test_lists_of_pages():
    table, kv_lens = table_of([0, 3, 4], [5, 2, 7, 1], [4, 8], 8)
    assert table.tolist() == [[5, 2, 7], [1, -1, -1]]
    assert kv_lens == [20, 8]


def pages_in(kv_layout: str, n_pages: int, size: int, nheads_kv: int, head_dim: int, contiguous: bool) -> Tensor:
    """Numbers of keys and values, ``(2, n_pages, nheads_kv, page_size, head_dim)``, views of one memory."""
    shape = [n_pages, 2, nheads_kv, size, head_dim] if kv_layout == "HND" else [n_pages, 2, size, nheads_kv, head_dim]
    gaps = 1 if contiguous else 2
    memory = torch.randn(shape[0], *(gaps * n for n in shape[1:4]), head_dim)[:, ::gaps, ::gaps, ::gaps]
    return memory.transpose(0, 1) if kv_layout == "HND" else memory.permute(1, 0, 3, 2, 4)


def listed(batch: int, kv_len: int, size: int, uneven: bool) -> tuple[Tensor, list[int], int]:
    """A block table and lengths of sequences whose pages are any of a pool; and how many pages there are."""
    kv_lens = [max(1, kv_len - 7 * i * uneven) for i in range(batch)]
    counts = [-(-n // size) for n in kv_lens]
    order = torch.randperm(sum(counts) + 5).tolist()
    indptr = [0, *itertools.accumulate(counts)]
    table, found = table_of(indptr, order, [(n - 1) % size + 1 for n in kv_lens], size)
    assert found == kv_lens
    return table, kv_lens, len(order)


@quick.only(large=False)
@pytest.mark.parametrize(
    ("size", "nheads_q", "kv_layout", "contiguous", "theta", "dtype", "large"),
    [
        (1, 4, "NHD", True, None, torch.float16, False),
        (8, 8, "HND", True, 1e4, torch.float16, False),
        (16, 8, "NHD", False, None, torch.float8_e4m3fn, False),
        (16, 4, "HND", False, 1e4, torch.float8_e4m3fn, False),
        (8, 32, "HND", False, None, torch.float16, True),
        (16, 32, "NHD", True, 1e4, torch.float8_e4m3fn, True),
    ],
)
@backends
def test_batch_decode(size, nheads_q, kv_layout, contiguous, theta, dtype, large, backend):
    """One query of each sequence, with a batch for each length; fp8 without a scale has one of 1."""
    device, head_dim = device_of(backend), 128 if large else 32
    for batch, kv_len in ((12, 54), (3, 97), (2, 512), (1, 2048)) if large else ((3, 54), (2, 97)):
        table, kv_lens, n_pages = listed(batch, kv_len, size, uneven=kv_len == 97)
        stored = pages_in(kv_layout, n_pages, size, 4, head_dim, contiguous).to(dtype)
        problem = Paged(*stored.double(), table, [1] * batch, kv_lens, causal=False, theta=theta)
        q = torch.randn(batch, nheads_q, head_dim).half().to(device)
        k, v = stored.to(device)
        cache = KVCache(k, v, lengths(kv_lens, device), table.to(device), **unit_scales(k))
        problem.assert_right(q, *problem.attend(q, cache, backend), (batch, kv_len))


def unit_scales(k: Tensor) -> dict[str, Tensor]:
    """Given scales of 1 for codes."""
    ones = torch.ones(k.shape[:2], device=k.device)
    return {"k_scale": ones, "v_scale": ones} if k.dtype.itemsize == 1 else {}


@quick.only(large=False)
@pytest.mark.parametrize(
    ("kv_len", "qo_len", "size", "causal", "theta", "soft_cap", "large"),
    [
        (54, 37, 1, True, None, None, False),
        (54, 17, 5, False, 1e4, None, False),
        (97, 37, 16, True, 1e4, 8.0, False),
        (512, 127, 16, True, None, None, True),
        (512, 17, 1, True, 1e4, 30.0, True),
    ],
)
@backends
def test_batch_prefill(kv_len, qo_len, size, causal, theta, soft_cap, large, backend):
    """Many queries of each sequence, behind the tokens of earlier pieces."""
    device, head_dim, nheads = device_of(backend), 128 if large else 32, 4
    table, kv_lens, n_pages = listed(2, kv_len, size, uneven=True)
    query_lens = [min(qo_len, n) if causal or theta else qo_len for n in kv_lens]
    stored = pages_in("NHD", n_pages, size, nheads, head_dim, contiguous=size != 5).half()
    problem = Paged(*stored.double(), table, query_lens, kv_lens, causal, None, soft_cap, theta=theta)
    q = torch.randn(sum(query_lens), nheads, head_dim).half().to(device)
    k, v = stored.to(device)
    cache = KVCache(k, v, lengths(kv_lens, device), table.to(device))
    problem.assert_right(q, *problem.attend(q, cache, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("stage", "shared", "unique", "size"), [("decode", 64, 17, 16), ("append", 48, 37, 1)])
@backends
def test_cascade(stage, shared, unique, size, dtype, backend):
    """The tokens that sequences share are attended to once, by all queries as those of one sequence, then merged."""
    device, batch, heads, head_dim = device_of(backend), 3, 8, 32
    each = 1 if stage == "decode" else 9
    unique_lens = [unique, unique - 5, unique]
    counts = [-(-n // size) for n in unique_lens]
    n_shared = shared // size
    order = torch.randperm(n_shared + sum(counts) + 3, dtype=torch.int32)
    width = max(counts)
    own = torch.zeros(batch, width, dtype=torch.int32)
    for i, start in enumerate([n_shared, *(n_shared + x for x in itertools.accumulate(counts[:-1]))]):
        own[i, : counts[i]] = order[start : start + counts[i]]
    whole = torch.cat((order[:n_shared].expand(batch, -1), own), dim=1)
    stored = pages_in("NHD", len(order), size, 2, head_dim, contiguous=True).to(dtype)
    problem = Paged(*stored.double(), whole, [each] * batch, [shared + n for n in unique_lens])
    q = torch.randn(batch * each, heads, head_dim).to(dtype).to(device)
    k, v = stored.to(device)
    prefix = KVCache(k, v, lengths([shared], device), order[None, :n_shared].contiguous().to(device))
    suffix = KVCache(k, v, lengths(unique_lens, device), own.to(device))
    together = replace(problem, query_lens=[batch * each], kv_lens=[shared], causal=False)
    alone = replace(problem, kv_lens=unique_lens)
    parts = [together.attend(q, prefix, backend), alone.attend(q, suffix, backend)]
    out, lse = merge([out for out, _ in parts], [lse.T for _, lse in parts])
    problem.assert_right(q, out, lse.T)


@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn])
@backends
def test_appended_pieces(codes, backend):
    """Prompts of uneven lengths, in pieces, into pages from a permutation; then attention to all of them."""
    device, size, head_dim = device_of(backend), 16, 32
    kv_lens, pieces = [45, 0, 17, 33], [[20, 0, 16, 1], [25, 0, 1, 32]]
    table = torch.randperm(64)[: 4 * 3].int().view(4, 3)
    cache = KVCache.paged(table.to(device), 64, size, 2, head_dim, dtype=codes or torch.bfloat16)
    if codes is not None:
        scale = torch.full((64, 2), 0.01, device=device)
        cache = replace(cache, k_scale=scale, v_scale=2 * scale)
    for counts in pieces:
        k, v = torch.randn(2, sum(counts), 2, head_dim).bfloat16().to(device)
        stops = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
        caches.append(cache, k, v, cu_seqlens=stops, max_seqlen=max(counts), backend=backend)
    assert cache.lengths.tolist() == kv_lens
    factors = (1.0, 1.0) if codes is None else (scale[0, 0].double().cpu(), 2 * scale[0, 0].double().cpu())
    numbers = (x.cpu().double() * factor for x, factor in zip((cache.k, cache.v), factors, strict=True))
    query_lens = [3, 0, 17, 1]
    problem = Paged(*numbers, table, query_lens, kv_lens)
    q = torch.randn(sum(query_lens), 4, head_dim).bfloat16().to(device)
    problem.assert_right(q, *problem.attend(q, cache, backend))
