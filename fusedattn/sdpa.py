"""The ``torch`` backend: ``F.scaled_dot_product_attention`` composed to this package's contract.

What torch leaves open is closed here: rotary embedding, bottom-right causal masks, rows that see nothing, and
NaN or Inf behind a mask. Gradients are torch's own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedattn import indices, pieces, reference
from fusedattn.biases import Bias
from fusedattn.constants import Options
from fusedattn.cuts import cut, paste
from fusedattn.masks import Mask, boolean
from fusedattn.reference import LARGE
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
    # In float32 at least, as in 16 bits a large negative bias would become -inf.
    wide = torch.promote_types(q.dtype, torch.float32)
    added = None if bias is None else bias.dense(seqlen_q, seqlen_k, dtype=wide)
    given = [q, k, v] if added is None else [q, k, v, added]
    readable = all(map(reference.is_readable, (*given, *mask.tensors().values())))
    lowest = highest = 0.0
    if added is not None:
        lowest, highest = _bounds(added) if readable else (-math.inf, 0.0)
    # It multiplies 0 by a masked NaN, and its CPU kernel makes 0 of a NaN in q.
    if readable and not (highest < math.inf and _finite(rotated_q, rotated_k, v)):
        return reference.attention(q, k, v, mask=mask, rope=rope, bias=bias, scale=scale)[0]
    if added is not None and lowest == -math.inf:
        mask = mask & boolean(added != -math.inf)

    q, k, v = _apart(rotated_q), _apart(rotated_k), _apart(v)
    is_large = not (lowest > -LARGE and highest < LARGE)
    if added is not None and is_large and _is_differentiated(q, k, v) and _has_large_rows(added, mask, q, k):
        with sdpa_kernel(SDPBackend.MATH):  # which keeps the weights
            return _at_once(q, k, v, mask, added, scale)
    can_plan = readable and q.device.type == "cpu" and not _is_transformed(*given)
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    if not can_plan or head_dim == head_dim_v or _is_differentiated(q, k, v, added):
        return _run(q, k, v, mask, added, scale, can_plan)
    # torch's fast kernel takes one head_dim; the other one has derivatives of derivatives, which this has not.
    q, k, v = (F.pad(x, (0, max(head_dim, head_dim_v) - x.shape[3])) for x in (q, k, v))
    out = _run(q, k, v, mask, added, scale, can_plan)
    return out.transpose(1, 2)[..., :head_dim_v].contiguous().transpose(1, 2)


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float, can_plan: bool) -> Tensor:
    """The output; `added` to the scores is finite where `mask` shows a pair."""
    if added is None and mask.only_bands:
        lower, upper = mask.band(q.shape[2], k.shape[2])
        if lower is None and upper in (None, 0):
            return _call(q, k, v, is_causal=upper is not None, scale=scale)
    return (_in_pieces if can_plan else _at_once)(q, k, v, mask, added, scale)


def _has_large_rows(added: Tensor, mask: Mask, q: Tensor, k: Tensor) -> bool:
    """Whether a large number is added to every score that some query sees; True where that cannot be known.

    torch's kernels recompute the weights from lse in the backward, and lse then has too few digits.
    """
    if not reference.is_readable(added):
        return True
    visible = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device)
    largest = added.detach().masked_fill(~visible, -torch.inf).amax(dim=-1)
    return reference.large_rows(largest) is not None


def _is_transformed(*tensors: Tensor) -> bool:
    """Whether forward-mode derivatives or those of torch.func may be asked for, which a plan does not have."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return forward_ad._current_level >= 0 or any(map(wrapped, tensors))


def _in_pieces(q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float) -> Tensor:
    """A call for each piece of the plan, which leaves out most of what the mask hides."""
    shape = pieces.Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = pieces.readily(mask, shape)
    if added is not None and added.requires_grad:
        groups = pieces.whole(mask, shape)
    else:
        groups = pieces.plan(mask, shape, diagonals=added is None)
    parts = [(batches, piece) for batches, own in groups for piece in own]
    boxes_q, boxes_k = ([(batches, getattr(piece, name)) for batches, piece in parts] for name in ("rows", "keys"))
    bands: dict[tuple[int, int, int], _Rows] = {}
    outs = []
    for (batches, piece), queries, keys, values in zip(
        parts, cut(q, boxes_q), cut(k, boxes_k), cut(v, boxes_k), strict=True
    ):
        own = _part(added, batches, piece)
        if piece.hidden in ("nothing", "later"):
            is_causal = piece.hidden == "later"
            outs.append(_call(queries, keys, values, attn_mask=own, is_causal=is_causal, scale=scale))
            continue
        in_band = piece.hidden == "band"
        shown = Mask(mask.bands) if in_band else mask
        if in_band and own is None:  # the same of all pieces in such a place
            place = len(piece.rows), len(piece.keys), piece.keys.start - piece.rows.start
            if place not in bands:
                bands[place] = _rows(_visible(shown, batches, piece, shape), None, q.dtype)
            rows = bands[place]
        else:
            rows = _rows(_visible(shown, batches, piece, shape), own, q.dtype)
        outs.append(_masked(queries, keys, values, rows, scale))
    return paste(outs, boxes_q, (*q.shape[:3], v.shape[3]))


def _visible(mask: Mask, batches: range, piece: pieces.Piece, shape: pieces.Shape) -> Tensor:
    """Bool, broadcastable to the scores of a piece."""
    rows, keys = _slice(piece.rows), _slice(piece.keys)
    mask = pieces.of_batches(mask, batches)
    if mask.allowed is not None:  # all there is
        return indices.part_of(mask.allowed, rows, keys)
    if mask.valid is not None and piece.hidden == "keys":
        return mask.valid[:, None, None, keys]
    return mask.dense(shape.seqlen_q, shape.seqlen_k, rows=rows, keys=keys)


def _part(added: Tensor | None, batches: range, piece: pieces.Piece) -> Tensor | None:
    """Of what is added to all scores, that of a piece."""
    if added is None:
        return None
    own = added[_slice(batches)] if added.shape[0] > 1 else added
    return indices.part_of(own, _slice(piece.rows), _slice(piece.keys))


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _at_once(q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float) -> Tensor:
    """In one call, without looking at the mask."""
    visible = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device)
    if not reference.is_readable(q):
        # Keys hidden from every query, at least, are made harmless.
        hidden = ~visible.any(dim=(1, 2))[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    return _masked(q, k, v, _rows(visible, added, q.dtype), scale)


class _Rows(NamedTuple):
    """A mask as torch's function takes it: what it adds, finite somewhere in each row.

    A row that may attend to nothing attends to everything instead, and its output is then replaced by 0: the zero
    gradient that it gets back makes all of its gradients exactly 0.
    """

    added: Tensor  # broadcastable to the scores
    empty: Tensor | None  # bool, of the same shape but for one column; None: no row is


def _rows(visible: Tensor, added: Tensor | None, dtype: torch.dtype) -> _Rows:
    """`visible`, bool, and what else is `added`, finite where it is True, for queries of `dtype`."""
    seen = visible.any(dim=-1, keepdim=True)
    empty = None if reference.is_readable(seen) and seen.all() else ~seen
    if added is None:
        kept = visible if empty is None else visible | empty
        return _Rows(torch.where(kept, 0.0, -torch.inf).to(dtype), empty)
    hidden = torch.scalar_tensor(-torch.inf, dtype=added.dtype, device=added.device)
    if empty is not None:
        hidden = torch.where(empty, 0.0, -torch.inf).to(added.dtype)
    return _Rows(torch.where(visible, added, hidden), empty)


def _masked(q: Tensor, k: Tensor, v: Tensor, rows: _Rows, scale: float) -> Tensor:
    if rows.empty is None:
        return _call(q, k, v, attn_mask=rows.added, scale=scale)
    out = _call(q.masked_fill(rows.empty, 0.0), k, v, attn_mask=rows.added, scale=scale)
    return out.masked_fill(rows.empty, 0.0)


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    enable_gqa = False
    if q.shape[1] != k.shape[1]:  # a branch, because under a compiler the comparison is no bool
        enable_gqa = True
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of these may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def rows_overlap(x: Tensor) -> bool:
    """Whether rows of ``x``, ``(..., head_dim)``, share some of their memory, but not all of it."""
    return any(size > 1 and 0 < stride < x.shape[3] for size, stride in zip(x.shape[:3], x.stride(), strict=False))


def _apart(x: Tensor) -> Tensor:
    """``x``, copied if its rows overlap: torch's CPU kernel returns wrong numbers for such views."""
    return x.contiguous() if rows_overlap(x) else x


def _bounds(x: Tensor) -> tuple[float, float]:
    """The least and the greatest value; NaN if there is one."""
    low, high = torch.aminmax(x.detach())
    return low.item(), high.item()


def _finite(*tensors: Tensor) -> bool:
    """Whether all values are."""
    with torch.no_grad():
        # A sum of what is not finite is not finite either; that of finite numbers may overflow.
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
        return math.isfinite(sum(sums)) or all(bool(torch.isfinite(x).all()) for x in tensors)
