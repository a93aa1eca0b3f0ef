"""Attention of packages that may or may not be installed, behind the signature of :func:`fusedattn.attention`.

:data:`LIBRARIES` has a function for each, used like those of :mod:`fusedattn.testing.peers`. Each takes the masks that
its package has an argument for, and refuses all others with the reason. Tensors are ``(batch, nheads, seqlen,
head_dim)`` and are passed as the transposed views that these packages take. TileLang has examples of attention but no
function for it: pass your own as ``package.module:function``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.testing.peers import Peer

Window = tuple[int | None, int | None]


def _band(function: str, mask: Mask | Tensor | None, seqlen_q: int, seqlen_k: int) -> Window:
    """A mask as (left, right) around the diagonal that ends at the last key; None is unlimited."""
    mask = as_mask(mask)
    if not (mask.is_full or mask.only_bands):
        raise NotImplementedError(f"mask: {function} has causal masks and windows only")
    lower, upper = (None, None) if mask.is_full else mask.band(seqlen_q, seqlen_k)
    shift = seqlen_k - seqlen_q  # the band bounds j - i, theirs bounds j - i - shift
    return (None if lower is None else shift - lower, None if upper is None else upper - shift)


def _refuse(function: str, options: dict[str, Any]) -> None:
    """Raise NotImplementedError for an option that is set."""
    reasons = [f"{name}: {function} has none" for name, x in options.items() if x is not None and x is not False]
    if reasons:
        raise NotImplementedError("; ".join(reasons))


def _flash_attn(
    module: str,
    unlimited: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """``flash_attn_func`` of a FlashAttention package; `unlimited` is its value for no window limit, -1 or None."""
    function = f"{module}.flash_attn_func"
    _refuse(function, options)
    left, right = _band(function, mask, q.shape[2], k.shape[2])
    causal = right == 0
    window = (unlimited if left is None else left, unlimited if right is None or (causal and left is None) else right)
    found = importlib.import_module(module).flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal, window_size=window
    )
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out.transpose(1, 2)


def _xformers(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None, scale: float | None = None, **options: Any
) -> Tensor:
    """``memory_efficient_attention``; grouped queries are its fifth dimension, expanded without a copy."""
    function = "xformers.ops.memory_efficient_attention"
    _refuse(function, options)
    window = _band(function, mask, q.shape[2], k.shape[2])
    ops: Any = importlib.import_module("xformers.ops")
    if window == (None, None):
        attn_bias = None
    elif window == (None, 0):
        attn_bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    else:
        raise NotImplementedError(f"mask: {function} is measured with causal masks, not with windows")
    groups = k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[2] != groups:
        repeats = q.shape[2] // groups
        q = q.unflatten(2, (groups, repeats))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, repeats, -1) for x in (k, v))
    out: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=attn_bias, scale=scale)
    return (out.flatten(2, 3) if out.dim() == 5 else out).transpose(1, 2)


LIBRARIES: dict[str, Peer] = {
    "flash-attn 2": functools.partial(_flash_attn, "flash_attn", -1),
    "flash-attn 3": functools.partial(_flash_attn, "flash_attn_interface", -1),
    "flash-attn 4": functools.partial(_flash_attn, "flash_attn.cute", None),
    "xformers": _xformers,
}
MODULES = {
    "flash-attn 2": "flash_attn.flash_attn_interface",
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": "flash_attn.cute",
    "xformers": "xformers.ops",
    "liger": "liger_kernel.ops.rope",
}


def is_installed(name: str) -> bool:
    """Whether the module of one of :data:`MODULES` is installed."""
    try:
        return importlib.util.find_spec(MODULES[name]) is not None
    except ImportError:  # its parent package is missing
        return False


Rotation = Callable[[Rope, Tensor, Tensor], tuple[Tensor, Tensor]]


def liger_rope(rope: Rope, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Liger's kernel. It overwrites inputs whose memory layout is ``(batch, seqlen, nheads, head_dim)``.

    Its tables have the rows of q's positions, in q's dtype and for both halves, and are made once, as users do; so q
    and k must have one length.
    """
    if rope.interleaved or rope.positions_q is not None or rope.positions_k is not None or rope.cos.dim() != 2:
        raise NotImplementedError("rope: Liger has half-split RoPE with tables (n_positions, rotary_dim / 2)")
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("rope: Liger takes q and k of one length")
    cos, sin = _liger_tables(rope, q.shape[2], q.dtype)
    function: Any = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    rotated: tuple[Tensor, Tensor] = function.apply(q, k, cos, sin)
    return rotated


@functools.lru_cache(maxsize=4)
def _liger_tables(rope: Rope, seqlen: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(1, seqlen, rotary_dim)``."""
    cos, sin = (torch.cat((table[:seqlen],) * 2, dim=-1).to(dtype)[None] for table in (rope.cos, rope.sin))
    return cos, sin
