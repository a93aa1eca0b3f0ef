"""Packed sequences in eager PyTorch: one attention per sequence, in turn; padded under a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import reference
from fusedattn.biases import Bias
from fusedattn.indices import four_dimensional
from fusedattn.masks import Documents, Layout, Mask, Prefix
from fusedattn.options import Options, Packed
from fusedattn.rope import Rope
from fusedattn.shard import Shard

Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, largest


class Attend(Protocol):
    """A function that returns ``(out, lse, largest)`` of one sequence; the last two may be None if not asked for."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results: ...


def by_reference(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, largest)`` by :mod:`fusedattn.reference`; largest is None if not asked for."""
    out, lse, _ = reference.attention(q, k, v, **options.of_numbers())
    return out, lse, reference.largest_scores(q, k, **options.of_scores()) if options.return_max else None


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, *, attend: Attend = by_reference) -> Results:
    """``(out, lse, largest)`` of sequences packed into a batch of 1; 0 and ``-inf`` for rows of no sequence.

    Reads `options.packed`, and so waits for it, except under a compiler, which cannot read values.
    """
    packed = options.packed
    assert packed is not None
    if torch.compiler.is_compiling():
        return _padded(q, k, v, options, packed)
    stops_q, stops_k = (x.tolist() for x in cu_seqlens_of(packed))
    outs, lses, maxima = [], [], []
    for i in range(packed.n_sequences):
        queries, keys = slice(stops_q[i], stops_q[i + 1]), slice(stops_k[i], stops_k[i + 1])
        mask = _mask_of(options.mask, i, queries, keys)
        own = replace(
            options,
            mask=mask,
            bias=None if options.bias is None else bias_of(options.bias, i, _length(queries), _length(keys)),
            rope=None if options.rope is None else _rope_of(options.rope, queries, keys),
            packed=None,
            shard=Shard(i),
        )
        out, lse, largest = attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], own)
        outs.append(out)
        lses += [] if lse is None else [lse]
        maxima += [] if largest is None else [largest]
    n_rest = q.shape[2] - stops_q[-1]
    outs.append(q.new_zeros(1, q.shape[1], n_rest, v.shape[3]))
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    rest = torch.full((1, q.shape[1], n_rest), -torch.inf, dtype=lse_dtype, device=q.device)
    lse, largest = (
        None if len(parts) < packed.n_sequences else torch.cat([*parts, rest], dim=2) for parts in (lses, maxima)
    )
    return torch.cat(outs, dim=2), lse, largest


def cu_seqlens_of(packed: Packed) -> tuple[Tensor, Tensor]:
    """The starts of queries and of keys, which lie in no cache here."""
    assert packed.cu_seqlens_k is not None
    return packed.cu_seqlens_q, packed.cu_seqlens_k


def _length(rows: slice) -> int:
    length: int = rows.stop - rows.start
    return length


def _mask_of(mask: Mask, i: int, queries: slice, keys: slice) -> Mask:
    """The mask of sequence `i`, whose tokens are packed."""
    documents = mask.documents
    own = replace(
        mask,
        valid=None if mask.valid is None else mask.valid[:, keys],
        documents=None if documents is None else Documents(documents.q[:, queries], documents.k[:, keys]),
    )
    return pairs_of_mask(own, i, _length(queries), _length(keys))


def pairs_of_mask(mask: Mask, i: int, n_queries: int, n_keys: int) -> Mask:
    """The parts of a mask that each sequence has of its own, those of sequence `i`; the others stay."""
    layout, prefix = mask.layout, mask.prefix
    if layout is not None:
        blocks = -(-n_queries // layout.block_q), -(-n_keys // layout.block_k)
        layout = Layout(pairs_of(layout.blocks, i, *blocks), layout.block_q, layout.block_k)
    return replace(
        mask,
        allowed=None if mask.allowed is None else pairs_of(mask.allowed, i, n_queries, n_keys),
        prefix=None if prefix is None else Prefix(prefix.lengths[i : i + 1], prefix.align),
        layout=layout,
        tree=None if mask.tree is None else pairs_of(mask.tree, i, n_queries, n_queries),
    )


def bias_of(bias: Bias, i: int, n_queries: int, n_keys: int) -> Bias:
    """The bias of sequence `i`, of that many queries and keys."""
    slopes, relative = bias.slopes, bias.relative
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1:
        slopes = slopes[i]
    return Bias(
        None if bias.tensor is None else pairs_of(bias.tensor, i, n_queries, n_keys),
        slopes,
        None if relative is None else pairs_of(relative, i, n_queries, relative.shape[-1]),
    )


def pairs_of(x: Tensor, i: int, n_rows: int, n_columns: int) -> Tensor:
    """Sequence `i` of ``(n_sequences, nheads, rows, columns)``; any dimension may be 1 and broadcast."""
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


def _padded(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed) -> Results:
    """:func:`attention` by a batch of sequences padded to the greatest possible length, which takes more memory."""
    stops_q, stops_k = cu_seqlens_of(packed)
    rows_q = rows_of(stops_q, packed.max_seqlen_q, q.shape[2])
    rows_k = rows_of(stops_k, packed.max_seqlen_k, k.shape[2])
    valid, documents, rope = options.mask.valid, options.mask.documents, options.rope
    if documents is not None:
        documents = Documents(of_sequences(documents.q, rows_q), of_sequences(documents.k, rows_k))
    valid = None if valid is None else of_sequences(valid, rows_k)
    if rope is not None:
        rope = rope.at(of_positions(rope.positions_q, rows_q), of_positions(rope.positions_k, rows_k))
    own = replace(options, mask=replace(options.mask, valid=valid, documents=documents), rope=rope)
    own_q, own_k, own_v = of_heads(q, rows_q), of_heads(k, rows_k), of_heads(v, rows_k)
    there = rows_q < q.shape[2], rows_k < k.shape[2]
    out, lse, largest = padded_attention(own_q, own_k, own_v, own, (stops_q.diff(), stops_k.diff()), there)
    lse, largest = (None if x is None else of_tokens(x, rows_q, q.shape[2], -torch.inf) for x in (lse, largest))
    return of_tokens(out, rows_q, q.shape[2], 0.0), lse, largest


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]
) -> Results:
    """``(out, lse, largest)`` of a batch of sequences of different lengths, padded at their end.

    Args:
        q, k, v: ``(batch, nheads, longest, head_dim)``.
        options: as for :func:`fusedattn.reference.attention`, with lengths that none exceeds.
        lengths: of queries and of keys, int ``(batch,)``.
        there: which queries and keys are no padding, bool ``(batch, longest)``.
    """
    batch, nheads, longest_q, _ = q.shape
    longest_k, (there_q, there_k) = k.shape[2], there
    bias, rope, wide = options.bias, options.rope, torch.promote_types(q.dtype, torch.float32)
    visible = options.mask.dense(longest_q, longest_k, batch=batch, nheads=nheads, lengths=lengths, device=q.device)
    if bias is not None:
        bias = Bias(bias.dense(longest_q, longest_k, lengths=lengths, dtype=wide))
    if rope is not None:
        at_q, at_k = rope.positions_q, rope.positions_k
        from_end = torch.arange(longest_q, device=q.device) + (lengths[1] - lengths[0])[:, None]
        at_q = from_end if at_q is None else at_q
        at_k = torch.arange(longest_k, device=q.device) if at_k is None else at_k
        # Positions outside the tables would turn padding into NaN.
        sees = there_q & (lengths[1] > 0)[:, None]
        rope = rope.at(torch.where(sees, at_q, 0), torch.where(there_k, at_k, 0))
    own = replace(
        options,
        mask=Mask(allowed=visible & there_q[:, None, :, None] & there_k[:, None, None, :]),
        bias=bias,
        rope=rope,
    )
    out, lse, largest = by_reference(q.to(wide), k.to(wide), v.to(wide), own)
    return out.to(q.dtype), lse, largest


def rows_of(cu_seqlens: Tensor, longest: int, total: int) -> Tensor:
    """Where the tokens of each sequence stand, int64 ``(n_sequences, longest)``; `total` behind its last."""
    rows = cu_seqlens[:-1, None].long() + torch.arange(longest, device=cu_seqlens.device)
    return torch.where(rows < cu_seqlens[1:, None], rows, total)


def of_sequences(x: Tensor, rows: Tensor) -> Tensor:
    """``(1, total, ...)`` as ``(n_sequences, longest, ...)``, with 0 where there is no row."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))[0, rows]


def of_heads(x: Tensor, rows: Tensor) -> Tensor:
    """``(1, nheads, total, head_dim)`` as ``(n_sequences, nheads, longest, head_dim)``, likewise."""
    return of_sequences(x.transpose(1, 2), rows).transpose(1, 2)


def of_positions(positions: Tensor | None, rows: Tensor) -> Tensor | None:
    """Positions of packed tokens as ``(n_sequences, longest)``."""
    return None if positions is None else of_sequences(torch.atleast_2d(positions), rows)


def of_tokens(x: Tensor, rows: Tensor, total: int, rest: float) -> Tensor:
    """``(n_sequences, nheads, longest, ...)`` as ``(1, nheads, total, ...)``; `rest` for tokens of no sequence."""
    tokens = x.new_full((total + 1, x.shape[1], *x.shape[3:]), rest)
    return tokens.index_copy(0, rows.flatten(), x.transpose(1, 2).flatten(0, 1))[:-1].transpose(0, 1)[None]
