"""Attention to a cache by the kernels: every feature, format of codes, layout and shape, against eager PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusedattn import masks
from tests.conftest import DTYPES, INTERPRETING
from tests.helpers import quick
from tests.helpers.cache_model import LAYOUTS
from tests.helpers.cached_truth import FORMATS, NUMBERS, assert_cached, attend, cached_inputs, filled
from tests.helpers.decode_features import BASE, FEATURES, SHAPES, SPLIT, shaped, tilings

pytestmark = pytest.mark.usefixtures("poison", "_seed")

KINDS = (NUMBERS, *FORMATS)
MANY = [(17, 1), (40, 1), (33, 3), (20, 2)]  # queries that take more than a small tile


def lengths_for(capacity: int, shortest: int) -> list[int]:
    """Lengths of two sequences that end inside a split, and at the end of the cache."""
    return [max(shortest, capacity - SPLIT - 3), capacity]


@quick.every(3, feature=lambda feature: feature in ("block-sparse", "everything"))
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
    "of size 1e-3, a hidden one of 6e4": 1e-3,
    "of size 1, some 0": 1.0,
}


@quick.covering(pairs=True)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, form, dtype, many):
    """Of keys and of values, the others being ordinary; those of some tokens differ."""
    case = replace(BASE, dtype=dtype, nheads_q=6, seqlen_q=33 if many else 2, seqlen_k=2 * SPLIT + 5)
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


@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4"])
@pytest.mark.parametrize("shape", ["few", "many"])
def test_a_window_over_blocks_of_a_layout(shape, form):
    """The window ends at the last token of each sequence, not at the end of the cache."""
    case = shaped(BASE, *(SHAPES[6] if shape == "few" else MANY[1]))
    inputs = cached_inputs(replace(case, layout=16, window=(20, 0)), "pages of 17")
    lengths = [inputs.k.shape[2] - 37, inputs.k.shape[2]]
    cache = filled("pages of 17", inputs, lengths, form)
    assert_cached(attend(inputs, cache), inputs, cache)
