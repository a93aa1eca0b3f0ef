"""Calls that torch's function answers as they are, recognised by few attributes.

Of a short call the time goes into what happens around the work.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.checks import DTYPES
from fusedattn.masks import Mask
from fusedattn.support import Backend, default_backend


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, backend: Backend | None) -> Tensor | None:
    """The output of :func:`fusedattn.attention` with these arguments alone, or None: it must then look closer.

    What is answered here passes every check, for CPU tensors with data, finite values, and a mask that torch has.
    """
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if (backend or default_backend(q.device)) != "torch" or _intercepted():
        return None
    dtype = q.dtype
    if dtype not in DTYPES or k.dtype != dtype or v.dtype != dtype:
        return None
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.numel() == 0 or k.numel() == 0:
        return None
    batch, nheads_q, seqlen_q, head_dim = q.shape
    batch_k, nheads_kv, seqlen_k, head_dim_k = k.shape
    if batch_k != batch or nheads_kv != nheads_q or head_dim_k != head_dim:
        return None
    if not (_in_rows(q, head_dim) and _in_rows(k, head_dim) and _in_rows(v, head_dim)):
        return None
    is_causal = False
    if mask is not None:
        if not (isinstance(mask, Mask) and mask.only_bands):
            return None
        lower, upper = mask.band(seqlen_q, seqlen_k)
        if lower is not None or upper not in (None, 0):
            return None
        is_causal = upper is not None
    # Torch's kernel multiplies by 0 what it hides, and loses a NaN in q.
    with torch._C._AutoDispatchBelowAutograd():  # a sum that is finite has finite terms
        if not (math.isfinite(q.sum()) and math.isfinite(k.sum()) and math.isfinite(v.sum())):
            return None
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _intercepted() -> bool:
    """Whether something takes part in every call: a compiler, a transform of ``torch.func``, autocast."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    )


def _in_rows(x: Tensor, head_dim: int) -> bool:
    """Whether rows are contiguous and lie beside each other, as in a contiguous tensor or transposed heads."""
    if x.is_contiguous():
        return True
    *strides, last = x.stride()
    return last == 1 and min(strides) >= head_dim
