"""The attention over all keys from attentions of the same queries over disjoint parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, in the dtype of lses, as :func:`fusedattn.merge` defines them; differentiable."""
    stacked = torch.stack(tuple(lses))
    hidden = stacked == -math.inf
    weights, lse = _weights(stacked, hidden)
    out = torch.zeros_like(outs[0], dtype=weights.dtype)
    for x, weight, is_hidden in zip(outs, weights, hidden, strict=True):
        out = out + weight[..., None] * x.to(weights.dtype).masked_fill(is_hidden[..., None], 0.0)
    return out, lse


def _weights(lses: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of each part, ``(parts, ...)``, and their common lse; `lses` are stacked, -inf where `hidden`.

    Gradients are computed from the weights. Computed from the value of a large lse they would be wrong.
    """
    largest = lses.detach().amax(dim=0)
    # Constants in place of hidden numbers: no NaN goes forward from -inf minus -inf, nor back from a gradient.
    terms = (lses - largest).masked_fill(hidden, 0.0).exp().masked_fill(hidden, 0.0)
    total = terms.sum(dim=0).masked_fill(hidden.all(dim=0), 1.0)
    return terms / total, largest + total.log()
