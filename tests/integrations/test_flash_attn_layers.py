"""The rotation of flash_attn's layers, and its packing and unpacking of padded tensors."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from fusedattn.integrations.flash_attn.layers import rotary
from fusedattn.integrations.flash_attn.layers.rotary import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from tests.conftest import DEVICE
from tests.helpers.flash_attn_truth import NoWait, rotate

pytestmark = pytest.mark.usefixtures("_seed")

ROWS, HALF = 20, 3
EXACT = {"device": DEVICE, "dtype": torch.float64}


def tables(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    cos, sin = torch.randn(2, ROWS, HALF, device=DEVICE).to(dtype)
    return cos, sin


def int32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, device=DEVICE)


def assert_same_with_gradients(actual: Any, truth: Any, *leaves: Tensor) -> None:
    found = []
    for function in (actual, truth):
        own = [x.detach().clone().requires_grad_() for x in leaves]
        out = function(*own)
        dout = torch.linspace(-1, 1, out.numel(), device=DEVICE, dtype=out.dtype).view(out.shape)
        found.append((out.detach(), torch.autograd.grad(out, own, dout)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("offsets", [0, 7, [3, 13]], ids=str)
def test_rotation(offsets, inplace, interleaved):
    cos, sin = tables()
    starts = int32(offsets) if isinstance(offsets, list) else offsets
    positions = torch.tensor(offsets, device=DEVICE).expand(2)[:, None] + torch.arange(7, device=DEVICE)

    def ours(x: Tensor) -> Tensor:
        x = x * 1.0  # not a leaf, which torch would refuse to change
        out = apply_rotary_emb(x, cos, sin, interleaved, inplace, starts)
        assert (out is x) == inplace
        return out

    assert_same_with_gradients(
        ours, lambda x: rotate(x, cos, sin, positions, interleaved), torch.randn(2, 7, 3, 8, **EXACT)
    )


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("offsets", [2, [3, 9, 0, 11]], ids=str)
def test_rotation_of_packed_sequences(offsets, inplace):
    """Tokens after the last sequence stay unchanged."""
    cos, sin = tables()
    starts = int32(offsets) if isinstance(offsets, list) else offsets
    shifts = torch.tensor(offsets).expand(4)
    positions = torch.cat([torch.arange(n) + s for n, s in zip((4, 0, 6, 1), shifts, strict=True)]).to(DEVICE)

    def ours(x: Tensor) -> Tensor:
        return apply_rotary_emb(x * 1.0, cos, sin, False, inplace, starts, int32([0, 4, 4, 10, 11]), 6)

    def truth(x: Tensor) -> Tensor:
        return torch.cat((rotate(x[:11], cos, sin, positions, False), x[11:]))

    assert_same_with_gradients(ours, truth, torch.randn(13, 3, 8, **EXACT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rotation_is_rounded_once(dtype):
    """Computed in float32 from tables of any dtype."""
    cos, sin = tables(dtype)
    x = torch.randn(2, 7, 3, 8, device=DEVICE, dtype=dtype)
    found = apply_rotary_emb(x, cos, sin, interleaved=True)
    exact = rotate(x.double(), cos, sin, torch.arange(7, device=DEVICE).expand(2, -1), True)
    assert found.dtype == dtype
    assert found.is_contiguous()
    unit = torch.finfo(dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps
    assert ((found.double() - exact).abs() <= unit).all()
    assert torch.equal(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("own_tables", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_rotation_of_stacked_tensors_in_place(grouped, own_tables):
    cos, sin = tables()
    cos_k, sin_k = tables() if own_tables else (cos, sin)
    positions = (torch.arange(5, device=DEVICE) + 2).expand(2, -1)
    options: dict[str, Any] = {"interleaved": True, "seqlen_offsets": 2, "num_heads_q": 4 if grouped else None}
    if own_tables:
        options |= {"cos_k": cos_k, "sin_k": sin_k}

    def ours(x: Tensor) -> Tensor:
        x = x * 1.0
        out = apply_rotary_emb_qkv_(x, cos, sin, **options)
        assert out is x
        return out

    def truth(x: Tensor) -> Tensor:
        q, k, v = x.split([4, 1, 1], 2) if grouped else x.unbind(2)
        parts = (rotate(q, cos, sin, positions, True), rotate(k, cos_k, sin_k, positions, True), v)
        return torch.cat(parts, 2) if grouped else torch.stack(parts, 2)

    shape = (2, 5, 6, 8) if grouped else (2, 5, 3, 2, 8)
    assert_same_with_gradients(ours, truth, torch.randn(shape, **EXACT))


def test_rotation_of_keys_in_place():
    cos, sin = tables()
    offsets = int32([1, 6])
    positions = offsets[:, None] + torch.arange(5, device=DEVICE)

    def truth(x: Tensor) -> Tensor:
        return torch.stack((rotate(x[:, :, 0], cos, sin, positions, False), x[:, :, 1]), 2)

    assert_same_with_gradients(
        lambda x: apply_rotary_emb_kv_(x * 1.0, cos, sin, False, offsets), truth, torch.randn(2, 5, 2, 2, 8, **EXACT)
    )


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (functools.partial(apply_rotary_emb, inplace=True), (2, 7, 3, 8)),
        (apply_rotary_emb_qkv_, (2, 7, 3, 4, 8)),
        (functools.partial(apply_rotary_emb_qkv_, num_heads_q=4), (2, 7, 8, 8)),
        (apply_rotary_emb_kv_, (2, 7, 2, 4, 8)),
    ],
    ids=["x", "qkv", "grouped qkv", "kv"],
)
def test_a_leaf_is_changed_in_place(function, shape):
    """Its gradient is that of the values before the change."""
    cos, sin = tables()
    x = torch.randn(shape, **EXACT, requires_grad=True)
    before = x.detach().clone().requires_grad_()
    dout = torch.randn(shape, **EXACT)
    expected = function(before * 1.0, cos, sin)
    out = function(x, cos, sin)
    assert out.data_ptr() == x.data_ptr()
    assert torch.equal(x, expected)
    assert torch.equal(out, expected)
    (out * dout).sum().backward()
    (expected * dout).sum().backward()
    torch.testing.assert_close(x.grad, before.grad, rtol=0, atol=0)


def test_a_tensor_without_gradient_is_rotated_in_place_by_tables_with_one():
    """It then requires a gradient, as after torch's own in-place functions."""
    cos, sin = (table.clone().requires_grad_() for table in tables())
    x = torch.randn(2, 7, 3, 8, **EXACT)
    with torch.no_grad():
        expected = apply_rotary_emb(x, cos, sin)
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    assert torch.equal(x, expected)
    assert x.requires_grad


def test_a_leaf_is_not_changed_in_place_where_a_gradient_needs_it():
    """The gradients of the tables read it."""
    cos, sin = (table.requires_grad_() for table in tables())
    x = torch.randn(2, 7, 3, 8, **EXACT, requires_grad=True)
    out = apply_rotary_emb(x, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


COS = torch.zeros(6, 4, device=DEVICE)
X = torch.ones(2, 5, 3, 8, device=DEVICE)
CU = int32([0, 2, 5])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: apply_rotary_emb(X[0], COS, COS), ValueError, r"x: got shape \(5, 3, 8\)"),
        (lambda: apply_rotary_emb(X, COS, COS[:5]), ValueError, "cos, sin: got shapes"),
        (lambda: apply_rotary_emb(X[..., :6], COS, COS), ValueError, "rotary_dim of at most head_dim = 6"),
        (lambda: apply_rotary_emb(X, COS.int(), COS), TypeError, "cos: got torch.int32"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=2), ValueError, "seqlen_offsets: got 2 for sequences of"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=-1), ValueError, "seqlen_offsets: got -1"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=CU), ValueError, r"seqlen_offsets: got shape \(3,\)"),
        (lambda: apply_rotary_emb(X, COS, COS, seqlen_offsets=COS[0]), TypeError, "seqlen_offsets: got torch.float32"),
        (lambda: apply_rotary_emb(X[0], COS, COS, cu_seqlens=CU), ValueError, "cu_seqlens, max_seqlen: got .* None"),
        (lambda: apply_rotary_emb(X, COS, COS, cu_seqlens=CU, max_seqlen=3), ValueError, "x: got shape"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS), ValueError, "num_heads_q: got None"),
        (lambda: apply_rotary_emb_qkv_(X, COS, COS, num_heads_q=2), ValueError, "num_heads_q: got 2"),
        (lambda: apply_rotary_emb_qkv_(X[:, None], COS, COS), ValueError, "qkv: got shape"),
        (lambda: apply_rotary_emb_kv_(X, COS, COS), ValueError, "kv: got shape"),
        (lambda: unpad_input(X, X[:, :, 0, 0][:, :4]), ValueError, r"attention_mask: got shape \(2, 4\)"),
        (lambda: unpad_input(X, X[:, :, 0, 0], X[:1, :, 0, 0]), ValueError, "unused_mask: got shape"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing waits to be checked")
def test_positions_outside_of_the_tables_are_refused_before_anything_is_written():
    x = torch.ones(2, 5, 3, 2, 8)
    with pytest.raises(ValueError, match=r"seqlen_offsets: got positions 0 \.\. 7, allowed are 0 \.\. 5"):
        apply_rotary_emb_qkv_(x, COS, COS, seqlen_offsets=int32([0, 3]))
    with pytest.raises(ValueError, match="cos, sin: got shapes"):
        apply_rotary_emb_qkv_(x, COS, COS, COS[:3])
    assert (x == 1).all()


def test_positions_outside_of_the_tables_are_nan_where_they_are_not_read(monkeypatch):
    """Tokens of no sequence still get their own gradient, whatever position an offset gives them."""
    monkeypatch.setattr(rotary, "can_read", lambda x: False)
    found = apply_rotary_emb(X, COS, COS, seqlen_offsets=int32([0, 3]))
    assert found[0].isfinite().all()
    assert found[1, :3].isfinite().all()
    assert found[1, 3:].isnan().all()
    x = X[0].clone().requires_grad_()
    out = apply_rotary_emb(x, COS, COS, seqlen_offsets=int32([0, 99]), cu_seqlens=int32([0, 2, 2]), max_seqlen=2)
    out.sum().backward()
    assert torch.equal(out[2:], x[2:])
    assert (x.grad[2:] == 1).all()


def test_nothing_waits(monkeypatch):
    monkeypatch.setattr(rotary, "can_read", lambda x: False)
    with NoWait():
        apply_rotary_emb(X, COS, COS, seqlen_offsets=int32([0, 1]))
        apply_rotary_emb(X[0], COS, COS, cu_seqlens=CU, max_seqlen=3, seqlen_offsets=int32([0, 1]))


MASKS = {
    "bool": torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool),
    "int": torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]),
    "numbers of documents": torch.tensor([[1, 1, 0, 2, 0], [0, 0, 0, 0, 0], [0, 1, 2, 2, 3]]),
    "all": torch.ones(3, 5, dtype=torch.int32),
    "none": torch.zeros(3, 5, dtype=torch.int64),
    "no rows": torch.ones(0, 5),
}


@pytest.mark.parametrize("features", [(), (4,), (2, 3)])
@pytest.mark.parametrize("name", MASKS)
def test_padding(name, features):
    mask = MASKS[name].to(DEVICE)
    x = torch.randn(*mask.shape, *features, **EXACT, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    lengths = mask.bool().sum(1).tolist()
    assert torch.equal(packed, x[mask.bool()])
    assert torch.equal(indices, mask.flatten().bool().nonzero()[:, 0])
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
    assert used.tolist() == lengths
    assert type(longest) is int
    assert longest == max(lengths, default=0)
    for index in (indices, indices.int()):
        padded = pad_input(packed, index, *mask.shape)
        assert padded.shape == x.shape
        factor = mask.bool().view(*mask.shape, *[1] * len(features))
        assert torch.equal(padded, x * factor)
    (dx,) = torch.autograd.grad((padded.sin() * 3).sum(), x)
    torch.testing.assert_close(dx, 3 * x.detach().cos() * factor)


def test_unused_tokens_are_packed_but_not_counted():
    mask, unused = MASKS["int"].to(DEVICE), torch.zeros(3, 5, device=DEVICE).bool()
    unused[0, 2], unused[1, 0], unused[2, 4] = True, True, True  # the last is in both masks
    packed, _, cu_seqlens, longest, used = unpad_input(torch.arange(15, device=DEVICE).view(3, 5), mask, unused)
    assert packed.tolist() == [0, 1, 2, 3, 5, 11, 12, 13, 14]
    assert cu_seqlens.tolist() == [0, 4, 5, 9]
    assert longest == 4
    assert used.tolist() == [3, 0, 4]


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 3, 0, 2, 0, 0], [6, 0, 0, 0, 0, 0]], device=DEVICE)
    x = torch.arange(18, device=DEVICE).view(3, 6)
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert packed.tolist() == indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6


def test_rows():
    """A row that is taken twice gets the sum of both gradients; flash_attn keeps only one."""
    index = torch.tensor([2, 0, 2], device=DEVICE)
    x = torch.randn(4, 2, 3, **EXACT)
    assert_same_with_gradients(lambda x: index_first_axis(x, index), lambda x: torch.stack((x[2], x[0], x[2])), x)

    def put(x: Tensor) -> Tensor:
        return torch.stack((x[0] * 0, x[1], x[0] * 0, x[0], x[0] * 0))

    assert_same_with_gradients(lambda x: index_put_first_axis(x, int32([3, 1]), 5), put, torch.randn(2, 3, **EXACT))
