"""Dropout of weights, decided element by element, so that tiles of any size and both directions agree.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011): Philox-4x32-10 with the seed as key and
``(g(key), g(query), sequence * nheads_q + head, 0)`` as counter, where ``g`` removes bit 3 of an index. The four words
of a counter serve the four pairs that differ in these two bits alone. ``fusedattn.dropout`` has the same in PyTorch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.shard import head_number


class DropoutArguments(NamedTuple):
    """The arguments of dropout; `seed_ptr` is None if nothing is dropped.

    A weight is kept if its Philox word minus 2^31 is at least `threshold`, and is then multiplied by `factor`,
    1 / (1 - dropout_p).
    """

    seed_ptr: Any
    threshold: Any
    factor: Any


NO_DROPOUT = DropoutArguments(None, None, None)


@triton.jit
def kept(dropout, place, block):
    """Which weights of a block are kept."""
    rows = block.rows + place.shard.first_query
    keys = block.keys + place.shard.first_key
    sequence, head, nheads = head_number(place)
    stream = sequence * nheads + head
    zero = (rows + keys) * 0
    a, b, c, d = tl.philox(tl.load(dropout.seed_ptr), zero + _group(keys), zero + _group(rows), zero + stream, zero, 10)
    word = tl.where(rows & 8 != 0, tl.where(keys & 8 != 0, d, c), tl.where(keys & 8 != 0, b, a))
    # Compared as unsigned numbers: LLVM's backend for AMD aborts if the sign bits of words are flipped instead.
    return word >= (tl.cast(dropout.threshold, tl.uint32, bitcast=True) ^ 0x80000000)


@triton.jit
def _group(index):
    """An index without its bit 3."""
    return (index >> 4 << 3) | (index & 7)


def dropout_arguments(seed: Any, dropout_p: float) -> DropoutArguments:
    """The arguments for a seed, an int64 tensor of one element, or None; ``0 <= dropout_p < 1``."""
    if seed is None:
        return NO_DROPOUT
    return DropoutArguments(seed, int(dropout_p * 2**32) - 2**31, 1.0 / (1.0 - dropout_p))
