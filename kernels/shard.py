"""Numbers of batches, heads, queries and keys in a whole attention of which a call computes a shard.

A shard has tensors of its own (masks and biases are cut as q, k and v are), but alignments of masks, distances, dropout
and users' functions count through the whole attention. ``fusedattn.shard`` makes the numbers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ShardNumbers(NamedTuple):
    """The numbers of a shard, or those of a call that is the whole attention.

    `first_*` are the numbers of its own first ones, `nheads` counts the query heads of the whole. Query 0 stands
    `shift` keys further on than if the last query and the last key of the shard were those of the whole.
    """

    first_batch: Any
    first_head: Any
    nheads: Any
    first_query: Any
    first_key: Any
    shift: Any


@triton.jit
def shard_numbers(shard_ptr, nheads):
    """The :class:`ShardNumbers` of a call with `nheads` query heads; shard_ptr has them, int32, or is None.

    A :class:`~fusedattn.kernels.sequences.Place` has the numbers, not the pointer: Triton 3.6 cannot return None.
    """
    if shard_ptr is not None:
        return ShardNumbers(
            tl.load(shard_ptr),
            tl.load(shard_ptr + 1),
            tl.load(shard_ptr + 2),
            tl.load(shard_ptr + 3),
            tl.load(shard_ptr + 4),
            tl.load(shard_ptr + 5),
        )
    else:
        return ShardNumbers(0, 0, nheads, 0, 0, 0)


@triton.jit
def diagonal_at_end(place):
    """The key at which query 0 stands if the last query of all stands at the last key of all."""
    return place.seqlen_k - place.seqlen_q + place.shard.shift


@triton.jit
def diagonal_at_start(place):
    """The key at which query 0 stands if the first query of all stands at the first key of all."""
    return place.shard.first_query - place.shard.first_key


@triton.jit
def head_number(place):
    """(number of the sequence, number of the head, number of heads)."""
    return place.sequence + place.shard.first_batch, place.head + place.shard.first_head, place.shard.nheads
