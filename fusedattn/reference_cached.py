"""Attention to the tokens of a cache in eager PyTorch: one attention per sequence, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.kv_cache import KVCache
from fusedattn.masks import Documents, Mask
from fusedattn.options import Options, lengths_of
from fusedattn.readable import can_read
from fusedattn.reference_varlen import (
    Attend,
    Results,
    bias_of,
    by_reference,
    of_heads,
    of_positions,
    of_tokens,
    padded_attention,
    pairs_of_mask,
    rows_of,
)
from fusedattn.rope import Rope, apply_rope
from fusedattn.shard import Shard


def attention(q: Tensor, options: Options, *, attend: Attend = by_reference) -> Results:
    """``(out, lse, largest)`` of queries ``(batch, nheads_q, seqlen_q, head_dim)``, or packed ones in a batch of 1.

    Reads the lengths of the sequences, and so waits for them, except under a compiler, which cannot read values.
    """
    cache, packed = options.cache, options.packed
    assert cache is not None
    if torch.compiler.is_compiling():
        return _padded(q, cache, options)
    stops = None if packed is None else packed.cu_seqlens_q.tolist()
    n_packed = q.shape[2]
    if not can_read(q):  # a CPU has checked them
        cache.check_values()
    lengths, kept = cache.lengths.tolist(), cache.kept().tolist()
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    wide = q.dtype if cache.format is None else lse_dtype  # codes times scales may exceed float16
    outs, lses, maxima = [], [], []
    for i, (k, v, seen) in enumerate(_sequences(cache, kept)):
        rows = slice(0, q.shape[2]) if stops is None else slice(stops[i], stops[i + 1])
        own_q = q[i : i + 1] if stops is None else q[:, :, rows]
        rope = options.rope
        if cache.rope is not None:
            own_q = rotated(own_q, cache.rope, i, rows, lengths[i])
        elif rope is not None:
            rope = _rope_of(rope, i, rows, kept[i])
        own = replace(
            options,
            mask=mask_of(options.mask, i, own_q, kept[i]) & seen,
            bias=None if options.bias is None else bias_of(options.bias, i, own_q.shape[2], kept[i]),
            rope=rope,
            packed=None,
            cache=None,
            shard=Shard(i),
        )
        out, lse, largest = attend(own_q.to(wide), k.to(wide), v.to(wide), own)
        outs.append(out.to(q.dtype))
        lses += [] if lse is None else [lse]
        maxima += [] if largest is None else [largest]
    dim = 0 if stops is None else 2
    n_rest = 0 if stops is None else n_packed - stops[-1]
    first = 0 if stops is None else 1  # of the empty parts, without which there may be none
    outs.append(q.new_zeros(first, q.shape[1], q.shape[2] if stops is None else n_rest, cache.head_dim_v))
    rest = torch.full(outs[-1].shape[:3], -torch.inf, dtype=lse_dtype, device=q.device)
    lse, largest = (
        torch.cat([*parts, rest], dim) if asked else None
        for parts, asked in ((lses, options.return_lse), (maxima, options.return_max))
    )
    return torch.cat(outs, dim), lse, largest


def _sequences(cache: KVCache, kept: list[int]) -> Iterator[tuple[Tensor, Tensor, Mask]]:
    """Keys and values of each sequence, ``(1, nheads_kv, its tokens, head_dim)``, and which are visible.

    They are views of the cache if it has no pages, codes or overwritten tokens.
    """
    if cache.block_table is None and cache.format is None and not cache.overwrites:
        keys, values = cache.k, cache.v
        rows = range(cache.batch) if cache.rows is None else cache.rows.tolist()
    else:
        keys, values, _ = cache.dense()
        rows = range(cache.batch)
    for i, (row, n) in enumerate(zip(rows, kept, strict=True)):
        seen = Mask()
        if cache.left_padding is not None:
            first = cache.left_padding[i] - (cache.lengths[i] - n)
            seen = Mask(valid=(torch.arange(n, device=keys.device) >= first)[None])
        yield keys[row : row + 1, :, :n], values[row : row + 1, :, :n], seen


def append(cache: KVCache, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Write tokens that `cache.lengths` counts; packed ones, ``(total, nheads_kv, head_dim)``, with `cu_seqlens`."""
    positions = None if cache.rope is None else cache.rope.positions_k
    if cu_seqlens is None:
        cache.write(k, v, positions=positions)
        return
    counts = cu_seqlens.diff()
    at = cu_seqlens[:-1, None].long() + torch.arange(int(counts.max()) if counts.numel() else 0, device=k.device)
    at = at.clamp(max=k.shape[0] - 1)
    positions = None if positions is None else positions.reshape(-1)[at]
    cache.write(k[at].transpose(1, 2), None if v is None else v[at].transpose(1, 2), counts, positions)


def check_room(cache: KVCache, k: Tensor, cu_seqlens: Tensor | None, counted: bool) -> None:
    """Raise ValueError unless the cache has a place and a position for new tokens, counted by its lengths if `counted`.

    Only on a CPU and not under a compiler: elsewhere this would wait for values.
    """
    if not can_read(k):
        return
    n_new = [k.shape[2]] * cache.batch if cu_seqlens is None else lengths_of(cu_seqlens)
    cache.check_values(n_new, counted=counted)
    rows, rope = cache.rows, cache.rope
    if rows is not None and len(set(rows.tolist())) < cache.batch:
        raise ValueError(f"rows: got {rows.tolist()}, allowed are different rows for sequences that are appended to")
    if rope is not None and any(n_new):
        rope = rope.at(None, rope.positions_k)
        longest = max(length + (0 if counted else n) for length, n in zip(cache.lengths.tolist(), n_new, strict=True))
        rope.check_lengths(0, longest)
        rope.check_positions()


def _padded(q: Tensor, cache: KVCache, options: Options) -> Results:
    """:func:`attention` of all sequences at once, to as many keys as the cache has room for."""
    packed, rope, of_cache = options.packed, options.rope, cache.rope
    lengths = torch.full_like(cache.lengths, q.shape[2]) if packed is None else packed.cu_seqlens_q.diff()
    rows, own_q = None, q
    if packed is not None:
        rows = rows_of(packed.cu_seqlens_q, packed.max_seqlen_q, q.shape[2])
        own_q = of_heads(q, rows)
        rope, of_cache = (
            None if x is None else x.at(of_positions(x.positions_q, rows), x.positions_k) for x in (rope, of_cache)
        )
    number = torch.arange(own_q.shape[2], device=q.device)
    there = number < lengths[:, None]
    if of_cache is not None:
        at = of_cache.positions_q
        at = (cache.lengths - lengths)[:, None] + number if at is None else at
        at = torch.where(there, at, 0)  # others would be NaN
        own_q = apply_rope(own_q, of_cache.cos, of_cache.sin, at, interleaved=of_cache.interleaved)
    keys, values, visible = cache.dense()
    wide = torch.promote_types(q.dtype, keys.dtype)
    own = replace(options, rope=rope, packed=None, cache=None)
    out, lse, largest = padded_attention(own_q.to(wide), keys, values, own, (lengths, cache.kept()), (there, visible))
    out = out.to(q.dtype)
    if rows is None:
        return out, lse, largest
    lse, largest = (None if x is None else of_tokens(x, rows, q.shape[2], -torch.inf) for x in (lse, largest))
    return of_tokens(out, rows, q.shape[2], 0.0), lse, largest


def rotated(q: Tensor, rope: Rope, i: int, rows: slice, length: int) -> Tensor:
    """Queries of sequence `i`, rotated as the keys of a cache were."""
    own = _rope_of(rope, i, rows, length)
    positions = own.positions_q
    if positions is None:
        positions = torch.arange(length - q.shape[2], length, device=q.device)
    return apply_rope(q, own.cos, own.sin, positions, interleaved=own.interleaved)


def _rope_of(rope: Rope, i: int, rows: slice, n_keys: int) -> Rope:
    """The rotation of sequence `i`: its tables, and the positions of its queries and keys."""

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[i] if x.dim() == 2 and x.shape[0] > 1 else x.reshape(x.shape[-1:])

    positions_q, positions_k = own(rope.positions_q), own(rope.positions_k)
    of_batch = rope.cos.dim() == 3 and rope.cos.shape[0] > 1
    return replace(
        rope,
        cos=rope.cos[i : i + 1] if of_batch else rope.cos,
        sin=rope.sin[i : i + 1] if of_batch else rope.sin,
        positions_q=None if positions_q is None else positions_q[rows],
        positions_k=None if positions_k is None else positions_k[:n_keys],
    )


def mask_of(mask: Mask, i: int, q: Tensor, n_keys: int) -> Mask:
    """The mask of sequence `i`, whose lengths those of the tensors may exceed."""
    n_queries, documents = q.shape[2], mask.documents
    own = replace(
        mask,
        valid=None if mask.valid is None else mask.valid[i : i + 1, :n_keys],
        documents=None if documents is None else Documents(documents.q[i : i + 1], documents.k[i : i + 1, :n_keys]),
    )
    own = pairs_of_mask(own, i, n_queries, n_keys)
    if own.function is None:
        return own
    written = own.dense(n_queries, n_keys, batch=1, nheads=q.shape[1], shard=Shard(i), device=q.device)
    return Mask(allowed=written)  # a function may use the number of the sequence
