"""Tensors sent between the processes of a group, differentiable; as bytes, which every backend carries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Spec = tuple[torch.Size, torch.dtype]  # shape and dtype of a tensor


def spec_of(x: Tensor) -> Spec:
    """The shape and dtype of a tensor."""
    return x.shape, x.dtype


def exchange(parts: Sequence[Tensor], specs: Sequence[Spec], group: dist.ProcessGroup) -> list[Tensor]:
    """Send ``parts[i]`` to process ``i`` of a group; returns the tensor from each, which has its ``specs[i]``.

    Differentiable: gradients take the way back.
    """
    found: tuple[Tensor, ...] = _Exchange.apply(group, tuple(specs), *parts)  # type: ignore[no-untyped-call]
    return list(found)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, specs: tuple[Spec, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.specs = group, tuple(map(spec_of, parts))
        found = tuple(_exchanged(parts, specs, group))
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchanged(grads, ctx.specs, ctx.group)


def _exchanged(parts: Sequence[Tensor], specs: Sequence[Spec], group: dist.ProcessGroup) -> list[Tensor]:
    sent = [as_bytes(x) for x in parts]
    received = sent[0].new_empty(n_bytes(specs))
    sizes = [n_bytes([spec]) for spec in specs]
    dist.all_to_all_single(received, torch.cat(sent), sizes, [x.numel() for x in sent], group=group)
    return [from_bytes(x, spec) for x, spec in zip(_parts(received, specs), specs, strict=True)]


def gather_equal(found: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `found` with the ``x`` of every process of a group, all of one size, one after another."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    function(found, x, group=group)


def gather(x: Tensor, specs: Sequence[Spec], group: dist.ProcessGroup) -> list[Tensor]:
    """The ``x`` of every process of a group, which have these `specs`. Differentiable.

    The gradient is summed in the order of processes, in float32 at least: it is the same on every run.
    """
    found: tuple[Tensor, ...] = _Gather.apply(x, tuple(specs), group)  # type: ignore[no-untyped-call]
    return list(found)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, specs: tuple[Spec, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group, ctx.spec = group, spec_of(x)
        sizes = [n_bytes([spec]) for spec in specs]
        own = as_bytes(x)
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own
        received = own.new_empty(len(sizes), max(sizes))
        gather_equal(received.view(-1), padded, group)
        parts = tuple(from_bytes(row[:size], spec) for row, size, spec in zip(received, sizes, specs, strict=True))
        if not x.is_floating_point():
            ctx.mark_non_differentiable(*parts)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts = _exchanged(grads, [ctx.spec] * len(grads), ctx.group)
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(parts[0].dtype), None, None


def depending(results: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """`results`, which depend on `sources` for autograd even if no number does.

    The backward of what made the sources then runs on every process, also on one without queries.
    """
    found: tuple[Tensor, ...] = _Depending.apply(len(results), *results, *sources)  # type: ignore[no-untyped-call]
    return list(found)


class _Depending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.n_sources = len(tensors) - n
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:n])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *grads, *(None,) * ctx.n_sources


class Passing:
    """Bytes under way to the next process of a ring, and others from the one before."""

    def __init__(self, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
        """Start to send `sent` and to fill `received`, uint8 ``(n,)`` each."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        self._received = received
        transfers = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % world),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world),
        ]
        transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
        self._works = dist.batch_isend_irecv(transfers) if transfers else []

    def received(self) -> Tensor:
        """The bytes from the process before, which this waits for, as for those that it sends."""
        for work in self._works:
            work.wait()
        return self._received


def n_bytes(specs: Sequence[Spec]) -> int:
    """The bytes of tensors."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in specs)


def views(x: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """Tensors that lie one after another in `x`, uint8; each at a multiple of its itemsize."""
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(_parts(x, specs), specs, strict=True)]


def _parts(x: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """The bytes of each of these tensors, which lie one after another in `x`."""
    ends = accumulate((n_bytes([spec]) for spec in specs), initial=0)
    return [x[start:stop] for start, stop in pairwise(ends)]


def as_bytes(x: Tensor) -> Tensor:
    """A copy of a tensor as uint8 ``(n,)``, or a view."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(x: Tensor, spec: Spec) -> Tensor:
    """The inverse of :func:`as_bytes`; a copy if the bytes do not lie where this dtype can."""
    shape, dtype = spec
    if x.storage_offset() % dtype.itemsize:
        x = x.clone()
    return x.view(dtype).view(shape)
