"""A fast path for calls that torch's function can run directly, or with a small mask; few attributes decide.

The shorter a call, the larger the share of its time that checks take.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.backends.torch import mask_plan, sdpa
from fusedattn.call_checks import DTYPES, check_mask
from fusedattn.masks import Mask
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
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.numel() == 0 or k.numel() == 0:
        return None
    batch, nheads_q, seqlen_q, head_dim = q.shape
    batch_k, nheads_kv, seqlen_k, head_dim_k = k.shape
    if batch_k != batch or nheads_kv != nheads_q or head_dim_k != head_dim:
        return None
    if not all(x.is_contiguous() or has_rows(x) for x in (q, k, v)):
        return None
    is_causal = False if mask is None else sdpa.is_causal(mask, q, k)  # None: torch has no argument for this mask
    if mask is not None and is_causal is None:
        is_short = mask_plan.is_short(mask, mask_plan.ScoresShape(batch, nheads_q, seqlen_q, seqlen_k))
        if not is_short or mask.function is not None or not _in_memory(mask):
            return None
    # Torch's kernel multiplies hidden values by 0, and loses a NaN in q.
    if not sdpa.is_finite(k, v, q):
        return None
    if mask is None or is_causal is not None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal))
    check_mask(mask, q, seqlen_k)
    return sdpa.at_once(q, k, v, mask, None, None)


def _in_memory(mask: Mask) -> bool:
    return all(type(x) is Tensor and x.is_cpu for x in mask.tensors().values())


def _intercepted() -> bool:
    """Whether something takes part in every call: a compiler, a transform of ``torch.func``, autocast."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    )
