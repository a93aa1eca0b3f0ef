"""Packed sequences of any lengths, as one batch of the tests: what computes them, and the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fusedattn import attention_varlen, reference

Lengths = Sequence[tuple[int, int]]  # queries and keys of each sequence


def packed(lengths: Lengths, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any) -> tuple[Any, ...]:
    """attention() of a batch of sequences that lie one after the other, by attention_varlen()."""
    cu_seqlens = [torch.tensor(stops, dtype=torch.int32) for stops in _stops(lengths)]
    flat = [_in_a_row(x) for x in (q, k, v)]
    longest = (max(n) for n in zip(*lengths, strict=True))
    out, lse = attention_varlen(*flat, *cu_seqlens, *longest, return_lse=return_lse, **options)
    batch = q.shape[0]
    return out.unflatten(0, (batch, -1)).transpose(1, 2), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def each(lengths: Lengths, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any) -> tuple[Any, ...]:
    """The same by the reference, one sequence after the other; of a batch of 1."""
    results = [reference.attention(q[:, :, i], k[:, :, j], v[:, :, j], **options) for i, j in _slices(lengths)]
    out, lse, _ = zip(*results, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def _in_a_row(x: Tensor) -> Tensor:
    """``(batch, nheads, seqlen, head_dim)`` as ``(batch * seqlen, nheads, head_dim)``."""
    return x.transpose(1, 2).flatten(0, 1)


def _stops(lengths: Lengths) -> list[list[int]]:
    return [[0, *accumulate(n)] for n in zip(*lengths, strict=True)]


def _slices(lengths: Lengths) -> Iterator[tuple[slice, slice]]:
    """The rows of q and k of each sequence."""
    queries, keys = (pairwise(stops) for stops in _stops(lengths))
    return ((slice(*i), slice(*j)) for i, j in zip(queries, keys, strict=True))
