"""Attention to a cache by the kernels: every feature, format of codes, layout and shape, against eager PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusedattn import Rope, attention, attention_varlen, caches, masks
from fusedattn.options import Packed
from tests.conftest import DEVICE, DTYPES, INTERPRETING
from tests.helpers import quick
from tests.helpers.cache_model import LAYOUTS
from tests.helpers.cached_eager import FORMATS, NUMBERS
from tests.helpers.cached_truth import assert_cached, attend, cached_inputs, filled
from tests.helpers.decode_features import BASE, FEATURES, SHAPES, SPLIT, shaped, tilings

pytestmark = pytest.mark.usefixtures("poison", "_seed")

KINDS = (NUMBERS, *FORMATS)
MANY = [(17, 1), (40, 1), (33, 3), (20, 2)]  # queries that take more than a small tile


def lengths_for(capacity: int, shortest: int) -> list[int]:
    """Lengths of two sequences that end inside a split, and at the end of the cache."""
    return [max(shortest, capacity - SPLIT - 3), capacity]


@quick.every(7, feature=lambda feature: feature in ("block-sparse", "everything"))
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, many):
    """Each with another shape, dtype, format and layout."""
    i = list(FEATURES).index(feature)
    form, layout = KINDS[(2 * i + many) % len(KINDS)], LAYOUTS[(i + many) % len(LAYOUTS)]
    case = replace(BASE, **FEATURES[feature], dtype=DTYPES[(i + many) % 3])
    if form.startswith("int4") and case.head_dim_v is not None:
        form = "int8" if case.head_dim_v % 2 else "int4"
    case = shaped(case, *(MANY[i % len(MANY)] if many else SHAPES[5 * i % len(SHAPES)]))
    inputs = cached_inputs(case, layout)
    lengths = lengths_for(inputs.k.shape[2], case.seqlen_q)
    cache = filled(layout, inputs, lengths, form)
    with tilings() as found:
        assert_cached(attend(inputs, cache), inputs, cache, (case, form, layout, lengths))
    if INTERPRETING:
        assert (found[0].split_keys > 0) == (not many and case.layout is None)


SIZES = {
    "of size 1e-6": 1e-6,
    "of size 1e4": 1e4,
    "below the normal numbers of float16": 3e-6,
    "of size 1e-2, one 1000 times larger": 1e-2,
    "of size 1e-4, a hidden one of 6e4": 1e-4,
    "of size 1, some 0": 1.0,
}


@quick.covering()
@quick.pairwise(size="of size 1e-4, a hidden one of 6e4", dtype=torch.float16, form="int8", many=False)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, form, dtype, many):
    """Of keys and of values, the others being ordinary; those of some tokens differ."""
    case = shaped(replace(BASE, dtype=dtype, seqlen_k=SPLIT + 5), *((20, 1) if many else (2, 3)))
    inputs = cached_inputs(case, "pages of 17")
    allowed = torch.ones(1, 1, case.seqlen_q, inputs.k.shape[2], dtype=torch.bool, device=inputs.q.device)
    if "hidden" in size:
        allowed[..., 9] = False
    for name in ("k", "v"):
        x = getattr(inputs, name) * SIZES[size]
        largest = 4.0 * SIZES[size]
        if "1000" in size:
            x[:, :, SPLIT - 2] *= 1000.0
        elif "hidden" in size:
            x[:, :, 9] = x[:, :, 9].sign() * 6e4
        elif "some" in size:
            x[:, :, 3:7] = 0.0
            x[1, 0] = 0.0
        own = replace(inputs, **{name: x.to(dtype)}, mask=masks.boolean(allowed))
        lengths = lengths_for(x.shape[2], 0)
        cache = filled("pages of 17", own, lengths, form, largest)
        assert_cached(attend(own, cache), own, cache, (name, lengths))


@pytest.mark.parametrize("form", ["e4m3", "int8"])
def test_a_large_value_that_another_query_sees(form):
    """Weights of a query keep their digits in float16 beside one of 10^7 times their size, of the same tile."""
    inputs = cached_inputs(replace(BASE, dtype=torch.float16, seqlen_k=SPLIT), "pages of 16")
    inputs.v.mul_(1e-3)
    inputs.v[:, :, 9] = 6e4
    cache = filled("pages of 16", inputs, [SPLIT, SPLIT], form)
    allowed = torch.ones(1, 1, 2, SPLIT, dtype=torch.bool, device=DEVICE)
    allowed[:, :, 0, 9] = False
    got = attend(replace(inputs, mask=masks.boolean(allowed)), cache)["out"][:, :, 0]
    allowed[..., 9] = False
    expected = attend(replace(inputs, mask=masks.boolean(allowed)), cache)["out"][:, :, 0]
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item())


@quick.covering()
@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4"])
@pytest.mark.parametrize("shape", ["few", "many"])
def test_a_window_over_blocks_of_a_layout(shape, form):
    """The window ends at the last token of each sequence, not at the end of the cache."""
    case = shaped(BASE, *(SHAPES[6] if shape == "few" else MANY[1]))
    inputs = cached_inputs(replace(case, layout=16, window=(20, 0)), "pages of 17")
    lengths = [inputs.k.shape[2] - 37, inputs.k.shape[2]]
    cache = filled("pages of 17", inputs, lengths, form)
    assert_cached(attend(inputs, cache), inputs, cache)


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize(("seqlen_q", "group"), [(1, 1), (2, 3), (1, 8), (1, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [NUMBERS, *FORMATS])
@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 7, 100])
def test_splits_and_groups_of_heads(num_splits, form, dtype, seqlen_q, group):
    """Of 1, 3, 8 and 16 query heads that share a KV head."""
    case = shaped(replace(BASE, dtype=dtype, seqlen_k=3 * SPLIT, causal="bottom_right"), seqlen_q, group)
    inputs = cached_inputs(case, "pages of 16")
    cache = filled("pages of 16", inputs, [3 * SPLIT, SPLIT + 7], form)
    with tilings() as found:
        assert_cached(attend(inputs, cache, num_splits=num_splits), inputs, cache)
    if INTERPRETING:
        most = 3 if num_splits is None else num_splits
        assert [x.n_tiles for x in found] == [max(-(-6 // -(-6 // most)), 1)]  # blocks of 16 keys


POISON = (torch.nan, torch.inf, -torch.inf)


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("of", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "e5m2", "int8", "int4, groups of 4"])
def test_tokens_that_are_not_finite(form, dtype, of, many):
    """Queries that see one are NaN; the others do not notice it, not even in the same block."""
    case = shaped(replace(BASE, dtype=dtype, seqlen_k=SPLIT + 5), *(MANY[0] if many else (4, 3)))
    inputs = cached_inputs(case, "pages of 17")
    n = inputs.k.shape[2]
    keys, lengths = [2, n - 3, n - 1], [n, n]
    allowed = torch.rand(2, case.nheads_q, case.seqlen_q, n, device=DEVICE) < 0.7
    allowed[:, :, 0, keys], allowed[:, :, 1, keys[1:]], allowed[..., 3] = False, False, True
    x = getattr(inputs, of).clone()
    for key, value in zip(keys, POISON, strict=True):
        x[:, :, key, 1] = value
    spoiled = replace(inputs, **{of: x}, mask=masks.boolean(allowed))
    cache = filled("pages of 17", spoiled, lengths, form)
    got = attend(spoiled, cache)
    sees = allowed[..., keys].any(dim=-1)
    assert sees.any()
    # A key that is Inf may have the weight 0 or 1.
    certain = allowed[..., keys[:1]].any(dim=-1) if of == "k" and form == NUMBERS else sees
    assert got["out"][certain].isnan().all()
    assert not got["out"][~sees].isnan().any()
    allowed[..., keys] = False
    clean = replace(inputs, mask=masks.boolean(allowed))
    own = filled("pages of 17", clean, lengths, form)
    expected = attend(clean, own)
    eps = torch.finfo(dtype).eps
    for name in got:
        blind = ~sees
        atol = 4 * eps * expected[name][blind].abs().max().item()
        torch.testing.assert_close(got[name][blind], expected[name][blind], rtol=4 * eps, atol=atol)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_rotated_queries_of_a_ring(many, packed):
    """They stand at the end of their sequence, not of the cache; and keys at the number of their token."""
    seqlen_q = 20 if many else 2
    rope = Rope.from_theta(16, 128).to(DEVICE)
    inputs = cached_inputs(replace(BASE, seqlen_k=48, seqlen_q=seqlen_q), "pages of 16")
    results = []
    for backend in ("torch", "triton"):
        cache = filled("pages of 16", inputs, [48, 48], overwrites=True, n_sinks=2, rope=rope)
        cache.lengths.copy_(torch.tensor([0, 5]))
        for _ in range(2):
            caches.append(cache, inputs.k, inputs.v, backend=backend)
        options = {"cache": cache, "mask": masks.causal(), "return_lse": True, "backend": backend}
        if packed:
            stops = torch.tensor([0, seqlen_q, 2 * seqlen_q], dtype=torch.int32, device=DEVICE)
            q = inputs.q.transpose(1, 2).flatten(0, 1)
            results.append(attention_varlen(q, None, None, stops, None, seqlen_q, **options))
        else:
            results.append(attention(inputs.q, **options))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@quick.covering()
@pytest.mark.parametrize("form", [NUMBERS, "e5m2", "int4, groups of 4", "int8, given"])
@pytest.mark.parametrize("feature", ["plain", "boolean", "block-sparse", "bias", "sinks and dropout", "tree", "prefix"])
def test_packed_queries(feature, form):
    """Sequences of no, few and many queries, and queries of none; tensors are padded to the longest sequence."""
    counts = [0, 23, 5]
    case = replace(BASE, **FEATURES[feature], batch=3, seqlen_q=max(counts), seqlen_k=SPLIT + 5)
    case = replace(case, dtype=DTYPES[len(form) % 3])
    inputs = cached_inputs(case, "pages of 17")
    n = inputs.k.shape[2]
    cache = filled("pages of 17", inputs, [3, n - 20, n], form)
    stops = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    q = torch.randn(sum(counts) + 2, case.nheads_q, 16, device=DEVICE).to(case.dtype)
    out, lse = attention_varlen(
        q, None, None, stops, None, max(counts), cache=cache, return_lse=True, backend="triton", **inputs.options
    )
    own = replace(inputs, q=q.transpose(0, 1)[None])
    got = {"out": out.transpose(0, 1)[None], "lse": lse[None]}
    assert_cached(got, own, cache, (feature, form), Packed(stops, None, max(counts), n))
