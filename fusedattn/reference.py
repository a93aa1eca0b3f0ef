"""The eager oracle: the meaning of attention in this package, written to be read rather than to be fast.

Run on float64 copies of the inputs it is the golden answer of the tests; run on the inputs themselves it is the
"same-dtype eager PyTorch" that the error budget compares the kernels with. It materialises the
``(seqlen_q, seqlen_k)`` scores and lets autograd derive the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedattn.masks import Mask
from fusedattn.rope import Rope


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    rope: Rope | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(scale * rope(q) rope(k)^T, masked) v`` (Vaswani et al., 2017, eq. 1), step by step.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``.
        k, v: ``(batch, nheads_kv, seqlen_k, head_dim)`` with ``nheads_q % nheads_kv == 0``.
        mask, rope, scale: as for :func:`fusedattn.attention`.

    Returns:
        ``(out, lse, weights)``: out like q; lse float32 (float64 for float64 inputs)
        ``(batch, nheads_q, seqlen_q)``, natural log; weights ``(batch, nheads_q, seqlen_q, seqlen_k)`` in q's
        dtype. A query that may attend to nothing has out 0, lse ``-inf`` and weights 0, and gives no gradient.
        A NaN or Inf in a key or value that a query may not attend to does not reach that query.
    """
    mask = mask or Mask()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    visible = mask.dense(seqlen_q, seqlen_k, device=q.device).expand(q.shape[0], q.shape[1], -1, -1)

    if rope is not None:
        q, k = rope.rotate(q, k)
    blind = ~visible.any(dim=-1, keepdim=True)
    q = q.masked_fill(blind, 0.0)  # not even a NaN of such a query goes anywhere
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    scores = _scores(q, k) * scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)  # -inf where nothing is visible
    # Hidden weights are 0 even in a row that softmax has made NaN, because it sees a NaN.
    hidden = ~visible | (lse == -math.inf)[..., None]
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(q.dtype)
    return _weighted_sum(weights, v, visible).masked_fill(blind, 0.0), lse, weights


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T``; all scores of a non-finite key are NaN, and what hides them there hides it from the gradients too."""
    if torch.compiler.is_compiling() or k.isfinite().all():  # a compiler cannot branch on data
        return q @ k.mT
    # The gradient of q is ds @ k, where 0 * NaN is NaN: take the poisoned keys out of the product and put them
    # back as NaN scores, by a sum, so that their own gradients are NaN where they are seen.
    poisoned = ~k.isfinite().all(dim=-1)  # (batch, nheads_q, seqlen_k)
    scores = q @ _Zeroed.apply(k, poisoned[..., None]).mT
    return scores + torch.zeros_like(scores[..., :1, :]).masked_fill(poisoned[..., None, :], math.nan)


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``weights @ v``; a non-finite value reaches only the queries that see it, in value and in gradient."""
    if torch.compiler.is_compiling() or v.isfinite().all():
        return weights @ v
    poisoned = ~v.isfinite()  # (batch, nheads_q, seqlen_k, head_dim)
    out = weights @ _Zeroed.apply(v, poisoned)
    pairs = visible & poisoned.any(dim=-1)[..., None, :]
    nan = (weights * torch.zeros_like(weights).masked_fill(pairs, math.nan)).sum(dim=-1, keepdim=True)
    return torch.where(visible.to(v.dtype) @ poisoned.to(v.dtype) > 0, out + nan, out)


class _Zeroed(torch.autograd.Function):
    """``x`` with 0 where `poisoned`; the gradient is that of ``x``, as if nothing had been replaced."""

    @staticmethod
    def forward(x: Tensor, poisoned: Tensor) -> Tensor:
        return x.masked_fill(poisoned, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
