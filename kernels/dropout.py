"""Dropout of weights, decided element by element, so that tiles of any size and both directions agree.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011): Philox-4x32-10 with the seed as key and
``(key, query, sequence * nheads_q + head, 0)`` as counter. ``fusedattn.dropout`` has the same in PyTorch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class DropoutArguments(NamedTuple):
    """How weights are dropped.

    A weight is kept where the first word of Philox, less 2^31, is at least `threshold`, and then multiplied by
    `factor`, 1 / (1 - dropout_p). `seed_ptr` is None where nothing is dropped.
    """

    seed_ptr: Any
    threshold: Any
    factor: Any


NO_DROPOUT = DropoutArguments(None, None, None)


@triton.jit
def kept(dropout, place, nheads, rows, keys):
    """Which weights of queries `rows` and `keys`, pairwise, are kept."""
    stream = place.sequence * nheads + place.head
    zero = (rows + keys) * 0
    word, _, _, _ = tl.philox(tl.load(dropout.seed_ptr), zero + keys, zero + rows, zero + stream, zero, 10)
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= dropout.threshold


def dropout_arguments(seed: Any, dropout_p: float) -> DropoutArguments:
    """Of an int64 tensor of one element, or None; ``0 <= dropout_p < 1``."""
    if seed is None:
        return NO_DROPOUT
    return DropoutArguments(seed, int(dropout_p * 2**32) - 2**31, 1.0 / (1.0 - dropout_p))
