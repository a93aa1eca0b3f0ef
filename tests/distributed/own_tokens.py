"""A small problem whose tokens are split among processes, as arguments of each one's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fusedattn import attention, masks
from fusedattn.distributed import Context
from tests.distributed.processes import new_group

BATCH, NHEADS, HEAD_DIM = 2, 4, 8

CONTEXTS: dict[str, dict[str, Any]] = {
    "ring": {"mode": "ring"},
    "contiguous ring": {"mode": "ring", "balance": "contiguous"},
    "all_gather": {"mode": "all_gather"},
    "ulysses": {"mode": "ulysses"},
    "ring of two shares": {"mode": ("ring", "ulysses")},
    "all_gather of two shares": {"mode": ("all_gather", "ulysses")},
}
PLAIN = ("ring", "all_gather", "ulysses")  # modes of one dimension, balanced as by default
PAIRS = ("ring of two shares", "all_gather of two shares")  # of a mesh of 2 x 2 processes


def contexts_of(world: int) -> tuple[str, ...]:
    """Those of so many processes, 2 or 4."""
    return tuple(name for name in CONTEXTS if world == 4 or name not in PAIRS)


def context_of(name: str) -> Context:
    """A context whose groups nothing has been sent in; all processes of the world call this."""
    if name not in PAIRS:
        return Context(new_group(), **CONTEXTS[name])
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    return Context(DeviceMesh("cpu", ranks), **CONTEXTS[name])


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of this process."""

    context: Context
    q: Tensor
    k: Tensor
    v: Tensor
    seqlen: int

    @property
    def length(self) -> int:
        """The number of tokens of this process."""
        return self.q.shape[2]

    def call(self, **changes: Any) -> Any:
        """The attention of these tokens, causal unless `changes` say otherwise; they may replace q, k and v."""
        arguments: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "mask": masks.causal(), "backend": "torch"}
        arguments |= changes
        q, k, v = (arguments.pop(name) for name in "qkv")
        return attention(q, k, v, context=self.context, **arguments)

    def out_and_gradients(self, **changes: Any) -> list[Tensor]:
        """out and the gradients of its sum of squares by the tokens of this process."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = self.call(**dict(zip("qkv", leaves, strict=True)), **changes)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def whole_tokens(seqlen: int, dtype: torch.dtype = torch.float64, nheads_kv: int = NHEADS) -> list[Tensor]:
    """q, k and v of the whole sequence."""
    generator = torch.Generator().manual_seed(seqlen)
    heads = NHEADS, nheads_kv, nheads_kv
    return [torch.randn(BATCH, n, seqlen, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def own_tokens(context: Context, seqlen: int, dtype: torch.dtype = torch.float64, nheads_kv: int = NHEADS) -> OwnTokens:
    """The tokens of this process."""
    return OwnTokens(context, *(context.shard(x, 2) for x in whole_tokens(seqlen, dtype, nheads_kv)), seqlen)


def by_one_process(seqlen: int) -> list[Tensor]:
    """What :meth:`OwnTokens.out_and_gradients` are for the whole sequence."""
    leaves = [x.requires_grad_() for x in whole_tokens(seqlen)]
    out = attention(*leaves, mask=masks.causal(), backend="torch")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
