"""Context parallelism: one attention over a sequence whose tokens are split among processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fusedattn.distributed import checks, rows
from fusedattn.distributed.agreement import agree
from fusedattn.distributed.collectives import depending
from fusedattn.distributed.gathered import attention as gathered_attention
from fusedattn.distributed.partial import learned_of
from fusedattn.distributed.placement import Placement, order_of, rank_in, size_of
from fusedattn.distributed.ring import Ring
from fusedattn.distributed.ring import attention as ring_attention
from fusedattn.distributed.split import Balance, Split
from fusedattn.distributed.ulysses import Heads
from fusedattn.distributed.whole_keys import with_all_keys
from fusedattn.options import Options
from fusedattn.support import Backend, default_backend

Mode = Literal["ring", "all_gather", "ulysses"]
MODES: tuple[Mode, ...] = ("ring", "all_gather", "ulysses")
ALLOWED_MODES = (*((mode,) for mode in MODES), ("ring", "ulysses"), ("all_gather", "ulysses"))
BALANCES: tuple[Balance, ...] = ("zigzag", "contiguous")


class Context:
    """The processes among which the tokens of a sequence are split, and how keys and values reach them.

    Args:
        group: a process group, or a DeviceMesh of one or two dimensions, of two with ranks that increase along rows and
            columns. Every process of it creates the context.
        mode: ``"ring"`` passes keys and values around, ``"all_gather"`` copies all of them to every process,
            ``"ulysses"`` gives each process all tokens of some heads. For a mesh of two dimensions, a pair: the first
            is ``"ring"`` or ``"all_gather"``, the second ``"ulysses"``.
        balance: ``"zigzag"`` gives each process an early and a late chunk of the sequence, which balances a causal
            mask; ``"contiguous"`` gives each one chunk. ``"ulysses"`` alone is always contiguous.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        mode: Mode | tuple[Mode, Mode] = "ring",
        *,
        balance: Balance = "zigzag",
    ) -> None:
        modes = mode if isinstance(mode, tuple) else (mode,)
        if balance not in BALANCES:
            raise ValueError(f"balance: got {balance!r}, allowed are {BALANCES}")
        if modes not in ALLOWED_MODES:
            raise ValueError(
                f"mode: got {mode!r}, allowed are {', '.join(map(repr, MODES))}, and for a mesh of two "
                "dimensions ('ring', 'ulysses') and ('all_gather', 'ulysses')"
            )
        groups = group.get_all_groups() if isinstance(group, DeviceMesh) else [group]
        if not all(isinstance(x, dist.ProcessGroup) for x in groups):
            raise TypeError(f"group: got {type(group).__name__}, allowed are a ProcessGroup and a DeviceMesh")
        if len(groups) != len(modes):
            raise ValueError(f"mode: got {mode!r} for {len(groups)} dimensions, allowed is one mode for each")
        by_mode = dict(zip(modes, groups, strict=True))
        self._heads: dist.ProcessGroup | None = by_mode.pop("ulysses", None)
        self._passes = "ring" in by_mode
        self._tokens: dist.ProcessGroup | None = next(iter(by_mode.values()), None)
        self._balance: Balance = balance if self._tokens is not None else "contiguous"
        self._checked: set[Hashable] = set()  # lengths and shapes of calls that all processes have found right
        self._order = order_of(group.mesh) if isinstance(group, DeviceMesh) and len(groups) > 1 else None
        self._group = _of_cpus(group, groups)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of ``x`` for this process; dimension `dim` is that of the tokens."""
        split = Split(x.shape[dim], size_of(self._tokens), self._balance)
        own = split.shard(x, rank_in(self._tokens), dim)
        return Split(own.shape[dim], size_of(self._heads), "contiguous").shard(own, rank_in(self._heads), dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, from the parts that :meth:`shard` gave to each process; differentiable."""
        try:
            length, others = x.shape[dim], [n for i, n in enumerate(x.shape) if i != dim % x.dim()]
        except Exception as error:
            self.refuse(error)
        found = self._agree([length], ("unshard", x.dtype, dim % x.dim(), others), None)
        return self._placement(found[:, 0].tolist()).whole(x, dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Where the `length` tokens of this process stand in the whole sequence, int64 ``(length,)``."""
        if length < 0:
            self.refuse(ValueError(f"length: got {length}, allowed are numbers from 0 on"))
        found = self._agree([length], "positions", None)
        placement = self._placement(found[:, 0].tolist())
        return self.shard(torch.arange(placement.outer.seqlen, device=device), 0)

    def _placement(self, lengths: Sequence[int]) -> Placement:
        """The place of each token of a sequence of which each process has so many.

        Raises:
            ValueError: :meth:`shard` would have given them other numbers.
        """
        n_inner = size_of(self._heads)
        outer = Split(sum(lengths), size_of(self._tokens), self._balance)
        expected = [n for own in outer.lengths for n in Split(own, n_inner, "contiguous").lengths]
        if list(lengths) != expected:
            raise ValueError(
                f"context: got {list(lengths)} tokens on the ranks, allowed for {outer.seqlen} tokens are {expected}, "
                "as context.shard gives them"
            )
        inner = Split(outer.lengths[rank_in(self._tokens)], n_inner, "contiguous")
        return Placement(outer, inner, self._tokens, self._heads)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error`, after all other processes know that this one does not take part in a call."""
        self._agree([], None, error)
        raise error

    def _agree(self, numbers: Sequence[int], call: Hashable, error: Exception | None) -> Tensor:
        """:func:`agree` among the processes in the order of their tokens: all of one share, then those of the next."""
        found = agree(numbers, call, error, self._group)
        return found if self._order is None else found[self._order]

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, options: Options, backend: Backend | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(out, lse, largest)`` of the queries of this process; :func:`fusedattn.attention` has the arguments.

        Raises:
            RuntimeError: another process raises an error.
        """
        q, k, v, options, queries, keys = self._agreed(q, k, v, options, backend)
        nheads, heads, exchanged = q.shape[1], slice(0, q.shape[1]), None
        if self._heads is not None:
            exchanged = Heads(self._heads, nheads, k.shape[1], queries.inner.lengths, keys.inner.lengths)
            heads = exchanged.queries(dist.get_rank(self._heads))
            q, k, v = exchanged.to_heads(q, k, v)
        ring = Ring(
            self._tokens, rank_in(self._tokens), queries.outer, keys.outer, heads, nheads,
            backend or default_backend(q.device),
        )  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            out, lse, largest = (ring_attention if self._passes else gathered_attention)(q, k, v, options, ring)
        sources = [x for x in (q, k, v, *learned_of(options)) if x is not None]
        out, lse = depending([out, lse], sources)
        if exchanged is None:
            return out, lse, largest
        out, largest = exchanged.to_tokens(out), None if largest is None else exchanged.to_tokens(largest)
        return out, exchanged.to_tokens(lse) if options.return_lse else lse, largest

    def _agreed(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, options: Options, backend: Backend | None
    ) -> tuple[Tensor, Tensor, Tensor, Options, Placement, Placement]:
        """(q, k, v, options with tensors of all keys, queries, keys), after all processes have checked their call."""
        own, description, numbers, error = None, None, [0], None
        try:
            own = checks.of_own(q, k, v, options, size_of(self._heads), backend)
            description = checks.description(*own, options)
            lengths = own[0].shape[2], own[1].shape[2]
            draws = options.dropout_p > 0.0 and options.dropout_seed is None
            seed = int(torch.randint(2**62, (), device="cpu")) if draws else 0
            numbers = [*lengths, checks.number_of_shapes(*own, options), rows.kinds(options, lengths[0]), seed]
        except Exception as failure:  # every process must hear of it
            error = failure
        found = self._agree(numbers, description, error)
        assert own is not None
        q, k, v = own
        if options.dropout_p and options.dropout_seed is None:
            options.dropout_seed = found[0, 4:].to(q.device)
        queries, keys = (self._placement(found[:, i].tolist()) for i in (0, 1))
        for_each_query = rows.for_each_query(found[:, 3].tolist())
        kind = tuple(found[:, :4].flatten().tolist())
        if kind not in self._checked:
            try:
                planned = with_all_keys(options, queries.planned(), keys.planned(), for_each_query, q.device)
                checks.of_all(q, options, planned, queries, keys, cuts_keys=self._passes)
            except Exception as failure:
                error = failure
            self._agree([], rows.other_sizes(options), error)
            self._checked.add(kind)
        options = with_all_keys(replace(options, qk_norm=None), queries, keys, for_each_query, q.device)  # done
        return q, k, v, options, queries, keys


def checked(context: object) -> Context:
    """A caller's context.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(context, Context):
        raise TypeError(f"context: got {type(context).__name__}, allowed are fusedattn.distributed.Context and None")
    return context


def _of_cpus(group: dist.ProcessGroup | DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of all processes that carries CPU tensors, for messages about calls: the given one if it does."""
    if len(groups) == 1 and torch.device("cpu") in groups[0]._device_types:
        return groups[0]
    ranks = group.mesh.flatten().tolist() if isinstance(group, DeviceMesh) else dist.get_process_group_ranks(group)
    return dist.new_group(ranks, _timeout_of(groups[0]), backend="gloo", use_local_synchronization=True)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a process waits for the others of a group; None for torch's default."""
    backends = [group._get_backend(device) for device in group._device_types]
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return max((timeout for timeout in found if timeout is not None), default=None)
