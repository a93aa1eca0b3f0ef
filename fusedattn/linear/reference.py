"""Linear attention, token by token: this defines its results, and is written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.packed import by_sequence
from fusedattn.linear.state import LinearState, empty_state


def attention(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """``(out, state)`` by the recurrence of Katharopoulos et al., 2020, equations 18 to 20.

    Arguments are those of :func:`fusedattn.linear_attention`, checked.
    """
    if options.cu_seqlens is not None:
        return by_sequence(q, k, v, options, attention)
    valid = options.valid
    if valid is not None:  # not even a NaN of a hidden key goes anywhere
        k, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (k, v))
    phi = feature_maps.eager(options.feature_map)
    phi_q, phi_k = phi(q), phi(k)
    if valid is not None:
        phi_k = phi_k.masked_fill(~valid[:, None, :, None], 0.0)
    kv, k_sum = options.initial_state or empty_state(q.shape[0], k, v)
    group = q.shape[1] // k.shape[1]
    if not options.causal:
        kv = kv + phi_k.to(kv.dtype).mT @ v.to(kv.dtype)
        k_sum = k_sum + phi_k.to(kv.dtype).sum(dim=2)
    outs = []
    for i in range(q.shape[2]):
        if options.causal:
            of_k, of_v = phi_k[:, :, i].to(kv.dtype), v[:, :, i].to(kv.dtype)
            kv = kv + of_k[..., :, None] * of_v[..., None, :]
            k_sum = k_sum + of_k
        of_q = phi_q[:, :, i].to(kv.dtype)
        out = (of_q[..., None, :] @ kv.repeat_interleave(group, dim=1)).squeeze(-2)
        if options.normalize:
            den = (of_q * k_sum.repeat_interleave(group, dim=1)).sum(dim=-1, keepdim=True)
            out = torch.where(den == 0, 0.0, out / torch.where(den == 0, 1.0, den))
        outs.append(out)
    # Without a query there is still a graph.
    out = torch.stack(outs, dim=2) if outs else phi_q.to(kv.dtype) @ kv.repeat_interleave(group, dim=1)
    return out.to(q.dtype), LinearState(kv, k_sum)
