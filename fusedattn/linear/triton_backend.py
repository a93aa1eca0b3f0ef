"""Linear attention by the Triton kernels, as PyTorch operators with gradients of any order.

Kernels compute first derivatives; those of gradients are derived from the torch backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.linear import chunked
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState


@torch.library.custom_op("fusedattn::linear_attention_fwd", mutates_args=())
def linear_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None,
    k_sum: Tensor | None,
    valid: Tensor | None,
    cu_seqlens: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, den, kv, k_sum)``; den is ``(batch, nheads_q, seqlen_q)``, or empty without `normalize`."""
    from fusedattn.linear import launching

    return launching.forward(q, k, v, _options(kv, k_sum, valid, cu_seqlens, feature_map, causal, normalize))


@linear_attention_fwd.register_fake
def _linear_attention_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    cu_seqlens, normalize = others[3], others[6]
    dtype = torch.promote_types(q.dtype, torch.float32)
    n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kv = k.new_empty(n, k.shape[1], k.shape[3], v.shape[3], dtype=dtype)
    den = q.new_empty(q.shape[:3] if normalize else 0, dtype=dtype)
    return q.new_empty(*q.shape[:3], v.shape[3]), den, kv, kv.new_empty(kv.shape[:3])


@torch.library.custom_op("fusedattn::linear_attention_bwd", mutates_args=())
def linear_attention_bwd(
    dout: Tensor,
    dkv: Tensor,
    dk_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None,
    k_sum: Tensor | None,
    den: Tensor,
    valid: Tensor | None,
    cu_seqlens: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dkv, dk_sum)``, the last two of the initial state."""
    from fusedattn.linear import launching

    options = _options(kv, k_sum, valid, cu_seqlens, feature_map, causal, normalize)
    return launching.backward(dout, LinearState(dkv, dk_sum), q, k, v, den, options)


@linear_attention_bwd.register_fake
def _linear_attention_bwd_fake(
    dout: Tensor, dkv: Tensor, dk_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, dkv, dk_sum))


def _options(
    kv: Tensor | None,
    k_sum: Tensor | None,
    valid: Tensor | None,
    cu_seqlens: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
) -> LinearOptions:
    state = None if kv is None or k_sum is None else LinearState(kv, k_sum)
    return LinearOptions(feature_maps.of_key(feature_map), causal, normalize, valid, state, cu_seqlens)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, kv, k_sum, valid, cu_seqlens, *ctx.rest = inputs
    den = output[1]
    ctx.save_for_backward(q, k, v, kv, k_sum, den, valid, cu_seqlens)
    ctx.mark_non_differentiable(den)


def _backward(ctx: Any, dout: Tensor, _: Any, dkv: Tensor, dk_sum: Tensor) -> tuple[Any, ...]:
    kv = ctx.saved_tensors[3]
    found = linear_attention_bwd(dout, dkv, dk_sum, *ctx.saved_tensors, *ctx.rest)
    of_state = found[3:] if kv is not None else (None, None)
    return (*found[:3], *of_state, *(None,) * 5)


linear_attention_fwd.register_autograd(_backward, setup_context=_keep_for_backward)


def _keep_for_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dout, dkv, dk_sum, q, k, v, kv, k_sum, _, valid, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(dout, dkv, dk_sum, q, k, v, kv, k_sum, valid, cu_seqlens)


def _second(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """The gradients of the first gradients, by differentiating those of the torch backend."""
    *moving, valid, cu_seqlens = ctx.saved_tensors
    indices = [i for i, x in enumerate(moving) if x is not None]

    def first(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(indices, tensors, strict=True))
        dout, dkv, dk_sum, q, k, v = (given[i] for i in range(6))
        state = (given[6], given[7]) if 6 in given else ()

        def results(q: Tensor, k: Tensor, v: Tensor, *state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            kv, k_sum = state or (None, None)
            options = _options(kv, k_sum, valid, cu_seqlens, *ctx.rest)
            out, found = chunked.attention(q, k, v, options)
            return out, *found

        _, transposed, *_ = torch.func.vjp(results, q, k, v, *state)
        return transposed((dout, dkv, dk_sum))

    found, transposed, *_ = torch.func.vjp(first, *(moving[i] for i in indices))
    by_input = dict(zip(indices, transposed(tuple(grads[: len(found)])), strict=True))
    # den is a function of the inputs, which are differentiated here.
    return (*(by_input.get(i) for i in range(8)), *(None,) * 6)


linear_attention_bwd.register_autograd(_second, setup_context=_keep_for_second)


def attention(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """``(out, state)`` by the Triton kernels, differentiable."""
    kv, k_sum = options.initial_state or (None, None)
    key = feature_maps.key_of(options.feature_map)
    out, _, kv, k_sum = linear_attention_fwd(
        q, k, v, kv, k_sum, options.valid, options.cu_seqlens, key, options.causal, options.normalize
    )
    return out, LinearState(kv, k_sum)
