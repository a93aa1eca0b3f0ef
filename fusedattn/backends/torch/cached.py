"""Attention of a few queries to a cache on a CPU, which reads the cache where it lies.

The query heads that share a KV head are rows of one head, so that each key is read once. Torch's kernel computes the
results of one tile of keys after the other, which are then merged; codes, and steps that the kernel does not have, take
two products with the scores written out in between. Both are right for finite numbers only: if a result shows that a
key or value was not finite, the whole call is computed from a copy of the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn import indices, reference_cached, reference_varlen
from fusedattn.backends.torch import largest, sdpa
from fusedattn.backends.torch.cache_numbers import joined_pairs, numbers_of, split_pairs
from fusedattn.backends.torch.cache_tiles import Sequences, sequences
from fusedattn.masks import Mask
from fusedattn.options import Options
from fusedattn.parts import sum_of_parts
from fusedattn.readable import is_readable
from fusedattn.reference_varlen import bias_of
from fusedattn.strides import rows_overlap

MOST_QUERIES = 16  # of a sequence; more are worth a copy of the cache, and a plan that skips hidden pairs

Results = tuple[Tensor, Tensor]

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(q: Tensor, options: Options) -> reference_varlen.Results:
    """The results of :func:`fusedattn.reference_cached.attention`; lse and largest are None if not asked for."""
    if _is_short(q, options):
        with torch.autocast("cpu", enabled=False):
            results = _in_place(q, options)
        if results is not None:
            return results[0], results[1] if options.return_lse else None, None
    return reference_cached.attention(q, options, attend=largest.attention)


def _is_short(q: Tensor, options: Options) -> bool:
    """Whether these are few, finite queries on a CPU, without steps that only the other way has."""
    cache, packed = options.cache, options.packed
    assert cache is not None
    if options.rope is not None or options.score_mod is not None or options.dropout_p or options.return_max:
        return False
    given = [q, cache.k, cache.v, *(() if options.sinks is None else (options.sinks,))]
    if q.device.type != "cpu" or not is_readable(*given) or sdpa.is_transformed(*given):
        return False
    longest = q.shape[2] if packed is None else int(packed.cu_seqlens_q.diff().max()) if cache.batch else 0
    is_bounded = options.sinks is None or bool((options.sinks < math.inf).all())
    return longest <= MOST_QUERIES and is_bounded and bool(q.isfinite().all())


def _in_place(q: Tensor, options: Options) -> Results | None:
    cache, packed = options.cache, options.packed
    assert cache is not None
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], cache.head_dim_v, dtype=wide)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    stops = None if packed is None else packed.cu_seqlens_q.tolist()
    together = packed is None and options.mask.only_bands and options.bias is None
    for own in sequences(cache, together):
        i = own.batches.start
        at = (own.batches, slice(None), slice(None))
        if stops is not None:
            at = (slice(0, 1), slice(None), slice(stops[i], stops[i + 1]))
        queries = q[at]
        if queries.numel() == 0 or own.kept == 0:
            continue
        if cache.rope is not None:
            parts = enumerate(queries.split(1), start=i)
            queries = torch.cat([reference_cached.rotated(x, cache.rope, j, at[2], own.length) for j, x in parts])
        results = _of_sequences(queries, options, own)
        if results is None:
            return None
        out[at], lse[at] = results
    if options.sinks is not None:
        sinks = options.sinks[:, None].to(wide)
        if stops is not None:  # queries of no sequence have none
            number = torch.arange(q.shape[2], device=q.device)
            sinks = sinks.where((stops[0] <= number) & (number < stops[-1]), -math.inf)
        whole = torch.logaddexp(lse, sinks)
        out = out * torch.exp(lse - whole).nan_to_num(0.0)[..., None]
        lse = whole
    return out.to(q.dtype), lse


class _Range(NamedTuple):
    """Adjacent keys; if `cut`, not all of them are seen by every query."""

    start: int
    stop: int
    cut: bool


class _Problem(NamedTuple):
    """Queries ``(batch, nheads_q, seqlen_q, head_dim)``, the sequences they attend to, and what is added to scores."""

    q: Tensor
    own: Sequences
    mask: Mask
    bias: Tensor | None
    options: Options

    def added(self, keys: slice) -> Results:
        """The mask and bias of these keys, added to scores, and the rows that see none of them.

        Both broadcast to ``(batch, nheads_q, seqlen_q, keys or 1)``. Those rows see all keys instead.
        """
        n_queries, n_keys = self.q.shape[2], self.own.kept
        visible = self.mask.dense(n_queries, n_keys, keys=keys, device=self.q.device, expand=False)
        bias = self.q.new_zeros((), dtype=torch.promote_types(self.q.dtype, torch.float32))
        if self.bias is not None:
            bias = indices.part_of(self.bias, slice(None), keys)
            visible = visible & (bias != -math.inf)
        blind = ~visible.any(dim=-1, keepdim=True)
        return torch.where(visible, bias, -math.inf).masked_fill(blind, 0.0), blind

    def ranges(self) -> list[_Range]:
        """The keys that some query sees."""
        n_queries, n_keys = self.q.shape[2], self.own.kept
        lower, upper = self.mask.band(n_queries, n_keys)
        start = max(self.own.first, 0 if lower is None else lower)
        stop = n_keys if upper is None else min(n_keys, upper + n_queries)
        if self.bias is not None or not self.mask.only_bands:
            cuts = [_Range(start, stop, True)]
        else:
            first = start if lower is None else min(max(start, lower + n_queries - 1), stop)
            last = stop if upper is None else min(max(first, upper + 1), stop)
            cuts = [_Range(start, first, True), _Range(first, last, False), _Range(last, stop, True)]
        return [x for x in cuts if x.start < x.stop]


def _of_sequences(q: Tensor, options: Options, own: Sequences) -> Results | None:
    """Without sinks, in float32 or float64; None if this way might be wrong."""
    cache, i, wide = own.cache, own.batches.start, torch.promote_types(q.dtype, torch.float32)
    n_queries, n_keys = q.shape[2], own.kept
    bias = None
    if options.bias is not None:
        bias = bias_of(options.bias, i, n_queries, n_keys).dense(n_queries, n_keys, dtype=wide)
    problem = _Problem(q, own, reference_cached.mask_of(options.mask, i, q, n_keys), bias, options)
    ranges = problem.ranges()
    if not ranges:
        return q.new_zeros(1, dtype=wide), q.new_full((1,), -math.inf, dtype=wide)
    has_kernel = cache.format is None and options.softcap is None and cache.head_dim == cache.head_dim_v
    if has_kernel and not (rows_overlap(cache.k) or rows_overlap(cache.v)):
        return _by_kernel(problem, ranges)
    return _by_scores(problem, ranges)


def _folded(x: Tensor, nheads_kv: int) -> Tensor:
    """``(batch, nheads_q, seqlen_q, n)`` with the heads of a group as rows; ``(batch, nheads_kv, rows, n)``."""
    return x.reshape(x.shape[0], nheads_kv, -1, x.shape[3])


def _by_kernel(problem: _Problem, ranges: list[_Range]) -> Results | None:
    """Torch's kernel for each tile, then the sum of their outputs by their lse."""
    q, own, cache = problem.q, problem.own, problem.own.cache
    nheads_kv = cache.k.shape[1]
    rows = _folded(q, nheads_kv)
    # An infinite key may have a score of -inf for one row. With the opposite of that row it then has one of +inf.
    rows = torch.cat((rows, -rows[:, :, :1]), dim=2)
    outs, lses = [], []
    for start, stop, cut in ranges:
        at = start
        for k, v in own.tiles((cache.k, cache.v), start, stop):
            added = blind = None
            if cut:
                added, blind = problem.added(slice(at, at + k.shape[2]))
                added = _folded(added.expand(-1, q.shape[1], q.shape[2], -1), nheads_kv)
                added = torch.nn.functional.pad(added, (0, 0, 0, 1))
            at += k.shape[2]
            out, lse = _kernel(rows, k, v, 0.0, False, attn_mask=added, scale=problem.options.scale)
            # The kernel makes 0 of a row whose scores are all NaN.
            if not (out.isfinite().all() and lse.isfinite().all() and out.any(dim=-1).all()):
                return None
            out = out[:, :, :-1].reshape(*q.shape[:3], -1).to(lse.dtype)
            lse = lse[:, :, :-1].reshape(q.shape[:3])
            if blind is not None:
                out, lse = out.masked_fill(blind, 0.0), lse.masked_fill(blind[..., 0], -math.inf)
            outs.append(out)
            lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return sum_of_parts(outs, lses)


def _by_scores(problem: _Problem, ranges: list[_Range]) -> Results | None:
    """Scores of all tiles, their softmax, and the sum of the values of all tiles."""
    q, own, cache, options = problem.q, problem.own, problem.own.cache, problem.options
    wide = torch.promote_types(q.dtype, torch.float32)
    start, stop = ranges[0].start, ranges[-1].stop
    rows = _folded(q.to(wide) * options.scale, cache.k.shape[1])
    is_packed = cache.k.dtype == torch.uint8
    rows = split_pairs(rows) if is_packed else rows
    scores = rows.new_empty(*rows.shape[:3], stop - start)
    for keys, numbers, factor in numbers_of(own, cache.k, cache.k_scale, start, stop, wide):
        products = rows @ numbers.mT
        scores[..., keys] = products if factor is None else products * factor
    if not scores.isfinite().all():
        return None
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    blind = None
    if any(x.cut for x in ranges):
        added, blind = problem.added(slice(start, stop))
        scores = _folded(scores.view(*q.shape[:3], -1) + added, cache.k.shape[1])
    lse, weights = scores.logsumexp(dim=-1), torch.softmax(scores, dim=-1)
    out = rows.new_zeros(*rows.shape[:3], cache.head_dim_v)
    for keys, numbers, factor in numbers_of(own, cache.v, cache.v_scale, start, stop, wide):
        own_weights = weights[..., keys]
        out += (own_weights if factor is None else own_weights * factor) @ numbers
    out = joined_pairs(out) if is_packed else out
    if not (out.isfinite().all() and lse.isfinite().all()):
        return None
    out, lse = out.view(*q.shape[:3], -1), lse.view(q.shape[:3])
    if blind is not None:
        out, lse = out.masked_fill(blind, 0.0), lse.masked_fill(blind[..., 0], -math.inf)
    return out, lse
