"""Numbers of batches, heads, queries and keys in a whole attention of which a call computes a shard.

A shard has tensors of its own (masks and biases are cut as q, k and v are), but alignments of masks, distances, dropout
and users' functions count through the whole attention. ``fusedattn.shard`` makes the numbers.
"""

import triton
import triton.language as tl

# Entries of `shard_ptr`, int32.
FIRST_BATCH = tl.constexpr(0)
FIRST_HEAD = tl.constexpr(1)
NHEADS = tl.constexpr(2)
FIRST_QUERY = tl.constexpr(3)
FIRST_KEY = tl.constexpr(4)
DIAGONAL = tl.constexpr(5)


@triton.jit
def diagonal_at_end(place):
    """The key at which query 0 stands if the last query of all stands at the last key of all."""
    if place.shard_ptr is not None:
        return tl.load(place.shard_ptr + DIAGONAL)
    else:
        return place.seqlen_k - place.seqlen_q


@triton.jit
def diagonal_at_start(place):
    """The key at which query 0 stands if the first query of all stands at the first key of all."""
    if place.shard_ptr is not None:
        return tl.load(place.shard_ptr + FIRST_QUERY) - tl.load(place.shard_ptr + FIRST_KEY)
    else:
        return 0


@triton.jit
def first_query(place):
    """The number of query 0."""
    if place.shard_ptr is not None:
        return tl.load(place.shard_ptr + FIRST_QUERY)
    else:
        return 0


@triton.jit
def first_key(place):
    """The number of key 0."""
    if place.shard_ptr is not None:
        return tl.load(place.shard_ptr + FIRST_KEY)
    else:
        return 0


@triton.jit
def head_number(place):
    """(number of the sequence, number of the head, number of heads)."""
    if place.shard_ptr is not None:
        sequence = place.sequence + tl.load(place.shard_ptr + FIRST_BATCH)
        head = place.head + tl.load(place.shard_ptr + FIRST_HEAD)
        return sequence, head, tl.load(place.shard_ptr + NHEADS)
    else:
        return place.sequence, place.head, place.nheads
