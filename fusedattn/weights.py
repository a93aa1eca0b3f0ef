"""The weights of an attention that has run, written out for inspection: all, or chosen queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedattn import call_checks, dropout, indices
from fusedattn.biases import Bias, as_bias
from fusedattn.masks import Mask, as_mask
from fusedattn.qk_norm import QKNorm
from fusedattn.reference import large_rows, logsumexp, modified, products
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    rows: Tensor | slice | None = None,
    keys: Tensor | slice | None = None,
) -> Tensor:
    """The weight of each key for each query, ``exp(score - lse)``, without a second softmax; in eager PyTorch.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    >>> out, lse = fusedattn.attention(q, k, v, return_lse=True)
    >>> weights = attention_weights(q, k, lse, rows=slice(-1, None))  # of the last query
    >>> torch.allclose(weights @ v, out[:, :, -1:], atol=1e-5)
    True

    Args:
        q, k: ``(batch, nheads_q, seqlen_q, head_dim)`` and ``(batch, nheads_kv, seqlen_k, head_dim)``, not rotated.
        lse: ``(batch, nheads_q, seqlen_q)``, as :func:`fusedattn.attention` returned it with ``return_lse=True`` for
            the same q, k, mask, rope, qk_norm, bias, scale, softcap and score_mod (and any sinks).
        mask, rope, qk_norm, bias, scale, softcap, score_mod: as for :func:`fusedattn.attention`; functions need their
            ``eager``.
        dropout_p, dropout_seed: likewise, for the weights after dropout; dropout needs a seed here.
        rows, keys: which queries and keys, int64 ``(n,)`` or a slice; all by default. Only this part of the
            ``seqlen_q x seqlen_k`` weights is written.

    Returns:
        ``(batch, nheads_q, rows, keys)``, float32 (float64 for float64 inputs), differentiable. Before dropout the
        weights of a query add up to 1 minus the weight of its sink; all are 0 if the query may attend to nothing. If a
        bias is so large that lse has few digits left for the other scores (a row of ``finfo.min``), the weights are
        exact if `keys` is None, and known up to a common factor otherwise.

    Raises:
        TypeError, ValueError: as ``attention``; the shape of lse is not that of the queries; dropout without a seed.
        NotImplementedError: a function of the mask or the scores has no ``eager=``.
    """
    mask, bias = as_mask(mask), as_bias(bias)
    call_checks.check_qkv(q, k, k)
    call_checks.check_mask(mask, q, k.shape[2])
    if rope is not None:
        call_checks.check_rope(rope, q, k.shape[2])
    if qk_norm is not None:
        call_checks.check_qk_norm(qk_norm, q, k.shape[1])
        q, k = qk_norm.apply(q, k)
    if bias is not None:
        call_checks.check_bias(bias, q, k.shape[2])
    if score_mod is not None:
        call_checks.check_score_mod(score_mod, q)
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse: got shape {tuple(lse.shape)}, allowed is (batch, nheads_q, seqlen_q) = {q.shape[:3]}")
    call_checks.check_dropout_p(dropout_p)
    if dropout_seed is not None:
        call_checks.check_dropout_seed(dropout_seed, q)
    elif dropout_p:
        raise ValueError(f"dropout_seed: got None with dropout_p={dropout_p}, allowed is the seed of the attention")
    (batch, nheads, seqlen_q), seqlen_k = q.shape[:3], k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    has_all_keys = keys is None
    rows, keys = indices.select(seqlen_q, rows, q.device), indices.select(seqlen_k, keys, q.device)

    dtype = torch.promote_types(q.dtype, torch.float32)
    if rope is not None and seqlen_k:
        positions_q = rows + (seqlen_k - seqlen_q) if rope.positions_q is None else rope.positions_q[..., rows]
        positions_k = keys if rope.positions_k is None else rope.positions_k[..., keys]
        q, k = rope.at(positions_q, positions_k).rotate(q[:, :, rows], k[:, :, keys])
    else:
        q, k = q[:, :, rows], k[:, :, keys]
    k = k.repeat_interleave(nheads // k.shape[1], dim=1)
    with torch.autocast(q.device.type, enabled=False):
        scores = products(q.to(dtype), k.to(dtype)) * scale
    scores = modified(
        scores, seqlen_q, seqlen_k, softcap=softcap, score_mod=score_mod, bias=bias, rows=rows, keys=keys
    )  # fmt: skip
    visible = mask.dense(seqlen_q, seqlen_k, rows=rows, keys=keys, batch=batch, nheads=nheads, device=q.device)
    lse = lse[:, :, rows, None]
    # Before the exponential, so that hidden scores overflow neither there nor in a gradient.
    hidden = ~visible | (lse == -math.inf)
    large = large_rows(lse) if has_all_keys else None
    if large is not None:
        own = logsumexp(scores.masked_fill(hidden, -math.inf))[..., None]
        coarse = large & ((own - lse).abs() <= torch.finfo(dtype).eps * lse.abs())
        exact = torch.softmax(scores.masked_fill(hidden, -math.inf).masked_fill(~coarse, 0.0), dim=-1)
        weights = torch.where(coarse, exact, torch.exp((scores - lse).masked_fill(hidden | coarse, -math.inf)))
    else:
        weights = torch.exp((scores - lse).masked_fill(hidden, -math.inf))
    if dropout_seed is None:
        return weights
    keep = dropout.keep_mask(dropout_seed, dropout_p, batch, nheads, seqlen_q, seqlen_k, rows=rows, keys=keys)
    return weights * (keep.to(dtype) / (1.0 - dropout_p))
