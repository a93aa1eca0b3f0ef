"""Checks of a call before any process sends a tensor."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusedattn import call_checks
from fusedattn.distributed.cutting import reasons_of_pattern
from fusedattn.distributed.placement import Placement
from fusedattn.distributed.split import Split
from fusedattn.masks import Mask
from fusedattn.options import Options
from fusedattn.prepare import autocast
from fusedattn.readable import can_read
from fusedattn.rope import Rope
from fusedattn.shard import Shard
from fusedattn.support import Backend, are_dtensors, default_backend, reasons_of


def of_own(
    q: Tensor, k: Tensor | None, v: Tensor | None, options: Options, n_shares: int, backend: Backend | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) as autocast wants them, after checks of what needs no other process.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`fusedattn.attention`.
    """
    call_checks.check_scalars(options, backend)
    if options.cache is not None:
        raise NotImplementedError("cache: got a cache and a context, allowed is one of them")
    if k is None or v is None:
        raise TypeError(f"k, v: got {type(k).__name__} and {type(v).__name__}, allowed are tensors")
    if are_dtensors(q, k, v) or any(isinstance(x, Tensor) and x.is_nested for x in (q, k, v)):
        raise NotImplementedError(
            "q, k, v: got nested tensors or DTensors and a context, allowed are plain tensors; packed sequences are "
            "masks.documents there"
        )
    if options.precision is not None:
        raise NotImplementedError("precision: got FP8 and a context, allowed is one of them")
    q, k, v = autocast(q, k, v)
    call_checks.check_qkv(q, k, v)
    if q.shape[1] % n_shares:
        raise ValueError(
            f"context: got {q.shape[1]} query heads for {n_shares} processes that share them, allowed are multiples of "
            f"{n_shares}"
        )
    mask, rope, batch = options.mask, options.rope, q.shape[0]
    of_tokens: list[tuple[str, Tensor, int]] = []
    if mask.valid is not None:
        of_tokens.append(("padding(valid)", mask.valid, k.shape[2]))
    if mask.documents is not None:
        of_tokens += [("documents(ids_q)", mask.documents.q, q.shape[2])]
        of_tokens += [("documents(ids_k)", mask.documents.k, k.shape[2])]
    for name, x, length in of_tokens:
        if tuple(x.shape) != (batch, length):
            raise ValueError(
                f"mask: {name}: got shape {tuple(x.shape)}, allowed with a context is {(batch, length)}, the tokens of "
                "this process"
            )
    if rope is not None:
        if not isinstance(rope, Rope):
            raise TypeError(f"rope: got {type(rope).__name__}, allowed are fusedattn.Rope and None")
        rope.check_shapes(batch, q.shape[2], k.shape[2], q.shape[3])
    if options.score_mod is not None:
        call_checks.check_score_mod(options.score_mod, q)
    if options.sinks is not None:
        call_checks.check_sinks(options.sinks, q)
    if options.dropout_seed is not None:
        call_checks.check_dropout_seed(options.dropout_seed, q)
    if options.qk_norm is not None:
        call_checks.check_qk_norm(options.qk_norm, q, k.shape[1])
    chosen = backend or default_backend(q.device)
    reasons = reasons_of(q, k, v, options, chosen)
    reasons += reasons_of_pattern(mask)
    if reasons:
        raise NotImplementedError(f"attention cannot run on backend {chosen!r}: " + "; ".join(reasons))
    return (q, k, v) if options.qk_norm is None else (*options.qk_norm.apply(q, k), v)


def of_all(
    q: Tensor, options: Options, planned: Options, queries: Placement, keys: Placement, *, cuts_keys: bool
) -> None:
    """Check tensors that other processes have parts of; `planned` are the options of the share of this process.

    Args:
        cuts_keys: whether keys are attended to chunk by chunk.

    Raises:
        TypeError, ValueError: as :func:`fusedattn.attention`.
    """
    seqlen_q, seqlen_k = queries.outer.seqlen, keys.outer.seqlen
    share = q.new_empty(()).expand(q.shape[0], q.shape[1], queries.inner.seqlen, q.shape[3])
    layout = options.mask.layout
    if layout is not None:
        _check_blocks("queries", layout.block_q, queries)
        if cuts_keys:
            _check_blocks("keys", layout.block_k, replace(keys, inner=Split(0, 1, "contiguous")))
    call_checks.check_mask(planned.mask, share, seqlen_k, None, Shard(seqlen_q=seqlen_q))
    if planned.bias is not None:
        call_checks.check_bias(planned.bias, share, seqlen_k)
    if options.rope is not None and planned.rope is not None:
        options.rope.check_lengths(seqlen_q, seqlen_k)
        call_checks.check_rope(planned.rope, share, seqlen_k)
        if can_read(q):
            options.rope.check_positions()


def _check_blocks(name: str, size: int, placement: Placement) -> None:
    """Raise ValueError, the same on all processes, if a part of the tokens begins inside a block of a mask."""
    outer, n_inner = placement.outer, placement.inner.n_owners
    shares = [Split(n, n_inner, "contiguous") for n in outer.lengths]
    starts = {chunk.start for split in (outer, *shares) for chunk in split.chunks if chunk.start < split.seqlen}
    if any(start % size for start in starts):
        raise ValueError(
            f"mask: block_sparse: got blocks of {size} {name} and parts that begin at {sorted(starts)}, allowed are "
            f"parts that begin at blocks; the number of {name} must be a multiple of "
            f"{size * len(outer.chunks) * n_inner}"
        )


def description(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
    """What must be the same on all processes; its ``repr`` is compared."""
    mask, bias, rope, score_mod = options.mask, options.bias, options.rope, options.score_mod
    shapes = [(tuple(x.shape[:2]), x.shape[3], x.dtype) for x in (q, k, v)]
    tensors = {name: (x.dtype, x.dim()) for name, x in mask.tensors().items()}
    of_bias = None if bias is None else {name: (x.dtype, x.dim()) for name, x in bias.tensors().items()}
    of_rope = None
    if rope is not None:
        positions = [None if x is None else (x.dtype, x.dim()) for x in (rope.positions_q, rope.positions_k)]
        of_rope = rope.rotary_dim, rope.interleaved, positions
    absent = score_mod is None, options.sinks is None, options.dropout_seed is None
    numbers = options.scale, options.softcap, options.dropout_p, options.return_lse, options.return_max
    norm = options.qk_norm
    of_norm = None if norm is None else (norm.kind, norm.eps, norm.across_heads, list(norm.weights()))
    return shapes, _structure(mask), tensors, of_bias, of_rope, of_norm, absent, numbers


def number_of_shapes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> int:
    """A number that two calls share if :func:`of_all` finds the same in both; it is random if that reads values."""
    rope, tensors = options.rope, [q, k, v, *options.mask.tensors().values()]
    if options.bias is not None:
        tensors += options.bias.tensors().values()
    if rope is not None:
        if can_read(q) and (rope.positions_q is not None or rope.positions_k is not None):
            return random.SystemRandom().getrandbits(62)
        tensors += [rope.cos, rope.sin, *(x for x in (rope.positions_q, rope.positions_k) if x is not None)]
    return hash((tuple((x.shape, x.dtype, x.device) for x in tensors), repr(_structure(options.mask)))) // 2


def _structure(mask: Mask) -> Any:
    """The parts of a mask besides its tensors."""
    prefix, layout = mask.prefix, mask.layout
    of_layout = None if layout is None else (layout.block_q, layout.block_k)
    of_prefix = None if prefix is None else prefix.align
    pattern = None if mask.pattern is None or mask.pattern.tensors() else repr(mask.pattern)
    return sorted(mask.bands, key=repr), of_prefix, of_layout, mask.function is None, pattern
