"""Prepare a call of ``attention()``: checks, defaults, autocast, the sign of the scale."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedattn import call_checks
from fusedattn.dropout import draw_seed
from fusedattn.options import Options
from fusedattn.readable import can_read
from fusedattn.support import Backend, default_backend, interpreting, reasons_of


def scale_of(scale: float | None, q: Tensor) -> float:
    """The caller's scale, or the default one.

    Raises:
        TypeError, ValueError: the scale is not a finite number.
    """
    if scale is None:
        has_features = isinstance(q, Tensor) and q.dim() > 0 and q.shape[-1] > 0  # any other q is refused later
        return 1.0 / math.sqrt(q.shape[-1]) if has_features else 1.0
    call_checks.check_scale(scale)
    return float(scale)


def prepared(
    q: Tensor, k: Tensor | None, v: Tensor | None, options: Options, backend: Backend | None
) -> tuple[Tensor, Tensor, Tensor, Backend]:
    """q, k and v, ``(batch, nheads, seqlen, head_dim)``, as the backend takes them, and the backend.

    Fills in the defaults in `options`, and makes their scale positive. With a cache, k and v are None; those that are
    returned are its memory.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`fusedattn.attention`.
    """
    packed, mask, score_mod, cache = options.packed, options.mask, options.score_mod, options.cache
    seqlen_k = 0
    if cache is None:
        q, k, v = autocast(q, k, v)  # type: ignore[arg-type]
        if isinstance(k, Tensor) and k.dim() == 4:  # any other k is refused below
            seqlen_k = k.shape[2]
    else:
        call_checks.check_cache(cache, q, k, v)
        (q,), k, v = autocast(q), cache.k, cache.v
        seqlen_k = cache.capacity
    if packed is not None:
        call_checks.check_packed(packed, q, seqlen_k)
    call_checks.check_scalars(options, backend)
    kind = _kind(q, k, v, backend) if cache is None else None
    known = None if kind is None else _known.get(kind)
    if cache is not None:
        call_checks.check_cached(cache, q, mask, options.rope, packed)
    elif known is None:
        call_checks.check_qkv(q, k, v)
    call_checks.check_mask(mask, q, seqlen_k, packed, options.shard)
    if options.rope is not None:
        call_checks.check_rope(options.rope, q, seqlen_k, packed, cache)
    if options.qk_norm is not None:
        call_checks.check_qk_norm(options.qk_norm, q, k.shape[1])
    if options.bias is not None:
        call_checks.check_bias(options.bias, q, seqlen_k, packed)
    if score_mod is not None:
        call_checks.check_score_mod(score_mod, q)
    if options.sinks is not None:
        call_checks.check_sinks(options.sinks, q)
    if options.dropout_seed is not None:
        call_checks.check_dropout_seed(options.dropout_seed, q)
    options.dropout_p = float(options.dropout_p)
    if options.softcap is not None:
        options.softcap = float(options.softcap)
    chosen = known or backend or default_backend(q.device)
    asked = mask.function is not None or score_mod is not None
    if known is None or asked or options.qk_norm is not None or options.precision is not None:
        reasons = reasons_of(q, k, v, options, chosen)
        if reasons:
            raise NotImplementedError(f"attention cannot run on backend {chosen!r}: " + "; ".join(reasons))
    if known is None and kind is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[kind] = chosen
    # Reading the positions on a GPU would wait for it; there, the kernels turn rows outside the tables into NaN.
    rope = options.rope if cache is None else options.rope or cache.rope
    if rope is not None and not (rope.positions_q is None and rope.positions_k is None) and can_read(q):
        rope.check_positions()
    if options.dropout_p and options.dropout_seed is None:
        options.dropout_seed = draw_seed(q.device)
    if options.scale < SMALLEST_SCALE:
        q = _with_positive_scale(q, options)
    return q, k, v, chosen


MOST_KNOWN = 256
_known: dict[Hashable, Backend] = {}  # the backend of each kind of call that one can run


def _kind(q: Tensor, k: Tensor, v: Tensor, backend: Backend | None) -> Hashable:
    """The attributes that decide whether q, k and v are valid, and on which backend; None if they do not suffice.

    In a short call the checks take longer than a look-up.
    """
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    # Here sizes may be symbols, or tensors.
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return None
    return (
        backend or default_backend(q.device),
        q.is_cuda or interpreting(),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        *(q.device, q.dtype, q.shape, q.stride()),
        *(k.device, k.dtype, k.shape, k.stride()),
        *(v.device, v.dtype, v.shape, v.stride()),
    )


_PLAIN = (Tensor, Parameter)


# The smallest normal float32 number: kernels get the scale in float32, and GPUs may flush smaller numbers to 0.
SMALLEST_SCALE = 2.0**-126


def _with_positive_scale(q: Tensor, options: Options) -> Tensor:
    """Make the scale of `options` at least SMALLEST_SCALE; returns queries that give the same scores with it.

    Kernels take the maximum of scores, and hide some by -inf, before they scale: a negative scale would turn the
    maximum into the minimum, and ``0 * -inf`` is NaN.
    """
    scale = options.scale
    if scale <= -SMALLEST_SCALE:
        options.scale = -scale
        return -q
    options.scale = SMALLEST_SCALE
    return q * (scale / SMALLEST_SCALE)  # also if a norm undoes it: such scores are as good as 0


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype of the autocast region, if inside one, as torch's own functions do; float64 stays."""
    return tuple(map(_autocast, tensors)) if torch._C._is_any_autocast_enabled() else tensors


def _autocast(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    # The compiler of torch 2.11 cannot trace whether a device has autocast; these two have it.
    if not (device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)):
        return x
    if not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
