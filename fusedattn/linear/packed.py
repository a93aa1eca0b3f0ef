"""Linear attention of packed sequences, one after the other, by a function for a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState, empty_state

Attend = Callable[[Tensor, Tensor, Tensor, LinearOptions], tuple[Tensor, LinearState]]


def by_sequence(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, attend: Attend) -> tuple[Tensor, LinearState]:
    """``(out, state)`` by a call of `attend` for each sequence; their lengths are read on the host."""
    assert options.cu_seqlens is not None
    lengths: list[int] = options.cu_seqlens.diff().tolist()
    outs, states = [], [empty_state(0, k, v)]
    # Slices would have gradients of the whole length, one for each sequence.
    *parts, rest = zip(*(x.split([*lengths, x.shape[2] - sum(lengths)], dim=2) for x in (q, k, v)), strict=True)
    start = 0
    for i, (of_q, of_k, of_v) in enumerate(parts):
        initial, valid = options.initial_state, options.valid
        end = start + lengths[i]
        of_one = replace(
            options,
            valid=None if valid is None else valid[:, start:end],
            initial_state=None if initial is None else LinearState(initial.kv[i : i + 1], initial.k_sum[i : i + 1]),
            cu_seqlens=None,
        )
        out, state = attend(of_q, of_k, of_v, of_one)
        outs.append(out)
        states.append(state)
        start = end
    outs.append(q.new_zeros(*rest[0].shape[:3], v.shape[3]))
    kv, k_sum = torch.cat([x.kv for x in states]), torch.cat([x.k_sum for x in states])
    return torch.cat(outs, dim=2), LinearState(kv, k_sum)
