"""What attention with a context sends, and what its operators read and write, counted while it runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.scaling.stages import Mode, Model
from fusedattn import attention, masks
from fusedattn.distributed import Context, collectives, gathered, ring

FILLED = ("aten::new_zeros", "aten::zeros_like", "aten::new_full", "aten::zero_")
GATHER_EQUAL = collectives.gather_equal
EMPTY = ("aten::new_empty", "aten::empty", "aten::empty_like")


class Pass(NamedTuple):
    """A forward or a backward of one process, in bytes.

    Attributes:
        sent: to other processes, in this number of `messages`; without what they agree on before.
        moved: read and written by operators besides attention.
        kept: still in memory afterwards, besides the results.
        under_way: in memory at most for keys, values and gradients that are sent or received.
    """

    sent: int
    messages: int
    moved: int
    kept: int
    under_way: int


class Sending:
    """torch.distributed, with a count of the bytes that leave this process for another."""

    def __init__(self) -> None:
        self.sent = self.messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], sizes: list[int], group: dist.ProcessGroup
    ) -> None:
        own = sizes[dist.get_rank(group)]
        self._count((sum(sizes) - own) * x.itemsize, len(sizes) - 1)
        dist.all_to_all_single(output, x, output_sizes, sizes, group=group)

    def gather_equal(self, found: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        others = dist.get_world_size(group) - 1
        self._count(x.numel() * x.itemsize * others, others)
        GATHER_EQUAL(found, x, group)

    def batch_isend_irecv(self, transfers: Sequence[dist.P2POp]) -> list[dist.Work]:
        for transfer in transfers:
            if transfer.op is dist.isend:
                self._count(transfer.tensor.numel() * transfer.tensor.itemsize, 1)
        return dist.batch_isend_irecv(list(transfers))

    def _count(self, n_bytes: int, messages: int) -> None:
        self.sent += n_bytes
        self.messages += messages


class Memory(TorchDispatchMode):
    """Counts bytes that operators read and write, and that tensors occupy; tensors of less than `least` are left out.

    An operator reads each operand and writes each result once. Views are free, and so is a copy to the same place.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.moved = self.under_way = 0
        self.is_counting = True
        self._least = least
        self._storages: dict[StorageWeakRef, tuple[int, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        after = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self.is_counting and func.namespace == "aten":
            self.moved += self._moved(func._schema, before, after)
        known = {x.untyped_storage()._cdata for x in before}
        for x in after:
            if x.untyped_storage()._cdata not in known and self._size(x):
                entry = StorageWeakRef(x.untyped_storage())
                self._storages[entry] = x.untyped_storage().nbytes(), x.dtype == torch.uint8
        self.under_way = max(self.under_way, sum(size for size, is_sent in self._live() if is_sent))
        return result

    def _moved(self, schema: Any, before: list[Tensor], after: list[Tensor]) -> int:
        aliases = [result.alias_info for result in schema.returns]
        if schema.name in EMPTY or any(alias is not None and not alias.is_write for alias in aliases):
            return 0
        written = sum(map(self._size, after))
        if schema.name in FILLED:
            return written
        if schema.name == "aten::copy_":
            to, source = before
            is_same = to.data_ptr() == source.data_ptr() and to.stride() == source.stride()
            return 0 if is_same else written + self._size(source)
        if schema.name == "aten::index_select":
            return 2 * written
        return written + sum(map(self._size, before))

    def _size(self, x: Tensor) -> int:
        size = x.numel() * x.itemsize
        return size if size >= self._least else 0

    def _live(self) -> list[tuple[int, bool]]:
        self._storages = {entry: size for entry, size in self._storages.items() if not entry.expired()}
        return list(self._storages.values())

    def occupied(self, besides: Sequence[Tensor]) -> int:
        """Bytes of tensors that were made while this counted, and still exist."""
        gc.collect()
        for _ in range(100):  # threads of gloo let go of what they sent a little later
            if not any(is_sent for _, is_sent in self._live()):
                break
            time.sleep(0.01)
        return sum(size for size, _ in self._live()) - sum(x.untyped_storage().nbytes() for x in besides)


@dataclass
class Attention:
    """Stands in for the attention of a rectangle: it keeps what attention keeps, and its own operators do not count."""

    memory: Memory | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        out, lse = _Zeros.apply(self, q, k, v)
        return out, lse, None

    def uncounted(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        assert self.memory is not None
        self.memory.is_counting = False
        try:
            return compute()
        finally:
            self.memory.is_counting = True


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = stand_in.uncounted(lambda: (q.new_zeros(q.shape), q.new_zeros(q.shape[:3], dtype=torch.float32)))
        ctx.stand_in = stand_in
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return None, *ctx.stand_in.uncounted(lambda: tuple(x.new_zeros(x.shape) for x in (q, k, v)))


def context_of(mode: Mode, per_node: int) -> Context:
    """The context of a mode for all processes."""
    if mode in ("ring, ulysses", "all_gather, ulysses"):
        mesh = init_device_mesh("cpu", (dist.get_world_size() // per_node, per_node))
        return Context(mesh, tuple(mode.split(", ")))
    group = dist.group.WORLD
    assert group is not None
    return Context(group, mode)


def counted(modes: Sequence[Mode], models: Sequence[Model], tokens: int) -> dict[tuple[Mode, Model], tuple[Pass, Pass]]:
    """In each process: forward and backward of every mode and model; each process has `tokens` of one sequence."""
    return {(mode, model): _passes(context_of(mode, 2), model, tokens) for mode in modes for model in models}


def _passes(context: Context, model: Model, tokens: int) -> tuple[Pass, Pass]:
    def by_token(nheads: int) -> Tensor:
        return torch.randn(1, tokens, nheads, model.head_dim, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = (by_token(n).requires_grad_() for n in (model.heads, model.kv_heads, model.kv_heads))
    dout = by_token(model.heads)
    attend = Attention()
    least = tokens // 2 * model.head_dim * model.element_bytes  # a chunk of one head; the numbers of rows are fewer

    def count(compute: Callable[[], Sequence[Tensor]]) -> tuple[Pass, Sequence[Tensor]]:
        sending, memory = Sending(), Memory(least)
        attend.memory = memory
        with (
            mock.patch.object(collectives, "dist", sending),
            mock.patch.object(collectives, "gather_equal", sending.gather_equal),
            mock.patch.object(ring, "attend", attend),
            mock.patch.object(gathered, "attend", attend),
            memory,
        ):
            results = compute()
        found = Pass(sending.sent, sending.messages, memory.moved, memory.occupied(results), memory.under_way)
        return found, results

    forward, (out,) = count(lambda: (attention(q, k, v, mask=masks.causal(), context=context, backend="torch"),))
    backward, _ = count(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return forward, backward
