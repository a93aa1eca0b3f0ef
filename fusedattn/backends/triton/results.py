"""Uninitialised result tensors for the kernels and for fakes: shapes, dtypes and layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedattn.backends.triton.operands import Constants
from fusedattn.strides import rows_overlap

# Offsets inside a tile are int32 in the kernels: tensors whose rows lie further apart are made contiguous first.
MAX_ROW_STRIDE = 2**31 // 512


def new_like(x: Tensor, n: int | None = None) -> Tensor:
    """An uninitialised tensor of the shape, dtype and layout of ``x``; contiguous if that layout fits no tile.

    If `n` is not the number of features of ``x``, the result has `n` features and the memory order of ``x``.
    """
    if x.is_contiguous() and x.stride(2) <= MAX_ROW_STRIDE and (n is None or n == x.shape[3]):
        return torch.empty_like(x)
    unfit = x.stride(2) > MAX_ROW_STRIDE or rows_overlap(x)
    if n is not None and n != x.shape[3]:
        order = [0, 1, 2] if unfit else sorted(range(3), key=lambda d: -x.stride()[d])
        empty = torch.empty([x.shape[d] for d in order] + [n], dtype=x.dtype, device=x.device)
        return empty.permute(*(order.index(d) for d in range(3)), 3)
    layout = torch.contiguous_format if unfit else torch.preserve_format
    return torch.empty_like(x, memory_format=layout)


def features_of(x: Tensor) -> int:
    """The features of keys or values, of which uint8, a cache of 4-bit codes, has two in each element."""
    return x.shape[3] * (2 if x.dtype == torch.uint8 else 1)


ForwardResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def of_forward(q: Tensor, v: Tensor, constants: Constants) -> ForwardResults:
    """(out, lse, row_max, row_sum, rounding_residual, largest).

    rounding_residual is None unless it is asked for, in 16 bits; largest is None unless it is asked for.
    """
    batch, nheads, seqlen, _ = q.shape
    lse = q.new_empty((batch, nheads, seqlen), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    row_max, row_sum, out = (
        torch.empty_like(lse),
        torch.empty_like(lse),
        new_like(q, v.shape[3] if v.dtype != torch.uint8 else features_of(v)),
    )
    rounding_residual = None
    if constants.keep_residual and q.dtype.itemsize == 2:
        rounding_residual = torch.empty_like(out, dtype=torch.int8)
    largest = torch.empty_like(lse) if constants.sizes.return_max else None
    if constants.tensors.cu_seqlens_q is not None:  # rows behind the last sequence see nothing
        out.zero_()
        lse.fill_(-torch.inf)
        row_max.fill_(torch.inf)
        row_sum.fill_(1.0)
        if largest is not None:
            largest.fill_(-torch.inf)
    return out, lse, row_max, row_sum, rounding_residual, largest


def of_backward(
    q: Tensor, k: Tensor, v: Tensor, needed: Sequence[bool], *, packed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv), None if not needed; dk and dv come together."""
    dq = new_like(q) if needed[0] else None
    found = (dq, new_like(k), new_like(v)) if needed[1] else (dq, None, None)
    if packed:  # rows behind the last sequence get no gradient
        for x in found:
            if x is not None:
                x.zero_()
    return found
