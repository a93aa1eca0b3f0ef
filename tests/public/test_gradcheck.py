"""``torch.autograd.gradcheck`` on the kernels themselves, in float64: every feature, and every pair of features.

A difference quotient uses neither the formulas of the backward nor the reference. A GPU has no float64 kernels, so
this runs in the interpreter only.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import masks, testing
from fusedattn.kernels import configs
from fusedattn.testing import Case
from tests.conftest import INTERPRETING, triton_attention
from tests.helpers import quick

pytestmark = [
    pytest.mark.usefixtures("poison", "_seed"),
    pytest.mark.skipif(not INTERPRETING, reason="float64 runs in the interpreter only"),
]


@pytest.fixture(autouse=True)
def _tiles_of_one_head(monkeypatch):
    """The tiles that many queries get; tests/kernels/test_decode.py covers those of a few queries, as here."""
    monkeypatch.setattr(configs, "lookup_few_queries", lambda *asked: None)


TINY = Case(batch=1, nheads_q=1, nheads_kv=1, seqlen_q=4, seqlen_k=5, head_dim=4, dtype=torch.float64)

# The fields of TINY that each feature changes. Two features form a pair unless they set one field differently.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "causal, top-left": {"causal": "top_left"},
    "right padding": {"padding": "right"},
    "left padding": {"padding": "left"},
    "uneven padding": {"padding": "uneven"},
    "empty batch": {"padding": "uneven", "empty_batch": True, "batch": 2},
    "boolean": {"boolean": "full"},
    "broadcast boolean": {"boolean": "broadcast"},
    "rope": {"rope": "half"},
    "interleaved rope": {"rope": "interleaved"},
    "partial rope": {"rope": "half", "rotary_dim": 2},
    "partial interleaved rope": {"rope": "interleaved", "rotary_dim": 2},
    "scaled tables per batch": {"rope": "half", "rope_tables": "per_batch", "batch": 2},
    "positions": {"rope": "half", "rope_positions": True},
    "norm": {"qk_norm": "shared"},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.7},
    "grouped queries": {"nheads_q": 4, "nheads_kv": 2},
    "multi-query": {"nheads_q": 2},
    "head_dim 5": {"head_dim": 5, "rotary_dim": 2},
    "more queries than keys": {"seqlen_q": 6, "seqlen_k": 3},
    "one query": {"seqlen_q": 1},
    "one key": {"seqlen_k": 1},
    "several blocks": {"seqlen_q": 34, "seqlen_k": 35},
    "common part": {"offset": 4.0},
    "fewer features of values": {"head_dim_v": 3},
    "window": {"window": (1, 1)},
    "prefix": {"prefix": True},
    "documents": {"documents": "packed"},
    "blocks": {"layout": 16, "seqlen_q": 34, "seqlen_k": 35},
    "tree": {"tree": True},
    "mask function": {"mask_function": True},
    "sparse": {"sparse": "strided", "seqlen_q": 34, "seqlen_k": 35, "mask_function": False},
    "bias": {"bias": "full"},
    "bias per head": {"bias": "per_head", "nheads_q": 2, "batch": 2},
    "alibi": {"alibi": True},
    "relative per query": {"relative": "per_query"},
    "soft-cap": {"softcap": 0.7},
    "score function": {"score_mod": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4},
}

# Other forms of these features, which interact with the others in the same way.
VARIANTS: dict[str, dict[str, Any]] = {
    "norm with weights per head": {"qk_norm": "per_head", "nheads_q": 4, "nheads_kv": 2},
    "norm of length": {"qk_norm": "scale", "nheads_q": 2, "rope": "half"},
    "norm across heads": {"qk_norm": "across_heads", "nheads_q": 4, "nheads_kv": 2, "rope": "half"},
    "more features of values": {"head_dim_v": 6},
    "shuffled documents": {"documents": "shuffled"},
    "bias per batch": {"bias": "per_batch", "nheads_q": 2, "batch": 2},
    "bias per key": {"bias": "per_key", "nheads_q": 2},
    "bias per query with -inf": {"bias": "per_query", "bias_inf": True, "seed": 1},
    "bias of one number": {"bias": "scalar"},
    "slopes per batch": {"alibi": "per_batch", "batch": 2},
    "relative per head": {"relative": "per_head", "batch": 2},
    "fixed": {"sparse": "fixed", "seqlen_q": 34, "seqlen_k": 35},
    "global tokens": {"sparse": "global", "seqlen_q": 34, "seqlen_k": 35},
    "selected blocks": {"sparse": "blocks", "seqlen_q": 34, "seqlen_k": 35},
    "blocks of each query": {"sparse": "pairs", "seqlen_q": 34, "seqlen_k": 35},
}

EVERYTHING = replace(
    TINY, batch=2, causal="bottom_right", padding="uneven", boolean="full", rope="half", rotary_dim=2,
    rope_tables="per_batch", rope_positions=True, scale=0.3, nheads_q=2, offset=1.0, head_dim_v=5, window=(3, 2),
    prefix=True, documents="packed", layout=16, tree=True, mask_function=True, bias="full", bias_inf=True, alibi=True,
    relative="per_query", softcap=1.5, score_mod=True, sinks=True, dropout_p=0.2, qk_norm="per_head", seed=11,
)  # fmt: skip


@functools.cache
def pairs() -> dict[str, Case]:
    """Every pair that makes a new case."""
    seen = {replace(TINY, **changes) for changes in FEATURES.values()}
    found = {}
    for (one, a), (other, b) in itertools.combinations(FEATURES.items(), 2):
        case = replace(TINY, **a, **{field: value for field, value in b.items() if field not in a})
        if all(a.get(field, value) == value for field, value in b.items()) and case not in seen:
            seen.add(case)
            found[f"{one} and {other}"] = case
    return found


def with_something_visible(case: Case) -> Case:
    """The case with the first seed that leaves a pair visible: two random masks may hide nearly all."""
    seeds = (replace(case, seed=case.seed + n) for n in range(100))
    return next(x for x in seeds if testing.make_inputs(x).visible().any())


def gradcheck(case: Case, returned: str = "out and lse", *, joined: bool = False, **options: Any) -> None:
    """Check along random directions, unless `options` say otherwise; also that the backward repeats bit for bit.

    With `joined`, all leaves move in one direction together, which takes at most a third of the evaluations.
    """
    inputs = testing.make_inputs(case)
    tensors = list(inputs.leaves.values())

    def function(*x: Tensor) -> Tensor:
        if joined:
            parts = x[0].split([t.numel() for t in tensors])
            x = tuple(part.view_as(t) for part, t in zip(parts, tensors, strict=True))
        moved = inputs.with_leaves(dict(zip(inputs.leaves, x, strict=True)))
        out, lse = triton_attention(moved.q, moved.k, moved.v, **moved.options, return_lse=True)
        # The difference quotient of a constant -inf is NaN.
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        # One tensor, because each result costs its own backward passes.
        return {"out": out, "lse": lse, "out and lse": torch.cat((out, lse[..., None]), -1)}[returned]

    x = [torch.cat([t.flatten() for t in tensors])] if joined else tensors
    settings = {"fast_mode": True, "atol": 1e-6, "rtol": 1e-4, "check_undefined_grad": False, **options}
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in x], **settings)


def test_every_feature_is_drawn_with_every_other():
    """Except for the pairs that contradict each other."""
    assert len(pairs()) > 600


@pytest.mark.parametrize("name", [*FEATURES, *VARIANTS])
def test_gradcheck_of_a_feature(name):
    gradcheck(replace(TINY, **{**FEATURES, **VARIANTS}[name]))


@quick.every(15, name="fewer features of values and bias")
@pytest.mark.parametrize("name", pairs())
def test_gradcheck_of_a_pair(name):
    gradcheck(with_something_visible(pairs()[name]), joined=True)


@quick.every(3, case=TINY)
@pytest.mark.parametrize("returned", ["out", "lse", "out and lse"])
@pytest.mark.parametrize("case", [TINY, EVERYTHING], ids=["nothing", "everything"])
def test_gradcheck_of_each_result(case, returned):
    """Also with gradients that autograd leaves undefined."""
    gradcheck(case, returned, check_undefined_grad=True)


@pytest.mark.thorough
def test_gradcheck_element_by_element():
    """The whole Jacobian; the other checks take random directions."""
    case = replace(EVERYTHING, batch=1, nheads_q=1, seqlen_q=2, seqlen_k=2, head_dim=2, head_dim_v=3)
    gradcheck(with_something_visible(case), joined=True, fast_mode=False)


def test_gradcheck_of_an_out_of_order_mask():
    """One query sees only later keys, and one sees every second key."""
    allowed = torch.zeros(5, 7, dtype=torch.bool)
    allowed[0, 4:], allowed[1, ::2], allowed[3] = True, True, True
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    assert torch.autograd.gradcheck(
        lambda *x: triton_attention(*x, mask=masks.boolean(allowed)), (q, k, v), fast_mode=True
    )
