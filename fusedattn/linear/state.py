"""The state of linear attention: what it keeps of all tokens before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LinearState(NamedTuple):
    """Sums over the tokens so far; their size does not depend on the number of tokens.

    Attributes:
        kv: ``sum_j phi(k_j) v_j^T``, float32 (float64 for float64 inputs)
            ``(batch or n_sequences, nheads_kv, n_features, head_dim_v)``.
        k_sum: ``sum_j phi(k_j)``, in the same dtype, ``(batch or n_sequences, nheads_kv, n_features)``.
    """

    kv: Tensor
    k_sum: Tensor


def empty_state(n: int, k: Tensor, v: Tensor) -> LinearState:
    """The state of n sequences before their first token; k has the features of keys."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    kv = k.new_zeros(n, k.shape[1], k.shape[3], v.shape[3], dtype=dtype)
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))
