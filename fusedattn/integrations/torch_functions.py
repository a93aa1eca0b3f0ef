"""``torch.nn.functional.scaled_dot_product_attention`` by :func:`fusedattn.attention`, also as a replacement of it."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedattn import masks
from fusedattn.attention import attention
from fusedattn.call_checks import DTYPES, check_backend
from fusedattn.masks import Mask
from fusedattn.prepare import autocast
from fusedattn.support import Backend, default_backend, not_supported_reasons

logger: logging.Logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by :func:`fusedattn.attention`; differentiable.

    Every argument means the same as in torch. Heads are the dimension before the last two, if there is one; all
    dimensions before it are batches. Batches and heads of the three tensors broadcast against each other. A key and
    value with one head serve all query heads, and are not copied. With two or more batch dimensions, a tensor that has
    only some of them is copied.

    Args:
        query: ``(..., nheads, seqlen_q, head_dim)``, at least two dimensions; float16, bfloat16, float32 or float64,
            as the backend allows; any strides.
        key: ``(..., nheads, seqlen_k, head_dim)``, dtype and device of query.
        value: ``(..., nheads, seqlen_k, head_dim_v)``, likewise. Or all three nested tensors of four dimensions with
            the layout ``torch.jagged``, ragged in seqlen.
        attn_mask: bool, True = attend, or of dtype float32 or that of query, added to the scores, with its gradient;
            broadcastable to ``(..., nheads, seqlen_q, seqlen_k)``. Or a ``torch.nn.attention.bias.CausalBias`` of
            these two lengths, which is not written out.
        dropout_p: probability that a weight is dropped, ``0 <= dropout_p < 1``; in training and evaluation alike. The
            seed is drawn from torch's generator, but other weights are dropped than by torch's function.
        is_causal: query ``i`` sees keys ``j <= i``, whatever the lengths (``"top_left"``). With an `attn_mask` both
            hold, as in torch's kernel for CPUs; torch's other paths raise.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        enable_gqa: query may have a multiple of the heads of key, and of value; query head ``h`` attends with head
            ``h // (nheads of query // nheads of key)``. If key and value have different numbers, both are copied.

    Returns:
        ``(..., nheads, seqlen_q, head_dim_v)`` in the dtype of query, with the broadcast dimensions.

        A query that may attend to nothing has out 0 and causes no gradient, as in torch's function. Unlike in torch's
        function, a NaN or Inf in a key or value does not reach queries that may not attend to it. Under autocast all
        floating-point tensors except float64 are cast to its dtype, as in torch.

    Raises:
        TypeError, ValueError: an argument is wrong in itself; torch raises RuntimeError for most of these.
        NotImplementedError: the call is valid but cannot be run; the message lists every reason.
    """
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def replace_sdpa(*, backend: Backend | None = None, fallback: bool = False) -> SdpaReplacement:
    """A context in which ``F.scaled_dot_product_attention`` is :func:`scaled_dot_product_attention` of this module.

    Calls from Python are replaced under any name, in user code, ``nn.MultiheadAttention`` and libraries, in the thread
    that entered the context and in the backward passes that it starts. Calls from C++ and TorchScript, and calls of
    ``torch.ops.aten``, are not replaced. It is also a decorator of functions::

        with replace_sdpa() as replaced:
            model(x)
        print(replaced.fused, replaced.left_to_torch)

    Activation checkpointing inside the context must also recompute inside it: call ``backward()`` there.

    Args:
        backend: as for :func:`fusedattn.attention`.
        fallback: let torch's own function run the calls that this package cannot. Each reason is logged once, as a
            WARNING, a level that is shown by default.

    Raises:
        NotImplementedError: a call inside cannot be run and `fallback` is False; the message lists every reason.
        TypeError, ValueError: by a call inside, as :func:`scaled_dot_product_attention`, whatever `fallback`; here,
            if `backend` or `fallback` is wrong.
    """
    check_backend(backend)
    if not isinstance(fallback, bool):
        raise TypeError(f"fallback: got {type(fallback).__name__}, allowed is a bool")
    return SdpaReplacement(backend, fallback)


class _Inside(threading.local):
    """Whether this thread is inside a replaced call: the torch backend calls torch's function itself."""

    def __init__(self) -> None:
        self.active = False


_inside = _Inside()


class SdpaReplacement(TorchFunctionMode):
    """The result of :func:`replace_sdpa`: a context manager, which may be entered again, and a decorator.

    Attributes:
        fused: the number of calls that this package has run.
        left_to_torch: the number of calls that torch's own function has run.
        reasons: each reason for these, with its number of calls.
    """

    def __init__(self, backend: Backend | None, fallback: bool) -> None:
        super().__init__()
        self.backend = backend
        self.fallback = fallback
        self.fused: int = 0
        self.left_to_torch: int = 0
        self.reasons: dict[str, int] = {}

    def __enter__(self) -> SdpaReplacement:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __call__(self, function: Function) -> Function:
        """Wrap a function to run inside the context."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                "function: got a generator or coroutine function, allowed are functions that have finished when they "
                "return; enter the context inside it"
            )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not _inside.active:
            return self._attention(*args, **kwargs)
        if func in _CALLING_OTHERS and not any(map(_overrides, (*args, *kwargs.values()))):
            with self:
                return _CALLING_OTHERS[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        _inside.active = True
        try:
            out = _attention(*args, **kwargs, backend=self.backend)
        except NotImplementedError as error:
            if not self.fallback:
                raise
            reason = str(error)
        else:
            self.fused += 1
            return out
        finally:
            _inside.active = False
        if reason not in self.reasons:
            logger.warning("torch's own function runs a call of F.scaled_dot_product_attention: %s", reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.left_to_torch += 1
        return F.scaled_dot_product_attention(*args, **kwargs)


def _without_overrides(function: Any) -> Callable[..., Any]:
    """A function of torch written in Python, without its check for overrides."""
    namespace = dict(function.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        namespace[name] = _no_overrides
    del namespace["__name__"]  # a compiler would look names up in the module of that name
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_overrides(*_: Any) -> bool:
    return False


# A function that may be overridden runs outside the context it was called in, and so would the functions it calls:
# torch's attention, or recomputation in activation checkpointing. Inside, it would check for overrides endlessly.
_CALLING_OTHERS = {
    function: _without_overrides(function)
    for function in (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    _check_types(query, key, value, attn_mask, is_causal, enable_gqa)
    dropout_p, scale = _number(dropout_p), _number(scale)
    query, key, value = autocast(query, key, value)
    causal_bias = _is_causal_bias(attn_mask)
    if attn_mask is not None and not causal_bias:
        (attn_mask,) = autocast(attn_mask)
    _check_dtypes(query, key, value, None if causal_bias else attn_mask)
    nested = query.is_nested or key.is_nested or value.is_nested
    reasons = _reasons(query, key, value, attn_mask, dropout_p)
    if reasons:
        if not nested:
            reasons += not_supported_reasons(query, key, value, backend=backend)
        name = backend or default_backend(query.device)
        raise NotImplementedError(f"scaled_dot_product_attention cannot run on backend {name!r}: " + "; ".join(reasons))
    mask: Mask = masks.causal("top_left") if is_causal else Mask()
    if nested:
        return attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p, backend=backend)

    batch, nheads_q, nheads_kv = _leading(query, key, value, enable_gqa)
    leading = (*batch, nheads_q) if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    bias: Tensor | None = None
    if causal_bias:
        mask = _causal(attn_mask, seqlen_q, seqlen_k, is_causal)
    elif attn_mask is not None:
        scores = _of_scores(attn_mask, (*leading, seqlen_q, seqlen_k), batch)
        if attn_mask.dtype == torch.bool:
            mask = mask & masks.boolean(scores)
        else:
            bias = scores
    shape = (*leading, seqlen_q, value.shape[-1])
    if math.prod(shape) == 0:
        return _nothing(shape, query, key, value, bias)
    if query.shape[-1] == 0:  # all scores are 0, as with one feature of 0
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    out = attention(
        _four_dimensional(query, batch, nheads_q),
        _four_dimensional(key, batch, nheads_kv),
        _four_dimensional(value, batch, nheads_kv),
        mask=mask,
        bias=bias,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )
    return out.reshape(shape)


def _check_types(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any, enable_gqa: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a torch.Tensor")
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, bool):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a bool")


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, allowed are {', '.join(map(str, DTYPES))}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: got {x.dtype}, allowed is the dtype of query, {query.dtype}")
        if x.dim() < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed are two dimensions and more")
        if x.is_nested != query.is_nested:
            got, allowed = ("nested", "dense") if x.is_nested else ("dense", "nested")
            raise ValueError(f"{name}: got a {got} tensor, allowed is a {allowed} one, as query is")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        allowed = " and ".join(map(str, dict.fromkeys((torch.bool, torch.float32, query.dtype))))
        raise TypeError(f"attn_mask: got {attn_mask.dtype}, allowed are {allowed}")
    others: tuple[tuple[str, Tensor | None], ...] = (("key", key), ("value", value), ("attn_mask", attn_mask))
    for name, other in others:
        if other is not None and other.device != query.device:
            raise ValueError(f"{name}: got device {other.device}, allowed is the device of query, {query.device}")


def _number(x: Any) -> Any:
    """NumPy numbers and tensors without dimensions as Python numbers; torch accepts them too."""
    if isinstance(x, numbers.Real) and not isinstance(x, (int, float)):
        return float(x)
    if isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad:
        return x.item()
    return x


def _is_causal_bias(x: Any) -> bool:
    """Whether ``x`` is a ``torch.nn.attention.bias.CausalBias``; does not import that module, which takes a second."""
    if x is None or type(x) is Tensor:
        return False
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(x, bias.CausalBias)


def _causal(bias: Any, seqlen_q: int, seqlen_k: int, is_causal: bool) -> Mask:
    if is_causal:
        raise ValueError("is_causal: got True beside a CausalBias as attn_mask, allowed is False")
    if (bias.seq_len_q, bias.seq_len_kv) != (seqlen_q, seqlen_k):
        raise ValueError(
            f"attn_mask: got a CausalBias of lengths {(bias.seq_len_q, bias.seq_len_kv)}, allowed are those of query "
            f"and key, {(seqlen_q, seqlen_k)}"
        )
    return masks.causal("top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right")


def _overrides(x: Any) -> bool:
    """Whether a tensor overrides functions of torch, as a subclass with ``__torch_function__`` does."""
    if not isinstance(x, Tensor) or type(x) is Tensor or x.is_nested or _is_causal_bias(x):
        return False
    own, default = (getattr(kind.__torch_function__, "__func__", None) for kind in (type(x), Tensor))
    return own is not default and type(x).__torch_function__ is not torch._C._disabled_torch_function_impl


def _reasons(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any) -> list[str]:
    """Reasons why a valid call of torch's function cannot run, besides those of :func:`not_supported_reasons`."""
    reasons = []
    named = (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask))
    for name, x in named:
        if _overrides(x):
            reasons.append(f"{name}: got {type(x).__name__}, which has a __torch_function__, allowed is a torch.Tensor")
    if query.is_nested:
        for name, x in named[:3]:
            if x.layout != torch.jagged or x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
                reasons.append(
                    f"{name}: got a nested tensor of {x.dim()} dimensions and layout {x.layout}, allowed is "
                    "(batch, nheads, seqlen, head_dim), ragged in seqlen and without gaps, with the layout torch.jagged"
                )
        if attn_mask is not None:
            reasons.append("attn_mask: got a tensor, allowed is None with nested tensors")
    if dropout_p == 1:
        reasons.append("dropout_p: got 1.0, allowed is 0 <= dropout_p < 1")
    return reasons


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int, int]:
    """The broadcast dimensions before the heads, the number of query heads, and that of key and value heads.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    inputs = (query, key, value)
    if key.shape[-1] != query.shape[-1]:
        raise _misfit(inputs, "query and key of the same last dimension")
    if value.shape[-2] != key.shape[-2]:
        raise _misfit(inputs, "key and value of the same second last dimension")
    if enable_gqa and any(x.dim() < 3 for x in inputs):
        raise _misfit(inputs, "three dimensions and more with enable_gqa=True")
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in inputs]
    if enable_gqa:
        nheads_q, *others = heads
        if any(heads) and any(n == 0 or nheads_q % n for n in others):
            raise _misfit(inputs, "heads of query that are a multiple of those of key and of value")
        nheads_kv = math.lcm(*others) if others[0] != others[1] else others[0]
    else:
        try:
            nheads_q = torch.broadcast_shapes(*((n,) for n in heads))[0]
        except RuntimeError as error:
            raise _misfit(inputs, "heads that broadcast, or enable_gqa=True") from error
        nheads_kv = heads[1] if heads[1] == heads[2] else nheads_q
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in inputs))
    except RuntimeError as error:
        raise _misfit(inputs, "dimensions before the heads that broadcast") from error
    return tuple(batch), nheads_q, nheads_kv


def _misfit(inputs: tuple[Tensor, Tensor, Tensor], allowed: str) -> ValueError:
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
    return ValueError(f"query, key, value: got shapes {shapes}, allowed are {allowed}")


def _of_scores(x: Tensor, shape: tuple[int, ...], batch: tuple[int, ...]) -> Tensor:
    """A mask or bias for scores of `shape`, with its batch dimensions flattened.

    Raises:
        ValueError: it does not broadcast to this shape.
    """
    n = x.dim()
    if n > len(shape) or any(a not in (1, b) for a, b in zip(x.shape, shape[len(shape) - n :], strict=True)):
        raise ValueError(f"attn_mask: got shape {tuple(x.shape)}, allowed are those that broadcast to {shape}")
    if n <= 3:
        return x
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])


def _four_dimensional(x: Tensor, batch: tuple[int, ...], nheads: int) -> Tensor:
    """``x`` as ``(batch, nheads, seqlen, features)``, a view if possible, with the last dimension contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() > 2 and x.shape[-3] not in (1, nheads):
        x = x.repeat_interleave(nheads // x.shape[-3], dim=-3)
    return x.expand(*batch, nheads, *x.shape[-2:]).reshape(math.prod(batch), nheads, *x.shape[-2:])


def _nothing(shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """A result without elements through which every input gets a gradient of zeros."""
    query = inputs[0]
    assert query is not None
    total = sum(x.sum() for x in inputs if x is not None)
    return torch.as_tensor(total).to(query.dtype).expand(shape)
