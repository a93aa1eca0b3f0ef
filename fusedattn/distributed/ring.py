"""Ring attention: queries stay, and keys and values pass from process to process while they are attended to.

Liu et al., "Ring Attention with Blockwise Transformers" (2023). Each process merges the attentions to the keys that it
gets (:func:`fusedattn.merge`). In the backward keys and values pass again, together with the sums of their gradients,
and the partial attentions are computed again. Besides its own tokens, a process has two processes' keys in memory, and
in the backward three processes' gradients of keys.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedattn.distributed.collectives import Passing, Spec, n_bytes, views
from fusedattn.distributed.cutting import Rectangle, may_see
from fusedattn.distributed.partial import N_LEARNED, attend, constants_of, learned_of, with_learned
from fusedattn.distributed.placement import Group
from fusedattn.distributed.split import Split
from fusedattn.options import Options
from fusedattn.parts import add_part, gradients_of_part
from fusedattn.shard import Shard
from fusedattn.support import Backend


@dataclass(frozen=True)
class Ring:
    """The processes among which keys and values pass.

    Attributes:
        group: the processes, each of which owns tokens of `queries` and `keys` by its rank.
        rank: that of this process.
        heads: the query heads of this process, among all `nheads`.
    """

    group: Group
    rank: int
    queries: Split
    keys: Split
    heads: slice
    nheads: int
    backend: Backend

    @property
    def processes(self) -> dist.ProcessGroup:
        """The group, if there is more than one owner."""
        assert self.group is not None
        return self.group

    def owner(self, step: int) -> int:
        """The rank whose keys this process has at a step."""
        return (self.rank - step) % self.keys.n_owners

    def specs(self, owner: int, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> list[Spec]:
        """The shapes and dtypes of the keys and values of a process; `dtype` instead of theirs, for gradients."""
        n = self.keys.lengths[owner]
        return [(torch.Size((*x.shape[:2], n, x.shape[3])), dtype or x.dtype) for x in (k, v)]

    def rectangles(self, options: Options, owner: int) -> Iterator[tuple[slice, slice, Rectangle]]:
        """(own queries, keys of `owner`, their rectangle) for pairs of chunks whose queries may see the keys."""
        whole_q, whole_k = self.queries.seqlen, self.keys.seqlen
        for rows, chunk_q in self.queries.places(self.rank):
            for keys, chunk_k in self.keys.places(owner):
                if may_see(options.mask, chunk_q, chunk_k, whole_q, whole_k):
                    yield rows, keys, Rectangle(self.shard_at(chunk_q.start, chunk_k.start), self.heads, rows, chunk_k)

    def shard_at(self, query: int, key: int) -> Shard:
        """The shard from a query and a key of the whole attention on."""
        return Shard(0, self.heads.start, query, key, self.nheads, self.queries.seqlen, self.keys.seqlen)


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, ring: Ring) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, largest)`` of the queries of this process, differentiable."""
    found: tuple[Tensor, Tensor, Tensor | None] = _Ring.apply(ring, options, q, k, v, *learned_of(options))  # type: ignore[no-untyped-call]
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, options: Options, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = _without_keys(options.sinks, ring, q, wide)
        largest = q.new_full(q.shape[:3], -math.inf, dtype=wide) if options.return_max else None
        options = replace(options, sinks=None)
        for owner, (keys, values) in _passed(ring, k, v):
            for rows, own, part in ring.rectangles(options, owner):
                found = attend(q[:, :, rows], keys[:, :, own], values[:, :, own], options, part, ring.backend)
                add_part(out[:, :, rows], lse[:, :, rows], found[:2])
                if largest is not None and found[2] is not None:
                    largest[:, :, rows] = torch.maximum(largest[:, :, rows], found[2])
        ctx.ring, ctx.options = ring, options
        # The backward reads the constants again: saved, they may not change before.
        ctx.save_for_backward(q, k, v, out, lse, *learned, *constants_of(options))
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out.to(q.dtype), lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        learned = saved[:N_LEARNED]
        ring, options, needed = ctx.ring, ctx.options, ctx.needs_input_grad[2:]
        of_rows = _OfRows(
            out, lse, torch.zeros_like(out) if dout is None else dout.to(out.dtype),
            torch.zeros_like(lse) if dlse is None else dlse,
        )  # fmt: skip
        grads: list[Tensor | None] = [
            torch.zeros_like(x, dtype=out.dtype) if x is not None and n else None
            for x, n in zip((q, None, None, *learned), needed, strict=True)
        ]
        specs = [ring.specs(owner, k, v, out.dtype) for owner in range(ring.keys.n_owners)]
        sums = _buffers(3, specs, k)  # those of this step; received; sent
        passing = None
        for step, (owner, (keys, values)) in enumerate(_passed(ring, k, v)):
            own_sums = sums[0][: n_bytes(specs[owner])].zero_()
            of_keys = views(own_sums, specs[owner])
            for rows, own, part in ring.rectangles(options, owner):
                inputs = q[:, :, rows], keys[:, :, own], values[:, :, own], *learned
                dq, dk, dv, *others = _gradients(inputs, needed, options, part, of_rows.at(rows), ring.backend)
                if grads[0] is not None and dq is not None:
                    grads[0][:, :, rows] += dq
                for of_owner, grad in zip(of_keys, (dk, dv), strict=True):
                    if grad is not None:
                        of_owner[:, :, own] += grad
                for total, grad in zip(grads[3:], others, strict=True):
                    if total is not None and grad is not None:
                        total += grad
            if passing is not None:
                for of_owner, of_others in zip(of_keys, views(passing.received(), specs[owner]), strict=True):
                    of_owner += of_others
            if ring.keys.n_owners > 1:
                following = ring.owner(step + 1)
                passing = Passing(own_sums, sums[1][: n_bytes(specs[following])], ring.processes)
                sums.rotate(1)
        grads[1:3] = of_keys if passing is None else views(passing.received(), specs[ring.rank])
        sinks, dsinks = learned[SINKS - 3], grads[SINKS]
        if dsinks is not None:
            _, into_sinks = of_rows.of_part(out.new_zeros(()), sinks[ring.heads].to(lse.dtype)[:, None])
            dsinks[ring.heads] = into_sinks.sum((0, 2))
        return (
            None,
            None,
            *(
                None if grad is None or not n else grad.to(x.dtype)
                for grad, n, x in zip(grads, needed, (q, k, v, *learned), strict=True)
            ),
        )


SINKS = 3 + 3  # among q, k, v and the tensors of learned_of


@dataclass(frozen=True)
class _OfRows:
    """Results of the forward and gradients of them, ``(batch, nheads_q, rows)`` and, of out, head_dim_v."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor

    def of_part(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of these results of some of the keys."""
        return gradients_of_part((out, lse), (self.out, self.lse), (self.dout, self.dlse))

    def at(self, rows: slice) -> _OfRows:
        """Those of some rows."""
        return _OfRows(*(x[:, :, rows] for x in (self.out, self.lse, self.dout, self.dlse)))


def _gradients(
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    options: Options,
    part: Rectangle,
    of_rows: _OfRows,
    backend: Backend,
) -> list[Tensor | None]:
    """The gradients of q, k and v of a rectangle and of the tensors of :func:`learned_of`."""
    with torch.enable_grad(), torch.autocast(of_rows.out.device.type, enabled=False):
        leaves = [None if x is None else x.detach().requires_grad_(n) for x, n in zip(inputs, needed, strict=True)]
        q, k, v, *learned = leaves
        learned[SINKS - 3] = None
        out, lse, _ = attend(q, k, v, with_learned(options, learned), part, backend)  # type: ignore[arg-type]
    into_out, into_lse = of_rows.of_part(out.detach(), lse.detach())
    wanted = {i: x for i, x in enumerate(leaves) if x is not None and x.requires_grad and i != SINKS}
    if not wanted:
        return [None] * len(inputs)
    into = into_out.to(out.dtype), into_lse.to(lse.dtype)
    found = torch.autograd.grad((out, lse), list(wanted.values()), into, allow_unused=True)
    by_input = dict(zip(wanted, found, strict=True))
    return [by_input.get(i) for i in range(len(inputs))]


def _passed(ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """(owner, [keys, values]) of every process, those of this one first; the next are under way meanwhile."""
    n = ring.keys.n_owners
    if n == 1:
        yield 0, [k, v]
        return
    specs = [ring.specs(owner, k, v) for owner in range(n)]
    buffers = _buffers(2, specs, k)
    for held, x in zip(views(buffers[0][: n_bytes(specs[ring.rank])], specs[ring.rank]), (k, v), strict=True):
        held.copy_(x)
    for step in range(n):
        owner, following = ring.owner(step), ring.owner(step + 1)
        own, next_ones = buffers[0][: n_bytes(specs[owner])], buffers[1][: n_bytes(specs[following])]
        passing = Passing(own, next_ones, ring.processes) if step < n - 1 else None
        yield owner, views(own, specs[owner])
        if passing is not None:
            passing.received()
        buffers.rotate(1)


def _buffers(n: int, specs: Sequence[list[Spec]], k: Tensor) -> deque[Tensor]:
    """Memory for the tensors of any process, uint8, on the device of k."""
    most = max(map(n_bytes, specs))
    return deque(k.new_empty(most, dtype=torch.uint8) for _ in range(n))


def _without_keys(sinks: Tensor | None, ring: Ring, q: Tensor, dtype: torch.dtype) -> Tensor:
    """lse of queries that have seen no key: their sink or ``-inf``."""
    if sinks is None:
        return q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    return sinks.detach()[ring.heads].to(dtype)[:, None].expand(q.shape[:3]).clone()
