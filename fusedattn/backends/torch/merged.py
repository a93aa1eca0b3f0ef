"""Sparse patterns whose keys are scattered: attentions over parts of the keys of each query, merged by lse.

Queries that are a stride apart see keys that are a stride apart, and no others but their window. Each block of keys
that is listed for single queries is attended to by these queries. The plan reads values of the mask.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn import parts, reference
from fusedattn.backends.torch import flash
from fusedattn.backends.torch.mask_plan import CALL, ScoresShape, some
from fusedattn.block_tables import KnownTable
from fusedattn.mask_parts import Band
from fusedattn.masks import Mask
from fusedattn.patterns import Strided, whole_of

# A part with its merge costs as much as two calls; its rows, as so many of their scores.
PART, ROW = 2 * CALL, 24


class Part(NamedTuple):
    """Queries, keys, int64 ``(n,)`` each, and the mask between them, which has no pattern."""

    rows: Tensor
    keys: Tensor
    mask: Mask


def plan(mask: Mask, shape: ScoresShape) -> list[Part]:
    """Parts that together have each visible pair once; none if the pattern has no such parts.

    `mask` is that of a group (:mod:`fusedattn.backends.torch.gathered`).
    """
    pattern = mask.pattern
    if isinstance(pattern, Strided):
        return _of_strides(pattern, mask, shape)
    if isinstance(pattern, KnownTable) and pattern.known.shape[:2] == (1, 1):
        return _of_table(pattern, mask, shape)
    return []


def cost(found: list[Part], shape: ScoresShape) -> float:
    """In scores of one head, as that of :class:`fusedattn.backends.torch.mask_plan.Piece`."""
    nheads = shape.batch * shape.nheads
    return sum(PART + nheads * len(part.rows) * (len(part.keys) + ROW) for part in found)


def _of_strides(pattern: Strided, mask: Mask, shape: ScoresShape) -> list[Part]:
    stride, align, others = pattern.stride, pattern.align, replace(mask, pattern=None)
    _, _, n, m = shape
    shift = pattern.shift(whole_of(None, n, m))
    lower, upper = mask.band(n, m)
    first = -math.inf if lower is None else lower - shift  # distances from a query's position to its keys
    last = math.inf if upper is None else upper - shift
    found = []
    near = others & Mask(bands=frozenset({Band(stride - 1, stride - 1, align)}))
    size = min(max(stride, 64), 256)
    for start in range(0, n, size):
        stop = min(start + size, n)
        left = max(start + shift + max(first, 1 - stride), 0)
        right = min(stop + shift + min(last, stride - 1), m)
        if left < right:
            found.append(
                Part(torch.arange(start, stop, device="cpu"), torch.arange(int(left), int(right), device="cpu"), near)
            )
    for is_before, band in ((True, Band(None, -stride, align)), (False, Band(-stride, None, align))):
        if (first > -stride) if is_before else (last < stride):
            continue
        far = others & Mask(bands=frozenset({band}))
        for place in range(min(stride, m)):
            start = (place - shift) % stride
            if start < n:
                found.append(
                    Part(
                        torch.arange(start, n, stride, device="cpu"), torch.arange(place, m, stride, device="cpu"), far
                    )
                )
    return found


def _of_table(pattern: KnownTable, mask: Mask, shape: ScoresShape) -> list[Part]:
    others, size = replace(mask, pattern=None), pattern.block_k
    shift = pattern.shift(whole_of(None, shape.seqlen_q, shape.seqlen_k))
    position = torch.arange(shape.seqlen_q, device="cpu") + shift
    row = position.div(pattern.block_q, rounding_mode="floor")
    table = pattern.known[0, 0]
    exists = (row >= 0) & (row < table.shape[0])
    upper = mask.band(shape.seqlen_q, shape.seqlen_k)[1]
    found = []
    for column in some(table, 0).nonzero()[:, 0].tolist():
        seen = exists & table[:, column][row.clamp(0, table.shape[0] - 1)]
        first = column * size
        if upper is not None:  # queries before all keys of the block
            seen = seen & (torch.arange(shape.seqlen_q, device="cpu") + upper >= first)
        rows = seen.nonzero()[:, 0]
        if len(rows):
            found.append(Part(rows, torch.arange(first, min(first + size, shape.seqlen_k), device="cpu"), others))
    return found


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, found: list[Part], scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, differentiable; float32 or float64, finite, one head_dim for all."""
    out, lse = _Merged.apply(q, k, v, mask, found, scale)  # type: ignore[no-untyped-call]
    return out, lse


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, found: list[Part], scale: float
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        lse = q.new_full(q.shape[:3], -math.inf)
        masks = _Masks(q, k)
        for part in found:
            added, empty = masks.of(part)
            queries, keys, values = _own(part, q, k, v)
            part_out, part_lse = flash.forward(queries, keys, values, added, scale)
            if empty is not None:
                part_lse = part_lse.masked_fill(empty, -math.inf)
            own_out, own_lse = out.index_select(2, part.rows), lse.index_select(2, part.rows)
            parts.add_part(own_out, own_lse, (part_out, part_lse))
            out.index_copy_(2, part.rows, own_out)
            lse.index_copy_(2, part.rows, own_lse)
        ctx.set_materialize_grads(False)
        ctx.mask, ctx.found, ctx.scale = mask, found, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled():
            results = reference.attention(q, k, v, mask=ctx.mask, scale=ctx.scale)[:2]
            given = dout, torch.zeros_like(lse) if dlse is None else dlse
            wanted = [x for x, is_needed in zip((q, k, v), ctx.needs_input_grad, strict=False) if is_needed]
            differentiable = iter(torch.autograd.grad(results, wanted, given, create_graph=True))
            needed = ctx.needs_input_grad
            return tuple(next(differentiable) if is_needed else None for is_needed in needed)
        blind = lse == -math.inf
        dout = dout.masked_fill(blind[..., None], 0.0)
        dlse = None if dlse is None else dlse.masked_fill(blind, 0.0)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        masks = _Masks(q, k)
        for part in ctx.found:
            added, empty = masks.of(part)
            rows = part.rows
            queries, keys, values = _own(part, q, k, v)
            # With out and lse of all keys, the weights and their gradients are those of the whole.
            whole = lse.index_select(2, rows)
            if empty is not None:
                whole = whole.masked_fill(empty, math.inf)  # weights of 0
            of_lse = None if dlse is None else dlse.index_select(2, rows)
            dout_rows, out_rows = (x.index_select(2, rows) for x in (dout, out))
            of_part = flash.gradients(
                dout_rows, of_lse, queries, keys, values, added, out_rows, whole, False, ctx.scale
            )
            for grad, tokens, x in zip(grads, (rows, part.keys, part.keys), of_part, strict=True):
                grad.index_add_(2, tokens, x)
        return *grads, None, None, None


def _own(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.index_select(2, part.rows), k.index_select(2, part.keys), v.index_select(2, part.keys)


class _Masks:
    """What torch's kernel adds to the scores of a part, and its queries that see nothing there.

    Parts of a stride repeat each other: with bands alone, the place of their first tokens decides.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.known: dict[Any, tuple[Tensor | None, Tensor | None]] = {}

    def of(self, part: Part) -> tuple[Tensor | None, Tensor | None]:
        if not part.mask.only_bands:
            return self._of(part)
        rows, keys = part.rows, part.keys
        steps = [int(x[1] - x[0]) if len(x) > 1 else 1 for x in (rows, keys)]
        regular = all(int(x[-1] - x[0]) == (len(x) - 1) * step for x, step in zip((rows, keys), steps, strict=True))
        if not regular:
            return self._of(part)
        key = part.mask.bands, len(rows), len(keys), *steps, int(rows[0] - keys[0])
        if key not in self.known:
            self.known[key] = self._of(part)
        return self.known[key]

    def _of(self, part: Part) -> tuple[Tensor | None, Tensor | None]:
        q, k = self.q, self.k
        seen = part.mask.dense(q.shape[2], k.shape[2], rows=part.rows, keys=part.keys, device=q.device)
        if seen.all():
            return None, None
        empty = ~some(seen, -1, keepdim=True)
        added = torch.where(seen | empty, 0.0, -math.inf).to(q.dtype)
        return added, empty[..., 0] if empty.any() else None
