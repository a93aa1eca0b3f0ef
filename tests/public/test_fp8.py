"""Attention of e4m3 codes: equal to its steps in eager PyTorch, and as accurate as its definition."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import FP8, Rope, attention, attention_varlen, low_precision, masks, testing
from fusedattn.masks import Mask
from fusedattn.testing import CASES, Case
from tests.conftest import DEVICE, DTYPES, INTERPRETING, inputs_of, triton_attention
from tests.helpers import fp8_eager, quick
from tests.helpers.interpreted import interpreted

pytestmark = pytest.mark.usefixtures("poison", "_seed")

PRECISIONS = {
    "block": FP8(),
    "tensor": FP8("tensor"),
    "block-rotated": FP8(rotate=True),
    "tensor-rotated": FP8("tensor", rotate=True),
}
precisions = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
PLAIN = Case("plain", batch=1, nheads_q=2, nheads_kv=1, seqlen_q=133, seqlen_k=170, causal="bottom_right")
SMALL = replace(PLAIN, seqlen_q=20, seqlen_k=140)
EXACT = (
    PLAIN,
    replace(SMALL, name="full", batch=2, causal=None, seqlen_q=5, seqlen_k=128),
    replace(SMALL, name="top-left", causal="top_left", nheads_q=4, nheads_kv=2, seqlen_q=50, seqlen_k=40),
    replace(SMALL, name="window", window=(50, 10), seqlen_q=70),
    replace(SMALL, name="window over a block", window=(129, 0), seqlen_q=40, seqlen_k=260),
    replace(SMALL, name="left padding", batch=2, padding="left"),
    replace(SMALL, name="right padding, one batch empty", batch=2, padding="right", causal=None, empty_batch=True),
    replace(SMALL, name="uneven padding", batch=2, padding="uneven", causal=None),
    replace(SMALL, name="boolean", boolean="full", causal=None),
    replace(SMALL, name="scale", scale=2.0),
    replace(SMALL, name="negative scale", scale=-0.4),
    replace(SMALL, name="one query", seqlen_q=1, seqlen_k=257),
    replace(SMALL, name="one key", seqlen_q=33, seqlen_k=1, causal=None),
    replace(SMALL, name="1", head_dim=1, head_dim_v=8),
    replace(SMALL, name="8", head_dim=8, head_dim_v=1),
    replace(SMALL, name="40", head_dim=40, head_dim_v=64),
    replace(SMALL, name="64", head_dim=64, head_dim_v=40),
    replace(SMALL, name="80", head_dim=80, head_dim_v=128),
    replace(SMALL, name="128", head_dim=128, head_dim_v=80),
    replace(SMALL, name="256", head_dim=256, head_dim_v=24),
    replace(SMALL, name="24, 256", head_dim=24, head_dim_v=256),
)
PREPARED = (
    replace(SMALL, name="RoPE", rope="half"),
    replace(SMALL, name="RoPE, interleaved, of 24", rope="interleaved", rotary_dim=24, head_dim=40),
    replace(SMALL, name="RoPE of 8", rope="half", head_dim=8, rope_tables="per_batch", rope_positions=True),
    replace(SMALL, name="norm", qk_norm="shared", rope="half", seqlen_q=33),
    replace(SMALL, name="norm per head", qk_norm="per_head", nheads_q=4, nheads_kv=2),
    replace(SMALL, name="norm of length", qk_norm="scale", scale=3.0),
    replace(SMALL, name="norm across heads", qk_norm="across_heads", nheads_kv=2, rope="interleaved", head_dim=20),
)


def fp8_attention(*x: Tensor, precision: FP8 = PRECISIONS["block"], **options: Any) -> Any:
    return triton_attention(*x, precision=precision, **options)


def results(inputs: testing.Inputs, precision: FP8) -> tuple[Tensor, Tensor]:
    x = inputs.q, inputs.k, inputs.v
    return fp8_attention(*x, **inputs.options, precision=precision, return_lse=True)


def with_outliers(inputs: testing.Inputs) -> testing.Inputs:
    """Some numbers of q, k and v are larger, so that scales of blocks and heads differ."""
    drawn = {name: x * torch.where(torch.rand_like(x.float()) < 0.01, 4.0, 1.0).to(x) for name, x in
             (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))}  # fmt: skip
    return inputs.with_leaves(drawn)


@interpreted
@quick.covering()
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@precisions
def test_equals_its_steps(case: Case, dtype: torch.dtype, precision: FP8) -> None:
    """Tile by tile, each weight rounded to the same code."""
    inputs = with_outliers(inputs_of(replace(case, dtype=dtype)))
    out, lse = results(inputs, precision)
    expected, expected_lse = fp8_eager.as_kernels(inputs, precision)
    unit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=unit, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@interpreted
@quick.covering()
@pytest.mark.parametrize("case", PREPARED, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@precisions
def test_equals_its_steps_after_a_norm_and_a_rotation(case: Case, dtype: torch.dtype, precision: FP8) -> None:
    """They are computed in another order: of a few numbers, or weights of their rows, the code is the next one."""
    inputs = inputs_of(replace(case, dtype=dtype))
    out, lse = results(inputs, precision)
    expected, expected_lse = fp8_eager.as_kernels(inputs, precision)
    unit = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    error = (out.double() - expected).abs().amax(-1)
    assert error.max() < 0.05
    assert (error > unit * expected.abs().amax(-1).clamp(min=1.0)).double().mean() < 0.03
    assert ((lse.double() - expected_lse).abs() > 1e-5).double().mean() < 0.03


@quick.every(2)
@precisions
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=["full", "causal"])
def test_the_definition_with_all_features_is_the_one_that_is_documented(precision: FP8, mask: Mask) -> None:
    inputs = replace(inputs_of(replace(PLAIN, seqlen_q=170, causal=None)), mask=mask)
    recipe = low_precision.RECIPES["fp8, blocks" if precision.scales == "block" else "fp8, tensor"]
    recipe = replace(recipe, rotate=precision.rotate)
    expected = low_precision.attention(inputs.q, inputs.k, inputs.v, recipe, mask=mask)
    torch.testing.assert_close(fp8_eager.defined(inputs, precision), expected, rtol=1e-4, atol=1e-4)


def of_codes(case: Case) -> Case:
    """The case with blocks that codes can have."""
    return replace(case, layout=case.layout and 32)


FEATURES = tuple(of_codes(c) for c in CASES)


@quick.every(16)
@pytest.mark.parametrize("case", FEATURES, ids=lambda c: c.name)
@pytest.mark.parametrize("precision", [FP8(), FP8("tensor", rotate=True)], ids=["block", "tensor-rotated"])
def test_every_feature_is_as_accurate_as_the_definition(case: Case, precision: FP8) -> None:
    inputs = inputs_of(case)
    fp8_eager.assert_as_accurate(results(inputs, precision), inputs, precision, case)


def shown(n_q: int, n_k: int) -> Tensor:
    return torch.rand(1, 2, n_q, n_k, generator=torch.Generator().manual_seed(3)).lt(0.6).to(DEVICE)


def blocks(size: int | tuple[int, int]) -> Mask:
    block_q, block_k = (size, size) if isinstance(size, int) else size
    return masks.block_sparse(shown(-(-133 // block_q), -(-170 // block_k)), (block_q, block_k))


SCORES = torch.rand(1, 1, 5, 6, generator=torch.Generator().manual_seed(1))
MASKS = {
    "causal, top-left": masks.causal("top_left"),
    "window": masks.window(60, 20),
    "prefix": masks.prefix_lm(torch.tensor([90])),
    "blocks of 32": blocks(32),
    "blocks of 64": blocks(64),
    "blocks of 96": blocks(96),
    "blocks of 128": blocks(128),
    "blocks of 160": blocks(160),
    "blocks of 48 queries, 256 keys": blocks((48, 256)),
    "blocks of 16 queries, 96 keys, causal": blocks((16, 96)) & masks.causal(),
    "strided": masks.strided(12, causal=False),
    "fixed": masks.fixed(20, 3),
    "dilated": masks.dilated(30, 3, 4, global_tokens=2),
    "BigBird": masks.bigbird(32, n_random=1),
    "selected blocks of 16": masks.top_blocks(
        SCORES.repeat_interleave(2, 2).repeat_interleave(2, 3)[..., :9, :11], 5, 16
    ),
    "selected blocks": masks.top_blocks(SCORES, 2, (32, 32)),
    "tree": masks.tree(torch.ones(133, 133, dtype=torch.bool).tril()),
}


@quick.only(
    precision=FP8(),
    name=lambda x: x in ("window", "blocks of 160", "dilated", "BigBird", "tree", "prefix", "selected blocks of 16"),
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("precision", [FP8(), FP8("tensor")], ids=["block", "tensor"])
def test_masks_of_several_blocks(name: str, precision: FP8) -> None:
    """More tokens than share a scale; the last block of keys reaches behind the last."""
    case = replace(PLAIN, causal=None, head_dim=8)
    inputs = with_outliers(replace(inputs_of(case), mask=MASKS[name].to(DEVICE)))
    fp8_eager.assert_as_accurate(results(inputs, precision), inputs, precision, name)


@quick.every(14, size=256)
@pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("n", [1, 65, 97, 128, 129, 161, 257])
def test_blocks_that_reach_behind_the_last_key(n: int, size: int) -> None:
    """There are no codes: what stands behind them has no effect."""
    q, k, v = torch.randn(1, 1, 3, 8, device=DEVICE), *torch.randn(2, 1, 1, n, 8, device=DEVICE)
    visible = torch.ones(1, 1, 1, -(-n // size), dtype=torch.bool, device=DEVICE)
    found = fp8_attention(q, k, v, mask=masks.block_sparse(visible, (16, size)))
    torch.testing.assert_close(found, fp8_attention(q, k, v), rtol=1e-5, atol=1e-6)
    x = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE), torch.tensor([0, 0, n], dtype=torch.int32)
    options: Any = {"mask": masks.block_sparse(visible.expand(2, -1, -1, -1), (16, size)), "backend": "triton"}
    packed = attention_varlen(*x, ends[0], ends[1].to(DEVICE), 2, n, **options, precision=FP8())
    assert torch.equal(packed[0], torch.zeros_like(packed[0]))
    torch.testing.assert_close(packed[1:], fp8_attention(q[:, :, 1:], k, v)[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_dropout_keeps_the_same_weights() -> None:
    inputs = inputs_of(replace(SMALL, dropout_p=0.4))
    fp8_eager.assert_as_accurate(results(inputs, FP8()), inputs, FP8())


@precisions
def test_the_largest_scores(precision: FP8) -> None:
    """Those of the codes."""
    inputs = with_outliers(inputs_of(SMALL))
    _, largest = fp8_attention(inputs.q, inputs.k, inputs.v, **inputs.options, precision=precision, return_max=True)
    q, k, _ = fp8_eager.prepared(inputs, precision)
    (q, q_scale), (k, k_scale) = (fp8_eager.codes_of(x, precision) for x in (q, k))
    scores = (q * q_scale[..., None]) @ (k * k_scale[..., None]).mT * 32**-0.5
    expected = scores.masked_fill(~inputs.visible(), -torch.inf).amax(-1)
    torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-5)


LENGTHS = (0, 1, 127, 128, 129, 300)


@quick.only(precision=FP8(), behind=5)
@pytest.mark.parametrize("behind", [0, 5])
@pytest.mark.parametrize("precision", [FP8(), FP8(rotate=True)], ids=["block", "rotated"])
def test_packed_sequences(precision: FP8, behind: int) -> None:
    """Each bit for bit as if it were alone."""
    total = sum(LENGTHS) + behind
    q, k, v = torch.randn(3, total, 1, 16, device=DEVICE)
    ends = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).int()
    rope = Rope.from_theta(16, 300, device=DEVICE)
    options: Any = {"mask": masks.causal(), "rope": rope, "precision": precision, "backend": "triton"}
    q[total - behind :], k[total - behind :], v[total - behind :] = torch.nan, 1e30, torch.inf
    out, lse = attention_varlen(q, k, v, ends, ends, 300, 300, **options, return_lse=True)
    for i, j in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        alone = attention(*(x[None, i:j].transpose(1, 2) for x in (q, k, v)), **options, return_lse=True)
        assert torch.equal(out[i:j], alone[0][0].transpose(0, 1))
        assert torch.equal(lse[:, i:j], alone[1][0])
    assert not out[total - behind :].any()


@quick.every(3)
@precisions
def test_packed_sequences_are_as_accurate(precision: FP8) -> None:
    """A scale for all tokens of all sequences too; keys of other lengths, which padding hides in part."""
    lengths_q, lengths_k = (33, 0, 5), (130, 7, 20)
    x = torch.randn(38, 2, 16, device=DEVICE), *torch.randn(2, 157, 1, 16, device=DEVICE)
    ends_q, ends_k = (torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in (lengths_q, lengths_k))
    valid = torch.rand(1, 157, device=DEVICE) < 0.7
    options: Any = {"backend": "triton", "precision": precision}
    found = attention_varlen(*x, ends_q, ends_k, 33, 130, mask=masks.padding(valid), **options)
    whole = torch.zeros(38, 157, dtype=torch.bool, device=DEVICE)
    for i, j, n, m in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        whole[i:j, n:m] = True
    inputs = inputs_of(replace(SMALL, seqlen_q=38, seqlen_k=157, head_dim=16))
    q, k, v = (y.transpose(0, 1)[None] for y in x)
    inputs = replace(inputs, q=q, k=k, v=v, mask=masks.boolean(whole) & masks.padding(valid))
    expected, _ = fp8_eager.defined(inputs, precision)
    torch.testing.assert_close(found.transpose(0, 1)[None], expected, rtol=0, atol=0.15)
    truth = testing.golden(inputs)["out"]
    assert (found.transpose(0, 1)[None] - truth).abs().mean() < 1.1 * (expected - truth).abs().mean() + 1e-6


def test_nested_tensors() -> None:
    parts = [torch.randn(n, 2, 16, device=DEVICE) for n in (3, 41)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = fp8_attention(x, x, x, mask=masks.causal())
    for part, found in zip(parts, out.transpose(1, 2).unbind(), strict=True):
        y = part.transpose(0, 1)[None]
        assert torch.equal(found, fp8_attention(y, y, y, mask=masks.causal())[0].transpose(0, 1))


@pytest.mark.parametrize("precision", [FP8(), FP8("tensor", rotate=True)], ids=["block", "tensor-rotated"])
def test_compiled(precision: FP8) -> None:
    """One graph, with q, k and v that a caller's code computes."""
    torch.compiler.reset()
    x = torch.randn(3, 1, 2, 40, 16, device=DEVICE)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_attention(q * 2, k, v, mask=masks.causal(), precision=precision, return_lse=True)

    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*x)
    torch.testing.assert_close(found, function(*x), rtol=0, atol=0)


def test_vmap_inference_mode_and_autocast() -> None:
    q, k, v = torch.randn(3, 2, 1, 2, 33, 16, device=DEVICE)
    expected = torch.stack([fp8_attention(*x) for x in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(fp8_attention)(q, k, v), expected)
    shared = torch.func.vmap(functools.partial(fp8_attention, q[0]))(k, v)
    assert torch.equal(shared[0], expected[0])
    with torch.inference_mode():
        assert torch.equal(fp8_attention(q[0], k[0], v[0]), expected[0])
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = fp8_attention(q[0], k[0], v[0])
    assert torch.equal(cast, fp8_attention(*(x[0].bfloat16() for x in (q, k, v))))


@interpreted
def test_one_launch_for_each_operand_and_three_for_a_tensor() -> None:
    """The scale of a tensor takes a pass over it, and a sum of what its programs found."""
    from tests.helpers.interpreted import seen_launches

    inputs = inputs_of(replace(SMALL, qk_norm="across_heads", rope="half"))
    for precision, n in ((FP8(), 1), (FP8("tensor"), 2)):
        with seen_launches() as launches:
            results(inputs, precision)
        names = [kernel for kernel, _ in launches]
        assert (names.count("quantize_fp8"), names.count("largest_of_all")) == (3 * n, 3 * (n - 1))
        assert (names.count("qk_norm_rows"), names.count("attention_fwd"), names.count("qk_prologue")) == (2, 1, 0)


@quick.only(precision=FP8())
@precisions
def test_the_result_repeats(precision: FP8) -> None:
    inputs = inputs_of(replace(SMALL, dtype=torch.bfloat16))
    first, again = results(inputs, precision), results(inputs, precision)
    assert all(map(torch.equal, first, again))
    assert INTERPRETING or first[0].is_cuda
