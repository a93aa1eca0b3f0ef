"""A fast path for calls that torch's function can run directly, or with a small mask; few attributes decide.

The shorter a call, the larger the share of its time that checks take.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.backends.torch import mask_plan, sdpa
from fusedattn.call_checks import DTYPES, check_mask
from fusedattn.masks import Band, Mask
from fusedattn.strides import has_rows
from fusedattn.support import Backend, default_backend


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, backend: Backend | None) -> Tensor | None:
    """The output of :func:`fusedattn.attention` with these arguments alone, or None if it must take the full path.

    Calls that run here would pass every check: CPU tensors with data and finite values, and a mask that torch has, or
    so few scores that one call computes them.

    Raises:
        ValueError: the mask does not fit.
    """
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if not (mask is None or isinstance(mask, Mask)):
        return None
    if (backend or default_backend(q.device)) != "torch" or _intercepted():
        return None
    dtype = q.dtype
    if dtype not in DTYPES or k.dtype != dtype or v.dtype != dtype:
        return None
    if q.dim() != 4 or k.dim() != 4 or q.is_nested or k.is_nested or v.is_nested:
        return None
    shape, shape_k = q.shape, k.shape
    batch, nheads, seqlen_q, head_dim = shape
    seqlen_k = shape_k[2]
    if shape_k != (batch, nheads, seqlen_k, head_dim) or v.shape != shape_k or 0 in shape or seqlen_k == 0:
        return None
    if not ((q.is_contiguous() or has_rows(q)) and (k.is_contiguous() or has_rows(k))):
        return None
    if not (v.is_contiguous() or has_rows(v)):
        return None
    is_causal: bool | None = False  # None: torch has no argument for this mask
    if mask is not None:
        is_causal = _is_causal(mask.bands, seqlen_q, seqlen_k) if mask.only_bands else None
    if mask is not None and is_causal is None:
        is_short = mask_plan.is_short(mask, mask_plan.ScoresShape(batch, nheads, seqlen_q, seqlen_k))
        if not is_short or mask.function is not None or not _in_memory(mask):
            return None
    # Torch's kernel multiplies hidden values by 0, and loses a NaN in q.
    if not sdpa.is_finite(k, v, q):
        return None
    if mask is None or is_causal is not None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal))
    check_mask(mask, q, seqlen_k)
    return sdpa.at_once(q, k, v, mask, None, None)


@lru_cache(maxsize=256)
def _is_causal(bands: frozenset[Band], seqlen_q: int, seqlen_k: int) -> bool | None:
    return sdpa.is_causal(Mask(bands), seqlen_q, seqlen_k)


def _in_memory(mask: Mask) -> bool:
    return all(type(x) is Tensor and x.is_cpu for x in mask.tensors().values())


def _intercepted() -> bool:
    """Whether something takes part in every call: a compiler, a transform of ``torch.func``, autocast."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    )
