"""Attention in few bits: unrounded it is attention, rounded its error is small, and hidden tokens reach nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedattn import low_precision, masks, reference
from fusedattn.low_precision import (
    E4M3,
    INT8,
    RECIPES,
    Quantisation,
    Recipe,
    by_block,
    by_tensor,
    by_token,
    mx,
    of_weights,
)
from fusedattn.masks import Mask
from tests.conftest import DEVICE
from tests.helpers import quick

pytestmark = pytest.mark.usefixtures("_seed")

VALID = torch.arange(37, device=DEVICE) < torch.tensor([[37], [0], [20]], device=DEVICE)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "padding": masks.padding(VALID),
    "window": masks.window(3, 0, "top_left"),
}
STEPS = [
    Recipe(rotate=rotate, smooth_k=smooth_k, smooth_q=smooth_q)
    for rotate, smooth_k, smooth_q in itertools.product((False, True), (False, True), (None, 1, 8, 128))
]


def drawn(seqlen_q: int = 19, head_dim: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two groups of query heads; keys have a mean."""
    q = torch.randn(3, 4, seqlen_q, head_dim, dtype=dtype, device=DEVICE)
    k, v = (torch.randn(3, 2, 37, d, dtype=dtype, device=DEVICE) for d in (head_dim, 16))
    return q, k + 3 * torch.randn(2, 1, head_dim, dtype=dtype, device=DEVICE), v


@quick.covering()
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("recipe", STEPS, ids=lambda r: f"{r.rotate}-{r.smooth_k}-{r.smooth_q}")
def test_rotation_and_smoothing_change_nothing(recipe: Recipe, mask: Mask) -> None:
    q, k, v = drawn()
    out, lse = low_precision.attention(q, k, v, recipe, mask=mask, scale=0.3)
    expected = reference.attention(q, k, v, mask=mask, scale=0.3)
    torch.testing.assert_close((out, lse), expected[:2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seqlen_q", [0, 1, 19])
def test_no_queries_no_keys(seqlen_q: int) -> None:
    q, k, v = drawn(seqlen_q)
    recipe = RECIPES["NVFP4, two levels, smooth q, k"]
    assert low_precision.attention(q, k, v, recipe)[0].shape == (3, 4, seqlen_q, 16)
    out, lse = low_precision.attention(q, k[:, :, :0], v[:, :, :0], recipe)
    assert torch.equal(out, torch.zeros(3, 4, seqlen_q, 16, dtype=out.dtype, device=DEVICE))
    assert (lse == -math.inf).all()


def error(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> float:
    """The error of out, relative to its size."""
    out, _ = low_precision.attention(q, k, v, recipe, mask=mask)
    expected = reference.attention(q.double(), k.double(), v.double(), mask=mask)[0]
    return float((out - expected).norm() / expected.norm())


# Of standard normal numbers; for each recipe, the measured error and a third.
LARGEST = {"bfloat16": 0.005, "fp8": 0.075, "int8": 0.055, "fp8 e5m2": 0.15, "MXFP8": 0.085, "NVFP4": 0.27}


@pytest.mark.parametrize("name", RECIPES)
def test_error_of_a_recipe(name: str) -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, device=DEVICE) for _ in range(3))
    kind = max((kind for kind in LARGEST if name.startswith(kind)), key=len, default="")
    limit = LARGEST.get(kind, 0.43)
    found = error(RECIPES[name], q, k, v, masks.causal())
    assert limit / 3 < found < limit


@pytest.mark.parametrize(("name", "n"), [("MXFP8", 32), ("MXFP4", 32), ("NVFP4", 16), ("NVFP4, two levels", 16)])
def test_groups_lie_along_the_sums(name: str, n: int) -> None:
    recipe = RECIPES[name]
    sides = [x and (x.tokens, x.features) for x in (recipe.q, recipe.k, recipe.v, recipe.weights)]
    assert sides == [(1, n), (1, n), (n, 1), (1, n)]


def test_each_operand_is_rounded() -> None:
    """By its own part of the recipe, and by no other."""
    q, k, v = drawn(dtype=torch.float32)
    how = by_token(E4M3)
    exact = low_precision.attention(q, k, v, Recipe())[0]
    results = [low_precision.attention(q, k, v, Recipe(**{name: how}))[0] for name in ("q", "k", "v", "weights")]
    for a, b in itertools.combinations([exact, *results], 2):
        assert not torch.equal(a, b)
    rounded = [low_precision.quantised(x, how) for x in (q, k, v)]
    torch.testing.assert_close(
        low_precision.attention(q, k, v, Recipe(how, how, how)), low_precision.attention(*rounded, Recipe())
    )


def test_weights_are_relative_to_the_largest() -> None:
    """Two keys whose weights are 1 and a number of e4m3 over 448: exact, and divided by their exact sum."""
    q = torch.ones(1, 1, 1, 1, device=DEVICE)
    k = torch.tensor([5.0, 5.0 + math.log(26.0 / 448)], device=DEVICE)[None, None, :, None]
    v = torch.tensor([1.0, 0.0], device=DEVICE)[None, None, :, None]
    out, lse = low_precision.attention(q, k, v, Recipe(weights=of_weights(E4M3)), scale=1.0)
    assert out.item() == pytest.approx(448 / (448 + 26), rel=1e-6)
    assert lse.item() == pytest.approx(5.0 + math.log1p(26 / 448), rel=1e-6)
    half, _ = low_precision.attention(q, k, 1 - v, Recipe(weights=of_weights(E4M3)), scale=1.0)
    assert half.item() == pytest.approx(26 / (448 + 26), rel=1e-5)
    k[..., 1, :] += math.log(26.9 / 26.0)  # rounds to 26, between 448 and the next power of two below by steps of 2
    out, _ = low_precision.attention(q, k, 1 - v, Recipe(weights=of_weights(E4M3)), scale=1.0)
    assert out.item() == pytest.approx(26 / (448 + 26.9), rel=1e-5)


@pytest.mark.parametrize("name", ["fp8, tensor", "fp8, blocks, both", "NVFP4, two levels, smooth q, k"])
def test_hidden_tokens_reach_nothing(name: str) -> None:
    """Not their scales, nor their means, NaN or not."""
    q, k, v = drawn(dtype=torch.float32)
    expected = low_precision.attention(q, k, v, RECIPES[name], mask=masks.padding(VALID))
    for bad in (math.nan, math.inf, 1e9):
        k2, v2 = (x.masked_fill(~VALID[:, None, :, None], bad) for x in (k, v))
        q2 = q.clone()
        q2[1] = bad  # sees nothing
        found = low_precision.attention(q2, k2, v2, RECIPES[name], mask=masks.padding(VALID))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(expected[0][1], torch.zeros_like(expected[0][1]))
    assert (expected[1][1] == -math.inf).all()


@pytest.mark.parametrize("how", [by_tensor(E4M3), by_block(INT8, 16), mx(E4M3)], ids=["tensor", "blocks", "MXFP8"])
def test_hidden_tokens_need_not_be_there(how: Quantisation) -> None:
    """Also where a mean that is subtracted is larger than what is left."""
    q, k, v = (x[:1] for x in drawn(seqlen_q=37, dtype=torch.float32))
    recipe = Recipe(how, how, how, of_weights(E4M3), smooth_k=True, smooth_q=16)
    q, k = q + 50, k + 50
    shown = torch.zeros(37, 37, dtype=torch.bool, device=DEVICE)
    shown[:20, :20] = True
    out, lse = low_precision.attention(q, k, v, recipe, mask=masks.boolean(shown), scale=0.01)
    cut = low_precision.attention(*(x[:, :, :20] for x in (q, k, v)), recipe, scale=0.01)
    torch.testing.assert_close((out[:, :, :20], lse[:, :, :20]), cut, rtol=1e-5, atol=1e-5)


def test_tokens_of_one_kv_head() -> None:
    """A key that one query head of a group sees counts for the whole group."""
    q, k, v = drawn(dtype=torch.float32)
    shown = torch.ones(3, 4, 19, 37, dtype=torch.bool, device=DEVICE)
    shown[:, 0, :, 30:] = False
    both = low_precision.attention(q, k, v, RECIPES["fp8, blocks, both"], mask=masks.boolean(shown))
    alone = low_precision.attention(q, k, v, RECIPES["fp8, blocks, both"])
    torch.testing.assert_close(both[0][:, 1:], alone[0][:, 1:], rtol=0, atol=0)


def test_nan_that_is_seen_shows() -> None:
    q, k, v = drawn(dtype=torch.float32)
    k[0, 1, 30, 3] = math.nan
    blind = torch.ones(19, 37, dtype=torch.bool, device=DEVICE)
    blind[3] = False
    out, lse = low_precision.attention(q, k, v, Recipe(smooth_k=True), mask=masks.boolean(blind))
    assert out[0, 2:, :3].isnan().all()
    assert (lse[:, :, 3] == -math.inf).all()
    assert (out[:, :, 3] == 0).all()
    for how in (by_block(E4M3, 8), by_tensor(E4M3)):
        shown = blind.clone()
        shown[7, 30] = False
        out, lse = low_precision.attention(q, k, v, Recipe(k=how), mask=masks.boolean(shown))
        sees = (torch.arange(19, device=DEVICE) != 3) & (torch.arange(19, device=DEVICE) != 7)
        assert torch.equal(lse[0, 2:].isnan(), sees.expand(2, -1))
        assert torch.equal(out[0, 2:].isnan().all(dim=-1), sees.expand(2, -1))
        assert out[0, :2].isfinite().all()
        assert out[1:].isfinite().all()


@pytest.mark.parametrize("name", ["bfloat16", "fp8, blocks", "MXFP8", "NVFP4, two levels"])
def test_nan_of_a_query_stays_there(name: str) -> None:
    """Also if q shares a scale with other queries."""
    q, k, v = drawn(dtype=torch.float32)
    q[0, 1, 5, 3] = math.nan
    out, lse = low_precision.attention(q, k, v, RECIPES[name])
    expected = torch.zeros(lse.shape, dtype=torch.bool, device=DEVICE)
    expected[0, 1, 5] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected[..., None].expand(out.shape))


def test_outliers_are_spread() -> None:
    """FlashAttention-3's numbers: a rotation lowers the error of fp8."""
    q, k, v = (torch.randn(1, 4, 512, 128, device=DEVICE) for _ in range(3))
    q, k, v = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001) for x in (q, k, v))
    errors = [error(RECIPES[name], q, k, v, masks.full()) for name in ("fp8, tensor", "fp8, blocks, rotated")]
    assert errors[1] < 0.75 * errors[0]


def test_a_mean_is_subtracted() -> None:
    """Keys with a large mean and small differences: smoothing restores what int8 and fp4 lose."""
    q, k, v = (torch.randn(1, 2, 256, 64, device=DEVICE) for _ in range(3))
    k = k + 30.0
    names = ("NVFP4, two levels", "NVFP4, two levels, smooth k", "NVFP4, two levels, smooth q, k")
    direct, of_k, of_both = (error(RECIPES[name], q, k, v, masks.full()) for name in names)
    assert of_k < 0.3 * direct
    assert error(RECIPES["NVFP4, two levels, smooth q, k"], q + 30.0, k, v, masks.full()) < 1.5 * of_both


def test_results_of_16_bits_are_float32() -> None:
    q, k, v = (x.bfloat16() for x in drawn())
    out, lse = low_precision.attention(q, k, v, RECIPES["fp8, blocks"])
    assert out.dtype == lse.dtype == torch.float32
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": slice(0, 1)}, "k: got batch 1, allowed is that of q, 3"),
        ({"mask": masks.padding(VALID[:, :5])}, "valid"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, object], message: str) -> None:
    q, k, v = drawn()
    if isinstance(place := change.get("k"), slice):
        k = k[place]
    with pytest.raises(ValueError, match=message):
        low_precision.attention(q, k, v, Recipe(), mask=change.get("mask"))  # type: ignore[arg-type]
