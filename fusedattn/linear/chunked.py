"""Linear attention by torch's own operators, in chunks: the backend ``torch``, and derivatives of gradients."""

from __future__ import annotations

import torch
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
    # (batch, nheads_kv, group, seqlen, n_features): queries of one KV head together
    phi_q = phi_q.unflatten(1, (k.shape[1], -1))
    state = empty_state(q.shape[0], k, v) if initial is None else initial
    if options.causal:
        out, den, state = _causal(phi_q, phi_k, wide_v, state)
    else:
        state = _with_tokens(state, phi_k, wide_v)
        out, den = _of_state(phi_q, state)
    if options.normalize:
        empty = den == 0
        out = (out / den.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    return out.flatten(1, 2).to(q.dtype), state


def _causal(phi_q: Tensor, phi_k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, Tensor, LinearState]:
    """Sums of weighted values and of weights, and the state behind all tokens.

    The sums are ``(batch, nheads_kv, group, seqlen, n)``, with n = head_dim_v and n = 1.
    """
    outs, dens = [], []
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=phi_q.device).triu(1)
    # A slice of its own for each chunk would have a gradient of the whole length.
    for of_q, of_k, of_v in zip(*(x.split(CHUNK, dim=-2) for x in (phi_q, phi_k, v)), strict=True):
        n = of_k.shape[2]
        before = _of_state(of_q, state)
        within = _within_chunk(of_q, of_k, of_v, hidden[:n, :n])
        outs.append(before[0] + within[0])
        dens.append(before[1] + within[1])
        state = _with_tokens(state, of_k, of_v)
    return torch.cat(outs, dim=3), torch.cat(dens, dim=3), state


def _of_state(phi_q: Tensor, state: LinearState) -> tuple[Tensor, Tensor]:
    return phi_q @ state.kv[:, :, None], phi_q @ state.k_sum[:, :, None, :, None]


def _with_tokens(state: LinearState, phi_k: Tensor, v: Tensor) -> LinearState:
    return LinearState(state.kv + phi_k.mT @ v, state.k_sum + phi_k.sum(dim=2))


def _within_chunk(phi_q: Tensor, phi_k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the tokens of one chunk; a NaN or Inf of a token does not reach the queries before it."""
    poisoned = ~(phi_k.isfinite().all(dim=-1) & v.isfinite().all(dim=-1))  # (batch, nheads_kv, n)
    phi_k, v = (x.masked_fill(poisoned[..., None], 0.0)[:, :, None] for x in (phi_k, v))
    weights = (phi_q @ phi_k.mT).masked_fill(hidden, 0.0)
    sees = (poisoned[:, :, None, :] & ~hidden).any(dim=-1)
    factor = torch.where(sees, torch.nan, 1.0).to(v.dtype)[:, :, None, :, None]
    return (weights @ v) * factor, weights.sum(dim=-1, keepdim=True) * factor
