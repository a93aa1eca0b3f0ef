"""Attention on DTensors: every process computes its batches and heads, and no tensor is copied that need not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from fusedattn import backends, call_checks
from fusedattn.distributed.cutting import Rectangle, cut, reasons_of_pattern
from fusedattn.distributed.kv_heads import heads_of, kv_heads
from fusedattn.distributed.partial import learned_of, with_learned
from fusedattn.dropout import draw_seed
from fusedattn.options import Options
from fusedattn.prepare import prepared
from fusedattn.shard import Shard
from fusedattn.support import Backend

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

BATCH, HEADS = 0, 1  # dimensions of q, k and v


def attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, options: Options, backend: Backend | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(out, lse, largest)`` as DTensors, of q, k and v that are DTensors of one mesh.

    On each dimension of the mesh q, k and v are split by batches, by heads, or not at all; what is split for one of
    them is split for the others, and partial sums are added up first. Masks and biases are those of the whole attention
    on every process, as plain tensors or DTensors.

    Raises:
        TypeError, ValueError: as :func:`fusedattn.attention`; some of q, k and v are no DTensors, or of other meshes.
        NotImplementedError: a tensor is split along the sequence or head_dim, or heads cannot be divided evenly.
    """
    q, k, v = _of_one_mesh(q, k, v)
    _check(q, k, v, options)
    mesh = q.device_mesh
    split = [_split(i, (q, k, v)) for i in range(mesh.ndim)]
    n_shares = _check_heads(q.shape[1], mesh, split)
    of_kv = [Replicate() if x.is_shard(HEADS) and k.shape[1] % n_shares else x for x in split]
    own_q = _local(q, split, split)
    # Every process adds to the gradient of keys and values that several have.
    into_kv = [Partial() if x != y else y for x, y in zip(split, of_kv, strict=True)]
    own_k, own_v = _local(k, of_kv, into_kv), _local(v, of_kv, into_kv)
    batch, nheads, seqlen_q, _ = q.shape
    first_batch, n_batches = _own_part(batch, BATCH, mesh, split)
    first_head, n_heads = _own_part(nheads, HEADS, mesh, split)
    heads, group = slice(first_head, first_head + n_heads), nheads // k.shape[1]
    if own_k.shape[1] * group != n_heads:  # all KV heads are here
        own_k, own_v = (heads_of(x, kv_heads(heads, group)) for x in (own_k, own_v))
    options = _with_local_tensors(options, mesh, split)
    if options.qk_norm is not None:
        if options.qk_norm.across_heads and n_shares > 1:
            raise NotImplementedError(
                "qk_norm: got across_heads=True and heads that are split among processes, allowed is False"
            )
        options.qk_norm = options.qk_norm.of_heads(heads, kv_heads(heads, group))
    if options.dropout_p and options.dropout_seed is None:
        options.dropout_seed = _drawn(mesh, q.device)
    part = Rectangle(
        Shard(first_batch, first_head, nheads=nheads),
        heads,
        slice(None),
        slice(None),
        slice(first_batch, first_batch + n_batches),
    )
    own = cut(options, part)
    own_q, own_k, own_v, backend = prepared(own_q, own_k, own_v, own, backend)
    found = backends.attention(own_q, own_k, own_v, own, backend)
    shapes = (batch, nheads, seqlen_q, v.shape[3]), (batch, nheads, seqlen_q), (batch, nheads, seqlen_q)
    out, lse, largest = (_distributed(x, mesh, split, shape) for x, shape in zip(found, shapes, strict=True))
    assert out is not None
    return out, lse, largest


def _of_one_mesh(q: Tensor, k: Tensor | None, v: Tensor | None) -> list[DTensor]:
    found: list[DTensor] = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: got {type(x).__name__} beside a DTensor, allowed are DTensors of one mesh")
        found.append(x)
        if x.device_mesh != found[0].device_mesh:
            raise ValueError(f"{name}: got a DTensor of the mesh {x.device_mesh}, allowed is that of q")
    return found


def _check(q: DTensor, k: DTensor, v: DTensor, options: Options) -> None:
    """Check the whole attention, of which :func:`prepared` sees a part.

    Raises:
        TypeError, ValueError: as :func:`fusedattn.attention`.
        NotImplementedError: the mask cannot be cut.
    """
    call_checks.check_qkv(q, k, v)
    call_checks.check_mask(options.mask, q, k.shape[2])
    if reasons := reasons_of_pattern(options.mask):
        raise NotImplementedError("attention cannot run on DTensors: " + "; ".join(reasons))
    if options.precision is not None and options.precision.scales == "tensor":
        raise NotImplementedError("precision.scales: got 'tensor' and DTensors, allowed is 'block'")
    if options.rope is not None:
        call_checks.check_rope(options.rope, q, k.shape[2])
    if options.qk_norm is not None:
        call_checks.check_qk_norm(options.qk_norm, q, k.shape[1])
    if options.bias is not None:
        call_checks.check_bias(options.bias, q, k.shape[2])
    if options.sinks is not None:
        call_checks.check_sinks(options.sinks, q)


def _split(i: int, tensors: Sequence[DTensor]) -> Placement:
    """How dimension `i` of a mesh splits q, k and v: by batches, by heads, or not."""
    chosen: Placement = Replicate()
    for name, x in zip("qkv", tensors, strict=True):
        placement = x.placements[i]
        if placement.is_replicate() or placement.is_partial():
            continue
        if type(placement) is not dtensor.Shard or placement.dim % 4 not in (BATCH, HEADS):
            raise NotImplementedError(
                f"{name}: got the placement {placement} on dimension {i} of the mesh, allowed are Shard(0) for "
                "batches, Shard(1) for heads, Replicate() and Partial(); a sequence is split by "
                "fusedattn.distributed.Context"
            )
        if chosen.is_replicate():
            chosen = dtensor.Shard(placement.dim % 4)
    return chosen


def _check_heads(nheads: int, mesh: DeviceMesh, split: Sequence[Placement]) -> int:
    """The number of processes among which heads are split."""
    n = 1
    for i, placement in enumerate(split):
        n *= mesh.size(i) if placement.is_shard(HEADS) else 1
    if nheads % n:
        raise NotImplementedError(f"q: got {nheads} heads, split among {n} processes, allowed are multiples of {n}")
    return n


def _own_part(length: int, dim: int, mesh: DeviceMesh, split: Sequence[Placement]) -> tuple[int, int]:
    """(start, length) of the part of dimension `dim` that this process has.

    Each dimension of the mesh cuts what the one before left. Parts are equal but for the last, which may be shorter.
    """
    start = 0
    for i, placement in enumerate(split):
        if placement.is_shard(dim):
            size = -(-length // mesh.size(i))
            before = min(mesh.get_local_rank(i) * size, length)
            start, length = start + before, min(size, length - before)
    return start, length


def _local(x: DTensor, placements: Sequence[Placement], gradient: Sequence[Placement]) -> Tensor:
    """The part of this process; its gradient has placements of its own."""
    return x.redistribute(placements=placements).to_local(grad_placements=gradient)


def _with_local_tensors(options: Options, mesh: DeviceMesh, split: Sequence[Placement]) -> Options:
    """Options with plain tensors; gradients of those that all processes have are added up."""

    def plain(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    gradient = [Replicate() if placement.is_replicate() else Partial() for placement in split]
    everywhere = [Replicate()] * mesh.ndim

    def shared(x: Tensor | None) -> Tensor | None:
        if x is None or not (isinstance(x, DTensor) or x.requires_grad):
            return x
        found = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, everywhere)
        return _local(found, everywhere, gradient)

    mask, rope = options.mask, options.rope
    if any(isinstance(x, DTensor) for x in mask.tensors().values()):
        mask = mask.mapped(plain)
    if rope is not None:
        rope = rope.mapped(plain)
    norm = options.qk_norm
    if norm is not None:
        norm = replace(norm, q_weight=shared(norm.q_weight), k_weight=shared(norm.k_weight))
    options = replace(options, mask=mask, rope=rope, qk_norm=norm)
    return with_learned(options, [shared(x) for x in learned_of(options)])


def _drawn(mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A seed that all processes have."""
    seed = draw_seed(device)
    for i in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(i), group_src=0)
    return seed


def _distributed(
    x: Tensor | None, mesh: DeviceMesh, split: Sequence[Placement], shape: tuple[int, ...]
) -> Tensor | None:
    if x is None:
        return None
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, split, shape=torch.Size(shape), stride=stride)
