"""The place of a program's sequence: at one index of a batch, or packed with others in one long tensor.

Packed sequences share a batch of 1, in which sequence ``i`` has rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. A
kernel counts queries and keys from the start of its sequence; :class:`Place` gives that start in each tensor.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedattn.kernels.shard import shard_numbers


class Sequences(NamedTuple):
    """The starts of packed sequences, int32 ``(n + 1,)`` each; None if a batch is not packed.

    If keys lie in a cache (kernels/cached.py), `lengths_ptr`, int32 ``(n,)``, has the tokens of each sequence. If they
    are a shard (kernels/shard.py), `shard_ptr` has its numbers.
    """

    cu_q_ptr: Any
    cu_k_ptr: Any
    lengths_ptr: Any = None
    shard_ptr: Any = None


NOT_PACKED = Sequences(None, None)


class Place(NamedTuple):
    """One head of one sequence.

    `batch`, `first_q` and `first_k` say where it begins in q, k and v; `query_base` and `key_base`, in
    ``(batch, seqlen_q)`` and ``(batch, seqlen_k)`` tensors. `seqlen_q` and `seqlen_k` are its own lengths; a cache
    holds `dropped` tokens fewer than the sequence has. Row statistics are ``(batch, nheads, n_rows)``: `n_rows` is the
    seqlen_q of the tensors. `shard` has the :class:`~fusedattn.kernels.shard.ShardNumbers`.
    """

    sequence: Any
    head: Any
    nheads: Any
    batch: Any
    first_q: Any
    first_k: Any
    seqlen_q: Any
    seqlen_k: Any
    query_base: Any
    key_base: Any
    n_rows: Any
    dropped: Any
    shard: Any


@triton.jit
def place_of(sequences, sequence, head, nheads, seqlen_q, seqlen_k):
    """The :class:`Place` of one of `nheads` query heads; `seqlen_q` and `seqlen_k` are those of the tensors.

    In a cache, seqlen_k is the number of tokens of a sequence that it has room for.
    """
    wide = tl.cast(sequence, tl.int64)
    batch = sequence
    first_q = 0
    length_q = seqlen_q
    query_base = wide * seqlen_q
    first_k = 0
    length_k = seqlen_k
    key_base = wide * seqlen_k
    dropped = 0
    if sequences.cu_q_ptr is not None:
        batch = 0
        first_q = tl.load(sequences.cu_q_ptr + sequence)
        length_q = tl.load(sequences.cu_q_ptr + sequence + 1) - first_q
        query_base = first_q
    if sequences.cu_k_ptr is not None:
        first_k = tl.load(sequences.cu_k_ptr + sequence)
        length_k = tl.load(sequences.cu_k_ptr + sequence + 1) - first_k
        key_base = first_k
    if sequences.lengths_ptr is not None:
        length = tl.load(sequences.lengths_ptr + sequence)
        length_k = tl.minimum(tl.maximum(length, 0), seqlen_k)
        dropped = length - length_k
    return Place(
        sequence,
        head,
        nheads,
        batch,
        first_q,
        first_k,
        length_q,
        length_k,
        query_base,
        key_base,
        seqlen_q,
        dropped,
        shard_numbers(sequences.shard_ptr, nheads),
    )


@triton.jit
def with_head(place, head):
    """Another head of the same sequence."""
    return Place(
        place.sequence,
        head,
        place.nheads,
        place.batch,
        place.first_q,
        place.first_k,
        place.seqlen_q,
        place.seqlen_k,
        place.query_base,
        place.key_base,
        place.n_rows,
        place.dropped,
        place.shard,
    )


@triton.jit
def with_first(place, first_q, first_k):
    """The same sequence in tensors where it begins elsewhere."""
    return Place(
        place.sequence,
        place.head,
        place.nheads,
        place.batch,
        first_q,
        first_k,
        place.seqlen_q,
        place.seqlen_k,
        place.query_base,
        place.key_base,
        place.n_rows,
        place.dropped,
        place.shard,
    )


@triton.jit
def row_base(place):
    """The offset of a head's first row in a contiguous ``(batch, nheads, n_rows)`` tensor."""
    return (tl.cast(place.batch, tl.int64) * place.nheads + place.head) * place.n_rows + place.first_q


@triton.jit
def key_row_base(place, head_kv, nheads_kv, seqlen_k):
    """The offset of a head's first key in a contiguous ``(batch, nheads_kv, seqlen_k)`` tensor."""
    return (tl.cast(place.batch, tl.int64) * nheads_kv + head_kv) * seqlen_k + place.first_k


class Shape(NamedTuple):
    """The sizes of an attention, for the host.

    `seqlen_q` and `seqlen_k` are those of the tensors; no sequence is longer than `max_seqlen_q` or `max_seqlen_k`.
    """

    n_sequences: int
    nheads_q: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int
    max_seqlen_q: int
    max_seqlen_k: int
