"""``fusedattn.testing.cached``: cases of caches are within the budget, and a wrong result is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusedattn import caches, testing
from fusedattn.testing import CACHED_CASES, Case, cached
from tests.helpers import quick
from tests.helpers.interpreted import interpreted

BACKENDS = ["torch", pytest.param("triton", marks=interpreted)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@quick.covering(pairs=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CACHED_CASES, ids=lambda case: case.name)
def test_budget(case: Case, dtype: torch.dtype, backend: str) -> None:
    ratios = testing.check_cached(testing.make_inputs(replace(case, dtype=dtype)), backend)
    assert ratios.keys() == {"out", "lse"}
    # The budget is made for kernels; torch's function on a CPU uses several times as much in float32.
    limit = 10.0 if backend == "torch" else 1.0
    assert all(r.used <= limit for r in ratios.values()), ratios


@pytest.mark.parametrize("codes", ["e4m3", "e5m2", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_represent_keys_and_values_exactly(dtype: torch.dtype, codes: str) -> None:
    inputs = testing.make_inputs(Case(cache="contiguous", codes=codes, dtype=dtype, seqlen_k=33, head_dim_v=16))
    cache = cached.empty_cache(inputs)
    caches.append(cache, inputs.k, inputs.v, backend="torch")
    k, v, exists = cache.dense()
    assert exists.all()
    assert torch.equal(k, inputs.k.float())
    assert torch.equal(v, inputs.v.float())
    assert inputs.k.unique().numel() > 5


def test_a_wrong_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    append = caches.append

    def wrong(cache, k, v, **options) -> None:
        append(cache, k.roll(1, dims=2), v, **options)

    inputs = testing.make_inputs(replace(CACHED_CASES[1], dtype=torch.bfloat16))
    monkeypatch.setattr(caches, "append", wrong)
    assert not testing.check_cached(inputs, "torch")["out"].ok
