"""From the arguments of ``attention()`` to what is computed: checks, defaults, autocast, the sign of the scale."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedattn import checks
from fusedattn.biases import Bias, as_bias
from fusedattn.dropout import draw_seed
from fusedattn.masks import Mask, as_mask
from fusedattn.options import Options, Packed
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.support import Backend, default_backend, interpreting, reasons_of


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed | None,
    *,
    mask: Mask | Tensor | None,
    rope: Rope | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    score_mod: ScoreMod | None,
    sinks: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    deterministic: bool,
    backend: Backend | None,
) -> tuple[Options, Backend]:
    """The options of a call, defaults and a seed filled in, and what runs it; q, k and v have four dimensions.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`.
    """
    mask, bias = as_mask(mask), as_bias(bias)
    checks.check_backend(backend)
    kind = _kind(q, k, v, scale, backend)
    known = None if kind is None else _known.get(kind)
    is_new = known is None
    if known is None:
        checks.check_qkv(q, k, v)
        if scale is not None:
            checks.check_number("scale", scale, -sys.float_info.max, sys.float_info.max, "any finite number")
        known = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale), backend or default_backend(q.device)
    checks.check_mask(mask, q, k, packed)
    if rope is not None:
        checks.check_rope(rope, q, k, packed)
    if bias is not None:
        checks.check_bias(bias, q, k, packed)
    if score_mod is not None:
        checks.check_score_mod(score_mod, q)
    if sinks is not None:
        checks.check_sinks(sinks, q)
    if softcap is not None:
        checks.check_number("softcap", softcap, sys.float_info.min, sys.float_info.max, "a positive number")
        softcap = float(softcap)
    if dropout_p != 0.0 or type(dropout_p) is not float:
        checks.check_dropout_p(dropout_p)
    if dropout_seed is not None:
        checks.check_dropout_seed(dropout_seed, q)
    checks.check_deterministic(deterministic)
    scale, backend = known
    if is_new or mask.function is not None or score_mod is not None:
        reasons = reasons_of(q, k, v, mask, score_mod, backend)
        if reasons:
            raise NotImplementedError(f"attention cannot run on backend {backend!r}: " + "; ".join(reasons))
    if is_new and kind is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[kind] = known
    # On a GPU reading the positions would wait for it; there, the kernels turn rows outside the tables into NaN.
    if rope is not None and q.device.type == "cpu" and not torch.compiler.is_compiling():
        rope.check_positions()
    if dropout_p and dropout_seed is None:
        dropout_seed = draw_seed(q.device)
    return Options(mask, rope, bias, scale, softcap, score_mod, sinks, float(dropout_p), dropout_seed), backend


MOST_KNOWN = 256
_known: dict[Hashable, tuple[float, Backend]] = {}  # the scale and backend of each kind that a backend can run


def _kind(q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: Backend | None) -> Hashable:
    """What decides whether q, k, v and the scale pass, and by which backend; None where it is more than that.

    A short call takes longer to check than to look up.
    """
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    # Sizes may be symbols, or tensors.
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return None
    if not (scale is None or type(scale) is float) or not (backend is None or type(backend) is str):
        return None
    return (
        scale,
        backend or default_backend(q.device),
        q.is_cuda or interpreting(),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        *(q.device, q.dtype, q.shape, q.stride()),
        *(k.device, k.dtype, k.shape, k.stride()),
        *(v.device, v.dtype, v.shape, v.stride()),
    )


_PLAIN = (Tensor, Parameter)


# The smallest normal float32 number: kernels get the scale in float32, where GPUs may take smaller ones for 0.
SMALLEST_SCALE = 2.0**-126


def with_positive_scale(q: Tensor, options: Options) -> tuple[Tensor, Options]:
    """The same scores by a scale of at least SMALLEST_SCALE.

    Kernels take the maximum of scores, or hide some by -inf, before they scale: a negative scale would turn the maximum
    into the minimum, and ``0 * -inf`` is NaN.
    """
    scale = options.scale
    if scale >= SMALLEST_SCALE:
        return q, options
    if scale <= -SMALLEST_SCALE:
        return -q, replace(options, scale=-scale)
    return q * (scale / SMALLEST_SCALE), replace(options, scale=SMALLEST_SCALE)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own functions do: in the dtype of the autocast region, if they are in one; float64 stays."""
    return tuple(map(_autocast, tensors)) if torch._C._is_any_autocast_enabled() else tensors


def _autocast(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))
