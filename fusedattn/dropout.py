"""Which weights dropout keeps: a function of the seed and of the pair, so that nothing is stored for the backward.

Philox-4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), with the seed as its key and the
pair as its counter; word for word what ``tl.philox`` gives the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import indices

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and sqrt(3) - 1
_ROUNDS = 10


def draw_seed(device: torch.device | str) -> Tensor:
    """A new seed from torch's generator of ``device``: int64 ``(1,)`` there, which nobody waits for."""
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
    first_batch: int = 0,
) -> Tensor:
    """Which weights are kept, bool ``(batch, nheads, seqlen_q, seqlen_k)``; each with probability ``1 - dropout_p``.

    Pair ``(i, j)`` of head ``h`` and batch ``b`` is kept iff the first word of Philox under the key ``seed``, at the
    counter ``(j, i, (first_batch + b) * nheads + h, 0)``, is at least ``floor(dropout_p * 2**32)``.

    Args:
        seed: int64 ``(1,)``.
        dropout_p: ``0 <= dropout_p < 1``.
        batch, nheads, seqlen_q, seqlen_k: of the attention, or of ``batch`` of its batches from ``first_batch`` on.
        rows, keys: which queries and keys to write out, int64 ``(n,)`` or a slice; all by default.
    """
    device = seed.device
    q_index, k_index = indices.select(seqlen_q, rows, device), indices.select(seqlen_k, keys, device)
    batches, heads, i, j = indices.of_scores(batch, nheads, q_index, k_index, first_batch)
    word = philox(seed, j, i, batches * nheads + heads, torch.zeros_like(j))[0]
    return word >= int(dropout_p * 2**32)


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words, int64 tensors of numbers below ``2**32``, of four such words that broadcast; seed int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The low 64 bits of a product are right although it overflows int64; the shift's copies of its sign go.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
