"""Cut a tensor into parts and paste parts into a tensor: each is the gradient of the other, at any order.

A part is a range of tokens, which is a view, or a list of them, which is a copy.

The gradient of an ordinary slice is as large as the whole tensor, so many slices would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# A range of the batch; a range of the sequence, or int64 (n,) without repetitions.
Box = tuple[range, range | Tensor]


def cut(x: Tensor, boxes: Sequence[Box]) -> tuple[Tensor, ...]:
    """Parts of ``x``, ``(batch, nheads, seqlen, head_dim)``; they may overlap."""
    if len(boxes) == 1 and _covers(boxes, x.shape[0], x.shape[2]):
        return (x,)
    parts: tuple[Tensor, ...] = _Cut.apply(x, tuple(boxes))  # type: ignore[no-untyped-call]
    return parts


def paste(parts: Sequence[Tensor], boxes: Sequence[Box], shape: Sequence[int], *, elsewhere: float = 0.0) -> Tensor:
    """The tensor ``(batch, nheads, seqlen, head_dim)`` of these parts: their sum where they overlap, else `elsewhere`.

    In memory, the heads of a token are adjacent, as in the results of torch's own function on a CPU.
    """
    if len(boxes) == 1 and _covers(boxes, shape[0], shape[2]):
        return parts[0]
    whole: Tensor = _Paste.apply(tuple(boxes), tuple(shape), True, elsewhere, *parts)  # type: ignore[no-untyped-call]
    return whole


# With setup_context, which torch.func needs, each call would take as long as attention over 100 tokens.
class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: tuple[Box, ...]) -> tuple[Tensor, ...]:
        ctx.boxes, ctx.shape, ctx.by_token = boxes, tuple(x.shape), x.stride(1) < x.stride(2)
        return tuple(_part(x, box) for box in boxes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        paste = _Paste.apply if torch.is_grad_enabled() else _pasted
        return paste(ctx.boxes, ctx.shape, ctx.by_token, 0.0, *grads), None


class _Paste(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, boxes: tuple[Box, ...], shape: tuple[int, ...], by_token: bool, elsewhere: float, *parts: Tensor
    ) -> Tensor:
        ctx.boxes = boxes
        return _pasted(boxes, shape, by_token, elsewhere, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *cut(grad, ctx.boxes)


def _pasted(boxes: tuple[Box, ...], shape: tuple[int, ...], by_token: bool, elsewhere: float, *parts: Tensor) -> Tensor:
    batch, nheads, seqlen, head_dim = shape
    overlap = _overlap(boxes)
    dtype = parts[0].dtype
    # Sums of many parts are not rounded to 16 bits again and again.
    wide = torch.promote_types(dtype, torch.float32) if overlap else dtype
    if by_token:
        whole = parts[0].new_empty((batch, seqlen, nheads, head_dim), dtype=wide).transpose(1, 2)
    else:
        whole = parts[0].new_empty(shape, dtype=wide)
    if overlap or not _covers(boxes, batch, seqlen):
        whole.fill_(elsewhere)
    for part, box in zip(parts, boxes, strict=True):
        batches, tokens = box
        if isinstance(tokens, Tensor):
            whole[batches.start : batches.stop].index_add_(2, tokens, part.to(wide))
            continue
        own = _part(whole, box)
        if overlap:
            own.add_(part)
        else:
            own.copy_(part)
    return whole.to(dtype)


def _part(x: Tensor, box: Box) -> Tensor:
    batches, tokens = box
    if isinstance(tokens, Tensor):
        return x[batches.start : batches.stop].index_select(2, tokens)
    return x[batches.start : batches.stop, :, tokens.start : tokens.stop]


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes may share a token of a batch; their ranges of batches must be equal or disjoint."""
    if any(isinstance(tokens, Tensor) for _, tokens in boxes):
        return True
    ordered = sorted((batches.start, tokens.start, tokens.stop) for batches, tokens in boxes)  # type: ignore[union-attr]
    return any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(ordered))


def _covers(boxes: Sequence[Box], batch: int, seqlen: int) -> bool:
    """Whether boxes, ranges that do not overlap, cover the whole tensor."""
    if any(isinstance(tokens, Tensor) for _, tokens in boxes):
        return False
    return sum(len(batches) * len(tokens) for batches, tokens in boxes) == batch * seqlen
