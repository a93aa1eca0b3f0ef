"""Packed sequences in eager PyTorch: one after the other, each as an attention of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedattn import reference
from fusedattn.biases import Bias
from fusedattn.constants import Options, Packed, four_dimensional
from fusedattn.masks import Documents, Layout, Mask, Prefix
from fusedattn.rope import Rope


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of tensors with a batch of 1; 0 and ``-inf`` for rows that belong to no sequence.

    Waits for `packed` to be computed, as it reads where sequences lie.
    """
    stops_q, stops_k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    outs, lses = [], []
    for i in range(packed.n_sequences):
        queries, keys = slice(stops_q[i], stops_q[i + 1]), slice(stops_k[i], stops_k[i + 1])
        own = replace(
            options,
            mask=_mask_of(options.mask, i, queries, keys),
            bias=None if options.bias is None else _bias_of(options.bias, i, queries, keys),
            rope=None if options.rope is None else _rope_of(options.rope, queries, keys),
        )
        out, lse, _ = reference.attention(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], **vars(own), first_batch=i
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    n_rest = q.shape[2] - stops_q[-1]
    outs.append(q.new_zeros(1, q.shape[1], n_rest, v.shape[3]))
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lses.append(torch.full((1, q.shape[1], n_rest), -torch.inf, dtype=lse_dtype, device=q.device))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _mask_of(mask: Mask, i: int, queries: slice, keys: slice) -> Mask:
    """That of sequence `i`."""
    lengths = (queries.stop - queries.start, keys.stop - keys.start)
    layout, documents, prefix = mask.layout, mask.documents, mask.prefix
    if layout is not None:
        blocks = (-(-lengths[0] // layout.block_q), -(-lengths[1] // layout.block_k))
        layout = Layout(_pairs_of(layout.blocks, i, *blocks), layout.block_q, layout.block_k)
    return replace(
        mask,
        valid=None if mask.valid is None else mask.valid[:, keys],
        allowed=None if mask.allowed is None else _pairs_of(mask.allowed, i, *lengths),
        prefix=None if prefix is None else Prefix(prefix.lengths[i : i + 1], prefix.align),
        documents=None if documents is None else Documents(documents.q[:, queries], documents.k[:, keys]),
        layout=layout,
    )


def _bias_of(bias: Bias, i: int, queries: slice, keys: slice) -> Bias:
    lengths = (queries.stop - queries.start, keys.stop - keys.start)
    slopes, relative = bias.slopes, bias.relative
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1:
        slopes = slopes[i]
    return Bias(
        None if bias.tensor is None else _pairs_of(bias.tensor, i, *lengths),
        slopes,
        None if relative is None else _pairs_of(relative, i, lengths[0], relative.shape[-1]),
    )


def _pairs_of(x: Tensor, i: int, n_rows: int, n_columns: int) -> Tensor:
    """Sequence `i` of ``(n_sequences, nheads, rows, columns)``, of dimensions that may be 1 for all."""
    x = four_dimensional(x)
    x = x[i : i + 1] if x.shape[0] > 1 else x
    x = x[:, :, :n_rows] if x.shape[2] > 1 else x
    return x[:, :, :, :n_columns] if x.shape[3] > 1 else x


def _rope_of(rope: Rope, queries: slice, keys: slice) -> Rope:
    positions_q, positions_k = rope.positions_q, rope.positions_k
    return replace(
        rope,
        positions_q=None if positions_q is None else positions_q[..., queries],
        positions_k=None if positions_k is None else positions_k[..., keys],
    )
