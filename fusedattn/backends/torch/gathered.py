"""Plan a sparse pattern: blocks of queries, each with the keys that they see, which need not lie side by side.

The plan reads the values of a mask, so they must be available.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.backends.torch.mask_plan import CALL, ScoresShape, some
from fusedattn.masks import Mask
from fusedattn.pattern_blocks import blocks_of
from fusedattn.patterns import whole_of
from fusedattn.shard import WHOLE

BLOCKS = (64, 256)

# The mask of a pair takes as long as the scores of so many heads, and to gather a key, as so many of its scores.
MASK, GATHER = 3, 8


class Part(NamedTuple):
    """Queries, and the keys that one of them may see: a range, or int64 ``(n,)`` in ascending order."""

    rows: range
    keys: range | Tensor


class Group(NamedTuple):
    """Batches and query heads that are computed together: their mask has no other batches or heads."""

    batches: range
    heads: range
    mask: Mask


def fits(mask: Mask) -> bool:
    """Whether :func:`plan` takes a mask: a pattern, and nothing else that may differ from head to head."""
    others = mask.allowed, mask.layout, mask.function, mask.tree
    return mask.pattern is not None and all(part is None for part in others)


def groups(mask: Mask, shape: ScoresShape, nheads_kv: int, splits_heads: bool) -> list[Group]:
    """The batches, and with `splits_heads` the heads, that have keys of their own, each apart."""
    assert mask.pattern is not None
    whole = whole_of(shape.nheads, shape.seqlen_q, shape.seqlen_k, device=torch.device("cpu"))
    pattern = mask.pattern.written_out(whole)
    tensors = pattern.tensors().values()
    by_batch = shape.batch if any(x.dim() > 1 and x.shape[0] > 1 for x in tensors) else 1
    n_lists = max((x.shape[1] for x in tensors if x.dim() == 4), default=1)
    by_head = 1
    if splits_heads and n_lists > 1:  # heads of q that share keys and a list stay together
        by_head = nheads_kv if nheads_kv % n_lists == 0 else n_lists if n_lists % nheads_kv == 0 else shape.nheads
    found = []
    for b in range(by_batch):
        batches = range(b, b + 1) if by_batch > 1 else range(shape.batch)
        for h in range(by_head):
            n = shape.nheads // by_head

            def own(x: Tensor, b: int = b, h: int = h) -> Tensor:
                x = x[b : b + 1] if x.dim() > 1 and x.shape[0] > 1 else x
                if x.dim() < 4 or x.shape[1] == 1 or by_head == 1:
                    return x
                return x[:, h * x.shape[1] // by_head][:, None]

            of_batches = _of_batches(mask, batches)
            found.append(Group(batches, range(h * n, (h + 1) * n), replace(of_batches, pattern=pattern.mapped(own))))
    return found


def plan(mask: Mask, shape: ScoresShape) -> list[Part]:
    """The cheapest known parts of the mask of a group; queries outside every part see nothing.

    There is a part even if nothing is visible.
    """
    plans = [_parts(mask, shape, size) for size in BLOCKS]
    found = min((parts for parts in plans if parts), key=lambda parts: cost(parts, shape), default=[])
    return found or [Part(range(shape.seqlen_q), range(shape.seqlen_k))]


def _parts(mask: Mask, shape: ScoresShape, size: int) -> list[Part]:
    device = torch.device("cpu")
    blocks = blocks_of(mask, (size, 1), shape.nheads, shape.seqlen_q, shape.seqlen_k, WHOLE, device)
    seen = blocks if blocks.dim() == 2 else some(blocks, (0, 1))
    if mask.valid is not None:
        seen = seen & some(mask.valid, 0)
    found = []
    for i, row in enumerate(seen):
        keys = row.nonzero()[:, 0]
        if not len(keys):
            continue
        rows = range(i * size, min((i + 1) * size, shape.seqlen_q))
        around = range(int(keys[0]), int(keys[-1]) + 1)
        # A range is a view. It also costs less than to gather most of its keys.
        is_range = _scores(len(around), shape) <= _scores(len(keys), shape) + GATHER * shape.nheads * len(keys) / size
        found.append(Part(rows, around if is_range else keys))
    return found


def _scores(n_keys: int, shape: ScoresShape) -> float:
    """The cost of the scores of a query."""
    return n_keys * (shape.batch * shape.nheads + MASK)


def cost(parts: list[Part], shape: ScoresShape) -> float:
    """In scores of one head, as that of :class:`fusedattn.backends.torch.mask_plan.Piece`."""
    return sum(
        CALL
        + len(part.rows) * _scores(len(part.keys), shape)
        + (GATHER * shape.batch * shape.nheads * len(part.keys) if isinstance(part.keys, Tensor) else 0)
        for part in parts
    )


def _of_batches(mask: Mask, batches: range) -> Mask:
    def own(x: Tensor) -> Tensor:
        return x[batches.start : batches.stop] if x.shape[0] > 1 else x

    return replace(mask, pattern=None).mapped(own)
