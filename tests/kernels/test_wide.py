"""More features than registers can hold in a tile: products are computed in pieces, from rows that are read again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedattn import masks, testing
from fusedattn.backends.triton import launching
from fusedattn.testing import Case
from tests.conftest import DEVICE, INTERPRETING, assert_accurate, inputs_of, triton_attention
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

# Partial tiles; 132 features are 64, 64 and 4, and 260 are eight times 32 and 4.
SHAPE: dict[str, Any] = {"batch": 2, "nheads_q": 2, "nheads_kv": 1, "seqlen_q": 19, "seqlen_k": 35}
CASES = (
    Case("keys and values", **SHAPE, head_dim=260, causal="bottom_right", rope="half"),
    Case("whole pieces", **SHAPE, head_dim=512, padding="uneven"),
    Case("keys", **SHAPE, head_dim=300, head_dim_v=24, boolean="full"),
    Case("values", **SHAPE, head_dim=24, head_dim_v=300, window=(9, 3), dropout_p=0.2),
    Case(
        "gradients of scores", **SHAPE, head_dim=132, head_dim_v=260, bias="per_head", alibi=True, relative="per_head"
    ),
)


@quick.every(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_budget(case, dtype):
    case = replace(case, dtype=dtype)
    assert_accurate(triton_attention, inputs_of(case), case)


@pytest.mark.skipif(not INTERPRETING, reason="a GPU computes TF32 in fewer bits")
def test_pieces_of_fewer_features(monkeypatch):
    """If TF32 is allowed, more than 128 features are too many."""
    monkeypatch.setattr(launching, "precision_of", lambda dtype: "tf32")
    case = Case("tf32", **SHAPE, head_dim=132, causal="bottom_right", padding="right")
    assert_accurate(triton_attention, inputs_of(case), case)


@quick.every(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tensor", "feature"), [("k", 0), ("k", 259), ("v", 259)])
def test_a_nan_reaches_the_rows_that_see_it(tensor, feature, dtype):
    """The NaN may lie in any piece; it reaches no other query."""
    inputs = testing.make_inputs(Case(**SHAPE, head_dim=260, dtype=dtype), DEVICE)
    inputs = replace(inputs, mask=masks.causal())
    clean = testing.run(triton_attention, inputs)
    getattr(inputs, tensor)[:, :, 28, feature] = math.nan
    results = testing.run(triton_attention, inputs)
    for name in ("out", "dq"):
        # Query i sees the keys up to i + 16. The second pass sums in another order.
        torch.testing.assert_close(results[name][:, :, :12], clean[name][:, :, :12], atol=2e-3, rtol=2e-2)
        assert results[name][:, :, 12:].isnan().any(-1).all()
