"""Strategies of hypothesis: calls of linear attention."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.conftest import DTYPES
from tests.helpers.linear import MAPS, LinearProblem

SELDOM = st.sampled_from([False, False, True])
LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 97, 128, 130]))


@st.composite
def linear_problems(draw: st.DrawFn) -> LinearProblem:
    """Problems of every kind; each feature is in some of them."""
    feature_map = draw(st.sampled_from(MAPS))
    packed = draw(SELDOM)
    causal = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65])), max_size=4)))
    seqlen_q = sum(lengths) + draw(st.integers(0, 3)) if packed else draw(LENGTHS)
    nheads_kv = draw(st.integers(1, 2))
    # Features that are not positive can have a sum of weights near 0, of which every digit is rounding.
    positive = feature_map != "identity"
    return LinearProblem(
        seqlen_q=seqlen_q,
        seqlen_k=None if causal or packed else draw(st.one_of(st.none(), LENGTHS)),
        head_dim=draw(st.sampled_from([1, 2, 7, 16, 20, 33])),
        head_dim_v=draw(st.sampled_from([None, 1, 5, 16, 65, 80])),
        batch=1 if packed else draw(st.integers(1, 2)),
        nheads_q=nheads_kv * draw(st.integers(1, 3)),
        nheads_kv=nheads_kv,
        feature_map=feature_map,
        causal=causal,
        normalize=positive and draw(st.booleans()),
        valid=draw(st.sampled_from([None, "some", "last", "first", "none"])),
        initial_state=draw(st.booleans()),
        return_state=draw(st.booleans()),
        lengths=lengths if packed else None,
        dtype=draw(st.sampled_from(DTYPES)),
        size=draw(st.sampled_from([1.0, 1.0, 0.3, 0.01])),
        poisoned=draw(SELDOM),
        transposed=draw(SELDOM),
        seed=draw(st.integers(0, 10**6)),
    )
