"""Caches that hold the keys and values of a case, and the error budget of attention to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import KVCache, attention, testing
from fusedattn.options import Packed
from fusedattn.testing import Case
from tests.conftest import TERMS_LIMIT, assert_ratios, inputs_of
from tests.helpers.cache_model import cache_in, capacity_of
from tests.helpers.cached_eager import FORMATS, NUMBERS, by_eager, numbers_of


def filled(
    layout: str,
    inputs: testing.Inputs,
    lengths: Sequence[int],
    form: str = NUMBERS,
    largest: float = 4.0,
    **options: Any,
) -> KVCache:
    """A cache with the first `lengths` keys and values of `inputs`, whose seqlen_k is its capacity.

    Args:
        form: of FORMATS, or NUMBERS.
        largest: the magnitude that given scales can represent.
        options: of the cache.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype, group, given = FORMATS.get(form, (q.dtype, None, False))
    cache = cache_in(
        layout, k.shape[0], k.shape[2], k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=str(q.device),
        used=lengths, group_size=group,
    )  # fmt: skip
    assert cache.capacity == k.shape[2]
    if given:
        code = cache.format.largest
        scales = largest / code * (0.5 + torch.rand(2, *cache.k.shape[:2]).to(q.device))
        cache = replace(cache, k_scale=scales[0].float(), v_scale=scales[1].float())
    cache = replace(cache, **options)
    counts = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    cache.lengths.copy_(counts)
    if max(lengths, default=0):
        cache.write(k, v, counts)
    return cache


def assert_cached(
    actual: dict[str, Tensor],
    inputs: testing.Inputs,
    cache: KVCache,
    what: object = "",
    packed: Packed | None = None,
) -> None:
    """Fail if out or lse of a cache exceeds the error budget; eager PyTorch gets the numbers of codes in q's dtype."""
    dtype = inputs.q.dtype
    wide = inputs.to(torch.float64)
    truth = by_eager(wide, numbers_of(cache, torch.float64), packed)
    eager = by_eager(inputs, numbers_of(cache, dtype), packed)
    ratios = testing.compare_results(actual, truth, eager, dtype)
    bad = {name: r for name, r in ratios.items() if not r.used <= 1.0}
    if not bad:
        return
    terms = _terms(wide, cache, truth, packed)
    for name in list(bad):
        unit = TERMS_LIMIT[dtype] * torch.finfo(actual[name].dtype).eps
        same = (actual[name] == truth[name]) | (actual[name].isnan() & truth[name].isnan())
        error = (actual[name].double() - truth[name]).abs()
        # The last bit of a number below the normal ones.
        spacing = torch.finfo(actual[name].dtype).tiny * torch.finfo(actual[name].dtype).eps
        if (same | (error <= unit * terms[name] + spacing)).all():
            del bad[name]
    assert_ratios(bad, what)


def _terms(wide: testing.Inputs, cache: KVCache, truth: dict[str, Tensor], packed: Packed | None) -> dict[str, Tensor]:
    """The sums of the absolute terms of out and lse, or a bound, times one more than the largest terms of a score."""
    numbers = numbers_of(cache, torch.float64)
    scale = wide.q.shape[3] ** -0.5 if wide.scale is None else abs(wide.scale)
    largest = numbers.k.abs().amax(dim=(1, 2))[:, None, None]  # (batch, 1, 1, head_dim)
    if packed is not None:
        largest = largest.amax(dim=0, keepdim=True)
    factor = 1.0 + scale * (wide.q.abs() * largest).sum(-1, keepdim=True)
    values = by_eager(wide, replace(numbers, v=numbers.v.abs()), packed)["out"]
    return {"out": factor * values, "lse": factor[..., 0] + truth["lse"].abs().nan_to_num(posinf=0.0)}


def attend(inputs: testing.Inputs, cache: KVCache, **changes: Any) -> dict[str, Tensor]:
    """Out and lse by the kernels."""
    out, lse = attention(inputs.q, cache=cache, return_lse=True, backend="triton", **(inputs.options | changes))
    return {"out": out, "lse": lse}


def cached_inputs(case: Case, layout: str) -> testing.Inputs:
    """The inputs of a case, with as many keys more as the pages of a layout need."""
    return inputs_of(replace(case, seqlen_k=capacity_of(layout, case.seqlen_k)))
