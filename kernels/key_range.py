"""The visible keys of each sequence, reduced on the device: nothing waits for the host."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.sequences import Sequences, Shape, place_of

RANGE_BLOCK = 1024


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k"])
def _key_range(valid_ptr, key_range_ptr, sequences, seqlen_q, seqlen_k, BLOCK: tl.constexpr):
    """One program per sequence: reduce ``valid`` to (first visible, last visible + 1, no gaps)."""
    sequence = tl.program_id(0)
    place = place_of(sequences, sequence, 0, seqlen_q, seqlen_k)
    row = valid_ptr + place.key_base
    first = place.seqlen_k
    stop = 0
    count = 0
    for start in range(0, place.seqlen_k, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        seen = tl.load(row + offs, mask=offs < place.seqlen_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, offs, place.seqlen_k), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen, offs + 1, 0), 0))
        count += tl.sum(seen.to(tl.int32), 0)
    base = key_range_ptr + sequence.to(tl.int64) * 3
    tl.store(base, tl.minimum(first, stop))  # nothing visible: the empty range [0, 0)
    tl.store(base + 1, stop)
    tl.store(base + 2, (count == stop - first).to(tl.int32))


def key_range(valid: torch.Tensor, sequences: Sequences, shape: Shape) -> torch.Tensor:
    """The visible range of each sequence.

    Args:
        valid: uint8 ``(batch, seqlen_k)``, contiguous.
        sequences, shape: of the attention.

    Returns:
        int32 ``(n_sequences, 3)``: first visible key, last visible key + 1, and 1 where there is no gap between.
    """
    out = replay.scratch(valid, (shape.n_sequences, 3), torch.int32)
    launcher.launch(_constants(), shape.n_sequences, (valid, out, sequences), (shape.seqlen_q, shape.seqlen_k))
    return out


@lru_cache
def _constants() -> launcher.Constants:
    return launcher.Constants(_key_range, BLOCK=RANGE_BLOCK, num_warps=4)
