"""Linear attention, token by token: this defines its results, and is written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState, empty_state


def attention(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """``(out, state)`` by the recurrence of Katharopoulos et al., 2020, equations 18 to 20.

    Arguments are those of :func:`fusedattn.linear_attention`, checked.
    """
    if options.cu_seqlens is None:
        return _of_batch(q, k, v, options, options.initial_state, options.valid)
    bounds = options.cu_seqlens.tolist()
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    outs, states = [], []
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        initial, valid = options.initial_state, options.valid
        own = None if initial is None else LinearState(*(x[i : i + 1] for x in initial))
        seen = None if valid is None else valid[:, start:end]
        found, state = _of_batch(*(x[:, :, start:end] for x in (q, k, v)), options, own, seen)
        outs.append(found)
        states.append(state)
    end = bounds[-1]
    states.append(empty_state(0, k, v))
    return torch.cat([*outs, out[:, :, end:]], dim=2), LinearState(*(torch.cat(x) for x in zip(*states, strict=True)))


def _of_batch(
    q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, initial: LinearState | None, valid: Tensor | None
) -> tuple[Tensor, LinearState]:
    if valid is not None:  # not even a NaN of a hidden key goes anywhere
        k, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (k, v))
    phi = feature_maps.eager(options.feature_map)
    phi_q, phi_k = phi(q), phi(k)
    if valid is not None:
        phi_k = phi_k.masked_fill(~valid[:, None, :, None], 0.0)
    kv, k_sum = empty_state(q.shape[0], k, v) if initial is None else initial
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
    out = torch.stack(outs, dim=2) if outs else q.new_zeros(*q.shape[:3], v.shape[3])
    return out.to(q.dtype), LinearState(kv, k_sum)
