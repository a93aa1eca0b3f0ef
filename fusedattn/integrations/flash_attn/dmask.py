"""S_dmask, which ``flash_attn`` returns to tests of dropout: the weights, negative if dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedattn import biases
from fusedattn.dropout import keep_mask
from fusedattn.shard import Shard
from fusedattn.weights import attention_weights


def s_dmask(q: Tensor, k: Tensor, lse: Tensor, *, first_batch: int = 0, **options: Any) -> Tensor:
    """The weights before dropout, with a negative sign if dropout drops them; quadratic, without a gradient.

    Args:
        q, k: ``(batch, nheads, seqlen_q, head_dim)`` and ``(batch, nheads_k, seqlen_k, head_dim)``.
        lse: ``(batch, nheads, seqlen_q)``, from the attention with the same options.
        first_batch: the index of the first batch in the attention.
        options: keyword arguments of :func:`fusedattn.attention`, including dropout_p and dropout_seed.

    Returns:
        ``(batch, nheads, seqlen_q, seqlen_k)`` in the dtype of q; -0.0 for a dropped weight of 0.
    """
    dropout_p, seed = options.pop("dropout_p"), options.pop("dropout_seed")
    with torch.no_grad():
        weights = attention_weights(q, k, lse, **options)
        keep = keep_mask(seed, dropout_p, *weights.shape, shard=Shard(first_batch))
        return torch.where(keep, weights, -weights).to(q.dtype)


def s_dmask_packed(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """:func:`s_dmask` of each of several packed sequences; waits for their lengths.

    Args:
        q, k: ``(total_q, nheads, head_dim)`` and ``(total_k, nheads_k, head_dim)``.
        lse: ``(nheads, total_q)``.

    Returns:
        ``(n_sequences, nheads, max_seqlen_q, max_seqlen_k)``, 0 behind the end of a sequence.
    """
    n, bias = cu_seqlens_q.shape[0] - 1, options.pop("bias")
    found = q.new_zeros(n, q.shape[1], max_seqlen_q, max_seqlen_k)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(n):
        queries, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        own = None if bias is None else biases.alibi(bias.slopes.expand(n, -1)[i])
        heads_q, heads_k = (x.transpose(0, 1)[None] for x in (q[queries], k[keys]))
        part = s_dmask(heads_q, heads_k, lse[None, :, queries], first_batch=i, bias=own, **options)
        part = part[0, :, :max_seqlen_q, :max_seqlen_k]
        found[i, :, : part.shape[1], : part.shape[2]] = part
    return found
