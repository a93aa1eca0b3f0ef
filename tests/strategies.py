"""What hypothesis draws: attention cases, and problems with everything that is hostile about them."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from fusedattn.testing import Case
from tests.conftest import DTYPES
from tests.hostile import LAYOUTS, Problem

LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 13, 16, 17, 29, 31, 32, 33, 37, 47, 61])
ALIGNMENTS = st.sampled_from([None, "bottom_right", "top_left"])


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    """Small cases of every kind; those of `fixed` are not drawn."""
    nheads_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)]))
    head_dim = draw(st.sampled_from([1, 2, 3, 8, 11, 16, 24, 40]))
    rope = draw(st.sampled_from([None, "half", "interleaved"])) if head_dim > 1 else None
    padding = draw(st.sampled_from([None, "right", "left", "uneven"]))
    drawn = {
        "batch": draw(st.integers(1, 2)),
        "nheads_q": nheads_kv * group,
        "nheads_kv": nheads_kv,
        "seqlen_q": draw(LENGTHS),
        "seqlen_k": draw(LENGTHS),
        "head_dim": head_dim,
        "dtype": draw(st.sampled_from(DTYPES)),
        "causal": draw(ALIGNMENTS),
        "padding": padding,
        "empty_batch": padding is not None and draw(st.booleans()),
        "boolean": draw(st.sampled_from([None, None, "full", "broadcast"])),
        "rope": rope,
        "rotary_dim": None if rope is None else 2 * draw(st.integers(1, head_dim // 2)),
        "rope_tables": draw(st.sampled_from(["shared", "per_batch"])),
        "rope_positions": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, None, 1.0, 0.01, -0.3])),
        "seed": draw(st.integers(0, 10**6)),
    }
    return Case(**{**drawn, **fixed})  # type: ignore[arg-type]


HEADS = [(1, 1), (2, 1), (2, 1), (1, 2), (1, 3), (2, 2)]
HEAD_DIMS = [1, 2, 3, 8, 11, 16, 17, 24, 40, 64, 67, 128]
HOSTILE_LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([0, 1, 2, 3, 16, 17, 31, 32, 33, 48, 61, 64, 97]))
FACTORS = [1e-40, 1e-30, 1e-6, 1e2, 1e4, 1e30, 0.0]
FACTORS_FLOAT16 = [1e-6, 1e-3, 1e2, 1e3, 0.0]  # what makes neither all of them 0 nor an infinity


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Problems of every kind; about half of them have one hostile thing of each kind."""
    case = draw(hostile_cases())
    factors = st.sampled_from(FACTORS_FLOAT16 if case.dtype == torch.float16 else FACTORS)
    layouts = st.sampled_from([name for name in LAYOUTS if name != "over_everything"])
    poisons = st.tuples(
        st.sampled_from(["k", "v", "k", "v", "q", "dout", "dlse"]),
        st.sampled_from(["nan", "nan", "inf", "-inf"]),
        st.sampled_from(["hidden", "one element", "some rows"]),
    )
    return Problem(
        case,
        layouts=draw(_some({"q": layouts, "k": layouts, "v": layouts, "dout": st.sampled_from(sorted(LAYOUTS))})),
        storage_offset=draw(st.sampled_from([0, 0, 1, 3, 8])),
        strided_constants=draw(st.booleans()),
        magnitudes=draw(_some(dict.fromkeys(("q", "k", "v", "dout", "dlse"), factors))),
        rows=draw(st.sampled_from([None, None, None, None, "one key", "some empty", "all empty"])),
        poison=tuple(draw(st.sampled_from([0, 0, 1, 1, 2]).flatmap(lambda n: st.tuples(*[poisons] * n)))),
        dlse=draw(st.booleans()),
        needed=draw(st.sampled_from(["qkv", "q", "k", "v", "qk", "qv", "kv"])),
    )


def _some(choices: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict]:
    """Half of the time none of the `choices`, else any number of them."""
    return st.one_of(st.just({}), st.fixed_dictionaries({}, optional=choices))


@st.composite
def hostile_cases(draw: st.DrawFn) -> Case:
    """:func:`cases` with more heads, features and lengths, zero among them, and sizes kept within reason."""
    nheads_kv, group = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    case = draw(
        cases(
            batch=draw(st.sampled_from([1, 1, 2, 2, 2, 3, 0])),
            nheads_q=draw(st.sampled_from([nheads_kv * group] * 15 + [0])),
            nheads_kv=nheads_kv,
            seqlen_q=draw(HOSTILE_LENGTHS),
            seqlen_k=draw(HOSTILE_LENGTHS),
            head_dim=head_dim,
            scale=draw(st.sampled_from([None, None, None, 1.0, 0.01, -0.3, 0.0])),
        )
    )
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2)) if head_dim > 1 else None
    changes: dict[str, object] = {"rotary_dim": rotary_dim if case.rope is not None else None}
    if head_dim == 1 or (case.seqlen_q == 0 and case.seqlen_k == 0):
        changes |= {"rope": None, "rotary_dim": None}
    if case.seqlen_k == 0:  # make_inputs draws no lengths below 1
        changes |= {"padding": None, "empty_batch": False}
    if case.batch == 0:
        changes["empty_batch"] = False
    # The interpreter's time is that of the tiles.
    tiles = (1 + case.seqlen_q // 16) * (1 + case.seqlen_k // 16)
    if case.batch * case.nheads_q * tiles > 16:
        changes |= {"batch": min(case.batch, 1), "nheads_q": group if group * tiles <= 16 else 1, "nheads_kv": 1}
    return replace(case, **changes)  # type: ignore[arg-type]
