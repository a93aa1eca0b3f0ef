"""Tensors inside larger storages whose other bytes are known, so that reads and writes outside show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.conftest import every_allocation

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Values that no kernel computes: signalling NaNs, which arithmetic would make quiet, and integers out of every range. A
# bool that would be noticed.
SENTINELS: dict[torch.dtype, int] = {
    torch.float16: 0x7DA5,
    torch.bfloat16: 0x7FA5,
    torch.float32: 0x7FA5A5A5,
    torch.float64: 0x7FF4A5A5A5A5A5A5,
    torch.int8: -128,
    torch.int32: torch.iinfo(torch.int32).min,
    torch.int64: torch.iinfo(torch.int64).min,
    torch.bool: 1,
}


class Guarded:
    """A tensor, uninitialised, in a storage that is full of its dtype's sentinel; the gaps between rows included."""

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, filler: int
    ) -> None:
        # Guards at both ends are as long as a tile of 128 rows.
        guard = 128 * max([64, *(s for s in strides if s < 2**12)]) + 1
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        self.filler = filler
        self.bits = torch.full((guard + extent + guard,), filler, dtype=_BITS[dtype.itemsize], device=device)
        self.inside = torch.zeros(self.bits.shape, dtype=torch.bool, device=device)
        self.inside.as_strided(shape, strides, guard).fill_(True)
        # Not a view for autograd, so that an op may return it.
        storage = self.bits.view(dtype).untyped_storage()
        self.tensor = torch.tensor([], dtype=dtype, device=device).set_(storage, guard, shape, strides)

    def assert_untouched_outside(self) -> None:
        changed = int(((self.bits != self.filler) & ~self.inside).sum())
        assert changed == 0, f"{changed} elements outside of {tuple(self.tensor.shape)} were written"

    def assert_written(self) -> None:
        left = int(((self.bits == self.filler) & self.inside).sum())
        assert left == 0, f"{left} elements of {tuple(self.tensor.shape)} were not written"


def embed(x: Tensor, order: Sequence[int] | None = None, *, poisoned: bool = True) -> Guarded:
    """``x`` with gaps between its rows, heads and batches, at an odd offset of a larger storage.

    Args:
        x: the values.
        order: its dimensions except the last, outermost first; the last is contiguous.
        poisoned: fill the rest of the storage with the sentinel instead of zeros.
    """
    strides = [1] * x.dim()
    size = x.shape[-1] if x.dim() > 0 else 1
    for dim in reversed(range(x.dim() - 1) if order is None else order):
        strides[dim] = size + 3
        size = strides[dim] * x.shape[dim]
    out = Guarded(x.shape, strides, x.dtype, x.device, SENTINELS[x.dtype] if poisoned else 0)
    out.tensor.copy_(x)
    return out


class Allocations:
    """Tensors allocated inside :func:`guarded_allocations`: by the op itself, and copies of its inputs."""

    def __init__(self) -> None:
        self.new: list[Guarded] = []
        self.copies: list[Guarded] = []

    def check(self, *, in_part: bool = False) -> None:
        """Fail if an element outside was written, or one inside was not (unless `in_part`)."""
        for x in (*self.new, *self.copies):
            x.assert_untouched_outside()
        for x in () if in_part else self.new:
            x.assert_written()


@contextmanager
def guarded_allocations() -> Iterator[Allocations]:
    """Inside, uninitialised tensors are :class:`Guarded`; one made like a tensor with gaps has the same gaps."""
    allocations = Allocations()

    def guard(x: Tensor, strides: Sequence[int], to: list[Guarded]) -> Tensor:
        if x.is_meta or x.numel() == 0:
            return x
        to.append(Guarded(x.shape, strides, x.dtype, x.device, SENTINELS[x.dtype]))
        return to[-1].tensor

    def guarded(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            like = allocate is empty_like and kwargs.get("memory_format") is not torch.contiguous_format
            return guard(out, args[0].stride() if like else out.stride(), allocations.new)

        return wrapper

    def copied(x: Tensor, *args: Any) -> Tensor:
        if x.is_contiguous(*args):
            return x
        out = contiguous(x, *args)
        return guard(out, out.stride(), allocations.copies).copy_(out)

    empty_like, contiguous = torch.empty_like, Tensor.contiguous
    with every_allocation(guarded) as patch:
        patch.setattr(Tensor, "contiguous", copied)
        yield allocations
