"""Attention whose operands are quantised, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedattn.call_checks import check_mask, check_qkv
from fusedattn.low_precision.rotation import rotated
from fusedattn.low_precision.scaling import Quantisation, quantised
from fusedattn.low_precision.smoothing import mean_of_blocks, mean_of_tokens
from fusedattn.masks import Mask, as_mask


@dataclass(frozen=True)
class Recipe:
    """What is rounded, and what is done before to make the error small.

    Attributes:
        q, k, v: how each is rounded; None: not at all.
        weights: how the weights of a row are rounded, relative to its largest. Their tokens are queries, their features
            keys. None: not at all.
        rotate: rotate q and k (:func:`fusedattn.low_precision.rotated`).
        smooth_k: subtract the mean of all keys of a head.
        smooth_q: subtract the mean of each block of so many queries, and add what its products with the keys are, in
            full precision. None: subtract nothing.
    """

    q: Quantisation | None = None
    k: Quantisation | None = None
    v: Quantisation | None = None
    weights: Quantisation | None = None
    rotate: bool = False
    smooth_k: bool = False
    smooth_q: int | None = None


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T, masked) v`` with operands that are rounded as `recipe` says.

    A row's weights are rounded relative to its largest one. The sum that divides them is that of the weights before
    rounding. A kernel that goes through the keys in blocks rounds weights relative to the largest score so far.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``, rotated by its position if it has one.
        k: ``(batch, nheads_kv, seqlen_k, head_dim)`` with ``nheads_q % nheads_kv == 0``.
        v: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        recipe: what is rounded.
        mask: as for :func:`fusedattn.attention`; causal masks are aligned bottom-right unless they say otherwise.
        scale: by default ``1 / sqrt(head_dim)``.

    Returns:
        ``(out, lse)``, float32 (float64 for float64 inputs): out ``(batch, nheads_q, seqlen_q, head_dim_v)``, lse
        ``(batch, nheads_q, seqlen_q)``, natural log. A query that may attend to nothing has out 0 and lse ``-inf``.
        Queries that see nothing, and keys and values that no query sees, count as 0 and reach no scale. Elsewhere a NaN
        or infinity makes NaN of its number or, if tokens are rotated or smoothed, of all that it is added to, and in v
        of all queries of its head.

    Raises:
        TypeError, ValueError: q, k, v and mask do not fit together.
    """
    check_qkv(q, k, v)
    mask = as_mask(mask)
    check_mask(mask, q, k.shape[2])
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    visible = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device)
    visible = visible.expand(*q.shape[:2], -1, -1)

    asking = visible.any(dim=-1)  # (batch, nheads_q, seqlen_q)
    seen = visible.unflatten(1, (k.shape[1], -1)).any(dim=2).any(dim=2)  # (batch, nheads_kv, seqlen_k)
    q, k, v = (_zeroed(x, here) for x, here in ((q, asking), (k, seen), (v, seen)))
    scores, lost = _scores(q, k, asking, seen, recipe)
    weights, lse = _softmax((scores * scale).masked_fill(~visible, -math.inf), asking)

    v = _maybe(v, recipe.v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    out = _maybe(weights, recipe.weights) @ v / weights.sum(dim=-1, keepdim=True)
    return out.masked_fill(~asking[..., None], 0.0), (lse + lost * scale).masked_fill(~asking, -math.inf)


def _zeroed(x: Tensor, here: Tensor) -> Tensor:
    """``x`` in float32 or float64, with 0 in the tokens that are not `here`."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~here[..., None], 0.0)


def _softmax(scores: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of each row relative to its largest one, and lse."""
    if scores.shape[-1] == 0:
        return scores, scores.sum(dim=-1)
    largest = scores.amax(dim=-1, keepdim=True).masked_fill(~asking[..., None], 0.0)
    weights = (scores - largest).exp()
    return weights, weights.sum(dim=-1).log() + largest[..., 0]


def _scores(q: Tensor, k: Tensor, asking: Tensor, seen: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Products of q and k; and for each query, by how much smoothing k has made all of its products smaller."""
    group = q.shape[1] // k.shape[1]
    lost, of_mean = q.new_zeros(q.shape[:3]), q.new_zeros(())
    if recipe.smooth_k:
        mean = mean_of_tokens(k, seen)
        lost = (q @ mean.repeat_interleave(group, dim=1).mT)[..., 0]
        k = _zeroed(k - mean, seen)
    if recipe.smooth_q is not None:
        mean = mean_of_blocks(q, asking, recipe.smooth_q)
        of_mean = mean @ k.repeat_interleave(group, dim=1).mT
        q = _zeroed(q - mean, asking)
    if recipe.rotate:
        q, k = rotated(q), rotated(k)
    q, k = _maybe(q, recipe.q), _maybe(k, recipe.k).repeat_interleave(group, dim=1)
    return q @ k.mT + of_mean, lost


def _maybe(x: Tensor, how: Quantisation | None) -> Tensor:
    return x if how is None else quantised(x, how)
