"""Strategies of hypothesis: calls in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fusedattn import FP8
from tests.helpers.fp8_contract import FP8Problem
from tests.helpers.strategies import cases

# Blocks of 128 tokens share a scale, and tiles have 32.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 127, 128, 129, 161, 257]))
NUMBERS = st.sampled_from([None, float("nan"), float("inf"), 1e30])


@st.composite
def fp8_problems(draw: st.DrawFn) -> FP8Problem:
    """Problems of every kind; each feature is in some of them."""
    case = draw(cases())
    case = replace(
        case,
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        head_dim=draw(st.sampled_from([case.head_dim, case.head_dim, 64, 80])) if case.rope is None else case.head_dim,
        layout=case.layout and 32,
    )
    number = draw(NUMBERS)
    if case.dtype.itemsize == 2 and case.dtype.is_floating_point and number == 1e30:
        number = 6e4
    return FP8Problem(
        case=case,
        precision=FP8(draw(st.sampled_from(["block", "tensor"])), rotate=draw(st.booleans())),
        hidden=number,
        unseen=draw(st.sampled_from([None, None, float("nan"), float("-inf")])),
        transposed=draw(st.booleans()),
        size=draw(st.sampled_from([1.0, 1.0, 1.0, 0.01, 3.0])),
    )
