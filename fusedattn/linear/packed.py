"""Linear attention of packed sequences, one after the other, by a function for a batch."""

from __future__ import annotations

import itertools
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
    bounds: list[int] = options.cu_seqlens.tolist()
    outs, states = [], [empty_state(0, k, v)]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    # The backward of a slice has the size of the whole.
    parts = (x.split([*lengths, x.shape[2] - bounds[-1]], dim=2)[:-1] for x in (q, k, v))
    for i, (of_q, of_k, of_v) in enumerate(zip(*parts, strict=True)):
        initial, valid = options.initial_state, options.valid
        of_one = replace(
            options,
            valid=None if valid is None else valid[:, bounds[i] : bounds[i + 1]],
            initial_state=None if initial is None else LinearState(initial.kv[i : i + 1], initial.k_sum[i : i + 1]),
            cu_seqlens=None,
        )
        out, state = attend(of_q, of_k, of_v, of_one)
        outs.append(out)
        states.append(state)
    outs.append(q.new_zeros(*q.shape[:2], q.shape[2] - bounds[-1], v.shape[3]))
    kv, k_sum = torch.cat([x.kv for x in states]), torch.cat([x.k_sum for x in states])
    return torch.cat(outs, dim=2), LinearState(kv, k_sum)
