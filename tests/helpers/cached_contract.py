"""Check the whole contract of appending to a cache and of attending to it, on one problem, for both backends.

The memory of the cache is compared with plain Python first: each token lies where it must, is rounded once, and no
other byte has changed. Attention is then compared with attention to these numbers, for each sequence alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import KVCache, attention, attention_varlen
from tests.conftest import assert_equal
from tests.helpers.cache_model import CACHED, assert_results, device_of
from tests.helpers.cached_eager import FORMATS
from tests.helpers.cached_memory import assert_memory, assert_same_bytes, bytes_of, keys_and_values
from tests.helpers.cached_problem import PADDED, CachedProblem, Numbers
from tests.helpers.cached_refusals import check_refused
from tests.helpers.contract import uninitialised_is_nan


def check(problem: CachedProblem) -> bool:
    """Raise AssertionError, with the command that reproduces it, unless both backends keep the contract.

    Returns:
        Whether numbers were compared with the truth: True unless the call must be refused.
    """
    for backend in CACHED:
        try:
            if problem.wrong is None:
                _check_backend(problem, backend)
            else:
                check_refused(problem, backend)
        except Exception as error:
            raise AssertionError(f"{problem.command}\n{backend}: {type(error).__name__}: {error}") from error
    return problem.wrong is None


def attend(problem: CachedProblem, numbers: Numbers, cache: KVCache, backend: str, **returned: bool) -> Any:
    """The call of attention."""
    device = str(cache.k.device)
    options = numbers.options(device) | {"num_splits": problem.num_splits, "backend": backend} | returned
    q, cache = numbers.q.to(device), numbers.cache_to_read(cache)
    if isinstance(problem.queries, int):
        return attention(q, cache=cache, **options)
    stops = numbers.stops(problem.counts).to(device)
    return attention_varlen(q, None, None, stops, None, problem.longest, cache=cache, **options)


def _check_backend(problem: CachedProblem, backend: str) -> None:
    cache, numbers = problem.empty(device_of(backend)), Numbers(problem)
    before = bytes_of(cache)
    with uninitialised_is_nan():
        numbers.append(cache, backend)
        kept = [keys_and_values(problem, cache, i) for i in range(problem.batch)]
        assert_memory(problem, numbers, cache, before)
        full, q = bytes_of(cache), numbers.q.clone()
        results = attend(problem, numbers, cache, backend, return_lse=True, return_max=True)
        others = [(attend(problem, numbers, cache, backend), *results[1:])]
        if backend == "torch":  # without the largest score, another code path runs
            others.append(attend(problem, numbers, cache, backend, return_lse=True))
    assert_same_bytes(cache, full, "attention has changed the cache")
    assert_equal({"q": numbers.q}, {"q": q})
    out, lse, largest = results
    assert (out.dtype, out.shape[-1]) == (problem.dtype, problem.head_dim_v)
    assert lse.dtype == largest.dtype == torch.float32
    if backend == "triton":
        assert_equal({"out alone": others[0][0]}, {"out alone": out})
        others = []
    for i, (k, v) in enumerate(kept):
        found = [_of_sequence(problem, i, x) for x in (results, *others)]
        shown = [problem.padding is None or token >= problem.padding[i] for token in problem.kept(i)]
        options = numbers.of_sequence(i, shown) | {"unit": _unit(problem, backend)}
        own_q = _of_sequence(problem, i, (numbers.q,))[0]
        assert_results(found, own_q, k, v, f"sequence {i} of {k.shape[2]}", backend, **options)
    if not isinstance(problem.queries, int):
        for out, lse, *_ in (results, *others):
            assert not out[-PADDED:].any(), "queries of no sequence"
            assert (lse[:, -PADDED:] == -torch.inf).all(), "queries of no sequence"
    if backend == "triton" and problem.num_splits in (None, 1) and isinstance(problem.queries, int):
        _assert_independent(problem, numbers, cache, results)


def _unit(problem: CachedProblem, backend: str) -> torch.dtype | None:
    """The dtype that numbers are rounded to before scores and weights are summed, if it has fewer bits than the sums.

    Rotated numbers are rounded, and so are those of codes with several scales. In 16 bits torch's own kernel
    approximates the exponential, with an error of 1e-5.
    """
    rounds = problem.rope is not None or FORMATS.get(problem.form, (None, None))[1] is not None or backend == "torch"
    return problem.dtype if rounds else None


def _of_sequence(problem: CachedProblem, i: int, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a sequence, or its queries, with a batch of 1."""
    if isinstance(problem.queries, int):
        return tuple(x[i : i + 1] for x in results)
    first = sum(problem.counts[:i])
    rows = slice(first, first + problem.counts[i])
    return tuple(x[rows].transpose(0, 1)[None] if x.dim() == 3 else x[:, rows][None] for x in results)


def _assert_independent(problem: CachedProblem, numbers: Numbers, cache: KVCache, results: Sequence[Tensor]) -> None:
    """The last sequence has the same bits without the others."""
    last = slice(problem.batch - 1, problem.batch)
    row = torch.arange(problem.batch, dtype=torch.int32, device=cache.k.device) if cache.rows is None else cache.rows
    table, padding = (None if x is None else x[last] for x in (cache.block_table, cache.left_padding))
    own = replace(
        cache, lengths=cache.lengths[last], block_table=table, rows=row[last] if table is None else None,
        left_padding=padding,
    )  # fmt: skip
    alone = copy.copy(numbers)
    alone.problem = replace(problem, steps=((problem.lengths[-1],),), padding=None)
    alone.q, alone.pairs, alone.positions_q = numbers.q[last], numbers.pairs[last], numbers.positions_q[last]
    found = attend(alone.problem, alone, own, "triton", return_lse=True, return_max=True)
    names = ("out", "lse", "largest")
    expected = dict(zip(names, (x[last] for x in results), strict=True))
    assert_equal(dict(zip(names, found, strict=True)), expected)
