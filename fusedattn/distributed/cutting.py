"""The options of a rectangle of the scores: tensors cut to its heads, queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fusedattn import indices
from fusedattn.biases import Bias
from fusedattn.masks import Documents, Layout, Mask, Prefix
from fusedattn.options import Options
from fusedattn.rope import Rope
from fusedattn.shard import Shard


class Rectangle(NamedTuple):
    """Batches, heads, queries and keys to cut out of tensors, and the shard of the whole attention that they are.

    Attributes:
        heads, rows, keys, batches: indices of tensors, which have the queries of one process and all keys.
    """

    shard: Shard
    heads: slice
    rows: slice
    keys: slice
    batches: slice = slice(None)


def cut(options: Options, part: Rectangle) -> Options:
    """`options` for one rectangle; positions of rope are explicit."""
    return replace(
        options,
        mask=_mask(options.mask, part),
        bias=None if options.bias is None else _bias(options.bias, part),
        rope=None if options.rope is None else _rope(options.rope, part),
        sinks=None if options.sinks is None else options.sinks[part.heads],
        shard=part.shard,
    )


def reasons_of_pattern(mask: Mask) -> list[str]:
    """Why the sparse pattern of a mask cannot be cut: its tensors have the batches and heads of the whole."""
    if mask.pattern is None or not mask.pattern.tensors():
        return []
    named = ", ".join(mask.pattern.tensors())
    return [f"mask: got {named} and tensors of many processes, allowed are sparse patterns without tensors"]


def _mask(mask: Mask, part: Rectangle) -> Mask:
    documents, layout = mask.documents, mask.layout
    if documents is not None:
        documents = Documents(documents.q[part.batches, part.rows], documents.k[part.batches, part.keys])
    return replace(
        mask,
        valid=None if mask.valid is None else mask.valid[part.batches, part.keys],
        allowed=None if mask.allowed is None else _pairs(mask.allowed, part, part.keys),
        prefix=None if mask.prefix is None else Prefix(mask.prefix.lengths[part.batches], mask.prefix.align),
        documents=documents,
        layout=None if layout is None else _layout(layout, part),
        tree=None if mask.tree is None else _pairs(mask.tree, part, None),
    )


def _bias(bias: Bias, part: Rectangle) -> Bias:
    slopes = bias.slopes
    return Bias(
        None if bias.tensor is None else _pairs(bias.tensor, part, part.keys),
        None if slopes is None else _of_batches(slopes, part, 2)[..., part.heads],
        None if bias.relative is None else _pairs(bias.relative, part, None),
    )


def _rope(rope: Rope, part: Rectangle) -> Rope:
    positions_q, positions_k = (
        None if x is None else _of_batches(x, part, 2)[..., tokens]
        for x, tokens in ((rope.positions_q, part.rows), (rope.positions_k, part.keys))
    )
    cos, sin = (_of_batches(x, part, 3) for x in (rope.cos, rope.sin))
    return Rope(cos, sin, rope.interleaved, positions_q, positions_k)


def _of_batches(x: Tensor, part: Rectangle, dims: int) -> Tensor:
    """The batches of a tensor that has them if it has `dims` dimensions."""
    return x[part.batches] if x.dim() == dims and x.shape[0] > 1 else x


def _pairs(x: Tensor, part: Rectangle, keys: slice | None) -> Tensor:
    """The part of a tensor that broadcasts to ``(batch, nheads_q, rows, keys)``."""
    x = _of_batches(indices.part_of(x, part.rows, keys), part, 4)
    return x[:, part.heads] if x.shape[1] > 1 else x


def _layout(layout: Layout, part: Rectangle) -> Layout:
    """The blocks of a rectangle.

    Raises:
        ValueError: it does not begin at a block.
    """
    at = []
    for name, of_block, tokens in (("block_q", layout.block_q, part.rows), ("block_k", layout.block_k, part.keys)):
        if tokens == slice(None):
            at.append(tokens)
            continue
        if tokens.start % of_block:
            raise ValueError(
                f"mask: block_sparse: got {name} = {of_block} and a shard from token {tokens.start} on, allowed are "
                "blocks that divide the first token of each shard"
            )
        at.append(slice(tokens.start // of_block, -(-tokens.stop // of_block)))
    blocks = _of_batches(indices.part_of(layout.blocks, *at), part, 4)
    blocks = blocks[:, part.heads] if blocks.shape[1] > 1 else blocks
    return Layout(blocks, layout.block_q, layout.block_k)


def may_see(mask: Mask, queries: slice, keys: slice, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether the bands of a mask let any of these queries see any of these keys, of so many in all."""
    lower, upper = mask.band(seqlen_q, seqlen_k)
    if queries.start >= queries.stop or keys.start >= keys.stop:
        return False
    before = upper is not None and queries.stop - 1 + upper < keys.start
    behind = lower is not None and queries.start + lower > keys.stop - 1
    return not (before or behind)
