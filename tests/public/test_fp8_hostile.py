"""Attention of e4m3 codes: hostile numbers, tokens that must have no effect, and what results do not depend on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import FP8, low_precision, masks, reference
from fusedattn.masks import Mask
from fusedattn.testing import Case
from fusedattn.testing.fp8 import recipe_of
from tests.conftest import DEVICE, inputs_of, triton_attention
from tests.helpers import fp8_eager, quick

pytestmark = pytest.mark.usefixtures("poison", "_seed")

BLOCK, ROTATED = FP8(), FP8("tensor", rotate=True)
both = pytest.mark.parametrize("precision", [BLOCK, ROTATED], ids=["block", "tensor-rotated"])


def qkv(n: int = 20, m: int = 140, heads: int = 1, batch: int = 1, head_dim: int = 16) -> list[Tensor]:
    """q, k and v; there are two query heads for each of k and v."""
    shapes = (batch, 2 * heads, n, head_dim), *[(batch, heads, m, head_dim)] * 2
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


def attend(*x: Tensor, precision: FP8 = BLOCK, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = triton_attention(*x, precision=precision, return_lse=True, **options)
    return out, lse


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def assert_near(found: Tensor, expected: Tensor, share: float = 0.1) -> None:
    """A share of the largest number; NaN where NaN is expected."""
    expected = expected.to(found.dtype)
    size = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(size), equal_nan=True)


VALID = {
    "right": torch.arange(140) < torch.tensor([[100], [129]]),
    "left": torch.arange(140) >= torch.tensor([[31], [128]]),
    "holes": torch.rand(2, 140, generator=torch.Generator().manual_seed(0)) < 0.7,
    "nothing": torch.arange(140) < torch.tensor([[140], [0]]),
}


@quick.covering()
@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("name", VALID)
def test_what_padding_hides_has_no_effect(name: str, bad: float, precision: FP8) -> None:
    """Bit for bit, on no scale either."""
    q, k, v = qkv(5, batch=2)
    mask = masks.padding(VALID[name].to(DEVICE))
    expected = attend(q, k, v, mask=mask, precision=precision)
    hidden = ~VALID[name][:, None, :, None].to(DEVICE)
    found = attend(q, k.masked_fill(hidden, bad), v.masked_fill(hidden, -bad), mask=mask, precision=precision)
    assert_same(found, expected)
    assert expected[0].isfinite().all()


@quick.covering()
@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_nan_reaches_those_that_see_it(operand: str, bad: float, precision: FP8) -> None:
    """Others are as with 0 in its place, or in all of the token if a rotation makes NaN of all.

    A tile with a NaN walks over its keys again: weights of its other rows are rounded relative to the largest of all.
    """
    q, k, v = qkv(70, 70)
    x = {"q": q, "k": k, "v": v}
    at = 50
    x[operand][0, 0, at, slice(None) if precision.rotate and operand != "v" else 3] = 0.0
    expected, expected_lse = attend(q, k, v, mask=masks.causal(), precision=precision)
    x[operand][0, 0, at, 3] = bad
    out, lse = attend(q, k, v, mask=masks.causal(), precision=precision)
    reached = torch.zeros(out.shape, dtype=torch.bool, device=DEVICE)
    if operand == "q":
        reached[:, 0, at] = True
    else:
        reached[:, :, at:] = True
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[:, :, :32], expected[:, :, :32])
    assert_near(out[~reached], expected[~reached])
    if operand == "v":
        assert torch.equal(lse, expected_lse)
    else:
        assert torch.equal(lse.isnan(), reached.any(-1))
        assert torch.equal(lse[~lse.isnan()], expected_lse[~lse.isnan()])


@quick.only(precision=BLOCK)
@both
def test_a_nan_behind_a_window(precision: FP8) -> None:
    """Full blocks and others; values that are not finite take the second walk over the keys."""
    q, k, v = qkv(100, 100)
    mask = masks.window(20, 5)
    expected, _ = attend(q, k, v, mask=mask, precision=precision)
    v[0, 0, 60] = math.inf
    out, _ = attend(q, k, v, mask=mask, precision=precision)
    sees = mask.dense(100, 100, device=torch.device(DEVICE))[..., 60].view(-1)
    assert out[:, :, sees].isnan().all()
    # Weights are rounded relative to the largest of all keys there, and the token is in no scale.
    assert_near(out[:, :, ~sees], expected[:, :, ~sees])
    assert torch.equal(out[:, :, :32], expected[:, :, :32])


@quick.only(precision=BLOCK)
@both
def test_zeros(precision: FP8) -> None:
    """Equal weights, or a result of 0; and a block without a number beside others."""
    q, k, v = qkv(33)
    for zero in range(3):
        x = [torch.zeros_like(y) if i == zero else y for i, y in enumerate((q, k, v))]
        out, lse = attend(*x, precision=precision)
        assert_near(out, reference.attention(*(y.double() for y in x))[0], 0.2)
        if zero == 2:
            assert not out.any()
        else:
            torch.testing.assert_close(lse, torch.full_like(lse, math.log(140)))
    k[:, :, :128] = v[:, :, :128] = 0.0
    out, lse = attend(q, k, v, precision=precision)
    expected, expected_lse, _ = reference.attention(q.double(), k.double(), v.double())
    defined, _ = low_precision.attention(q, k, v, recipe_of(precision))
    assert (out - expected).abs().max() <= 1.5 * (defined - expected).abs().max()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.02, atol=0.02)


@quick.every(4)
@both
@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 127, 128, 129, 300])
def test_equal_keys_give_the_mean_of_the_values(n: int, precision: FP8) -> None:
    q, k, v = qkv(5, n)
    k = k[:, :, :1].expand_as(k)
    out, lse = attend(q, k, v, precision=precision)
    step = float(v.abs().max()) / 16
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(1, 2, 5, 16), rtol=0, atol=step)
    assert lse.isfinite().all()


def test_many_keys() -> None:
    """Weights below the least code, relative to the largest, are lost; those of one size are not.

    There are more scales of keys than of queries.
    """
    q, k, v = qkv(1, 2100, heads=2, head_dim=1)
    q, k, v = q[:, :2], 0.3 * k, v + 1.0
    v[:, :, 2048:] *= 3.0
    out, _ = attend(q, k, v)
    expected, _, _ = reference.attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.02)


LIMITS = [(torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)]


@quick.every(4)
@both
@pytest.mark.parametrize(("dtype", "limit"), LIMITS, ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_numbers_near_the_limit(operand: int, dtype: torch.dtype, limit: float, precision: FP8) -> None:
    """One token has a number near the limit; no product of it is beyond that of float32."""
    x = [(y / y.abs().max()).to(dtype) for y in qkv(20, 20)]
    x[operand][0, 0, 7] = 0.0
    x[operand][0, 0, 7, 2] = limit
    out, lse = attend(*x, precision=precision, scale=1e-30 if dtype != torch.float16 else None)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@quick.every(2)
@both
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-10])
def test_tiny_numbers(size: float, precision: FP8) -> None:
    q, k, v = qkv(20, 20)
    out, _ = attend(q, k, v * size, precision=precision)
    assert_near(out, size * reference.attention(q.double(), k.double(), v.double())[0], 1.0 if size < 1e-36 else 0.1)
    out, lse = attend(q, k * size, v, precision=precision)
    assert_near(out, v.mean(2, keepdim=True).expand(out.shape), 0.2)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(20)))
    out, lse = attend(q * size, k / max(size, 1e-30), v, precision=precision)
    assert out.isfinite().all()


def test_scales_that_differ() -> None:
    """By 1e30 from one block to the next; the product of two reaches beyond float32 while the numbers' does not."""
    q, k, v = qkv(140, 300)
    q[:, :, 128:], k[:, :, :128] = q[:, :, 128:] * 1e-15, k[:, :, :128] * 1e-15
    v[:, :, :128] *= 1e-30
    out, lse = attend(q, k, v)
    expected, expected_lse, _ = reference.attention(q.double(), k.double(), v.double())
    assert_near(out, expected, 0.2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.05, atol=0.05)
    q, k, v = qkv(40, 40)
    q[:, :, 0], k[:, :, 0] = 1e30, 1e30
    out, lse = attend(q, k, v)
    assert out[:, :, 1:].isfinite().all()  # their own codes are 0
    assert lse[:, :, 1:].isfinite().all()
    q, k, v = qkv(40, 40)
    out, lse = attend(q * 1e-30, k * 1e-30, v)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)))


@pytest.mark.parametrize("scales", ["block", "tensor"])
def test_a_rotation_helps_where_few_numbers_are_large(scales: Any) -> None:
    q, k, v = qkv(128, 128, head_dim=64)
    q, k = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3) for x in (q, k))
    truth = reference.attention(q.double(), k.double(), v.double())[0]
    plain, rotated = (attend(q, k, v, precision=FP8(scales, rotate=x))[0] for x in (False, True))
    assert (rotated.double() - truth).norm() < 0.95 * (plain.double() - truth).norm()


@both
def test_a_feature_alone(precision: FP8) -> None:
    """All others are 0 in every token."""
    q, k, v = qkv(32, 32, head_dim=32)
    q[..., 1:], k[..., 1:] = 0.0, 0.0
    inputs = replace(inputs_of(Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=32, seqlen_k=32)), q=q, k=k, v=v)
    fp8_eager.assert_as_accurate(attend(q, k, v, precision=precision), inputs, precision)


@pytest.mark.parametrize("precision", [FP8(rotate=True), ROTATED], ids=["block", "tensor"])
def test_equal_features_do_not_become_one(precision: FP8) -> None:
    """Signs are changed before, so that the sum of all features is no outlier."""
    q, k, v = qkv(32, 32, head_dim=32)
    q, k = (x[..., :1].expand_as(x).contiguous() for x in (q, k))
    found = attend(q, k, v, precision=precision)
    inputs = replace(inputs_of(Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=32, seqlen_k=32)), q=q, k=k, v=v)
    fp8_eager.assert_as_accurate(found, inputs, precision)


@quick.covering()
@both
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0), (1, 1), (3, 1), (1, 129)])
def test_lengths_of_zero_and_one(n: int, m: int, precision: FP8) -> None:
    q, k, v = qkv(n, m)
    out, lse = attend(q, k, v, precision=precision)
    assert out.shape == (1, 2, n, 16)
    if m == 0:
        assert not out.any()
        assert (lse == -math.inf).all()
    elif n:
        assert_near(out, reference.attention(q.double(), k.double(), v.double())[0], 0.15)


@both
def test_rows_that_see_nothing(precision: FP8) -> None:
    """They are 0, and their own NaN has no effect."""
    q, k, v = qkv(60, 40)
    q[0, 1, 3] = math.nan
    out, lse = attend(q, k, v, mask=masks.causal(), precision=precision)
    assert not out[:, :, :20].any()
    assert (lse[:, :, :20] == -math.inf).all()
    assert out[:, :, 20:].isfinite().all()
    assert out[:, :, 20:].any(-1).all()


@quick.only(precision=BLOCK)
@both
def test_strides(precision: FP8) -> None:
    """Tokens before heads, gaps between tokens, an expanded batch, and a tensor that starts anywhere."""
    q, k, v = qkv(3, 140, batch=2)
    expected = attend(q, k, v, precision=precision)
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = [torch.cat((x, x + 9, x * 0), -1)[..., :16] for x in (q, k, v)]
    odd = [torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape) for x in (q, k, v)]
    for x in (moved, spread, odd):
        assert_same(attend(*x, precision=precision), expected)
    k, v = (x[:1].expand_as(x) for x in (k, v))
    assert_same(attend(q, k, v, precision=precision), attend(q, k.clone(), v.clone(), precision=precision))


@quick.only(precision=BLOCK)
@both
def test_no_argument_is_written_to(precision: FP8) -> None:
    inputs = inputs_of(
        Case(seqlen_q=9, padding="uneven", rope="half", qk_norm="across_heads", bias="full", sinks=True, seqlen_k=140)
    )
    before = {name: x.clone() for name, x in inputs.tensors().items()}
    versions = {name: x._version for name, x in inputs.tensors().items()}
    attend(inputs.q, inputs.k, inputs.v, **inputs.options, precision=precision)
    for name, x in inputs.tensors().items():
        assert x._version == versions[name], name
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_head_alone() -> None:
    """Bit for bit the same as in a batch, whose other members have other sizes."""
    q, k, v = (x * torch.rand(2, x.shape[1], 1, 1, device=DEVICE).exp() for x in qkv(20, 140, heads=2, batch=2))
    out, lse = attend(q, k, v, mask=masks.causal())
    for b in range(2):
        for h in range(4):
            x = q[b : b + 1, h : h + 1], *(y[b : b + 1, h // 2 : h // 2 + 1] for y in (k, v))
            assert_same(attend(*x, mask=masks.causal()), (out[b : b + 1, h : h + 1], lse[b : b + 1, h : h + 1]))


@quick.every(3)
@both
@pytest.mark.parametrize("n", [1, 31, 128, 130])
def test_padding_on_the_right_is_slicing(n: int, precision: FP8) -> None:
    q, k, v = qkv(33, 140)
    valid = torch.arange(140, device=DEVICE)[None] < n
    found = attend(q, k, v, mask=masks.padding(valid), precision=precision)
    assert_same(found, attend(q, k[:, :, :n], v[:, :, :n], precision=precision))


LATER = [masks.causal("top_left"), masks.window(70, 0, "top_left")]


@quick.only(n=128)
@pytest.mark.parametrize(("mask", "n"), [(LATER[0], 128), *((x, 256) for x in LATER)], ids=["128", "causal", "window"])
def test_later_blocks_do_not_change_earlier_rows(mask: Mask, n: int) -> None:
    """Scales are those of 128 tokens: generation may append blocks."""
    x = qkv(n + 1, n + 1)
    for y in x:
        y[:, :, n:] = 1e15
    found = attend(*x, mask=mask)
    assert_same((found[0][:, :, :n], found[1][:, :, :n]), attend(*(y[:, :, :n] for y in x), mask=mask))


def test_a_scale_of_a_tensor_is_that_of_the_largest_number() -> None:
    """Of all heads and batches; hidden keys do not count."""
    q, k, v = qkv(5, 140, heads=2, batch=2)
    alone = attend(q[:1], k[:1], v[:1], precision=FP8("tensor"))
    k[1, 1, 139] = v[1, 1, 139] = 1e4
    together = attend(q, k, v, precision=FP8("tensor"))
    assert not torch.equal(together[0][:1], alone[0])
    valid = torch.ones(2, 140, dtype=torch.bool, device=DEVICE)
    valid[1, 139] = False
    hidden = attend(q, k, v, mask=masks.padding(valid), precision=FP8("tensor"))
    k[1, 1, 139] = v[1, 1, 139] = 0.0
    assert_same(hidden, attend(q, k, v, mask=masks.padding(valid), precision=FP8("tensor")))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-45, -1e-40, 50.0])
def test_any_scale(scale: float) -> None:
    q, k, v = qkv(33, 140)
    found = attend(q, k, v, scale=scale)
    inputs = inputs_of(Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=33, seqlen_k=140, head_dim=16, scale=scale))
    fp8_eager.assert_as_accurate(found, replace(inputs, q=q, k=k, v=v), FP8())
