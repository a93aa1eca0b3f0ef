"""The kernels as autograd functions: kernels compute first derivatives, eager PyTorch all others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedattn import reference_varlen
from fusedattn.backends.triton import ops
from fusedattn.backends.triton.operands import Constants, constants_of
from fusedattn.fp8 import KEYS_OF_FP8
from fusedattn.indices import four_dimensional
from fusedattn.options import Options
from fusedattn.pattern_blocks import blocks_and_rule
from fusedattn.qk_norm import two_dimensional
from fusedattn.shard import WHOLE

Eager = Callable[..., tuple[Tensor, Tensor]]


class _Differentiable(torch.autograd.Function):
    """The kernels with gradients for the differentiable inputs of the operator.

    `eager` computes (out, lse) of these in PyTorch. It runs only for other derivatives, forward-mode ones and
    those of gradients, and may then store quadratic tensors.
    """

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        inputs, kept, tensors = ops.split_saved(ctx.saved_tensors)
        dout = torch.zeros_like(kept[0]) if dout is None else dout
        needed = ctx.needs_input_grad[: ops.N_DIFFERENTIABLE]
        constants = Constants.joined(tensors, ctx.numbers)
        if torch.is_grad_enabled() or ops.transforming():
            found = AttentionBackward.apply(dout, dlse, *inputs, *kept, needed, constants, ctx.eager)  # type: ignore[no-untyped-call]
            found = ops.where_needed(found, needed)
        else:  # nothing differentiates the gradients
            found = ops.gradients(dout, dlse, inputs, kept, needed, constants)
        return (*found, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _vmap_by_loop(Attention.apply, info.batch_size, in_dims, args)


class DirectAttention(_Differentiable):
    """For calls outside any transform: torch's support for transforms takes longer than a short call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *inputs, constants, ctx.eager = args
        out, lse, row_max, row_sum, rounding_residual, largest = ops.forward(inputs, constants)
        of_constants, ctx.numbers = constants.split()
        ctx.save_for_backward(*inputs, out, row_max, row_sum, rounding_residual, *of_constants)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return out, lse, largest


class Attention(_Differentiable):
    """For transforms of ``torch.func``, which need a forward without a context."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, constants, _ = args
        with _below_autograd():
            return ops.attention_fwd(*inputs, *constants.flat())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, constants, ctx.eager = inputs
        out, _, row_max, row_sum, rounding_residual, largest = output
        of_constants, ctx.numbers = constants.split()
        ctx.save_for_backward(*tensors, out, row_max, row_sum, rounding_residual, *of_constants)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(row_max, row_sum, rounding_residual, largest)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors[: ops.N_DIFFERENTIABLE]
        return (*_jvp_by_vjp(ctx.eager, inputs, tangents[: ops.N_DIFFERENTIABLE]), None, None, None, None)


# Torch binds the arguments of every call to the signature, and computes the signature each time unless it finds one.
Attention.forward.__signature__ = inspect.signature(Attention.forward)  # type: ignore[attr-defined]

N_BACKWARD = 2 + ops.N_DIFFERENTIABLE  # dout, dlse and the differentiable inputs of Attention


class AttentionBackward(torch.autograd.Function):
    """The gradients of :class:`Attention` by the kernels; their own gradients come from `eager`."""

    @staticmethod
    def forward(dout: Tensor, dlse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        *tensors, needed, constants, _ = args
        inputs, kept, _ = ops.split_saved(tensors)
        with _below_autograd():
            found = ops.gradients(dout, dlse, inputs, kept, needed, constants)
        return tuple(dout.new_empty(0) if x is None else x for x in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.needed, _, ctx.eager = inputs
        ctx.n_others = len(inputs) - N_BACKWARD
        ctx.save_for_backward(*tensors[:N_BACKWARD])
        ctx.save_for_forward(*tensors[:N_BACKWARD])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        moving, function = _moving(_gradients_of(ctx.eager, ctx.needed), ctx.saved_tensors)
        results, transposed, *_ = torch.func.vjp(function, *(ctx.saved_tensors[i] for i in moving))
        wanted = [grad for grad, needs in zip(grads, ctx.needed, strict=True) if needs]
        found = transposed(tuple(_or_zeros(grad, x) for grad, x in zip(wanted, results, strict=True)))
        by_input = dict(zip(moving, found, strict=True))
        return (*(by_input.get(i) for i in range(N_BACKWARD)), *(None,) * ctx.n_others)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        found = iter(_jvp_by_vjp(_gradients_of(ctx.eager, ctx.needed), ctx.saved_tensors, tangents[:N_BACKWARD]))
        nothing = ctx.saved_tensors[0].new_zeros(0)  # as the gradients that are not needed
        return tuple(next(found) if needs else nothing for needs in ctx.needed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _vmap_by_loop(AttentionBackward.apply, info.batch_size, in_dims, args)


def _below_autograd() -> AbstractContextManager[None]:
    """Inside, an op skips autograd, because its caller handles gradients; a compiler cannot trace this."""
    return nullcontext() if torch.compiler.is_compiling() else torch._C._AutoDispatchBelowAutograd()


def _gradients_of(eager: Eager, needed: tuple[bool, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of dout, dlse and the inputs of Attention that returns the needed gradients, differentiable."""
    chosen = [i for i, needs in enumerate(needed) if needs]

    def function(dout: Tensor, dlse: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        def of_chosen(*moved: Tensor) -> tuple[Tensor, Tensor]:
            changed = dict(zip(chosen, moved, strict=True))
            return eager(*(changed.get(i, x) for i, x in enumerate(inputs)))

        (_, lse), transposed, *_ = torch.func.vjp(of_chosen, *(inputs[i] for i in chosen))
        return transposed((dout, _or_zeros(dlse, lse)))

    return function


def _moving(function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[list[int], Callable[..., Any]]:
    """The indices of the inputs that are tensors, and `function` as a function of these alone."""
    moving = [i for i, x in enumerate(inputs) if x is not None]

    def of_moving(*moved: Tensor) -> Any:
        changed = dict(zip(moving, moved, strict=True))
        return function(*(changed.get(i) for i in range(len(inputs))))

    return moving, of_moving


def _jvp_by_vjp(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """The Jacobian of a function times tangents, by reverse mode alone."""
    moving, of_moving = _moving(function, inputs)
    results, transposed, *_ = torch.func.vjp(of_moving, *(inputs[i] for i in moving))
    # It is the derivative, by u, of the product of the transposed Jacobian and u.
    _, product, *_ = torch.func.vjp(lambda *u: transposed(u), *map(torch.zeros_like, results))
    return product(tuple(_or_zeros(tangents[i], inputs[i]) for i in moving))


def _or_zeros(x: Tensor | None, like: Any) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _two_dimensional(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else two_dimensional(weight)


def _vmap_by_loop(function: Callable[..., Any], n: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """The results that torch.vmap needs: one call per index, stacked."""
    calls = [
        function(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(args, in_dims, strict=True)))
        for i in range(n)
    ]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0,) * len(calls[0])


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(out, lse, largest)`` by the Triton kernels, out and lse differentiable.

    lse may be None with a cache, and largest, if they are not asked for.
    """
    bias, sinks = options.bias, options.sinks
    added = None if bias is None or bias.tensor is None else four_dimensional(bias.tensor)
    relative = None if bias is None or bias.relative is None else four_dimensional(bias.relative)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(q.dtype, torch.float32))
    slopes = None if bias is None or bias.slopes is None else torch.atleast_2d(bias.slopes)
    learned = None if options.score_mod is None else options.score_mod.learned
    norm = options.qk_norm
    weights = (None, None) if norm is None else tuple(map(_two_dimensional, (norm.q_weight, norm.k_weight)))
    inputs = (q, k, v, added, relative, sinks, slopes, learned, *weights)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs if x is not None)
    shard = None
    if options.shard != WHOLE:
        shard = options.shard.numbers(q.shape[1], q.shape[2], k.shape[2], q.device)
    pattern = None
    if options.mask.pattern is not None:
        least_keys = 16 if options.precision is None else KEYS_OF_FP8
        pattern = blocks_and_rule(options.mask, q.shape[1], q.shape[2], k.shape[2], options.shard, q.device, least_keys)
    constants = constants_of(options, keep_residual=needs_gradient, shard=shard, pattern=pattern)
    # Dynamo cannot trace an autograd.Function in every setting (shared inputs, inputs without a gradient), but takes
    # the op as it is, with the same backward.
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:  # the op would silently return no tangent
            raise NotImplementedError(
                "attention: got forward-mode differentiation inside torch.compile, allowed there with backend 'triton' "
                "is reverse mode; move the call out of the compiled code, or use backend='torch'"
            )
        out, lse, *_, largest = ops.attention_fwd(*inputs, *constants.flat())
        return out, lse, largest if options.return_max else None
    if not needs_gradient and not ops.transforming():
        out, lse, *_, largest = ops.forward(inputs, constants)
        return out, lse, largest if options.return_max else None

    def eager(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        if options.precision is not None:
            raise NotImplementedError("precision: got FP8 in a transform that differentiates, allowed is None")
        added, relative, sinks, slopes, learned, *of_norm = others
        parts = None if bias is None else replace(bias, tensor=added, relative=relative, slopes=slopes)
        score_mod = options.score_mod
        if score_mod is not None and learned is not None:
            score_mod = score_mod.with_learned(learned)
        qk_norm = None if norm is None else replace(norm, q_weight=of_norm[0], k_weight=of_norm[1])
        changed = replace(options, bias=parts, score_mod=score_mod, sinks=sinks, qk_norm=qk_norm)
        changed.return_max = False  # it has no derivative
        if changed.packed is None:
            return reference_varlen.by_reference(q, k, v, changed)[:2]
        out, lse, _ = reference_varlen.attention(q, k, v, changed)
        assert lse is not None
        return out, lse

    function = Attention if ops.transforming() else DirectAttention
    out, lse, *_, largest = function.apply(*inputs, constants, eager)  # type: ignore[no-untyped-call]
    return out, lse, largest if options.return_max else None
