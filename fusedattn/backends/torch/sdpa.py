"""The ``torch`` backend: ``F.scaled_dot_product_attention`` composed to this package's contract.

It adds what torch's function lacks: rotary embedding, bottom-right causal masks, rows that see nothing, NaN or Inf
behind a mask, and all other steps on scores. Gradients are torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedattn import indices, reference
from fusedattn.backends.torch import eager, flash, gathered, mask_plan, merged
from fusedattn.backends.torch.boxes import Box, cut, paste
from fusedattn.backends.torch.eager import Steps
from fusedattn.masks import Mask, boolean
from fusedattn.options import Options
from fusedattn.readable import is_readable
from fusedattn.reference import LARGE
from fusedattn.shard import WHOLE, Shard
from fusedattn.strides import rows_overlap

Results = tuple[Tensor, Tensor | None]


class Compute(Protocol):
    """Compute ``(out, lse)`` of a piece, which is `part` of the scores.

    `of_rows` is added to its scores, `is_causal` hides keys ``j > i``.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, of_rows: Tensor | None, is_causal: bool, part: Shard
    ) -> Results: ...


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    """``(out, lse)`` of :func:`fusedattn.attention`; lse is None if not asked for."""
    return_lse, shard = options.return_lse, options.shard
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    has_kernel = options.softcap is None and options.score_mod is None and not options.dropout_p
    is_plain = has_kernel and options.sinks is None
    if q.numel() == 0 or seqlen_k == 0:  # torch's function cannot compute these
        return _by_reference(q, k, v, options)
    rope, bias = options.rope, options.bias
    shape = mask_plan.ScoresShape(q.shape[0], q.shape[1], seqlen_q, seqlen_k)
    mask = mask_plan.within_shard(options.mask, shard, shape, q.device)
    given = [q, k, v, *(x for x in (options.sinks, options.dropout_seed) if x is not None)]
    for value in (bias, options.score_mod):
        given += [] if value is None else value.tensors().values()
    readable = is_readable(*given, *mask.tensors().values())
    can_plan = readable and q.device.type == "cpu" and not is_transformed(*given)
    if not can_plan and (return_lse or not is_plain):
        return _by_reference(q, k, v, options)
    if can_plan and options.sinks is not None and not (options.sinks < math.inf).all():  # 0 * NaN is NaN
        return _by_reference(q, k, v, options)
    # In float32 at least: in 16 bits a large negative bias would become -inf.
    added = None
    if bias is not None:
        added = bias.dense(seqlen_q, seqlen_k, shard=shard, dtype=torch.promote_types(q.dtype, torch.float32))
    lowest = highest = 0.0
    if added is not None:
        lowest, highest = _bounds(added) if readable else (-math.inf, 0.0)
        if lowest == -math.inf:
            mask = mask & boolean(added != -math.inf)
    unrotated, poisoned = (q, k, v), None
    q, k = (q, k) if rope is None else rope.rotate(q, k)
    # torch's function multiplies 0 by a masked NaN, and its CPU kernel makes 0 of a NaN in q.
    if readable and not (highest < math.inf and is_finite(k, v, q)):
        cleaned = _cleaned(q, k, v, mask, _is_differentiated(q, k, *given)) if highest < math.inf else None
        if cleaned is None:
            return _by_reference(*unrotated, options)
        q, k, v, poisoned = cleaned

    q, k, v = _apart(q), _apart(k), _apart(v)
    is_large = not (lowest > -LARGE and highest < LARGE)
    keeps_weights = False
    if added is not None and is_large and _is_differentiated(q, k, v, options.sinks):
        keeps_weights = _has_large_rows(added, mask, q, k)
    if return_lse or not is_plain:
        steps = Steps(
            options.scale, options.softcap, options.score_mod, options.sinks, options.dropout_p, options.dropout_seed,
            needs_lse=return_lse or options.sinks is not None,
        )  # fmt: skip
        out, lse = _with_lse(q, k, v, mask, added, steps, has_kernel and not keeps_weights, shard)
    else:
        out, lse = _plain(q, k, v, mask, added, options.scale, can_plan, keeps_weights), None
    if poisoned is not None:
        out = out.masked_fill(poisoned[..., None], math.nan)
        lse = None if lse is None else lse.masked_fill(poisoned, math.nan)
    return out, lse if return_lse else None


def _by_reference(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Results:
        return reference.attention(q, k, v, **options.of_numbers())[:2]

    out, lse = _widened(compute, q, k, v)
    return out, lse if options.return_lse else None


def _widened(compute: Callable[[Tensor, Tensor, Tensor], Results], q: Tensor, k: Tensor, v: Tensor) -> Results:
    """The results of `compute` for q, k and v in float32 at least; out in the dtype of q.

    As in the kernels, scores are not rounded to 16 bits: attention_weights relies on their lse.
    """
    with torch.autocast(q.device.type, enabled=False):
        out, lse = compute(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)))
    return out.to(q.dtype), lse


def _cleaned(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, is_differentiated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """q, k, v with 0 in rows that are not finite, and the queries whose results are NaN, ``(batch, nheads, seqlen_q)``.

    None if that does not suffice: a query sees a key or value that is not finite, or has an Inf itself, or a NaN that
    must reach gradients.
    """
    bad_k = ~(_row_sums(k) + _row_sums(v)).isfinite()
    visible = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device)
    if bad_k.any():
        seen = mask_plan.some(visible, 2)  # (batch or 1, nheads or 1, seqlen_k)
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (k.shape[1], -1)).any(dim=2)
        if (bad_k & seen).any():
            return None
        lost = bad_k.flatten().nonzero()[:, 0]
        # This takes a third of the time of masked_fill.
        k, v = (x.reshape(-1, x.shape[3]).index_fill(0, lost, 0.0).view_as(x) for x in (k, v))
    if is_finite(q):
        return q, k, v, None
    bad_q = ~_row_sums(q).isfinite()
    poisoned = bad_q & mask_plan.some(visible, 3)
    if poisoned.any() and (is_differentiated or (poisoned & ~q.isnan().any(dim=-1)).any()):
        return None
    return q.masked_fill(bad_q[..., None], 0.0), k, v, poisoned


def is_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite; also False if their sum overflows float32."""
    for x in tensors:
        if x.requires_grad:  # in a short call, each step takes longer than its work
            x = x.detach()
        if math.isfinite(x.sum().item()):
            continue
        if x.dtype != torch.float16 or not math.isfinite(x.sum(dtype=torch.float32).item()):
            return False
    return True


def _row_sums(x: Tensor) -> Tensor:
    """Sums of rows. Not finite if the row is not, or if the sum overflows float32."""
    return x.detach().sum(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float, can_plan: bool, keeps_weights: bool
) -> Tensor:
    """The output alone, if only `added` changes the scores; `added` is finite wherever `mask` shows a pair."""
    if keeps_weights:
        with sdpa_kernel(SDPBackend.MATH):
            return at_once(q, k, v, mask, added, scale)
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    if not can_plan or head_dim == head_dim_v or _is_differentiated(q, k, v, added):
        return _run(q, k, v, mask, added, scale, can_plan)
    # torch's fast kernel takes one head_dim for all, and has no second derivatives; its other one has them.
    out = _run(*_of_one_head_dim(q, k, v), mask, added, scale, can_plan)
    return out.transpose(1, 2)[..., :head_dim_v].contiguous().transpose(1, 2)


def _of_one_head_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, padded with zeros to the same head_dim."""
    most = max(q.shape[3], v.shape[3])
    q, k, v = (x if x.shape[3] == most else flash.padded(x, most - x.shape[3]) for x in (q, k, v))
    return q, k, v


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float, can_plan: bool) -> Tensor:
    as_torch = None if added is not None else is_causal(mask, q.shape[2], k.shape[2])
    if as_torch is not None:
        return _call(q, k, v, is_causal=as_torch, scale=scale)
    if not can_plan:
        return at_once(q, k, v, mask, added, scale)

    def by_function(q: Tensor, k: Tensor, v: Tensor, of_rows: Tensor | None, is_causal: bool, part: Shard) -> Results:
        return _call(q, k, v, attn_mask=of_rows, is_causal=is_causal, scale=scale), None

    scale_of_parts = scale if q.shape[3] == v.shape[3] else None
    return _in_pieces(q, k, v, mask, added, by_function, has_triangles=True, scale=scale_of_parts)[0]


def is_causal(mask: Mask, seqlen_q: int, seqlen_k: int) -> bool | None:
    """The value of torch's ``is_causal`` that means `mask`; None if neither does."""
    if not mask.only_bands:
        return None
    lower, upper = mask.band(seqlen_q, seqlen_k)
    return upper is not None if lower is None and upper in (None, 0) else None


def _with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    added: Tensor | None,
    steps: Steps,
    has_kernel: bool,
    shard: Shard,
) -> Results:
    """The output and, if `steps` need it, lse; by torch's kernel or with the weights written out."""
    if has_kernel and not (added is not None and added.requires_grad):
        head_dim_v = v.shape[3]

        def by_kernel(q: Tensor, k: Tensor, v: Tensor, of_rows: Tensor | None, is_causal: bool, part: Shard) -> Results:
            def again(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Results:
                own = of_rows
                if is_causal:
                    triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
                    own = _rows(triangle[None, None], None, q.dtype).added
                of_sinks = steps._replace(sinks=sinks)
                return _widened(lambda q, k, v: eager.attention(q, k, v, own, of_sinks, part), q, k, v)

            return flash.attention(q, k, v, of_rows, steps.sinks, is_causal=is_causal, scale=steps.scale, eager=again)

        is_plain = steps.sinks is None
        out, lse = _in_pieces(
            *_of_one_head_dim(q, k, v), mask, added, by_kernel, has_triangles=True, splits_heads=is_plain,
            scale=steps.scale if is_plain else None,
        )  # fmt: skip
        out = out[..., :head_dim_v]
    else:

        def by_weights(
            q: Tensor, k: Tensor, v: Tensor, of_rows: Tensor | None, is_causal: bool, part: Shard
        ) -> Results:
            own = shard.part(part.first_batch, 0, part.first_query, part.first_key)
            return eager.attention(q, k, v, of_rows, steps, own._replace(nheads=shard.heads(q.shape[1])))

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Results:
            return _in_pieces(q, k, v, mask, added, by_weights, has_triangles=False)

        out, lse = _widened(compute, q, k, v)
    if lse is not None and steps.sinks is not None:
        lse = torch.where(lse == -math.inf, steps.sinks.to(lse.dtype)[:, None], lse)
    return out, lse


def _has_large_rows(added: Tensor, mask: Mask, q: Tensor, k: Tensor) -> bool:
    """Whether a large number is added to every score that some query sees; True if that cannot be known.

    In that case lse has too few digits for torch's kernels, which recompute the weights from it in the backward.
    """
    if not is_readable(added):
        return True
    visible = mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device)
    largest = added.detach().masked_fill(~visible, -torch.inf).amax(dim=-1)
    return reference.large_rows(largest) is not None


def is_transformed(*tensors: Tensor) -> bool:
    """Whether forward-mode or torch.func derivatives may be asked for, which a plan does not support."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return forward_ad._current_level >= 0 or any(map(wrapped, tensors))


def _in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    added: Tensor | None,
    compute: Compute,
    *,
    has_triangles: bool,
    splits_heads: bool = True,
    scale: float | None = None,
) -> Results:
    """Run `compute` on each piece of the plan, which skips most hidden pairs, and join the results.

    `compute` takes triangles of keys that are side by side, and some of the heads alone, where that is said. `scale` is
    that of scores that nothing else changes but `added`; then torch's kernel may be called without `compute`.
    """
    shape = mask_plan.ScoresShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    as_torch = is_causal(mask, q.shape[2], k.shape[2])
    can_gather = has_triangles  # other steps on scores count queries and keys, and parts of them must be ranges
    has_triangles = has_triangles and added is None
    if as_torch is False or (as_torch and has_triangles):
        return _whole(q, k, v, None, added, compute, is_causal=as_torch)
    if (added is not None and added.requires_grad) or mask_plan.is_short(mask, shape):
        return _whole(q, k, v, _everywhere(mask, q, k), added, compute)
    if can_gather and gathered.fits(mask):
        scale = scale if added is None else None
        return _in_groups(q, k, v, added, compute, gathered.groups(mask, shape, k.shape[1], splits_heads), shape, scale)
    mask = mask_plan.with_allowed_pairs(mask, shape, q.device)
    groups = mask_plan.plan(mask, shape, diagonals=has_triangles)
    parts = [(batches, piece) for batches, own in groups for piece in own]
    boxes_q, boxes_k = ([(batches, getattr(piece, name)) for batches, piece in parts] for name in ("rows", "keys"))
    bands: dict[tuple[int, int, int], _Rows] = {}
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for (batches, piece), queries, keys, values in zip(
        parts, cut(q, boxes_q), cut(k, boxes_k), cut(v, boxes_k), strict=True
    ):
        own = _part(added, batches, piece)
        in_band = piece.hidden == "band"
        if piece.hidden in ("nothing", "later"):
            rows = _Rows(own, None)
        elif in_band and own is None:  # pieces at the same place relative to the diagonal share one mask
            place = len(piece.rows), len(piece.keys), piece.keys.start - piece.rows.start
            if place not in bands:
                bands[place] = _rows(_visible(Mask(mask.bands), batches, piece, shape, q.device), None, q.dtype)
            rows = bands[place]
        else:
            shown = Mask(mask.bands) if in_band else mask
            rows = _rows(_visible(shown, batches, piece, shape, q.device), own, q.dtype)
        at = Shard(batches.start, 0, piece.rows.start, piece.keys.start)
        run = functools.partial(
            compute, k=keys, v=values, of_rows=rows.added, is_causal=piece.hidden == "later", part=at
        )
        out, lse = _masked(queries, rows, run)
        outs.append(out)
        if lse is not None:
            lses.append(lse[..., None])
    out = paste(outs, boxes_q, (*q.shape[:3], v.shape[3]))
    if not lses:
        return out, None
    return out, paste(lses, boxes_q, (*q.shape[:3], 1), elsewhere=-math.inf)[..., 0].contiguous()


def _in_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    compute: Compute,
    found: list[gathered.Group],
    shape: mask_plan.ScoresShape,
    scale: float | None,
) -> Results:
    """Run `compute` on the parts of a sparse pattern, batches and heads apart where they see different keys."""
    if len(found) == 1:
        return _in_parts(q, k, v, found[0].mask, added, compute, shape, scale)
    group = q.shape[1] // k.shape[1]
    n_batches, n_heads = len(found[0].batches), len(found[0].heads)
    n_kv = max(n_heads // group, 1)
    of_part = shape._replace(batch=n_batches, nheads=n_heads)
    batches: list[Results] = []
    remaining = iter(found)
    for of_batch in zip(*(x.split(n_batches) for x in (q, k, v)), strict=True):
        heads: list[Results] = []
        keys, values = (x.split(n_kv, 1) for x in of_batch[1:])
        for queries in of_batch[0].split(n_heads, 1):
            own = next(remaining)
            at = added
            if at is not None:
                at = at[_slice(own.batches)] if at.shape[0] > 1 else at
                at = at[:, _slice(own.heads)] if at.shape[1] > 1 else at
            i = own.heads.start // group // n_kv
            heads.append(_in_parts(queries, keys[i], values[i], own.mask, at, compute, of_part, scale))
        batches.append(_joined(heads, 1))
    return _joined(batches, 0)


def _joined(parts: list[Results], dim: int) -> Results:
    lses = [lse for _, lse in parts if lse is not None]  # merged parts have one, asked for or not
    return torch.cat([out for out, _ in parts], dim), torch.cat(lses, dim) if len(lses) == len(parts) else None


def _in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    added: Tensor | None,
    compute: Compute,
    shape: mask_plan.ScoresShape,
    scale: float | None,
) -> Results:
    """Run `compute` on each part of the plan of a group, and join the results; or merge parts, if that takes less."""
    parts = gathered.plan(mask, shape)
    if scale is not None and q.dtype in (torch.float32, torch.float64):  # in 16 bits, each part would be rounded
        scattered = merged.plan(mask, shape)
        if scattered and merged.cost(scattered, shape) < gathered.cost(parts, shape):
            return merged.attention(q, k, v, mask, scattered, scale)
    batches = range(shape.batch)
    boxes_q: list[Box] = [(batches, part.rows) for part in parts]
    boxes_k: list[Box] = [(batches, part.keys) for part in parts]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for part, queries, keys, values in zip(parts, cut(q, boxes_q), cut(k, boxes_k), cut(v, boxes_k), strict=True):
        at = _slice(part.rows), _slice(part.keys) if isinstance(part.keys, range) else part.keys
        own = None if added is None else indices.part_of(added, *at)
        visible = mask.dense(
            shape.seqlen_q, shape.seqlen_k, rows=at[0], keys=at[1], batch=shape.batch, nheads=shape.nheads,
            device=q.device, expand=False,
        )  # fmt: skip
        rows = _rows(visible, own, q.dtype)
        out, lse = _masked(queries, rows, functools.partial(
            compute, k=keys, v=values, of_rows=rows.added, is_causal=False, part=WHOLE
        ))  # fmt: skip
        outs.append(out)
        if lse is not None:
            lses.append(lse[..., None])
    out = paste(outs, boxes_q, (*q.shape[:3], v.shape[3]))
    if not lses:
        return out, None
    return out, paste(lses, boxes_q, (*q.shape[:3], 1), elsewhere=-math.inf)[..., 0].contiguous()


def _everywhere(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """The mask written out: bool, broadcastable to the scores."""
    return mask.dense(q.shape[2], k.shape[2], batch=q.shape[0], nheads=q.shape[1], device=q.device, expand=False)


def _visible(
    mask: Mask, batches: range, piece: mask_plan.Piece, shape: mask_plan.ScoresShape, device: torch.device
) -> Tensor:
    """The mask of a piece: bool, broadcastable to its scores."""
    rows, keys = _slice(piece.rows), _slice(piece.keys)
    mask = mask_plan.of_batches(mask, batches)
    if mask.valid is not None and piece.hidden == "keys":
        return mask.valid[:, None, None, keys]
    return mask.dense(shape.seqlen_q, shape.seqlen_k, rows=rows, keys=keys, device=device, expand=False)


def _part(added: Tensor | None, batches: range, piece: mask_plan.Piece) -> Tensor | None:
    """The part of `added` that belongs to a piece."""
    if added is None:
        return None
    own = added[_slice(batches)] if added.shape[0] > 1 else added
    return indices.part_of(own, _slice(piece.rows), _slice(piece.keys))


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    added: Tensor | None,
    compute: Compute,
    *,
    is_causal: bool = False,
) -> Results:
    """Run `compute` on everything at once; with `visible` None only `is_causal` hides pairs."""
    rows = _Rows(added, None) if visible is None else _rows(visible, added, q.dtype)
    run = functools.partial(compute, k=k, v=v, of_rows=rows.added, is_causal=is_causal, part=WHOLE)
    out, lse = _masked(q, rows, run)
    return out, None if lse is None else lse.contiguous()


def at_once(q: Tensor, k: Tensor, v: Tensor, mask: Mask, added: Tensor | None, scale: float | None) -> Tensor:
    """The output alone, in one call, without reading the mask; inputs must be finite if their values can be read."""
    visible = _everywhere(mask, q, k)
    if not is_readable(q):
        # At least the keys hidden from every query are made harmless.
        hidden = ~visible.any(dim=(1, 2))[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    rows = _rows(visible, added, q.dtype)
    return _masked(q, rows, lambda q: (_call(q, k, v, attn_mask=rows.added, scale=scale), None))[0]


class _Rows(NamedTuple):
    """A mask as torch's function takes it: added to the scores, with a finite value in each row.

    A row that may attend to nothing attends to everything instead, and its output is then replaced by 0. The gradient
    of that output is 0, which makes all gradients of the row exactly 0.
    """

    added: Tensor | None  # broadcastable to the scores
    empty: Tensor | None  # bool, the same shape with one column; None if no row is empty


def _rows(visible: Tensor, added: Tensor | None, dtype: torch.dtype) -> _Rows:
    """Combine `visible`, bool, and `added`, finite where `visible` is True, for queries of `dtype`."""
    seen = mask_plan.some(visible, -1, keepdim=True)
    empty = None if is_readable(seen) and seen.all() else ~seen
    if added is None:
        kept = visible if empty is None else visible | empty
        # 0 if kept, else -inf; torch.where takes four times as long.
        return _Rows(torch.threshold_(kept.to(dtype).sub_(1.0), -0.5, -math.inf), empty)
    hidden = torch.scalar_tensor(-torch.inf, dtype=added.dtype, device=added.device)
    if empty is not None:
        hidden = torch.where(empty, 0.0, -torch.inf).to(added.dtype)
    return _Rows(torch.where(visible, added, hidden), empty)


def _masked(q: Tensor, rows: _Rows, compute: Callable[[Tensor], Results]) -> Results:
    """The results of `compute` for q, with out 0 and lse ``-inf`` in rows that see nothing."""
    if rows.empty is None:
        return compute(q)
    out, lse = compute(q.masked_fill(rows.empty, 0.0))
    lse = None if lse is None else lse.masked_fill(rows.empty[..., 0], -math.inf)
    return out.masked_fill(rows.empty, 0.0), lse


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    enable_gqa = False
    if q.shape[1] != k.shape[1]:  # a branch: under a compiler the comparison is not a bool
        enable_gqa = True
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of these may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _apart(x: Tensor) -> Tensor:
    """``x``, copied if its rows overlap: torch's CPU kernel returns wrong numbers for such views."""
    return x.contiguous() if rows_overlap(x) else x


def _bounds(x: Tensor) -> tuple[float, float]:
    """The least and the greatest value; NaN if there is one."""
    low, high = torch.aminmax(x.detach())
    return low.item(), high.item()
