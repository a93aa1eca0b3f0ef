"""The ``torch`` backend: ``F.scaled_dot_product_attention`` composed to this package's contract.

What torch leaves open is closed here: rotary embedding, bottom-right causal masks, rows that see nothing, and
NaN or Inf behind a mask. Gradients are torch's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import reference
from fusedattn.biases import Bias
from fusedattn.constants import Options
from fusedattn.masks import Mask
from fusedattn.rope import Rope


def can_run(options: Options) -> bool:
    """Whether torch's function can compute out with these: it adds a bias, and that is all it does to scores."""
    changes = (options.softcap, options.score_mod, options.sinks)
    return all(x is None for x in changes) and not options.dropout_p


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, rope: Rope | None, bias: Bias | None, scale: float
) -> Tensor:
    """The output of :func:`fusedattn.attention`; arguments likewise, already checked, scale positive."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if q.numel() == 0 or seqlen_k == 0:  # torch's function has no answer for these
        return reference.attention(q, k, v, mask=mask, rope=rope, bias=bias, scale=scale)[0]
    rotated_q, rotated_k = (q, k) if rope is None else rope.rotate(q, k)
    wide = torch.promote_types(q.dtype, torch.float32)
    added = None if bias is None else bias.dense(seqlen_q, seqlen_k, dtype=wide)
    shown = None if added is None else added != -torch.inf
    finite_bias = () if added is None or shown is None else (added.where(shown, 0.0),)
    # It multiplies 0 by a masked NaN, and its CPU kernel makes 0 of a NaN in q.
    if not _finite(rotated_q, rotated_k, v, *finite_bias):
        return reference.attention(q, k, v, mask=mask, rope=rope, bias=bias, scale=scale)[0]

    q, k, v = _apart(rotated_q), _apart(rotated_k), _apart(v)
    enable_gqa = False
    if q.shape[1] != k.shape[1]:  # a branch, because under a compiler the comparison is no bool
        enable_gqa = True
    if added is None and mask.only_bands:
        lower, upper = mask.band(seqlen_q, seqlen_k)
        if lower is None and upper in (None, 0):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=upper is not None, scale=scale, enable_gqa=enable_gqa
            )

    visible = mask.dense(seqlen_q, seqlen_k, batch=q.shape[0], nheads=q.shape[1], device=q.device)
    if shown is not None:
        visible = visible & shown
    if not reference.is_readable(q):
        # Keys hidden from every query, at least, are made harmless without looking at them.
        hidden = ~visible.any(dim=(1, 2))[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)

    # A row that may attend to nothing attends to everything instead, and its output is then replaced by 0: the
    # zero gradient that it gets back makes all of its gradients exactly 0.
    empty = ~visible.any(dim=-1, keepdim=True)
    q = q.masked_fill(empty, 0.0)
    attn_mask = visible | empty
    if added is not None:
        # In float32 at least, as in 16 bits a large negative bias would become -inf.
        attn_mask = torch.where(visible, added, torch.where(empty, 0.0, -torch.inf).to(added.dtype))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)
    return out.masked_fill(empty, 0.0)


def rows_overlap(x: Tensor) -> bool:
    """Whether rows of ``x``, ``(..., head_dim)``, share some of their memory, but not all of it."""
    return any(size > 1 and 0 < stride < x.shape[3] for size, stride in zip(x.shape[:3], x.stride(), strict=False))


def _apart(x: Tensor) -> Tensor:
    """``x``, copied if its rows overlap: torch's CPU kernel returns wrong numbers for such views."""
    return x.contiguous() if rows_overlap(x) else x


def _finite(*tensors: Tensor) -> bool:
    """Whether all values are finite; taken for granted where there are none to look at."""
    if not all(map(reference.is_readable, tensors)):
        return True
    return all(bool(torch.isfinite(bound)) for x in tensors for bound in torch.aminmax(x.detach()))
