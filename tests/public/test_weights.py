"""``attention_weights``: equal to the reference's weights, as a whole and in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusedattn import attention, attention_weights, reference
from fusedattn.testing import CASES, Case, make_inputs
from tests.conftest import BACKENDS, DEVICE, triton_attention

pytestmark = pytest.mark.usefixtures("_seed")

NOT_OF_WEIGHTS = ("sinks", "dropout_p", "dropout_seed")  # the reference's weights are before dropout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights(case: Case) -> None:
    inputs = make_inputs(replace(case, dtype=torch.float64))
    _, lse, expected = reference.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    options = {name: x for name, x in inputs.options.items() if name not in NOT_OF_WEIGHTS}
    torch.testing.assert_close(attention_weights(inputs.q, inputs.k, lse, **options), expected)
    rows, keys = torch.tensor([3, 0, 3, inputs.q.shape[2] - 1]), slice(1, None, 3)
    part = attention_weights(inputs.q, inputs.k, lse, rows=rows, keys=keys, **options)
    torch.testing.assert_close(part, expected[:, :, rows][:, :, :, keys])


def test_with_the_lse_of_the_kernels() -> None:
    inputs = make_inputs(replace(CASES[1], dtype=torch.bfloat16), DEVICE)
    out, lse = triton_attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, return_lse=True)
    weights = attention_weights(inputs.q, inputs.k, lse, mask=inputs.mask)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(lse), atol=1e-5, rtol=0)
    torch.testing.assert_close((weights @ inputs.v.float()).bfloat16(), out, atol=2e-2, rtol=2e-2)


def test_gradients() -> None:
    inputs = make_inputs(
        Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=3, seqlen_k=4, head_dim=4, dtype=torch.float64)
    )
    q, k = (x.requires_grad_() for x in (inputs.q, inputs.k))

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attention_weights(q, k, reference.attention(q, k, inputs.v)[1])

    assert torch.autograd.gradcheck(weights, (q, k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_hidden_scores_are_zero(backend) -> None:
    """For a row that sees nothing, and for a key whose scores would overflow the exponential or are NaN."""
    q, k = torch.randn(2, 1, 1, 4, 8, device=DEVICE).unbind()
    k[:, :, 3] = torch.tensor([1e30, torch.nan])[[0] * 7 + [1]].to(DEVICE)
    q, k = q.requires_grad_(), k.requires_grad_()
    visible = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], device=DEVICE).bool()
    v = torch.randn(1, 1, 4, 8, device=DEVICE)
    _, lse = attention(q, k, v, mask=visible, return_lse=True, backend=backend)
    weights = attention_weights(q, k, lse, mask=visible)
    assert weights[0, 0, 1].eq(0).all()
    dq, dk = torch.autograd.grad(weights.square().sum(), (q, k))
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    assert dq[0, 0, 1].eq(0).all()
    assert dk[0, 0, 3].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_minus_infinity_hide_as_the_mask_does(backend) -> None:
    """A bias of -inf hides one pair, and one row."""
    q, k, v = torch.randn(3, 1, 1, 3, 8, device=DEVICE).unbind()
    bias = torch.zeros(3, 3, device=DEVICE)
    bias[0, 1] = bias[1] = -torch.inf
    leaves = [x.requires_grad_() for x in (q, k)]
    _, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    weights = attention_weights(q, k, lse, bias=bias)
    assert weights[0, 0].eq(0).tolist() == [[False, True, False], [True] * 3, [False] * 3]
    torch.testing.assert_close(weights.sum(-1), torch.tensor([[[1.0, 0.0, 1.0]]], device=DEVICE))
    dq, dk = torch.autograd.grad(weights.square().sum(), leaves)
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    assert dq[0, 0, 1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [torch.finfo(torch.bfloat16).min, -1e10, -65504.0])
def test_rows_whose_scores_are_all_lowest(dtype, lowest) -> None:
    """The precision of their lse is too low to hold the number of keys."""
    q, k, v = torch.randn(3, 1, 2, 9, 8, device=DEVICE, dtype=dtype).unbind()
    bias = torch.zeros(9, 9, device=DEVICE)
    bias[:3] = bias[5, :4] = lowest
    leaves = [x.requires_grad_() for x in (q, k)]
    out, lse = triton_attention(q, k, v, bias=bias, return_lse=True)
    weights = attention_weights(q, k, lse, bias=bias)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(lse), atol=1e-5, rtol=0)
    torch.testing.assert_close((weights @ v.float()).to(dtype), out, atol=2e-2, rtol=2e-2)
    assert all(x.isfinite().all() for x in torch.autograd.grad(weights.square().sum(), leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_add_up_to_one_in_16_bits(backend) -> None:
    """Also for large scores, and under autocast: the scores behind lse are not rounded."""
    q, k, v = (8 * torch.randn(3, 1, 2, 9, 32, device=DEVICE)).unbind()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out, lse = attention(q, k, v, return_lse=True, backend=backend)
        weights = attention_weights(q.bfloat16(), k.bfloat16(), lse)
    assert (out.dtype, lse.dtype, weights.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(lse), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_dropout(backend) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64 if DEVICE == "cpu" else None, device=DEVICE).unbind()
    options = {"dropout_p": 0.4, "dropout_seed": torch.tensor([7], device=DEVICE)}
    out, lse = attention(q, k, v, **options, return_lse=True, backend=backend)
    weights = attention_weights(q, k, lse, **options)
    torch.testing.assert_close(weights @ v, out)
    part = attention_weights(q, k, lse, **options, rows=slice(2, None, 3), keys=torch.tensor([8, 1], device=DEVICE))
    torch.testing.assert_close(part, weights[:, :, 2::3, [8, 1]])
    with pytest.raises(ValueError, match="dropout_seed: got None"):
        attention_weights(q, k, lse, dropout_p=0.4)


def test_another_lse_is_refused() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="lse: got shape"):
        attention_weights(q, q, torch.zeros(1, 2, 4))


def test_nothing_of_the_whole_size_is_written() -> None:
    """A million queries and keys, of which only a few weights are computed."""
    q = torch.randn(1, 1, 2**20, 4)
    weights = attention_weights(q, q, torch.zeros(1, 1, 2**20), rows=slice(5), keys=slice(7))
    assert weights.shape == (1, 1, 5, 7)
