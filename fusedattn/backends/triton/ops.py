"""The kernels as PyTorch operators: signatures, fakes and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fusedattn.backends.triton import results
from fusedattn.backends.triton.operands import Constants

N_DIFFERENTIABLE = 10  # q, k, v, bias, relative, sinks, slopes, learned, q_weight, k_weight
N_KEPT = 4  # of the forward, for the backward: out, row_max, row_sum, rounding_residual


@torch.library.custom_op("fusedattn::attention_fwd", mutates_args=())
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    learned: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    tensors: list[Tensor | None],
    sizes: list[int],
    functions: str,
    scale: float,
    softcap: float,
    dropout_p: float,
    norm_eps: float,
    keep_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(out, lse, row_max, row_sum, rounding_residual, largest)`` by the Triton kernels.

    row_max, row_sum and rounding_residual are for the backward. rounding_residual is empty unless `keep_residual` is
    True and the inputs have 16 bits; largest is empty unless it is asked for in `sizes`. With a cache, row_max and
    row_sum are empty, and lse unless it is asked for in `sizes`. `bias` and `relative` have four dimensions, `slopes`
    two, and `learned`, the args of the score function with a gradient, one; `sinks` are float32 or float64. The weights
    of a norm are ``(nheads or 1, head_dim or 1)``.
    :meth:`Constants.flat` makes the arguments from `tensors` on.
    """
    if not scale > 0:
        raise ValueError(f"scale: got {scale}, allowed are positive numbers")
    from fusedattn.backends.triton import launching

    constants = Constants.of(tensors, sizes, functions, scale, softcap, dropout_p, norm_eps, keep_residual)
    inputs = (q, k, v, bias, relative, sinks, slopes, learned, q_weight, k_weight)
    return _or_empty(launching.forward(inputs, constants))


@attention_fwd.register_fake
def _attention_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return _or_empty(results.of_forward(q, v, Constants.of(*others[N_DIFFERENTIABLE - 3 :])))


def _or_empty(found: results.ForwardResults) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of a forward, with empty tensors for those that are None: an operator returns tensors."""
    out = found[0]
    of_rows = torch.promote_types(out.dtype, torch.float32)
    dtypes = (out.dtype, of_rows, of_rows, of_rows, torch.int8, of_rows)
    return tuple(  # type: ignore[return-value]
        out.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(found, dtypes, strict=True)
    )


@torch.library.custom_op("fusedattn::attention_bwd", mutates_args=())
def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    learned: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    rounding_residual: Tensor,
    needed: list[bool],
    tensors: list[Tensor | None],
    sizes: list[int],
    functions: str,
    scale: float,
    softcap: float,
    dropout_p: float,
    norm_eps: float,
    keep_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dbias, drelative, dsinks, dslopes, dlearned, dq_weight, dk_weight)`` by the Triton kernels.

    A gradient that is not `needed` comes back empty; `needed` has one entry for dq, dk and dv, and one for each other.
    """
    from fusedattn.backends.triton import launching

    constants = Constants.of(tensors, sizes, functions, scale, softcap, dropout_p, norm_eps, keep_residual)
    inputs = (q, k, v, bias, relative, sinks, slopes, learned, q_weight, k_weight)
    kept = (out, row_max, row_sum, rounding_residual if rounding_residual.numel() else None)
    found = launching.backward(dout, dlse, inputs, kept, needed, constants)
    return tuple(q.new_empty(0) if x is None else x for x in found)  # type: ignore[return-value]


@attention_bwd.register_fake
def _attention_bwd_fake(dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    (q, k, v, *rest_of_inputs), needed = others[:N_DIFFERENTIABLE], others[N_DIFFERENTIABLE + N_KEPT]
    found = list(results.of_backward(q, k, v, needed, packed=False))
    for x, needs in zip(rest_of_inputs, needed[2:], strict=True):
        found.append(torch.empty(x.shape, dtype=x.dtype, device=x.device) if x is not None and needs else None)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def split_saved(saved: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Saved tensors in three parts: differentiable inputs, results that the forward keeps, and the constants'."""
    n = N_DIFFERENTIABLE
    return saved[:n], saved[n : n + N_KEPT], saved[n + N_KEPT :]


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


_PLAIN_KEYS: dict[torch.device, frozenset[int]] = {}


def _plain_keys(device: torch.device) -> frozenset[int]:
    """The dispatch keys of plain tensors on a device, including inference tensors."""
    known = _PLAIN_KEYS.get(device)
    if known is None:
        found = []
        for inference in (False, True):
            with torch.inference_mode(inference):
                found.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
        known = _PLAIN_KEYS[device] = frozenset(found)
    return known


def is_observed(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a mode, a profiler or a tensor subclass observes or intercepts operators."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch._C._is_tracing():
        return True
    if transforming() or torch._C._autograd._profiler_enabled():
        return True
    plain = None
    for x in tensors:
        if x is not None:
            if type(x) is not Tensor and type(x) is not Parameter:
                return True
            plain = plain or _plain_keys(x.device)
            if torch._C._dispatch_keys(x).raw_repr() not in plain:
                return True
    return False


def forward(inputs: Sequence[Tensor | None], constants: Constants) -> results.ForwardResults:
    """The results of `attention_fwd`; calls the operator only if something observes it."""
    if is_observed(inputs):
        return attention_fwd(*inputs, *constants.flat())
    from fusedattn.backends.triton import launching

    return launching.forward(inputs, constants)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    inputs: Sequence[Tensor | None],
    kept: Sequence[Tensor | None],
    needed: Sequence[bool],
    constants: Constants,
) -> Sequence[Tensor | None]:
    """The gradients of all inputs of the operator, in order; None if not needed.

    Calls `attention_bwd` only if something observes it; `kept` are (out, row_max, row_sum, rounding_residual).
    """
    needs_dq, needs_dk, needs_dv, *others = needed
    ask = [needs_dq, needs_dk or needs_dv, *others]
    *of_rows, rounding_residual = kept
    if not is_observed((dout, dlse, *inputs)):
        from fusedattn.backends.triton import launching

        rounding_residual = None if rounding_residual is None or rounding_residual.numel() == 0 else rounding_residual
        found = launching.backward(dout, dlse, inputs, (*of_rows, rounding_residual), ask, constants)
        if needs_dk == needs_dv:
            return found
    else:
        rounding_residual = dout.new_empty(0, dtype=torch.int8) if rounding_residual is None else rounding_residual
        found = attention_bwd(dout, dlse, *inputs, *of_rows, rounding_residual, ask, *constants.flat())
    return where_needed(found, needed)


def where_needed(found: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients, with None in place of unneeded ones, which are empty or were computed along with others."""
    return [x if needs else None for x, needs in zip(found, needed, strict=True)]


# The op alone is differentiable too, for compilers, which call it directly.
def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, row_max, row_sum, rounding_residual, largest = output
    tensors, *ctx.numbers = inputs[N_DIFFERENTIABLE:]
    ctx.save_for_backward(*inputs[:N_DIFFERENTIABLE], out, row_max, row_sum, rounding_residual, *tensors)
    ctx.mark_non_differentiable(row_max, row_sum, rounding_residual, largest)
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    inputs, kept, tensors = split_saved(ctx.saved_tensors)
    needed = ctx.needs_input_grad[:N_DIFFERENTIABLE]
    dout = torch.zeros_like(kept[0]) if dout is None else dout
    found = gradients(dout, dlse, inputs, kept, needed, Constants.of(list(tensors), *ctx.numbers))
    return (*found, *(None,) * (1 + len(ctx.numbers)))


attention_fwd.register_autograd(_op_backward, setup_context=_op_setup_context)
