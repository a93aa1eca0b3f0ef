"""Linear attention by torch's own operators, in chunks: the backend ``torch``, and derivatives of gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.packed import by_sequence
from fusedattn.linear.state import LinearState, empty_state

CHUNK = 64


def attention(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """``(out, state)`` of checked arguments, differentiable; memory is linear in the length.

    Packed sequences are computed one after the other.
    """
    if options.cu_seqlens is not None:
        return by_sequence(q, k, v, options, attention)
    with torch.autocast(q.device.type, enabled=False):  # which would add up in 16 bits
        return _of_batch(q, k, v, options)


def _of_batch(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    valid, initial = options.valid, options.initial_state
    hidden = None if valid is None else ~valid[:, None, :, None]
    if hidden is not None:  # not even a NaN of a hidden key goes anywhere
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    phi = feature_maps.eager(options.feature_map)
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Products of 16-bit numbers are exact in float32.
    phi_q, phi_k, wide_v = phi(q).to(dtype), phi(k).to(dtype), v.to(dtype)
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0.0)
    # A feature of 1 in each value: its sum of weights is the denominator.
    values = F.pad(wide_v, (0, 1), value=1.0)
    before = empty_state(q.shape[0], k, v) if initial is None else initial
    state = torch.cat([before.kv, before.k_sum[..., None]], dim=-1)  # (batch, nheads_kv, n_features, head_dim_v + 1)
    # (batch, nheads_kv, group, seqlen, n_features): queries of one KV head together
    phi_q = phi_q.unflatten(1, (k.shape[1], -1))
    if options.causal:
        sums, state = _causal(phi_q, phi_k, values, state)
    else:
        state = state + _sums(phi_k, values)
        sums = phi_q @ state[:, :, None]
    out, den = sums[..., :-1], sums[..., -1:]
    if options.normalize:
        empty = den == 0
        out = (out / den.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    return out.flatten(1, 2).to(q.dtype), LinearState(state[..., :-1], state[..., -1])


def _causal(phi_q: Tensor, phi_k: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The sums that each query sees, ``(batch, nheads_kv, group, seqlen, n)``, and the state behind all tokens."""
    outs = []
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=phi_q.device).triu(1)
    # The backward of a slice has the size of the whole.
    chunks = (x.split(CHUNK, dim=-2) for x in (phi_q, phi_k, values))
    for of_q, of_k, of_v in zip(*chunks, strict=True):
        n = of_k.shape[2]
        outs.append(of_q @ state[:, :, None] + _within_chunk(of_q, of_k, of_v, hidden[:n, :n]))
        state = state + _sums(of_k, of_v)
    return torch.cat(outs, dim=3), state


def _sums(phi_k: Tensor, values: Tensor) -> Tensor:
    """``phi_k^T values``; a product with the last column, of ones, would add the features of all tokens in a row."""
    return torch.cat([phi_k.mT @ values[..., :-1], phi_k.sum(dim=2)[..., None]], dim=-1)


def _within_chunk(phi_q: Tensor, phi_k: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """The sums over the tokens of one chunk; a NaN or Inf of a token does not reach the queries before it."""
    poisoned = ~(phi_k.isfinite().all(dim=-1) & values.isfinite().all(dim=-1))  # (batch, nheads_kv, n)
    phi_k, values = (x.masked_fill(poisoned[..., None], 0.0)[:, :, None] for x in (phi_k, values))
    sums = (phi_q @ phi_k.mT).masked_fill(hidden, 0.0) @ values
    sees = (poisoned[:, :, None, :] & ~hidden).any(dim=-1)
    return sums * torch.where(sees, torch.nan, 1.0).to(sums.dtype)[:, :, None, :, None]
