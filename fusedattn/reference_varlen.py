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
        if mask.function is not None:  # it may use the number of the sequence
            lengths = _length(queries), _length(keys)
            mask = Mask(allowed=mask.dense(*lengths, batch=1, nheads=q.shape[1], first_batch=i, device=q.device))
        own = replace(
            options,
            mask=mask,
            bias=None if options.bias is None else bias_of(options.bias, i, _length(queries), _length(keys)),
            rope=None if options.rope is None else _rope_of(options.rope, queries, keys),
            packed=None,
            first_batch=i,
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
    """The mask of sequence `i`."""
    lengths = _length(queries), _length(keys)
    layout, documents, prefix = mask.layout, mask.documents, mask.prefix
    if layout is not None:
        blocks = (-(-lengths[0] // layout.block_q), -(-lengths[1] // layout.block_k))
        layout = Layout(pairs_of(layout.blocks, i, *blocks), layout.block_q, layout.block_k)
    return replace(
        mask,
        valid=None if mask.valid is None else mask.valid[:, keys],
        allowed=None if mask.allowed is None else pairs_of(mask.allowed, i, *lengths),
        prefix=None if prefix is None else Prefix(prefix.lengths[i : i + 1], prefix.align),
        documents=None if documents is None else Documents(documents.q[:, queries], documents.k[:, keys]),
        layout=layout,
        tree=None if mask.tree is None else pairs_of(mask.tree, i, lengths[0], lengths[0]),
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


def _padded(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`attention` by a batch of sequences padded to the greatest possible length, which takes more memory."""
    n, longest_q, longest_k = packed.n_sequences, packed.max_seqlen_q, packed.max_seqlen_k
    stops_q, stops_k = cu_seqlens_of(packed)
    lengths = stops_q.diff(), stops_k.diff()
    rows_q, rows_k = _rows(stops_q, longest_q, q.shape[2]), _rows(stops_k, longest_k, k.shape[2])
    there_q, there_k = rows_q < q.shape[2], rows_k < k.shape[2]

    def of_sequences(x: Tensor, rows: Tensor) -> Tensor:
        """``(1, total, ...)`` as ``(n_sequences, longest, ...)``, with 0 where there is no row."""
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))[0, rows]

    def of_heads(x: Tensor, rows: Tensor) -> Tensor:
        return of_sequences(x.transpose(1, 2), rows).transpose(1, 2)

    mask, bias, rope = options.mask, options.bias, options.rope
    documents = mask.documents
    if documents is not None:
        documents = Documents(of_sequences(documents.q, rows_q), of_sequences(documents.k, rows_k))
    visible = replace(
        mask, valid=None if mask.valid is None else of_sequences(mask.valid, rows_k), documents=documents
    ).dense(longest_q, longest_k, batch=n, nheads=q.shape[1], lengths=lengths, device=q.device)
    if bias is not None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        bias = Bias(bias.dense(longest_q, longest_k, lengths=lengths, dtype=dtype))
    if rope is not None:
        at_q, at_k = rope.positions_q, rope.positions_k
        from_end = torch.arange(longest_q, device=q.device) + (lengths[1] - lengths[0])[:, None]
        at_q = from_end if at_q is None else of_sequences(torch.atleast_2d(at_q), rows_q)
        at_k = (
            torch.arange(longest_k, device=q.device) if at_k is None else of_sequences(torch.atleast_2d(at_k), rows_k)
        )
        # Positions outside the tables would turn padding into NaN.
        sees = there_q & (lengths[1] > 0)[:, None]
        rope = rope.at(torch.where(sees, at_q, 0), torch.where(there_k, at_k, 0))
    own = replace(
        options,
        mask=Mask(allowed=visible & there_q[:, None, :, None] & there_k[:, None, None, :]),
        bias=bias,
        rope=rope,
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    q_wide, k_wide, v_wide = (of_heads(x.to(wide), rows) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k)))
    out, lse, largest = by_reference(q_wide, k_wide, v_wide, own)

    def of_tokens(x: Tensor, rest: float) -> Tensor:
        """``(n_sequences, nheads, longest_q, ...)`` as ``(1, nheads, total_q, ...)``."""
        tokens = x.new_full((q.shape[2] + 1, x.shape[1], *x.shape[3:]), rest)
        return tokens.index_copy(0, rows_q.flatten(), x.transpose(1, 2).flatten(0, 1))[:-1].transpose(0, 1)[None]

    largest = None if largest is None else of_tokens(largest, -torch.inf)
    return of_tokens(out.to(q.dtype), 0.0), of_tokens(lse, -torch.inf), largest


def _rows(cu_seqlens: Tensor, longest: int, total: int) -> Tensor:
    """Where the tokens of each sequence stand, int64 ``(n_sequences, longest)``; `total` behind its last."""
    rows = cu_seqlens[:-1, None].long() + torch.arange(longest, device=cu_seqlens.device)
    return torch.where(rows < cu_seqlens[1:, None], rows, total)
