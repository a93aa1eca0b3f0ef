"""Strategies of hypothesis: attention cases, and problems with hostile properties."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from fusedattn.testing import Case
from tests.conftest import DTYPES
from tests.helpers.hostile import BROADCAST, LAYOUTS, FuzzProblem, added_leaves, broadcast_tensors

# Optional features, with the defaults of a Case.
FEATURES: dict[str, object] = {
    name: getattr(Case(), name)
    for name in (
        "head_dim_v", "window", "prefix", "documents", "layout", "tree", "mask_function", "sparse", "bias", "bias_inf",
        "alibi", "relative", "bias_dtype", "softcap", "score_mod", "sinks", "dropout_p", "qk_norm",
    )
}  # fmt: skip
# Features that depend on the position of a query or key, or on its batch or head.
PLACED = {name: FEATURES[name] for name in FEATURES if name not in ("head_dim_v", "bias_dtype", "softcap", "sinks")}

LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 13, 16, 17, 29, 31, 32, 33, 37, 47, 61])
ALIGNMENTS = st.sampled_from([None, "bottom_right", "top_left"])


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    """Small cases of every kind, half of them without any of :data:`FEATURES`; those of `fixed` are not drawn."""
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
        **(draw(features()) if draw(st.booleans()) else {}),
    }
    return Case(**{**drawn, **fixed})  # type: ignore[arg-type]


SPARSE = ("strided", "fixed", "dilated", "global", "bigbird", "blocks", "pairs")


@st.composite
def features(draw: st.DrawFn) -> dict[str, object]:
    """Some of :data:`FEATURES`."""
    seldom = st.sampled_from([False, False, False, True])
    reach = st.sampled_from([None, 0, 1, 5, 16, 40])
    bias = draw(st.sampled_from([None] * 4 + ["full", "per_head", "per_batch", "per_key", "per_query", "scalar"]))
    return {
        "qk_norm": draw(st.sampled_from([None] * 4 + ["shared", "per_head", "scale", "across_heads"])),
        "head_dim_v": draw(st.sampled_from([None, None, None, 1, 8, 16, 40])),
        "window": draw(st.one_of(st.none(), st.none(), st.tuples(reach, reach))),
        "prefix": draw(seldom),
        "documents": draw(st.sampled_from([None, None, None, None, "packed", "shuffled"])),
        "layout": draw(st.sampled_from([None, None, None, None, 16, 32, 48])),
        "tree": draw(seldom),
        **draw(st.sampled_from([{}, {}, {}, {"mask_function": True}, *({"sparse": kind} for kind in SPARSE)])),
        "bias": bias,
        "bias_inf": bias not in (None, "scalar") and draw(seldom),
        "alibi": draw(st.sampled_from([False, False, False, False, True, "per_batch"])),
        "relative": draw(st.sampled_from([None, None, None, None, "per_head", "per_query"])),
        "bias_dtype": draw(st.sampled_from([None, None, None, torch.float32, torch.bfloat16])),
        "softcap": draw(st.sampled_from([None, None, None, 0.5, 2.0, 30.0])),
        "score_mod": draw(seldom),
        "sinks": draw(seldom),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 0.9])),
    }


HEADS = [(1, 1), (2, 1), (2, 1), (1, 2), (1, 3), (2, 2)]
HEAD_DIMS = [1, 2, 3, 8, 11, 16, 17, 24, 40, 64, 67, 128]
HOSTILE_LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([0, 1, 2, 3, 16, 17, 31, 32, 33, 48, 61, 64, 97]))
FACTORS = [1e-40, 1e-30, 1e-6, 1e2, 1e4, 1e30, 0.0]
FACTORS_FLOAT16 = [1e-6, 1e-3, 1e2, 1e3, 0.0]  # factors that neither flush everything to 0 nor overflow


@st.composite
def problems(draw: st.DrawFn) -> FuzzProblem:
    """Problems of every kind; about half of them have one hostile thing of each kind."""
    case = draw(hostile_cases())
    factors = st.sampled_from(FACTORS_FLOAT16 if case.dtype == torch.float16 else FACTORS)
    layouts = st.sampled_from([name for name in LAYOUTS if name != "over_everything"])
    added = added_leaves(case)
    poisons = st.tuples(
        st.sampled_from(["k", "v", "k", "v", "q", "dout", "dlse", *added, *added]),
        st.sampled_from(["nan", "nan", "inf", "-inf"]),
        st.sampled_from(["hidden", "one element", "some rows"]),
    )
    # Only one: two may add up to an infinity.
    extremes = st.tuples(
        st.sampled_from(added or ["k"]),
        st.sampled_from(["lowest", "lowest", "highest"]),
        st.sampled_from(["one element", "some elements", "some rows", "all"]),
    )
    ones = {
        name: st.sets(st.integers(0, BROADCAST[name][1] - 1)).map(sorted).map(tuple) for name in broadcast_tensors(case)
    }
    laid_out = {"q": layouts, "k": layouts, "v": layouts, "dout": st.sampled_from(sorted(LAYOUTS))}
    if case.bias == "full":
        laid_out["bias"] = layouts
    return FuzzProblem(
        case,
        layouts=draw(_some(laid_out)),
        storage_offset=draw(st.sampled_from([0, 0, 1, 3, 8])),
        broadcast=draw(_some(ones)),
        strided_constants=draw(st.booleans()),
        magnitudes=draw(_some(dict.fromkeys(("q", "k", "v", "dout", "dlse", *added), factors))),
        rows=draw(st.sampled_from([None, None, None, None, "one key", "some empty", "all empty"])),
        poison=tuple(draw(st.sampled_from([0, 0, 1, 1, 2]).flatmap(lambda n: st.tuples(*[poisons] * n))))
        + tuple(draw(st.sampled_from([0, 0, 1] if added else [0]).flatmap(lambda n: st.tuples(*[extremes] * n)))),
        dlse=draw(st.booleans()),
        needed=draw(st.sampled_from(["qkvbrsl", "q", "k", "v", "qkv", "qkb", "qvr", "kvs", "brsl", *"brsl"])),
    )


def _some(choices: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict]:
    """None of the `choices` half of the time, else any number of them."""
    return st.one_of(st.just({}), st.fixed_dictionaries({}, optional=choices))


@st.composite
def hostile_cases(draw: st.DrawFn) -> Case:
    """:func:`cases` with more heads, features and lengths, including zero, and sizes that stay small."""
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
    # The interpreter's time grows with the number of tiles.
    tiles = (1 + case.seqlen_q // 16) * (1 + case.seqlen_k // 16)
    if case.batch * case.nheads_q * tiles > 16:
        changes |= {"batch": min(case.batch, 1), "nheads_q": group if group * tiles <= 16 else 1, "nheads_kv": 1}
    return replace(case, **changes)  # type: ignore[arg-type]
