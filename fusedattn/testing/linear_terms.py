"""Sums of the absolute terms of the results of linear attention, which bound what rounding can do to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.testing.budget import Results
from fusedattn.testing.linear_cases import LinearCase, LinearInputs


def sums_of_terms(case: LinearCase, inputs: LinearInputs) -> Results:
    """For each result a bound on the sum of the absolute values of its terms; in float64.

    That of a gradient through features is their derivative by finite terms: the features of -|x| and |x| bound it.
    """
    x = {name: y.double() for name, y in inputs.leaves.items()}
    dout, dkv, dk_sum = (y.double().abs() for y in inputs.back)
    if not case.return_state:
        dkv, dk_sum = torch.zeros_like(dkv), torch.zeros_like(dk_sum)
    group = case.nheads_q // case.nheads_kv
    options = dict(inputs.options)
    sequences = _sequences(case, options.pop("cu_seqlens"))
    found = {name: torch.zeros_like(x[name]) for name in x}
    out, kv, k_sum = torch.zeros_like(dout), torch.zeros_like(dkv), torch.zeros_like(dk_sum)
    for i, (batch, rows) in enumerate(sequences):
        one = slice(batch, batch + 1)
        q, k, v = (x[name][one, :, rows] for name in "qkv")
        valid = options["valid"]
        shown = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if valid is None else valid[one, rows]
        k, v = k.masked_fill(~shown[:, None, :, None], 0.0), v.masked_fill(~shown[:, None, :, None], 0.0)
        (phi_q, slope_q), (phi_k, slope_k) = (
            _features(y, options["feature_map"], is_k) for y, is_k in ((q, 0), (k, 1))
        )
        phi_k = phi_k * shown[:, None, :, None]
        phi_k_all, v_all = phi_k.repeat_interleave(group, 1), v.abs().repeat_interleave(group, 1)
        state = torch.zeros_like(kv[i : i + 1]), torch.zeros_like(k_sum[i : i + 1])
        if "kv" in x:
            state = x["kv"][i : i + 1].abs(), x["k_sum"][i : i + 1].abs()
        of_kv, of_sum = (y.repeat_interleave(group, 1) for y in state)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.float64, device=q.device)
        seen = seen.tril() if case.causal else seen
        weights = (phi_q @ phi_k_all.mT) * seen
        own = dout[one, :, rows]
        numerator = weights @ v_all + phi_q @ of_kv
        den = torch.ones_like(numerator[..., :1])
        delta = torch.zeros_like(den)
        if case.normalize:
            den = weights.sum(-1, keepdim=True) + phi_q @ of_sum[..., None]
            den = torch.where(den == 0, torch.inf, den)
            delta = (own * numerator / den).sum(-1, keepdim=True)
        out[one, :, rows] = numerator / den
        kv[i], k_sum[i] = (state[0] + phi_k.mT @ v.abs())[0], (state[1] + phi_k.sum(2))[0]
        own, share = own / den, delta / den
        dweights = (own @ v_all.mT + share) * seen

        def grouped(y: Tensor) -> Tensor:
            return y.unflatten(1, (-1, group)).sum(2)

        dphi_q = dweights @ phi_k_all + own @ of_kv.mT + share * of_sum[:, :, None]
        dphi_k = grouped(dweights.mT @ phi_q) + v.abs() @ dkv[i : i + 1].mT + dk_sum[i : i + 1, :, None]
        found["q"][one, :, rows] = slope_q(dphi_q)
        found["k"][one, :, rows] = slope_k(dphi_k) * shown[:, None, :, None]
        found["v"][one, :, rows] = (grouped(weights.mT @ own) + phi_k @ dkv[i : i + 1]) * shown[:, None, :, None]
        if "kv" in x:
            found["kv"][i] = (dkv[i : i + 1] + grouped(phi_q.mT @ own))[0]
            found["k_sum"][i] = (dk_sum[i : i + 1] + grouped((phi_q * share).sum(2)))[0]
    return {"out": out, "kv": kv, "k_sum": k_sum} | {f"d{name}": y for name, y in found.items()}


def _sequences(case: LinearCase, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    if cu_seqlens is None:
        return [(b, slice(None)) for b in range(case.batch)]
    stops = cu_seqlens.tolist()
    return [(0, slice(start, stop)) for start, stop in itertools.pairwise(stops)]


def _features(x: Tensor, feature_map: Any, of_keys: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The absolute features, and what bounds a gradient of x from one of its features."""
    x = x.detach()
    q, k, left = feature_maps.split(feature_map, x, x)
    phi = feature_maps.eager(left)(k if of_keys else q)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda y: _one(y, feature_map, of_keys)))(x.flatten(0, 2))
    jacobian = jacobian.abs().unflatten(0, x.shape[:3])  # (batch, nheads, seqlen, n_features, head_dim)
    return phi.abs(), lambda gradient: (gradient[..., None, :] @ jacobian).squeeze(-2)


def _one(x: Tensor, feature_map: Any, of_keys: int) -> Tensor:
    q, k, left = feature_maps.split(feature_map, x[None], x[None])
    return feature_maps.eager(left)(k if of_keys else q)[0]
