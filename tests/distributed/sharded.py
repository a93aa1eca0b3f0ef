"""A problem solved by several processes, each of which has some of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedattn import attention, testing
from fusedattn.biases import Bias
from fusedattn.distributed import Context
from fusedattn.masks import Documents, Layout
from fusedattn.testing import Inputs


def local(inputs: Inputs, context: Context) -> Inputs:
    """The part of a problem that this process is given: its own tokens, and rows of pairs."""

    def of_tokens(x: Tensor | None) -> Tensor | None:
        return None if x is None else context.shard(x, -1)

    def rows(x: Tensor | None) -> Tensor | None:
        if x is None or x.dim() < 2 or x.shape[-2] == 1:
            return x
        return context.shard(x, -2)

    mask, bias, rope = inputs.mask, inputs.bias, inputs.rope
    documents, layout = mask.documents, mask.layout
    if documents is not None:
        documents = Documents(context.shard(documents.q, 1), context.shard(documents.k, 1))
    if layout is not None:
        blocks = context.shard(layout.blocks.repeat_interleave(layout.block_q, -2), -2)[..., :: layout.block_q, :]
        layout = Layout(blocks, layout.block_q, layout.block_k)
    mask = replace(
        mask, valid=of_tokens(mask.valid), allowed=rows(mask.allowed), documents=documents, layout=layout,
        tree=rows(mask.tree),
    )  # fmt: skip
    if bias is not None:
        bias = Bias(rows(bias.tensor), bias.slopes, rows(bias.relative))
    if rope is not None:
        rope = rope.at(of_tokens(rope.positions_q), of_tokens(rope.positions_k))
    q, k, v, dout = (context.shard(x, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    return replace(
        inputs, q=q, k=k, v=v, dout=dout, dlse=context.shard(inputs.dlse, 2), mask=mask, bias=bias, rope=rope
    )


def solve(
    inputs: Inputs, context: Context, backend: str, layout: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    """out, lse and the gradients of all leaves, of the whole problem.

    Args:
        layout: the tokens of a process in another order in memory.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.leaves.items()}
    own = local(inputs.with_leaves(leaves), context)
    if layout is not None:
        q, k, v, dout = map(layout, (own.q, own.k, own.v, own.dout))
        own = replace(own, q=q, k=k, v=v, dout=dout)
    out, lse = attention(
        own.q, own.k, own.v, **own.options, return_lse=True, context=context, backend=backend, **options
    )
    into_lse = own.dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (own.dout, into_lse), allow_unused=True)
    results = {"out": context.unshard(out.detach(), 2), "lse": context.unshard(lse.detach(), 2)}
    for (name, leaf), grad in zip(leaves.items(), found, strict=True):
        total = torch.zeros_like(leaf) if grad is None else grad
        dist.all_reduce(total)  # a process has the gradient of its tokens, and a share of that of common tensors
        results[f"d{name}"] = total
    return results


def whole(inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """The same by one process."""
    return testing.run(lambda *args, **options: attention(*args, **options, backend=backend), inputs)
