"""Which calls the kernels for Hopper take, and NaN behind a mask; in a process that compiles: see test_hopper.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fusedattn import FP8, Rope, attention, attention_varlen, masks
from fusedattn.kernels import hopper
from fusedattn.virtual_gpu.attention import compiled_attention

N, FEATURES = 200, 128


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    with hopper.choosing("all"):
        yield


def _inputs(n: int = N, features: int = FEATURES, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1, n, features, dtype=dtype) for _ in range(3)]


def _kernels(*inputs: torch.Tensor, backward: bool = False, **options: Any) -> set[str]:
    """The kernels that a call runs, and its backward."""
    given = [x.requires_grad_(backward) for x in inputs]
    with compiled_attention("sm_90") as gpu:
        out = attention(*given, backend="triton", **options)
        first = out[0] if isinstance(out, tuple) else out
        if backward:
            torch.autograd.grad(first, given, torch.ones_like(first))
    return set(gpu.counters)


def test_a_call_that_they_take() -> None:
    taken = {"hopper_fwd", "hopper_bwd_dkdv", "hopper_bwd_dq", "attention_bwd_rows"}
    assert _kernels(*_inputs(), backward=True) == taken
    # What is hidden may have a NaN, for which the general kernels are asked.
    assert _kernels(*_inputs(), mask=masks.causal(), backward=True) == taken | {"attention_fwd", "attention_bwd_dq"}


def test_they_run_only_if_chosen() -> None:
    with hopper.choosing(None), patch.object(hopper, "FEWEST_QUERIES", N):
        assert _kernels(*_inputs()) == {"attention_fwd"}


def test_those_that_were_faster_run_where_they_were_faster() -> None:
    with hopper.choosing("faster"), patch.object(hopper, "FEWEST_QUERIES", N):
        assert _kernels(*_inputs()) == {"hopper_fwd"}
        assert _kernels(*_inputs(features=64)) == {"attention_fwd"}
        assert _kernels(*_inputs(n=N - 1)) == {"attention_fwd"}
        padding = masks.padding(torch.ones(1, N, dtype=torch.bool))
        assert "hopper_fwd" not in _kernels(*_inputs(), mask=padding)


def test_they_take_no_codes() -> None:
    assert _kernels(*_inputs(), precision=FP8()) == {"quantize_fp8", "attention_fwd"}


@pytest.mark.parametrize("options", [
    {"dropout_p": 0.1}, {"softcap": 5.0}, {"sinks": torch.zeros(1)}, {"bias": torch.zeros(N, dtype=torch.bfloat16)},
    {"mask": torch.ones(N, N, dtype=torch.bool)}, {"mask": masks.documents(torch.zeros(1, N, dtype=torch.int32))},
    {"mask": masks.block_sparse(torch.ones(4, 4, dtype=torch.bool), 64)}, {"return_max": True},
    {"rope": Rope.from_theta(FEATURES, N)},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_calls_that_they_do_not_take(options: dict[str, Any]) -> None:
    assert not [name for name in _kernels(*_inputs(), **options) if name.startswith("hopper")]


@pytest.mark.parametrize("inputs", [
    _inputs(dtype=torch.float32), _inputs(features=96), _inputs(n=60),
    [x[..., 4:] for x in _inputs(features=132)],
], ids=["float32", "head_dim", "few queries", "address"])  # fmt: skip
def test_tensors_that_they_do_not_take(inputs: list[torch.Tensor]) -> None:
    assert not [name for name in _kernels(*inputs) if name.startswith("hopper")]


def test_the_general_kernels_follow_where_values_may_be_hidden() -> None:
    """For NaN there; for gradients of keys only if a row may see nothing. A kernel of its own turns RoPE back."""
    q, k, v = _inputs(n=198)
    names = _kernels(q, k[:, :, :90], v[:, :, :90], mask=masks.causal(), backward=True)
    assert {"hopper_bwd_dkdv", "attention_bwd_dkdv", "hopper_bwd_dq", "attention_bwd_dq"} <= names
    names = _kernels(*_inputs(n=500), rope=Rope.from_theta(FEATURES, 500), backward=True)
    assert names == {"qk_prologue", "attention_bwd_rows", "hopper_fwd", "hopper_bwd_dkdv", "hopper_bwd_dq"}


def test_gradients_that_they_do_not_take() -> None:
    """At 256 features they compute out alone."""
    q, k, v = _inputs(n=100, features=256)
    with compiled_attention("sm_90") as gpu:
        out = attention(*(x.requires_grad_() for x in (q, k, v)), backend="triton")
        out.sum().backward()
    assert set(gpu.counters) == {"hopper_fwd", "attention_bwd_rows", "attention_bwd_dkdv", "attention_bwd_dq"}
    torch.testing.assert_close(out, attention(q, k, v, backend="torch"), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_of_rows_that_see_nothing(bad: float) -> None:
    """The first 108 queries see no key; whatever arrives for them reaches no gradient."""
    q, k, v = (x.requires_grad_() for x in _inputs(n=198))
    k, v = k[:, :, :90], v[:, :, :90]
    dout = torch.randn_like(q)
    grads = []
    for value in (0.0, bad):
        dout[:, :, :108] = value
        with compiled_attention("sm_90") as gpu:
            out = attention(q, k, v, mask=masks.causal(), backend="triton")
            grads.append(torch.autograd.grad(out, (q, k, v), dout))
    assert "hopper_bwd_dkdv" in gpu.counters
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=0.01, rtol=0.02)
    assert not grads[1][0][:, :, :108].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_behind_a_mask(bad: float) -> None:
    q, k, v = _inputs()
    v[0, 0, 150, 7] = k[0, 0, 150, 9] = bad
    expected = attention(q, k[:, :, :150], v[:, :, :150], mask=masks.causal("top_left"), backend="torch")
    with compiled_attention("sm_90"):
        given = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*given, mask=masks.causal(), backend="triton")
        dq, _, _ = torch.autograd.grad(out, given, torch.ones_like(out))
    torch.testing.assert_close(out[:, :, :150].detach(), expected[:, :, :150], atol=0.02, rtol=0.02)
    assert out[:, :, 150:].isnan().all()
    assert dq[:, :, :150].isfinite().all()
    assert dq[:, :, 150:].isnan().all()


def test_rows_of_scores_of_minus_infinity() -> None:
    """They see nothing, without a mask too: NaN among the values does not reach them."""
    q, k, v = _inputs(n=132)
    q[..., 0], k[..., 0], v[0, 0, 3, 5] = 1.0, float("-inf"), float("nan")
    with compiled_attention("sm_90") as gpu:
        out = attention(q, k, v, backend="triton")
    assert set(gpu.counters) == {"hopper_fwd"}
    assert not out.any()


def test_gradients_of_keys_that_nobody_sees() -> None:
    """Those from 100 on, whose values are NaN; in a tile with others."""
    q, k, v = _inputs()
    v[:, :, 100:] = float("nan")
    with compiled_attention("sm_90") as gpu:
        given = [x.requires_grad_() for x in (q[:, :, :100], k, v)]
        out = attention(*given, mask=masks.causal("top_left"), backend="triton")
        _, dk, dv = torch.autograd.grad(out, given, torch.ones_like(out))
    assert "hopper_bwd_dkdv" in gpu.counters
    for found in (dk, dv):
        assert found.isfinite().all()
        assert found[:, :, :100].any()
        assert not found[:, :, 100:].any()


def test_sequences_beside_one_with_nan() -> None:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _inputs())
    cu_seqlens = torch.tensor([0, 90, N], dtype=torch.int32)
    found = []
    for value in (1.0, float("nan")):
        v[90:] = value
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        with compiled_attention("sm_90") as gpu:
            out = attention_varlen(*given, cu_seqlens, cu_seqlens, 110, 110, backend="triton")
            found.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
    assert {"hopper_fwd", "hopper_bwd_dkdv", "hopper_bwd_dq"} <= set(gpu.counters)
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after[:90].detach(), before[:90].detach(), atol=0.02, rtol=0.02)
    assert all(x[90:].isnan().all() for x in found[1][:2])
