"""Calls make their tensors on the device of their inputs, whatever torch's default device is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fusedattn import KVCache, Rope, attention, biases, caches, masks, testing
from fusedattn.testing import Case, triton_functions
from tests.conftest import BACKENDS, assert_equal, inputs_of
from tests.helpers import quick
from tests.helpers.cache_model import CACHED, device_of

BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=45, seqlen_k=70, head_dim=16)

# The fields of BASE that each problem changes.
PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "more queries than keys": {"causal": "bottom_right", "seqlen_k": 30},
    "window and padding": {"window": (20, 3), "padding": "uneven", "empty_batch": True},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "boolean": {"boolean": "full"},
    "documents": {"documents": "packed", "causal": "bottom_right"},
    "blocks": {"layout": 16},
    "tree": {"tree": True},
    "strided": {"sparse": "strided"},
    "global tokens": {"sparse": "global"},
    "BigBird": {"sparse": "bigbird"},
    "mask function": {"mask_function": True},
    "score function": {"score_mod": True},
    "alibi and relative": {"alibi": True, "relative": "per_query"},
    "bias": {"bias": "full", "causal": "bottom_right"},
    "rope": {"rope": "half", "rope_positions": True},
    "sinks and soft-cap": {"sinks": True, "softcap": 0.7},
    "dropout": {"dropout_p": 0.4, "causal": "bottom_right"},
}


@quick.covering()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_results_and_gradients(problem: str, backend: str) -> None:
    inputs = inputs_of(Case(**{**vars(BASE), **PROBLEMS[problem]}))

    def solve() -> dict[str, torch.Tensor]:
        found = testing.run(partial(attention, backend=backend), inputs)
        return {name: x for name, x in found.items() if x is not None}

    expected = solve()
    with torch.device("meta"):
        found = solve()
    assert_equal(found, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": masks.window(5, 0)},
    "function": {"mask": triton_functions.mask_function(2, 4, torch.Generator().manual_seed(0))},
    "bias and sinks": {"bias": biases.tensor(torch.randn(4, 3, 12)), "sinks": torch.randn(4)},
}


@pytest.mark.parametrize("backend", CACHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", OPTIONS)
def test_caches(name: str, dtype: torch.dtype, backend: str) -> None:
    device = device_of(backend)
    q, k, v = (torch.randn(2, n, m, 16, device=device) for n, m in ((4, 3), (2, 11), (2, 11)))
    options = {key: x.to(device) for key, x in OPTIONS[name].items()}

    def solve() -> list[torch.Tensor]:
        rope = Rope.from_theta(16, 12, device=device)
        cache = KVCache.contiguous(2, 2, 12, 16, dtype=dtype, rope=rope, device=device)
        caches.append(cache, k, v, backend=backend)
        return list(attention(q, cache=cache, return_lse=True, backend=backend, **options))

    expected = solve()
    with torch.device("meta"):
        found = solve()
    for actual, right in zip(found, expected, strict=True):
        assert torch.equal(actual, right)
