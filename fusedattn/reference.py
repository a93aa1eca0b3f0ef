"""The eager reference: it defines attention in this package, and is written to be read rather than to be fast.

On float64 copies of the inputs it gives the golden results of the tests; on the inputs themselves it is the
"same-dtype eager PyTorch" that the error budget compares the kernels with. It materialises the
``(seqlen_q, seqlen_k)`` scores and lets autograd derive the gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedattn import dropout, indices
from fusedattn.biases import Bias, as_bias
from fusedattn.masks import Mask, as_mask
from fusedattn.qk_norm import QKNorm
from fusedattn.readable import is_readable
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.shard import WHOLE, Shard
from fusedattn.zeroed import zeroed


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    shard: Shard = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(scale * rope(q) rope(k)^T, masked) v`` (Vaswani et al., 2017, eq. 1), step by step.

    Optional steps between the two products, in this order: ``softcap * tanh(scores / softcap)`` (Gemma 2, 2024), a
    function of the scores, a bias, the mask, a softmax with one more logit (Xiao et al., 2023, section 3), dropout.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``.
        k: ``(batch, nheads_kv, seqlen_k, head_dim)`` with ``nheads_q % nheads_kv == 0``.
        v: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        mask, rope, qk_norm, bias, scale, softcap, score_mod, sinks, dropout_p, dropout_seed: as for
            :func:`fusedattn.attention`.
        shard: the part of a larger attention that this is.

    Returns:
        ``(out, lse, weights)``: out ``(batch, nheads_q, seqlen_q, head_dim_v)``; lse float32 (float64 for float64
        inputs) ``(batch, nheads_q, seqlen_q)``, natural log, with the sink; weights
        ``(batch, nheads_q, seqlen_q, seqlen_k)`` before dropout; out and weights in q's dtype. A query that may
        attend to nothing, or whose scores are all ``-inf``, has out 0, lse ``-inf`` (or that of its sink alone)
        and weights 0; its only gradient is that of the sink through lse. A NaN or Inf in a key, value or bias
        that a query may not attend to does not reach that query, nor the gradient of that key, value or bias.
    """
    given = q, k, v
    mask, bias = as_mask(mask), as_bias(bias)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    (batch, nheads, seqlen_q), seqlen_k = q.shape[:3], k.shape[2]
    group = nheads // k.shape[1]
    visible = mask.dense(seqlen_q, seqlen_k, batch=batch, nheads=nheads, shard=shard, device=q.device)
    visible = visible.expand(batch, nheads, -1, -1)

    if qk_norm is not None:
        q, k = qk_norm.apply(q, k)
    if rope is not None:
        q, k = rope.rotate(q, k)
    blind = ~visible.any(dim=-1, keepdim=True)
    q = q.masked_fill(blind, 0.0)  # not even a NaN of such a query goes anywhere
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    scores = products(q, k) * scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None or score_mod is not None:
        scores = scores.masked_fill(~visible, 0.0)  # the derivative at a NaN is NaN, and 0 * NaN is a NaN gradient
    scores = modified(scores, seqlen_q, seqlen_k, softcap=softcap, score_mod=score_mod, bias=bias, shard=shard)
    scores = scores.masked_fill(~visible, -math.inf)
    if _products_leak(v) and not ((scores < math.inf).all() and v.isfinite().all()):
        out, lse, weights = attention(
            *(x.float() for x in given), mask=mask, rope=rope, qk_norm=qk_norm, bias=bias, scale=scale, softcap=softcap,
            score_mod=score_mod, sinks=sinks, dropout_p=dropout_p, dropout_seed=dropout_seed, shard=shard,
        )  # fmt: skip
        return out.to(v.dtype), lse, weights.to(v.dtype)

    unseen = (scores == -math.inf).all(dim=-1, keepdim=True)
    # Scores of 0 in unseen rows: softmax and its gradient would be NaN there.
    weights, lse = _softmax(scores.masked_fill(unseen, 0.0), unseen, sinks)
    # Hidden weights are 0 even in a row that sees a NaN, which softmax has made NaN.
    weights = weights.masked_fill(~visible | unseen, 0.0)
    kept = weights
    if dropout_p:
        seed = dropout.draw_seed(q.device) if dropout_seed is None else dropout_seed
        keep = dropout.keep_mask(seed, dropout_p, batch, nheads, seqlen_q, seqlen_k, shard=shard)
        kept = weights * (keep.to(weights.dtype) / (1.0 - dropout_p))
    return _weighted_sum(kept.to(q.dtype), v, visible).masked_fill(unseen, 0.0), lse, weights.to(q.dtype)


def largest_scores(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    shard: Shard = WHOLE,
    rows: slice | None = None,
) -> Tensor:
    """The largest score of each query, as the softmax sees it: scaled, and after the other steps before the mask.

    Args:
        q, k, mask, rope, qk_norm, bias, scale, softcap, score_mod, shard: as for :func:`attention`.
        rows: which queries; all by default.

    Returns:
        float32 (float64 for float64 inputs) ``(batch, nheads_q, rows)``, without a gradient. A sink does not count.
        ``-inf`` for a query that sees nothing; NaN for one that sees a score of NaN or ``+inf``, as out is then.
    """
    mask, bias = as_mask(mask), as_bias(bias)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    (batch, nheads, seqlen_q), seqlen_k = q.shape[:3], k.shape[2]
    if qk_norm is not None:
        q, k = qk_norm.apply(q, k)
    if rope is not None:
        q, k = rope.rotate(q, k)
    chosen = indices.select(seqlen_q, rows, q.device)
    q, k = q[:, :, chosen], k.repeat_interleave(nheads // k.shape[1], dim=1)
    scores = ((q @ k.mT) * scale).to(torch.promote_types(q.dtype, torch.float32))
    scores = modified(
        scores, seqlen_q, seqlen_k, softcap=softcap, score_mod=score_mod, bias=bias, rows=chosen,
        shard=shard,
    )  # fmt: skip
    visible = mask.dense(seqlen_q, seqlen_k, rows=chosen, batch=batch, nheads=nheads, shard=shard, device=q.device)
    if seqlen_k == 0:
        return scores.new_full(scores.shape[:3], -math.inf)
    largest = torch.where(visible, scores, -math.inf).amax(dim=-1)
    return largest.masked_fill(largest == math.inf, math.nan).detach()


def modified(
    scores: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    *,
    softcap: float | None,
    score_mod: ScoreMod | None,
    bias: Bias | None,
    rows: Tensor | None = None,
    keys: Tensor | None = None,
    shard: Shard = WHOLE,
) -> Tensor:
    """Scaled scores after the steps before the mask; for all queries and keys, or for `rows` and `keys`, int64."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        scores = score_mod.apply(scores, rows=rows, keys=keys, shard=shard).to(scores.dtype)
    if bias is not None:
        scores = scores + bias.dense(seqlen_q, seqlen_k, rows=rows, keys=keys, shard=shard, dtype=scores.dtype)
    return scores


def _softmax(scores: Tensor, unseen: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(weights, lse)``; lse of the rows `unseen` counts no score."""
    if sinks is None:
        return torch.softmax(scores, dim=-1), logsumexp(scores).masked_fill(unseen[..., 0], -math.inf)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores, sink), dim=-1)
    lse = torch.where(unseen[..., 0], sink[..., 0], logsumexp(scores))
    return torch.softmax(scores, dim=-1)[..., :-1], lse


# Beyond this, lse has too few digits left for the sum, and a gradient computed from its value is wrong.
LARGE = 1e4


def logsumexp(scores: Tensor) -> Tensor:
    """``torch.logsumexp`` over the last dimension, but the gradient of a large lse is not computed from its value."""
    lse = torch.logsumexp(scores, dim=-1)
    large = large_rows(lse)
    if scores.shape[-1] == 0 or large is None:
        return lse
    largest = scores.detach().amax(dim=-1, keepdim=True).masked_fill(~large[..., None], 0.0)
    shifted = (scores - largest).masked_fill(~large[..., None], 0.0)
    return torch.where(large, largest[..., 0] + shifted.exp().sum(dim=-1).log(), lse)


def large_rows(lse: Tensor) -> Tensor | None:
    """Bool, True for finite numbers beyond LARGE; None if there are certainly none."""
    large = (lse.abs() > LARGE) & lse.isfinite()
    return None if is_readable(large) and not large.any() else large


def _products_leak(x: Tensor) -> bool:
    """Whether a NaN in one row may reach the previous row of a product: so for 16-bit matrices on a CPU with AMX.

    If the length of a row is not a multiple of 4, oneDNN reads into the next row and multiplies those values by 0.
    """
    return x.device.type == "cpu" and x.dtype.itemsize == 2 and is_readable(x)


def products(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T``; all scores of a non-finite key are NaN, and hiding these scores keeps it out of the gradients too."""
    if is_readable(k) and k.isfinite().all():
        return q @ k.mT
    # The gradient of q is ds @ k, in which 0 * NaN is NaN: take the poisoned keys out of the product and put them
    # back as NaN scores, by a sum, so that their own gradients are NaN if a query sees them.
    poisoned = ~k.isfinite().all(dim=-1)  # (batch, nheads_q, seqlen_k)
    scores = q @ zeroed(k, poisoned[..., None]).mT
    return scores + torch.zeros_like(scores[..., :1, :]).masked_fill(poisoned[..., None, :], math.nan)


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``weights @ v``; a non-finite value reaches only the queries that see it, in value and in gradient."""
    if is_readable(v) and v.isfinite().all():
        return weights @ v
    poisoned = ~v.isfinite()  # (batch, nheads_q, seqlen_k, head_dim)
    out = weights @ zeroed(v, poisoned)
    pairs = visible & poisoned.any(dim=-1)[..., None, :]
    nan = (weights * torch.zeros_like(weights).masked_fill(pairs, math.nan)).sum(dim=-1, keepdim=True)
    return torch.where(visible.to(v.dtype) @ poisoned.to(v.dtype) > 0, out + nan, out)
