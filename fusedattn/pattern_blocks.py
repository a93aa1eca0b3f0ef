"""From a sparse pattern to what kernels read: a list of blocks, and a rule for the pairs inside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn.block_tables import BlockTable
from fusedattn.mask import Mask
from fusedattn.patterns import Span, whole_of
from fusedattn.shard import Shard

BLOCK = 64  # queries and keys of a block, unless the mask or the pattern says otherwise


class BlocksAndRule(NamedTuple):
    """A pattern, and the layout of its mask, as kernels take them.

    Attributes:
        blocks: bool ``(batch or 1, nheads_q or 1, blocks of queries, blocks of keys)``.
        block_q, block_k: multiples of 16.
        rule: the name of a function in :mod:`fusedattn.kernels.sparse_rules`; empty if blocks are visible as a whole.
        args: of the rule.
    """

    blocks: Tensor
    block_q: int
    block_k: int
    rule: str
    args: tuple[Any, ...]


def blocks_and_rule(
    mask: Mask,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    shard: Shard,
    device: torch.device,
    least_keys: int = 16,
) -> BlocksAndRule:
    """The pattern of a mask for a call, or a shard, of these sizes; nothing waits for the device.

    Blocks of keys that are no multiples of `least_keys` are shown pair by pair.
    """
    pattern, layout = mask.pattern, mask.layout
    assert pattern is not None
    whole = whole_of(nheads, seqlen_q, seqlen_k, shard, device)
    sizes = (BLOCK, BLOCK) if layout is None else (layout.block_q, layout.block_k)
    by_block = False
    if isinstance(pattern, BlockTable):
        own = pattern.block_q, pattern.block_k
        starts = shard.first_query + pattern.shift(whole), shard.first_key
        fits = own[0] % 16 == 0 and own[1] % least_keys == 0
        fits = fits and all(start % size == 0 for size, start in zip(own, starts, strict=True))
        by_block = fits and (layout is None or sizes == own)
        sizes = own if by_block else sizes
    blocks = blocks_of(mask, sizes, nheads, seqlen_q, seqlen_k, shard, device)
    if layout is not None:
        blocks = blocks & layout.blocks
    blocks = blocks[(None,) * (4 - blocks.dim())]
    if by_block:
        return BlocksAndRule(blocks, *sizes, "", ())
    return BlocksAndRule(blocks, *sizes, pattern.rule, pattern.kernel_args(whole))


def blocks_of(
    mask: Mask,
    sizes: tuple[int, int],
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    shard: Shard,
    device: torch.device,
) -> Tensor:
    """Which blocks may have a pair that the pattern and the bands of a mask show.

    Returns:
        bool, ``(n_q, n_k)`` or ``(batch or 1, nheads_q or 1, n_q, n_k)``.
    """
    pattern = mask.pattern
    assert pattern is not None
    whole = whole_of(nheads, seqlen_q, seqlen_k, shard, device)
    q = _spans(seqlen_q, sizes[0], shard.first_query, device)
    k = _spans(seqlen_k, sizes[1], shard.first_key, device)
    shift = pattern.shift(whole)
    positions = Span(q.first[:, None] + shift, q.last[:, None] + shift)
    shown = pattern.blocks(positions, k, whole)
    lower, upper = mask.band(whole.seqlen_q, whole.seqlen_k)
    if upper is not None:
        shown = shown & (k.first <= q.last[:, None] + upper)
    if lower is not None:
        shown = shown & (k.last >= q.first[:, None] + lower)
    return shown


def _spans(seqlen: int, size: int, start: int, device: torch.device) -> Span:
    """The blocks of a shard that begins at token `start`."""
    first = torch.arange(0, seqlen, size, device=device)
    return Span(first + start, (first + size - 1).clamp(max=seqlen - 1) + start)
