"""Which weights dropout keeps: a function of the seed and of the pair, so that nothing is stored for the backward.

Philox-4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). Its key is the seed, and one
counter serves four pairs; every word equals that of ``tl.philox`` in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import indices
from fusedattn.shard import WHOLE, Shard

__all__ = [
    "draw_seed",
    "keep_mask",
]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and sqrt(3) - 1
_ROUNDS = 10

# Indices that differ only by 8 share a counter. In the tiles of matrix products one thread holds them all.
_APART = 8


def draw_seed(device: torch.device | str) -> Tensor:
    """Draw a seed from torch's generator of ``device``: int64 ``(1,)`` on that device, without a sync."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor,
    dropout_p: float,
    batch: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    rows: Tensor | slice | None = None,
    keys: Tensor | slice | None = None,
    shard: Shard = WHOLE,
) -> Tensor:
    """Which weights are kept, bool ``(batch, nheads, seqlen_q, seqlen_k)``; each with probability ``1 - dropout_p``.

    Pair ``(i, j)`` of head ``h`` and batch ``b`` is kept iff a word of Philox is at least ``floor(dropout_p * 2**32)``.
    The key is ``seed``, the counter is ``(g(j), g(i), b * nheads + h, 0)`` with ``g(x) = x // 16 * 8 + x % 8``, and the
    word number is ``i // 8 % 2 * 2 + j // 8 % 2``. All count through the whole attention of which this is a shard.

    Args:
        seed: int64 ``(1,)``.
        dropout_p: ``0 <= dropout_p < 1``.
        batch, nheads, seqlen_q, seqlen_k: of the attention, or of the shard.
        rows, keys: which queries and keys to write out, int64 ``(n,)`` or a slice; all by default.
        shard: the part of a larger attention that this is.
    """
    device, first_q, first_k = seed.device, shard.first_query, shard.first_key
    batches = torch.arange(shard.first_batch, shard.first_batch + batch, device=device)[:, None]
    heads = torch.arange(shard.first_head, shard.first_head + nheads, device=device)
    streams = batches * shard.heads(nheads) + heads
    # A range would make the lengths constants under a compiler.
    if rows is None and keys is None and not torch.compiler.is_compiling():
        return kept(seed, dropout_p, streams, range(first_q, first_q + seqlen_q), range(first_k, first_k + seqlen_k))
    i = indices.select(seqlen_q, rows, device)[:, None] + first_q
    j = indices.select(seqlen_k, keys, device) + first_k
    words = _words(seed, streams, _group(i), _group(j))
    odd_row, odd_key = (x // _APART % 2 == 1 for x in (i, j))
    first, second = (torch.where(odd_key, words[n + 1], words[n]) for n in (0, 2))
    return torch.where(odd_row, second, first) >= int(dropout_p * 2**32)


def kept(seed: Tensor, dropout_p: float, streams: Tensor, rows: range, keys: range) -> Tensor:
    """Which weights of some heads are kept, bool ``(*streams.shape, rows, keys)``.

    Args:
        seed: int64 ``(1,)``.
        dropout_p: ``0 <= dropout_p < 1``.
        streams: int64, ``batch * nheads + head`` of each.
        rows, keys: which queries and keys.
    """
    (i, skipped_rows), (j, skipped_keys) = (_groups(x, seed.device) for x in (rows, keys))
    words = _words(seed, streams, i[:, None], j)
    threshold = int(dropout_p * 2**32)
    # each (..., i // 16, i % 8, j // 16, j % 8)
    a, b, c, d = ((word >= threshold).unflatten(-1, (-1, _APART)).unflatten(-3, (-1, _APART)) for word in words)
    even, odd = (torch.stack(pair, dim=-2).flatten(-3) for pair in ((a, b), (c, d)))
    found = torch.stack((even, odd), dim=-3).flatten(-4, -2)
    return found[..., skipped_rows : skipped_rows + len(rows), skipped_keys : skipped_keys + len(keys)]


def _group(x: Tensor) -> Tensor:
    """An index without the bit that tells apart the indices of one counter."""
    return x // (2 * _APART) * _APART + x % _APART


def _groups(part: range, device: torch.device) -> tuple[Tensor, int]:
    """The groups, int64 ``(n,)``, of the runs of 16 indices that cover `part`, and how many indices precede `part`."""
    size = 2 * _APART
    first, stop = part.start // size, -(-part.stop // size)
    return torch.arange(first * _APART, stop * _APART, device=device), part.start - first * size


def _words(seed: Tensor, streams: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return philox(seed, j, i, streams[..., None, None], torch.zeros_like(j))


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox's four output words, int64 below ``2**32``, of four such counter words that broadcast; seed int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The low 64 bits of a product are right although it overflows int64. The shift copies its sign bit above the
        # high word; the mask cuts those copies off.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((first >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = second, first
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD
