"""Codes and scales of q, k and v: bit for bit those of the definition, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedattn import FP8, QKNorm, Rope, attention_varlen, masks
from fusedattn.kernels import attention_fwd, fp8, fp8_codes, launcher
from fusedattn.low_precision import E4M3, by_block, by_tensor, quantised, rotated
from tests.conftest import DEVICE, DTYPES, INTERPRETING, triton_attention
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.interpreted import interpreted

pytestmark = pytest.mark.usefixtures("poison", "_seed")

TOKENS = fp8.TOKENS.value
scales = pytest.mark.parametrize("scales", ["block", "tensor"])
BLOCKS = FP8()
Found = tuple[Tensor, Tensor, Tensor, fp8.CodeScales]


def codes_from(function: Callable[[], object]) -> Found:
    """What `function` quantises; nothing multiplies it."""
    found: list[Found] = []
    quantized = fp8_codes.quantized

    def seeing(*args: Any) -> Found:
        with checked_accesses() if INTERPRETING else nullcontext():
            found.append(quantized(*args))
        return found[0]

    launch = launcher.launch

    def skipping(constants: launcher.KernelConstants, *args: Any) -> None:
        if constants.kernel is not attention_fwd.attention_fwd:
            launch(constants, *args)

    with patch.object(fp8_codes, "quantized", seeing), patch.object(launcher, "launch", skipping):
        function()
    return found[0]


def of(q: Tensor, k: Tensor, v: Tensor, precision: FP8 = BLOCKS, **options: Any) -> Found:
    return codes_from(lambda: triton_attention(q, k, v, precision=precision, **options))


def numbers(codes: Tensor, scale: Tensor, n: int, *, transposed: bool = False) -> Tensor:
    """Codes of ``n`` tokens times their scales, float32 ``(batch, nheads, n, features)``."""
    x = codes.float()
    x = x.mT if transposed else x
    return (x * scale[..., : x.shape[2] // TOKENS].repeat_interleave(TOKENS, -1)[..., None])[:, :, :n]


def definition(x: Tensor, precision: FP8, *, of_v: bool = False) -> Tensor:
    x = x.float()
    if precision.rotate and not of_v:
        x = rotated(x)
    return quantised(x, by_block(E4M3, TOKENS) if precision.scales == "block" else by_tensor(E4M3))


def assert_numbers(found: Found, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """Bit for bit; features behind the last are 0, those of tokens behind the last too."""
    for codes, scale, x, is_v in zip(found[:3], found[3][:3], expected, (False, False, True), strict=True):
        n = x.shape[2]
        actual = numbers(codes, scale, n, transposed=is_v)
        torch.testing.assert_close(actual[..., : x.shape[3]], x, rtol=0, atol=0, equal_nan=True)
        assert not actual[..., x.shape[3] :].any()
        tokens = codes.mT if is_v else codes
        assert not tokens[:, :, n:].float().any()


def qkv(n: int = 130, m: int = 257, head_dim: int = 24, head_dim_v: int = 9, batch: int = 2, **options: Any) -> Any:
    """q, k and v, of 4 and 2 heads, whose tokens have many sizes."""
    shapes = (batch, 4, n, head_dim), (batch, 2, m, head_dim), (batch, 2, m, head_dim_v)
    return [torch.randn(s, device=DEVICE).mul(torch.randn(*s[:-1], 1, device=DEVICE).exp()).to(**options)
            for s in shapes]  # fmt: skip


@quick.covering()
@scales
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (8, 17), (32, 40), (40, 8), (65, 3), (256, 130)])
@pytest.mark.parametrize(("n", "m"), [(1, 257), (127, 128), (129, 1)])
def test_codes_are_those_of_the_definition(
    n: int, m: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, rotate: bool, scales: Any
) -> None:
    precision = FP8(scales, rotate=rotate)
    q, k, v = qkv(n, m, head_dim, head_dim_v, batch=1, dtype=dtype)
    found = of(q, k, v, precision)
    assert found[0].dtype == torch.float8_e4m3fn
    width = max(32, 1 << (head_dim - 1).bit_length())
    assert found[0].shape == (1, 4, -(-n // TOKENS) * TOKENS, width)
    assert found[1].shape == (1, 2, -(-m // TOKENS) * TOKENS, width)
    assert found[2].shape == (1, 2, head_dim_v, -(-m // TOKENS) * TOKENS)
    assert_numbers(found, (*(definition(x, precision) for x in (q, k)), definition(v, precision, of_v=True)))
    for scale, x in zip(found[3][:3], (q, k, v), strict=True):
        blocks = scale[..., : -(-x.shape[2] // TOKENS)]
        if scales == "tensor":
            assert (blocks == blocks.flatten()[0]).all()
        elif not rotate:
            assert blocks[0, 1, 0] == x[0, 1, :TOKENS].float().abs().max() / 448
    assert (found[3].n_q, found[3].n_k) == tuple(x.shape[2] for x in found[3][:2])


@scales
@pytest.mark.parametrize("across_heads", [False, True])
def test_what_is_done_before(scales: Any, across_heads: bool) -> None:
    """A norm and a rotation by positions, in float32; but for the last bit of what they give, and hence of a code."""
    q, k, v = qkv(batch=1)
    norm = QKNorm(torch.rand(4, 24, device=DEVICE), torch.rand(24, device=DEVICE), across_heads=across_heads)
    rope = Rope.from_theta(24, 300, device=DEVICE)
    precision = FP8(scales)
    found = of(q, k, v, precision, qk_norm=norm, rope=rope)
    ready = rope.rotate(*norm.apply(q, k))
    for codes, scale, x in zip(found[:2], found[3][:2], ready, strict=True):
        expected = definition(x, precision)
        actual = numbers(codes, scale, x.shape[2])[..., :24]
        torch.testing.assert_close(actual, expected, rtol=2**-3 + 1e-6, atol=1e-3 * float(x.abs().max()))
        assert torch.isclose(actual, expected, rtol=1e-6, atol=1e-7).double().mean() > 0.999
    torch.testing.assert_close(numbers(found[2], found[3][2], 257, transposed=True), definition(v, precision),
                               rtol=0, atol=0)  # fmt: skip


@scales
@pytest.mark.parametrize("rotate", [False, True])
def test_numbers_that_are_not_finite(scales: Any, rotate: bool) -> None:
    """They are NaN, and in no scale. A block of them, or of zeros, has the scale 0."""
    q, k, v = qkv(140, 140)
    for x in (q, k, v):
        x[0, 1, 7, 0], x[1, 0, 3, 0], x[1, 1, 99, 0] = math.nan, math.inf, -math.inf
        x[0, 0, :128] = math.nan
        x[1, 1, 128:] = 0.0
    precision = FP8(scales, rotate=rotate)
    found = of(q, k, v, precision)
    assert_numbers(found, (*(definition(x, precision) for x in (q, k)), definition(v, precision, of_v=True)))
    if scales == "block":
        for scale in found[3][:3]:
            assert scale[0, 0, 0] == 0.0
            assert scale[1, 1, 1] == 0.0
    assert all(scale[..., :2].isfinite().all() for scale in found[3][:3])


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 4e-36, 5.3e-36, 1e-38, 1e-42, 0.0])
def test_sizes(size: float) -> None:
    """A scale below the smallest normal number counts as 0."""
    q, k, v = (x / x.abs().max() * size for x in qkv(3, 5))
    found = of(q, k, v)
    for codes, scale, x, is_v in zip(found[:3], found[3][:3], (q, k, v), (False, False, True), strict=True):
        used = scale[..., 0]
        largest = x.abs().amax((2, 3)) / 448
        assert torch.equal(used, torch.where(largest < 2.0**-126, 0.0, largest))
        actual = numbers(codes, scale, x.shape[2], transposed=is_v)[..., : x.shape[3]]
        expected = torch.where(used[..., None, None] > 0, definition(x, FP8()), 0.0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@scales
@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_what_padding_hides_is_zero(side: str, scales: Any) -> None:
    """And in no scale; queries stay."""
    q, k, v = qkv(20, 300)
    keys = torch.arange(300, device=DEVICE)
    valid = {"right": keys < 200, "left": keys >= 131, "holes": torch.rand(300, device=DEVICE) < 0.5}[side]
    valid = torch.stack((valid, keys < 0 if side == "left" else keys >= 0))
    hidden = ~valid[:, None, :, None]
    found = of(
        *(q, k.masked_fill(hidden, 1e9), v.masked_fill(hidden, math.nan)), FP8(scales), mask=masks.padding(valid)
    )
    shown = (q, k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0))
    assert_numbers(found, tuple(definition(x, FP8(scales)) for x in shown))  # type: ignore[arg-type]


@scales
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((0, 1, 127), (128, 0, 130)), ((129, 3), (1, 257))])
def test_packed_sequences_begin_with_blocks_of_their_own(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], scales: Any
) -> None:
    """After as many blocks as its first token and its number say; tokens behind the last sequence are in no scale."""
    n, m, behind = sum(lengths_q), sum(lengths_k), 4
    q, k, v = (x[0].transpose(0, 1) for x in qkv(n + behind, m + behind, batch=1))
    for x in (q, k, v):
        x[-behind:] = 1e6
    ends_q, ends_k = (torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in (lengths_q, lengths_k))
    longest = max(lengths_q), max(lengths_k)
    options: Any = {"precision": FP8(scales), "backend": "triton"}
    found = codes_from(lambda: attention_varlen(q, k, v, ends_q, ends_k, *longest, **options))
    sides = zip(found[:3], found[3][:3], (q, k, v), (ends_q, ends_k, ends_k), (False, False, True), strict=True)
    for codes, scale, x, ends, is_v in sides:
        n_blocks = x.shape[0] // TOKENS + len(lengths_q)
        assert codes.shape[3 if is_v else 2] == n_blocks * TOKENS
        tokens = (codes.mT if is_v else codes).float()
        whole = quantised(x[: int(ends[-1])].transpose(0, 1)[None].float(), by_tensor(E4M3))
        for i, (start, stop) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            first = start // TOKENS + i
            part = x[start:stop].transpose(0, 1)[None].float()
            length = stop - start
            used = scale[..., first : first + -(-length // TOKENS)]
            block = tokens[:, :, first * TOKENS :][:, :, : used.shape[2] * TOKENS]
            actual = block * used.repeat_interleave(TOKENS, -1)[..., None]
            expected = definition(part, FP8()) if scales == "block" else whole[:, :, start:stop]
            torch.testing.assert_close(actual[:, :, :length, : x.shape[2]], expected, rtol=0, atol=0)
            assert not actual[:, :, length:].any()


def test_no_code_outside_its_blocks_is_written() -> None:
    """Neither by sequences shorter than the longest nor by one that is empty: its block stays as it was."""
    q, k, v = (x[0].transpose(0, 1) for x in qkv(140, 140, batch=1))
    ends = torch.tensor([0, 3, 3, 133], dtype=torch.int32, device=DEVICE)
    codes_q, codes_k, codes_v, scale = codes_from(
        lambda: attention_varlen(q, k, v, ends, ends, 130, 130, precision=FP8(), backend="triton")
    )
    written = torch.tensor([True, False, True, True], device=DEVICE)
    for codes in (codes_q, codes_k, codes_v.mT):
        blocks = codes.float().unflatten(2, (-1, TOKENS)).isfinite()
        assert torch.equal(blocks, written[:, None, None].expand(blocks.shape))
    for x in scale[:3]:
        assert torch.equal(x[0, 0].isfinite(), torch.nn.functional.pad(written, (0, 12)))


@interpreted
def test_rows_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of values of so many tokens that int32 does not reach the last feature."""
    q, k, v = qkv(3, 40, head_dim_v=20, batch=1)
    expected = triton_attention(q, k[:, :1], v[:, :1], precision=FP8())
    scratch, row = fp8_codes.scratch, 2**27
    memory = torch.from_numpy(np.empty(20 * row, dtype=np.uint8)).view(torch.float8_e4m3fn)  # of which little is used

    def spread(x: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
        if shape[2] != 20:
            return scratch(x, shape, dtype)
        return memory.as_strided(shape, (20 * row, 20 * row, row, 1))

    monkeypatch.setattr(fp8_codes, "scratch", spread)
    assert torch.equal(triton_attention(q, k[:, :1], v[:, :1], precision=FP8()), expected)


def test_codes_do_not_depend_on_strides() -> None:
    q, k, v = qkv(batch=1)
    moved = [torch.cat((x, x), -1)[..., : x.shape[3]] for x in (q, k, v)]
    moved[1] = k.transpose(1, 2).contiguous().transpose(1, 2)
    first, second = of(q, k, v), of(*moved)
    for x, y in zip(first[:3], second[:3], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of a tensor of more blocks than one step of the reduction takes, whose first number is the largest."""
    monkeypatch.setattr(
        fp8_codes, "_REDUCTION", launcher.KernelConstants(fp8_codes.largest_of_all, BLOCK=2, num_warps=4)
    )
    q, k, v = qkv(3, 300)
    k[0, 0, 0, 0] = v[0, 0, 0, 0] = 50.0
    found = of(q, k, v, FP8("tensor"))
    assert_numbers(found, tuple(definition(x, FP8("tensor")) for x in (q, k, v)))  # type: ignore[arg-type]


def test_tokens_beyond_the_tables_of_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody reads positions before: a row without one is NaN, but not if padding hides it."""
    q, k, v = qkv(3, 40, batch=1)
    positions = torch.arange(40, device=DEVICE)
    valid, rope = (positions < 30)[None], Rope.from_theta(24, 40, device=DEVICE)
    expected = of(q, k, v, rope=rope.at(positions[:3], positions), mask=masks.padding(valid))
    monkeypatch.setattr(Rope, "check_positions", lambda self: None)
    outside = torch.where(positions < 30, positions, 1000 + positions)
    found = of(q, k, v, rope=rope.at(positions[:3], outside), mask=masks.padding(valid))
    assert torch.equal(found[1].view(torch.uint8), expected[1].view(torch.uint8))
    shown = of(q, k, v, rope=rope.at(positions[:3], outside))
    assert shown[1][:, :, 30:40, :24].float().isnan().all()


@interpreted
@pytest.mark.parametrize("size", [96, 256])
def test_no_memory_behind_the_codes_is_read(size: int) -> None:
    """By blocks of a mask that reach further."""
    q, k, v = (torch.randn(1, 1, n, 8) for n in (3, 100, 100))
    blocks = torch.ones(1, 1, 1, -(-100 // size), dtype=torch.bool)
    with checked_accesses():
        triton_attention(q, k, v, mask=masks.block_sparse(blocks, (16, size)), precision=FP8())
