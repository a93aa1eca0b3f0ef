"""The two backends: the Triton kernels, and torch's own functions. Neither imports the other."""

from __future__ import annotations

from torch import Tensor

from fusedattn import reference_varlen
from fusedattn.backends.torch import sdpa
from fusedattn.backends.triton import autograd
from fusedattn.options import Options
from fusedattn.support import Backend


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, backend: Backend) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)`` of prepared arguments, differentiable; lse may be None if `options` do not ask for it.

    Args:
        q, k, v: ``(batch, nheads, seqlen, head_dim)``; packed sequences are a batch of 1.
        options: of the call.
        backend: the backend to run.
    """
    if backend == "triton":
        return autograd.attention(q, k, v, options)
    if options.packed is not None:
        return reference_varlen.attention(q, k, v, options, attend=sdpa.attention)
    return sdpa.attention(q, k, v, options)
