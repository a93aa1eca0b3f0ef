"""Attention to keys and values that every process gathers from all: one call per chunk of queries.

Llama 3 (2024), section 3.3.2. It takes the memory of all keys and values, and skips what a mask of documents hides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.distributed.collectives import depending, gather
from fusedattn.distributed.cutting import Rectangle
from fusedattn.distributed.partial import attend
from fusedattn.distributed.ring import Ring
from fusedattn.options import Options


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, ring: Ring) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, largest)`` of the queries of this process, differentiable."""
    if ring.keys.n_owners > 1:
        of_owners = [ring.specs(owner, k, v) for owner in range(ring.keys.n_owners)]
        k, v = (
            ring.keys.joined(gather(x, [specs[i] for specs in of_owners], ring.processes), dim=2)
            for i, x in enumerate((k, v))
        )
    found = []
    keys = slice(0, ring.keys.seqlen)
    for rows, chunk in ring.queries.places(ring.rank):
        part = Rectangle(ring.shard_at(chunk.start, 0), ring.heads, rows, keys)
        found.append(attend(q[:, :, rows], k, v, options, part, ring.backend))
    outs, lses, maxima = zip(*found, strict=True)
    largest = torch.cat(maxima, dim=2) if options.return_max else None
    out, lse = depending([torch.cat(outs, dim=2), torch.cat(lses, dim=2)], [k, v])
    return out, lse, largest
