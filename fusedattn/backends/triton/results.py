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


# out, lse, row_max, row_sum, rounding_residual, largest
ForwardResults = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def of_forward(q: Tensor, v: Tensor, constants: Constants) -> ForwardResults:
    """(out, lse, row_max, row_sum, rounding_residual, largest).

    A result that is not needed is None: rounding_residual unless it is asked for, in 16 bits; largest unless it is
    asked for; with a cache, which has no gradients, row_max and row_sum, and lse unless it is asked for.
    """
    sizes, is_cached = constants.sizes, constants.tensors.lengths is not None
    rows, dtype = q.shape[:3], torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(rows, dtype=dtype) if sizes.return_lse or not is_cached else None
    row_max = None if is_cached else q.new_empty(rows, dtype=dtype)
    row_sum = None if is_cached else q.new_empty(rows, dtype=dtype)
    largest = q.new_empty(rows, dtype=dtype) if sizes.return_max else None
    out = new_like(q, v.shape[3] if v.dtype != torch.uint8 else features_of(v))
    rounding_residual = None
    if constants.keep_residual and q.dtype.itemsize == 2:
        rounding_residual = torch.empty_like(out, dtype=torch.int8)
    if constants.tensors.cu_seqlens_q is not None:  # rows behind the last sequence see nothing
        out.zero_()
        for x, nothing in ((lse, -torch.inf), (row_max, torch.inf), (row_sum, 1.0), (largest, -torch.inf)):
            if x is not None:
                x.fill_(nothing)
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
