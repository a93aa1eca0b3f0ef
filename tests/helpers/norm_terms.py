"""Sums of the absolute terms of gradients through a norm of q and k."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fusedattn.qk_norm import two_dimensional
from fusedattn.testing import Inputs


def of_gradients(inputs: Inputs, dq: Tensor, dk: Tensor) -> dict[str, Tensor]:
    """Those of dq, dk and the weights, from those of the gradients of the normalised q and k; empty without a norm.

    A gradient is ``r (g weight - y c)`` with the normalised row y and the mean, or sum, ``c`` of ``g weight y``.
    """
    norm = inputs.qk_norm
    if norm is None:
        return {}
    found = {}
    normalized = replace(norm, q_weight=None, k_weight=None).apply(inputs.q, inputs.k)
    dims = (1, 3) if norm.across_heads else (3,)
    for name, x, y, g in zip("qk", (inputs.q, inputs.k), normalized, (dq, dk), strict=True):
        weight = getattr(norm, f"{name}_weight")
        share = 1.0 / (x.shape[3] * (x.shape[1] if norm.across_heads else 1)) if norm.kind == "rms" else 1.0
        r = (share * x.square().sum(dims, keepdim=True) + norm.eps).rsqrt()
        terms = (g * y.abs()).nan_to_num(0.0)
        of_weight = two_dimensional(weight).abs()[:, None]
        c = share * (terms * of_weight).sum(dims, keepdim=True)
        found[f"d{name}"] = r * (g * of_weight + y.abs() * c)
        found[f"d{name}_weight"] = terms.sum((0, 2)).sum_to_size(of_weight[:, 0].shape).view(weight.shape)
    return found
