"""The public function :func:`linear_attention`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from fusedattn import call_checks, feature_maps
from fusedattn.feature_maps import AnyFeatureMap, FeatureMap
from fusedattn.linear import checks, chunked, triton_backend
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState
from fusedattn.prepare import autocast
from fusedattn.support import Backend, default_backend


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: AnyFeatureMap = ...,
    causal: bool = ...,
    normalize: bool = ...,
    valid: Tensor | None = ...,
    initial_state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: Backend | None = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: AnyFeatureMap = ...,
    causal: bool = ...,
    normalize: bool = ...,
    valid: Tensor | None = ...,
    initial_state: LinearState | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: Backend | None = ...,
) -> tuple[Tensor, LinearState]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: AnyFeatureMap = "elu+1",
    causal: bool = True,
    normalize: bool = True,
    valid: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Attention with the weights ``phi(q_i) . phi(k_j)``, in time and memory linear in the length; differentiable.

    ``out_i = phi(q_i) S_i / (phi(q_i) . s_i)`` with the state ``S_i = S + sum_j phi(k_j) v_j^T`` and
    ``s_i = s + sum_j phi(k_j)`` of the keys that query i sees (Katharopoulos et al., "Transformers are RNNs", 2020).

    >>> q, k, v = torch.randn(3, 1, 2, 10, 16).unbind()
    >>> out, state = linear_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], return_state=True)
    >>> step = linear_attention(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], initial_state=state)  # one more token
    >>> torch.allclose(torch.cat([out, step], dim=2), linear_attention(q, k, v), atol=1e-5)
    True

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``; float16, bfloat16, float32 or, on the torch backend and in
            Triton's interpreter, float64. Any strides whose last is 1.
        k: ``(batch, nheads_kv, seqlen_k, head_dim)``; nheads_kv divides nheads_q, and query head ``h`` reads KV head
            ``h // (nheads_q / nheads_kv)``.
        v: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        feature_map: ``"elu+1"``, ``"relu"``, ``"softmax"`` (over the features of a token) or ``"identity"``; a
            :class:`fusedattn.feature_maps.FeatureMap`, computed inside the kernels as these are; a
            :class:`fusedattn.feature_maps.Favor`, which approximates softmax attention; or any differentiable function
            of torch from ``(..., head_dim)`` to ``(..., n_features)``. On the Triton backend a token has at most 256
            features.
        causal: query i sees keys ``j <= i``, and seqlen_q equals seqlen_k; otherwise every key.
        normalize: divide by the sum of the weights. If that sum is 0, out is 0, and so are its gradients.
        valid: bool ``(batch, seqlen_k)``, True = a real token; other keys are hidden from every query, and not even
            their NaN reaches a result.
        initial_state: of the tokens before these, which every query sees; differentiable.
        return_state: also return the state of all tokens, differentiable, for the next ones.
        cu_seqlens: int32 ``(n_sequences + 1,)``, on the device of q: sequence ``i`` has the tokens
            ``cu_seqlens[i] .. cu_seqlens[i + 1] - 1`` of a batch of 1, and a state of its own. They begin with 0 and do
            not decrease; out is 0 for tokens behind the last. On a GPU they are neither waited for nor checked.
        backend: ``"triton"``, ``"torch"``, or None: Triton on a GPU and in its interpreter, torch otherwise.

    Returns:
        out, ``(batch, nheads_q, seqlen_q, head_dim_v)`` in the dtype of q; with `return_state`, ``(out, state)``. Sums
        are float32 (float64 for float64). A NaN or Inf in a key or value reaches exactly the queries that see it.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, the value it got and the allowed ones.
        NotImplementedError: the backend cannot run the call; the message has every reason.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a torch.Tensor")
    if backend is not None and backend not in call_checks.BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed are {call_checks.BACKENDS} and None")
    q, k, v = autocast(q, k, v)
    call_checks.check_qkv(q, k, v)
    if valid is not None and not isinstance(feature_map, str | FeatureMap):
        checks.check_valid(valid, k)  # the derivative of the features of a hidden NaN would be NaN
        k = k.masked_fill(~valid[:, None, :, None], 0.0)
    q, k, feature_map = feature_maps.split(feature_map, q, k)
    q, k = autocast(q, k)  # some functions of torch return float32 under autocast
    options = LinearOptions(feature_map, causal, normalize, valid, initial_state, cu_seqlens)
    checks.check(q, k, v, options)
    chosen = backend or default_backend(q.device)
    reasons = checks.reasons_of(q, k, v, options, chosen)
    if reasons:
        raise NotImplementedError(f"linear_attention cannot run on backend {chosen!r}: " + "; ".join(reasons))
    run = triton_backend.attention if chosen == "triton" else chunked.attention
    out, state = run(q, k, v, options)
    return (out, state) if return_state else out
