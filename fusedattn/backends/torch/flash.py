"""Torch's fused kernel for CPU tensors, with sinks and with the log-sum-exp that torch's function does not return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# The same output and lse by differentiable functions, for derivatives of derivatives.
Eager = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    sinks: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    eager: Eager,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, differentiable in q, k, v and sinks.

    Args:
        q, k, v: as for :func:`fusedattn.attention`, finite, with one head_dim for all.
        added: added to the scores, ``(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k)``; each row has a finite value.
        sinks: ``(nheads_q,)``, or None.
        is_causal: query ``i`` sees keys ``j <= i``; without `added`.
        scale: factor of the scores.
        eager: computes the same from ``(q, k, v, sinks)``.
    """
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))):
        return _results(q, k, v, sinks, added, is_causal, scale)
    out, lse = _Flash.apply(q, k, v, sinks, added, is_causal, scale, eager)  # type: ignore[no-untyped-call]
    return out, lse


def padded(x: Tensor, n: int, value: float = 0.0) -> Tensor:
    """``x`` with `n` more features of one value; its last stride is 1, as torch's kernel expects.

    ``F.pad`` alone gives other strides to heads of one feature, whose memory order may be that of ``channels_last``.
    """
    return F.pad(x, (0, n), value=value).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` without gradients."""
    out, lse = _forward(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    return out, lse


def _results(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, added: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale)
    if sinks is None:
        return out, lse
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * torch.exp(lse - with_sinks)[..., None].to(out.dtype), with_sinks


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        added: Tensor | None,
        is_causal: bool,
        scale: float,
        eager: Eager,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = _results(q, k, v, sinks, added, is_causal, scale)
        ctx.is_causal, ctx.scale, ctx.eager = is_causal, scale, eager
        ctx.save_for_backward(q, k, v, sinks, added, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, added, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(ctx, (q, k, v, sinks), (dout, dlse))
            return *found, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        # lse counts the sinks, so that the kernel recomputes the weights that remain beside them.
        grads = gradients(dout, dlse, q, k, v, added, out, lse, ctx.is_causal, ctx.scale)
        dsinks = None
        if ctx.needs_input_grad[3]:
            into_lse = -(dout * out).sum(-1, dtype=lse.dtype)
            into_lse = into_lse if dlse is None else into_lse + dlse
            dsinks = (torch.exp(sinks.to(lse.dtype)[:, None] - lse) * into_lse).sum((0, 2)).to(sinks.dtype)
        return *grads, dsinks, None, None, None, None


def _differentiable(
    ctx: Any, inputs: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and sinks, by differentiable functions."""
    results = [(x, grad) for x, grad in zip(ctx.eager(*inputs), given, strict=True) if grad is not None]
    outputs, grads = zip(*results, strict=True)
    needed = ctx.needs_input_grad[: len(inputs)]
    wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed and x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, which may have a part of the keys that out and lse are of."""
    group = q.shape[1] // k.shape[1]
    if group > 1:  # the backward has no grouped heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        dq, *others = gradients(dout, dlse, q, k, v, added, out, lse, is_causal, scale)
        return dq, *(x.unflatten(1, (-1, group)).sum(2, dtype=lse.dtype).to(x.dtype) for x in others)
    if dlse is None:
        return tuple(_backward(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=added, scale=scale))
    # The kernel subtracts the sum of dout * out from the derivative of each weight; dlse must be added to it. One more
    # column does so: 1 in dout, -dlse in out and 0 in v.
    dtype = lse.dtype
    wide = [padded(x.to(dtype), 1) for x in (q, k, v)]
    dout = padded(dout.to(dtype), 1, value=1.0)
    out = torch.cat((out.to(dtype), -dlse[..., None].to(dtype)), dim=-1)
    added = None if added is None else added.to(dtype)
    grads = _backward(dout, *wide, out, lse, 0.0, is_causal, attn_mask=added, scale=scale)
    return tuple(grad[..., :-1].to(q.dtype) for grad in grads)
