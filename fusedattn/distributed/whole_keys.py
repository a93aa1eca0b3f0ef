"""The options of a call with the tensors of all keys, and of the queries of all heads that a process computes.

A tensor that has an entry for each token (valid, documents, positions) is given for the process's own tokens, as q, k
and v are. A tensor that has an entry for each pair has the rows of the process's own queries, with all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.biases import Bias
from fusedattn.distributed import rows
from fusedattn.distributed.placement import Placement, rank_in
from fusedattn.masks import Documents, Layout
from fusedattn.options import Options
from fusedattn.rope import Rope


def with_all_keys(
    options: Options, queries: Placement, keys: Placement, for_each_query: Sequence[bool], device: torch.device
) -> Options:
    """`options` with per-token tensors of all keys and rows of the share of queries; positions are explicit.

    Args:
        for_each_query: which of :data:`rows.NAMES` have a row for each query.
    """
    mask, bias, rope = options.mask, options.bias, options.rope
    documents, layout = mask.documents, mask.layout
    if documents is not None:
        documents = Documents(queries.share(documents.q, 1), keys.whole(documents.k, 1))
    allowed, tree, blocks, tensor, relative = rows.tensors_of(options)
    of_allowed, of_tree, of_blocks, of_tensor, of_relative = for_each_query
    if layout is not None and blocks is not None and of_blocks:
        blocks = queries.blocks_of_share(blocks, layout.block_q)

    def share(x: Tensor | None, is_split: bool) -> Tensor | None:
        return x if x is None or not is_split else queries.share(x, -2)

    mask = replace(
        mask,
        valid=None if mask.valid is None else keys.whole(mask.valid, 1),
        documents=documents,
        layout=None if layout is None or blocks is None else Layout(blocks, layout.block_q, layout.block_k),
        allowed=share(allowed, of_allowed),
        tree=share(tree, of_tree),
    )
    if bias is not None:
        bias = Bias(share(tensor, of_tensor), bias.slopes, share(relative, of_relative))
    return replace(options, mask=mask, bias=bias, rope=None if rope is None else _rope(rope, queries, keys, device))


def _rope(rope: Rope, queries: Placement, keys: Placement, device: torch.device) -> Rope:
    positions_q, positions_k = rope.positions_q, rope.positions_k
    if positions_q is None:
        chunks = queries.outer.of(rank_in(queries.outer_group))
        positions = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]
        positions_q = torch.cat(positions) + (keys.outer.seqlen - queries.outer.seqlen)
    else:
        positions_q = queries.share(positions_q, -1)
    if positions_k is None:
        positions_k = torch.arange(keys.outer.seqlen, device=device)
    else:
        positions_k = keys.whole(positions_k, -1)
    return rope.at(positions_q, positions_k)
