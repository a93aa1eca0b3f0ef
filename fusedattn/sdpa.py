"""The ``torch`` backend: ``F.scaled_dot_product_attention`` composed to this package's contract.

What torch leaves open is closed here: rotary embedding, bottom-right causal masks, rows that see nothing, and
NaN or Inf behind a mask. Gradients are torch's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import reference
from fusedattn.masks import Mask
from fusedattn.rope import Rope


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, rope: Rope | None, scale: float) -> Tensor:
    """The output of :func:`fusedattn.attention`; arguments likewise, already checked, scale positive."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if q.numel() == 0 or seqlen_k == 0:  # torch's function has no answer for these
        return reference.attention(q, k, v, mask=mask, rope=rope, scale=scale)[0]
    rotated_q, rotated_k = (q, k) if rope is None else rope.rotate(q, k)
    # It multiplies 0 by a masked NaN, and its CPU kernel makes 0 of a NaN in q.
    if not _finite(rotated_q, rotated_k, v):
        return reference.attention(q, k, v, mask=mask, rope=rope, scale=scale)[0]

    q, k, v = _apart(rotated_q), _apart(rotated_k), _apart(v)
    enable_gqa = False
    if q.shape[1] != k.shape[1]:  # a branch, because under a compiler the comparison is no bool
        enable_gqa = True
    diagonal = mask.diagonal(seqlen_q, seqlen_k)
    only_causal = mask.valid is None and mask.allowed is None
    if only_causal and diagonal in (None, 0):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=diagonal is not None, scale=scale, enable_gqa=enable_gqa
        )

    visible = mask.dense(seqlen_q, seqlen_k, device=q.device)
    if torch.compiler.is_compiling():
        # Keys hidden from every query, at least, are made harmless without looking at them.
        hidden = ~visible.any(dim=(1, 2))[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    if only_causal and diagonal is not None and diagonal > 0:  # every query sees the first key
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=enable_gqa)

    # A row that may attend to nothing attends to everything instead, and its output is then replaced by 0: the
    # zero gradient that it gets back makes all of its gradients exactly 0.
    empty = ~visible.any(dim=-1, keepdim=True)
    q = q.masked_fill(empty, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | empty, scale=scale, enable_gqa=enable_gqa)
    return out.masked_fill(empty, 0.0)


def rows_overlap(x: Tensor) -> bool:
    """Whether rows of ``x``, ``(..., head_dim)``, share some of their memory, but not all of it."""
    return any(size > 1 and 0 < stride < x.shape[3] for size, stride in zip(x.shape[:3], x.stride(), strict=False))


def _apart(x: Tensor) -> Tensor:
    """``x``, copied if its rows overlap: torch's CPU kernel returns wrong numbers for such views."""
    return x.contiguous() if rows_overlap(x) else x


def _finite(*tensors: Tensor) -> bool:
    """Whether all values are finite; taken for granted where there is no data to look at."""
    if torch.compiler.is_compiling() or tensors[0].is_meta:
        return True
    return all(bool(torch.isfinite(bound)) for x in tensors for bound in torch.aminmax(x.detach()))
