"""The functions of flash_attn, written out in its layouts, and checks of results and waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import testing
from tests.conftest import DEVICE, INTERPRETING, assert_ratios


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out ``(batch, seqlen_q, nheads, head_dim)``, laid out like q, k and v, and lse ``(batch, nheads, seqlen_q)``."""
    (_, seqlen_q, nheads, head_dim), (seqlen_k, nheads_k) = q.shape, k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(nheads // nheads_k, dim=2) for x in (k, v))
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k).to(wide) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(wide)[..., None, None] * (position - key).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    blind = hidden.all(dim=1)
    scores = scores.masked_fill(hidden, -math.inf).masked_fill(blind[:, None], 0.0)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", weights.to(q.dtype), v), lse


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    alibi_slopes: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` of one sequence after the other: out ``(total_q, nheads, head_dim)``, lse ``(nheads, total_q)``"""
    outs, lses = [], []
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for i, part in enumerate(parts):
        slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = attend(*(x[None] for x in part), alibi_slopes=slopes, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate x ``(..., seqlen, nheads, head_dim)`` by complex multiplication; positions ``(..., seqlen)``."""
    half = cos.shape[1]
    angle = torch.complex(cos.double(), sin.double())[positions][..., None, :]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    product = torch.complex(a, b) * angle
    parts = (product.real, product.imag)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def results(function: Callable[..., tuple[Tensor, Tensor]], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and the gradients of all leaves through both, ``function(**leaves) -> (out, lse)``."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out, lse = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse)
    dlse = dlse.masked_fill(lse.detach() == -math.inf, 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    gradients = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def assert_right(
    function: Callable[..., tuple[Tensor, Tensor]],
    truth: Callable[..., tuple[Tensor, Tensor]],
    leaves: Mapping[str, Tensor],
) -> None:
    """Fail if results of a function differ from the truth: in float64 at all, else by more than eager's budget."""
    actual = results(function, leaves)
    expected = results(truth, {name: x.double() for name, x in leaves.items()})
    if leaves["q"].dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
        return
    eager = results(truth, leaves)
    assert_ratios({name: testing.compare(actual[name], expected[name], eager[name]) for name in expected})


def place_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Device and dtype with which functions without an argument `backend` use that one."""
    if backend == "torch":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        return {"device": "cpu", "dtype": torch.float64}
    return {"device": DEVICE, "dtype": torch.float64 if INTERPRETING else torch.float32}


class NoWait(TorchDispatchMode):
    """Fail if an operator reads a value, or has a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"), name
        return func(*args, **(kwargs or {}))
