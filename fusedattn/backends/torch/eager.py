"""Attention with its weights written out, a few at a time, for steps on scores that torch's function does not have.

Autograd derives the gradients, of any order. :mod:`fusedattn.reference` defines the results; here, inputs are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn import dropout, reference
from fusedattn.score_mod import ScoreMod
from fusedattn.shard import Shard

# The number of scores in one step, which fit a cache; and the fewest queries that are worth a separate product.
SCORES, LEAST_ROWS = 2**17, 64


class Steps(NamedTuple):
    """The steps on scores.

    Attributes:
        scale, softcap, score_mod, sinks, dropout_p, dropout_seed: as for :func:`fusedattn.attention`.
        needs_lse: whether lse is computed.
    """

    scale: float
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    needs_lse: bool = True


def attention(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, steps: Steps, shard: Shard
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)``, float32 or float64; lse is None if not needed.

    Args:
        q, k, v: as for :func:`fusedattn.attention`, those of `shard`; finite, float32 or float64.
        added: added to the scores, ``(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k)``; each row has a finite value.
        steps: the other steps.
        shard: the part of the whole attention that q and k are, with its nheads.
    """
    nheads, n_rows = q.shape[1:3]
    nheads_kv, n_keys = k.shape[1:3]
    group = nheads // nheads_kv
    of_batch = nheads * n_rows * n_keys
    n_batches = max(1, SCORES // of_batch)
    # A function of scores gets all heads at once.
    n_heads = nheads_kv if steps.score_mod is not None else max(1, min(nheads_kv, SCORES * nheads_kv // of_batch))
    size = max(LEAST_ROWS, SCORES // (n_heads * group * n_keys))
    q = q * (steps.scale if steps.softcap is None else steps.scale / steps.softcap)
    batches = []
    for b, of_batches in enumerate(_split((q, k, v), (n_batches,) * 3, dim=0)):
        own, heads = _narrowed(added, 0, b * n_batches, n_batches), []
        for h, (queries, keys, values) in enumerate(_split(of_batches, (n_heads * group, n_heads, n_heads), dim=1)):
            first = h * n_heads * group
            of_heads, blocks = _narrowed(own, 1, first, queries.shape[1]), []
            for i, rows in enumerate(queries.split(size, dim=2)):
                start = i * size
                on_rows = _narrowed(of_heads, 2, start, size)
                own_steps = steps if steps.sinks is None else steps._replace(sinks=steps.sinks[first:][: rows.shape[1]])
                own_shard = shard.part(b * n_batches, first, start)
                blocks.append(_step(rows, keys, values, on_rows, own_steps, own_shard))
            heads.append(_joined(blocks, 2))
        batches.append(_joined(heads, 1))
    return _joined(batches, 0)


Results = tuple[Tensor, Tensor | None]


def _split(xs: Iterable[Tensor], sizes: Iterable[int], dim: int) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding parts of these tensors."""
    return zip(*(x.split(size, dim) for x, size in zip(xs, sizes, strict=True)), strict=True)


def _narrowed(added: Tensor | None, dim: int, start: int, size: int) -> Tensor | None:
    """`size` indices of a dimension, or fewer at its end; all of a broadcast dimension."""
    if added is None or added.shape[dim] == 1:
        return added
    return added.narrow(dim, start, min(size, added.shape[dim] - start))


def _joined(parts: list[Results], dim: int) -> Results:
    if len(parts) == 1:
        return parts[0]
    outs = torch.cat([out for out, _ in parts], dim)
    lses = [lse for _, lse in parts if lse is not None]
    return outs, torch.cat(lses, dim) if lses else None


def _step(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, steps: Steps, shard: Shard) -> Results:
    """``(out, lse)`` of a shard, with its own `steps.sinks`; q is scaled."""
    scores = _product(q, k.mT)
    if steps.softcap is not None:
        scores = torch.tanh_(scores)
    factor = 1.0 if steps.softcap is None else steps.softcap
    if steps.score_mod is not None:
        scores = steps.score_mod.apply(scores * factor, shard=shard).to(q.dtype)
        factor = 1.0
    if added is not None:
        scores = torch.add(added, scores, alpha=factor)
    elif factor != 1.0:
        scores = scores * factor
    weights = torch.softmax(scores, dim=-1)
    if steps.dropout_p:
        assert steps.dropout_seed is not None
        keep = dropout.keep_mask(steps.dropout_seed, steps.dropout_p, *scores.shape, shard=shard)
        weights = weights.masked_fill(~keep, 0.0)
    out = _product(weights, v)
    if steps.dropout_p:
        out = out / (1.0 - steps.dropout_p)
    if not steps.needs_lse:
        return out, None
    lse = reference.logsumexp(scores)
    if steps.sinks is None:
        return out, lse
    # Not by the sigmoid of their difference: its derivative would compute the weight of a sink as 1 minus almost 1.
    whole = torch.logaddexp(lse, steps.sinks[:, None].to(lse.dtype))
    return out * torch.exp(lse - whole)[..., None], whole


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, where `a` may have a multiple of the heads of `b`."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    return (a.reshape(*b.shape[:2], -1, a.shape[3]) @ b).view(*a.shape[:3], b.shape[3])
