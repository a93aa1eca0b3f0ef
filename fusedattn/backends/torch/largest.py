"""The largest score of each query, some queries at a time: torch's kernels do not return it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedattn import reference
from fusedattn.backends.torch import sdpa
from fusedattn.backends.torch.eager import LEAST_ROWS, SCORES
from fusedattn.options import Options
from fusedattn.readable import is_readable
from fusedattn.reference_varlen import Results


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    """``(out, lse, largest)`` of sequences that are neither packed nor in a cache; None if not asked for."""
    out, lse = sdpa.attention(q, k, v, options)
    return out, lse, largest_scores(q, k, options) if options.return_max else None


def largest_scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """:func:`fusedattn.reference.largest_scores` in float32 at least, without storing all scores."""
    batch, nheads, seqlen_q, _ = q.shape
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        if options.rope is not None:
            q, k = options.rope.rotate(q, k)
        k = k.repeat_interleave(nheads // k.shape[1], dim=1)
        options = replace(options, rope=None)
        if not is_readable(q):  # lengths may be symbols
            return reference.largest_scores(q, k, **options.of_scores())
        size = max(LEAST_ROWS, SCORES // max(1, batch * nheads * k.shape[2]))
        parts = [
            reference.largest_scores(q, k, **options.of_scores(), rows=slice(start, min(start + size, seqlen_q)))
            for start in range(0, max(1, seqlen_q), size)
        ]
        return torch.cat(parts, dim=2)
