"""A model of a cache, a list of tokens for each sequence, and caches in every layout to compare with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, caches, masks, reference, testing
from fusedattn.backends.torch import cached
from tests.conftest import DEVICE, TERMS_LIMIT, assert_ratios, sum_of_terms

CACHED = ("torch", "triton")  # the backends that have caches

HEADS_Q, HEADS, DIM, DIM_V = 4, 2, 16, 24
LAYOUTS = ("contiguous", "token-major", "rows", "pages of 16", "pages of 17", "pages of 64")
GARBAGE = (-7, 10**6)  # entries of a block table that no token reaches


class Model:
    """The tokens of each sequence; each is a pair of k and v, ``(nheads_kv, head_dim)``.

    Attributes:
        capacity: the tokens that are kept, the first `n_sinks` and the last ones; None for all.
    """

    def __init__(self, batch: int, capacity: int | None = None, n_sinks: int = 0) -> None:
        self.tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]
        self.capacity, self.n_sinks = capacity, n_sinks

    def append(self, sequence: int, k: Tensor, v: Tensor) -> None:
        """Append ``(nheads_kv, n, head_dim)``."""
        self.tokens[sequence] += [(k[:, t], v[:, t]) for t in range(k.shape[1])]

    def kept(self, sequence: int) -> list[int]:
        """The numbers of the tokens that the cache still has."""
        n = len(self.tokens[sequence])
        numbers = list(range(n))
        if self.capacity is None or n <= self.capacity:
            return numbers
        return numbers[: self.n_sinks] + numbers[n - self.capacity + self.n_sinks :]

    def keys_and_values(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Those that are kept, ``(1, nheads_kv, n, head_dim)``."""
        k, v = zip(*(self.tokens[sequence][t] for t in self.kept(sequence)), strict=True)
        return torch.stack(k, dim=1)[None], torch.stack(v, dim=1)[None]


def pages_of(layout: str) -> int | None:
    """The page size of a layout; None if it has no pages."""
    return int(layout.split()[-1]) if layout.startswith("pages") else None


def capacity_of(layout: str, tokens: int) -> int:
    """The least capacity in this layout for that many tokens."""
    size = pages_of(layout)
    return tokens if size is None else -(-tokens // size) * size


def cache_in(
    layout: str,
    batch: int,
    tokens: int,
    nheads_kv: int = HEADS,
    head_dim: int = DIM,
    head_dim_v: int = DIM_V,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    used: Sequence[int] | None = None,
    **options: Any,
) -> KVCache:
    """An empty cache for that many tokens and more, whose memory is NaN, or any codes with NaN scales.

    Args:
        used: the greatest length of each sequence; the block table has no page behind it.
    """
    size, draw = pages_of(layout), random.Random(0)
    sizes = nheads_kv, head_dim, head_dim_v
    group_size = options.pop("group_size", None)
    if size is None:
        cache = KVCache.contiguous(
            batch + 2, nheads_kv, tokens, head_dim, head_dim_v, dtype=dtype, group_size=group_size, device=device
        )
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        rows = torch.tensor(draw.sample(range(batch + 2), batch), dtype=torch.int32, device=device)
        cache = replace(cache, lengths=lengths, rows=rows if layout == "rows" else None)
    else:
        width = -(-tokens // size)
        order = draw.sample(range(batch * width + 3), batch * width)
        table = torch.tensor(order, dtype=torch.int32, device=device).reshape(batch, width)
        for i, most in enumerate(used or ()):
            for j in range(-(-most // size), width):
                table[i, j] = draw.choice(GARBAGE)
        cache = KVCache.paged(table, batch * width + 3, size, *sizes, dtype=dtype, group_size=group_size)
    moved = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    for name, x in moved.items():
        if x is not None:
            x = torch.full_like(x, torch.nan) if x.is_floating_point() else torch.full_like(x, 99)
            moved[name] = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "token-major" else x
    return replace(cache, **moved, **options)


def assert_results(
    found: Sequence[tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: object = "",
    backend: str = "torch",
    unit: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Fail if an (out, lse) or (out, lse, largest score) of one sequence exceeds the error budget.

    Args:
        found, q: those of one sequence, with a batch of 1.
        k, v: the numbers in the cache, which may have more bits than q.
        unit: a dtype with fewer bits than some results, to which the factors of scores are rounded.
        options: of :func:`fusedattn.attention`.
    """
    q, (out, lse) = q.detach().cpu(), (x.cpu() for x in found[0][:2])
    options = {"mask": masks.full(), "rope": None, "scale": None} | options
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    inputs = testing.Inputs(q, k.to(q.dtype), v.to(q.dtype), dout, dlse, **options)
    wide, terms = replace(inputs.to(torch.float64), k=k.double(), v=v.double()), None
    every_truth, every_eager = (_results(x, len(found[0]) == 3) for x in (wide, inputs))
    for results in found:
        actual = {name: x.cpu() for name, x in zip(("out", "lse", "largest"), results, strict=False)}
        truth, eager = ({name: x[name] for name in actual} for x in (every_truth, every_eager))
        if backend == "triton":  # a query that sees a NaN or Inf may have NaN in all features, or if it is a NaN, must
            spoiled = ~truth["out"].isfinite().all(dim=-1)
            assert not (k.isnan().any() or v.isnan().any()) or actual["out"][spoiled].isnan().all()
            actual = {
                name: truth[name].to(x.dtype).where(spoiled.view(*spoiled.shape, *[1] * (x.dim() - 3)), x)
                for name, x in actual.items()
            }
        ratios = {name: testing.compare(x, truth[name], eager[name]) for name, x in actual.items()}
        bad = {name: r for name, r in ratios.items() if not r.used <= 1.0}
        if bad and terms is None:
            finite = {name: getattr(inputs, name).nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v")}
            terms = sum_of_terms(replace(inputs, **finite))
            terms["largest"] = terms["lse"]
        for name in list(bad):
            assert terms is not None
            eps = max(torch.finfo(dtype).eps for dtype in (actual[name].dtype, unit or actual[name].dtype))
            error = (actual[name].double() - truth[name]).abs()
            same = (actual[name] == truth[name]) | (actual[name].isnan() & truth[name].isnan())
            if (same | (error <= TERMS_LIMIT[q.dtype] * eps * terms[name])).all():
                del bad[name]
        assert_ratios(bad, what)


def _results(inputs: testing.Inputs, with_largest: bool) -> dict[str, Tensor]:
    out, lse, _ = reference.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    results = {"out": out, "lse": lse}
    if with_largest:
        of_softmax = ("sinks", "dropout_p", "dropout_seed")
        options = {name: x for name, x in inputs.options.items() if name not in of_softmax}
        results["largest"] = reference.largest_scores(inputs.q, inputs.k, **options)
    return results


def rotated(x: Tensor, rope: Rope, positions: Sequence[int], batch: int = 0) -> Tensor:
    """``(nheads, n, head_dim)``, rotated as complex numbers; in float64."""
    cos, sin = (t if t.dim() == 2 else t[batch % t.shape[0]] for t in (rope.cos.double(), rope.sin.double()))
    x, half = x.double().clone(), rope.rotary_dim // 2
    for t, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
            pair = torch.complex(x[:, t, a], x[:, t, b]) * torch.complex(cos[position, i], sin[position, i])
            x[:, t, a], x[:, t, b] = pair.real.clone(), pair.imag.clone()
    return x


def device_of(backend: str) -> str:
    return "cpu" if backend == "torch" else DEVICE


def tokens(n: int, dtype: torch.dtype, batch: tuple[int, ...] = (), head_dim_v: int = DIM_V) -> tuple[Tensor, Tensor]:
    """New keys and values, ``(*batch, nheads_kv, n, head_dim)``."""
    return torch.randn(*batch, HEADS, n, DIM).to(dtype), torch.randn(*batch, HEADS, n, head_dim_v).to(dtype)


def append(cache: KVCache, model: Model, counts: list[int], backend: str, dtype: torch.dtype) -> None:
    """Append that many new tokens to each sequence of both, packed."""
    new = [tokens(n, dtype, head_dim_v=cache.head_dim_v) for n in counts]
    for i, (k, v) in enumerate(new):
        model.append(i, k, v)
    k, v = (torch.cat(x, dim=1).transpose(0, 1).to(cache.k.device) for x in zip(*new, strict=True))
    stops = torch.tensor([0, *counts]).cumsum(0).int().to(cache.k.device)
    caches.append(cache, k, v, cu_seqlens=stops, backend=backend)


def assert_holds(cache: KVCache, model: Model) -> None:
    """Fail unless the cache has exactly the tokens that the model keeps."""
    k, v, _ = cache.dense()
    assert cache.lengths.tolist() == [len(x) for x in model.tokens]
    for i in range(cache.batch):
        n = len(model.kept(i))
        assert cache.kept()[i] == n
        assert not k[i, :, n:].any()
        assert not v[i, :, n:].any()
        if n:
            for x, expected in zip((k, v), model.keys_and_values(i), strict=True):
                assert torch.equal(x[i : i + 1, :, :n].cpu(), expected)


def assert_attends(
    cache: KVCache,
    model: Model,
    backend: str,
    dtype: torch.dtype,
    seqlen_q: int = 1,
    *,
    of_sequence: Any = lambda i, n: {},
    **options: Any,
) -> None:
    """Fail if attention to the cache is not attention to each list of tokens; `of_sequence` has the options of each."""
    q = torch.randn(cache.batch, HEADS_Q, seqlen_q, DIM).to(dtype).to(cache.k.device)
    out, lse = attention(q, cache=cache, return_lse=True, backend=backend, **options)
    alone = attention(q, cache=cache, backend=backend, **options)
    found = [(out, lse), (alone, lse)]
    if backend == "torch":  # and from a copy of the cache
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cached, "MOST_QUERIES", -1)
            found.append(attention(q, cache=cache, return_lse=True, backend=backend, **options))
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for i in range(cache.batch):
        n = len(model.kept(i))
        if n == 0:
            for x, of_x in found:
                assert not x[i].any()
                assert (of_x[i] == -torch.inf).all()
            continue
        k, v = model.keys_and_values(i)
        own = options | of_sequence(i, n)
        rows = slice(i, i + 1)
        of_sequence_i = [(x[rows], of_x[rows]) for x, of_x in found]
        assert_results(of_sequence_i, q[rows], k, v, f"sequence {i} of {n}", backend, **own)
