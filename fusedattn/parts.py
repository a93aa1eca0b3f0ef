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


def add_part(out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
    """Make of ``(out, lse)``, float32 or float64, in place, those of their keys and of a part's too."""
    part_out, part_lse = part
    hidden = part_lse == -math.inf
    # Weights by the difference of lses: by the value of their sum, a large lse would make them wrong.
    difference = (part_lse - lse).masked_fill(hidden, -math.inf)
    weight, rest = torch.sigmoid(difference), torch.sigmoid(-difference)
    out.mul_(rest[..., None]).addcmul_(part_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def gradients_of_part(
    part: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The gradients of ``(out, lse)`` of a part, in the dtype of lse, from `gradients` of ``(out, lse)`` of the whole.

    The whole is :func:`sum_of_parts`. A part that is the whole has the same gradients. A row that the part does not see
    has gradients of 0. The gradient of the whole's lse may be None.
    """
    (out, lse), (whole_out, whole_lse), (dout, dlse) = part, whole, gradients
    hidden = lse == -math.inf
    weight = torch.exp(lse - whole_lse).masked_fill(hidden, 0.0)
    dout = dout.to(weight.dtype)
    into_lse = (dout * (out.to(weight.dtype) - whole_out)).sum(dim=-1)
    into_lse = into_lse if dlse is None else into_lse + dlse
    return weight[..., None] * dout, (weight * into_lse).masked_fill(hidden, 0.0)
