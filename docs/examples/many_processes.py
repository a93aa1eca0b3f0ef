"""Split a sequence among processes: each has some of its tokens, and attention is still to all of them.

    torchrun --standalone --nproc-per-node 2 docs/examples/many_processes.py

Keys and values go around in a ring (Liu et al., 2023). Loss and gradients are compared with those of one process.
"""

from __future__ import annotations

import argparse
import copy
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedattn import fuse
from fusedattn.distributed import Context
from fusedattn.transformer import GPTModel


def text_of_library(batch: int, seqlen: int) -> Tensor:
    """The first bytes of the largest modules of Python's standard library: ids ``(batch, seqlen + 1)``."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size)[-batch:]
    return torch.tensor([list(path.read_bytes()[: seqlen + 1]) for path in paths])


def share_of_loss(model: GPTModel, ids: Tensor, targets: Tensor, n_tokens: int) -> Tensor:
    """The tokens of this process, divided by the number of all: the sum over processes is the mean loss."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum") / n_tokens


def training_step(model: GPTModel, optimizer: torch.optim.Optimizer, text: Tensor, context: Context) -> float:
    ids, targets = context.shard(text[:, :-1]), context.shard(text[:, 1:])
    optimizer.zero_grad()
    loss = share_of_loss(model, ids, targets, text[:, 1:].numel())
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item()


def check(model: GPTModel, alone: GPTModel, loss: float, text: Tensor) -> None:
    """Compare loss and gradients with those of a copy that sees whole sequences."""
    expected = share_of_loss(alone, text[:, :-1], text[:, 1:], text[:, 1:].numel())
    expected.backward()
    torch.testing.assert_close(loss, expected.item(), rtol=1e-5, atol=0)
    largest = 0.0
    for (name, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        difference = (own.grad - other.grad).abs().max().item()
        if difference > 1e-4 * other.grad.abs().max().item() + 1e-7:
            raise RuntimeError(f"{name}: gradients differ by {difference:.1e}")
        largest = max(largest, difference)
    print(f"loss and gradients agree with one process: {abs(loss - expected.item()):.1e} and {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # gloo carries the few numbers by which processes compare their calls.
    dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
    context = Context(dist.group.WORLD, mode="ring")
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)  # the same parameters everywhere
    model = GPTModel(256, 128, 4, 2, max_len=args.seqlen, positions="rotary").to(device)
    alone = fuse(copy.deepcopy(model))
    fuse(model, context=context)
    text = text_of_library(2, args.seqlen).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_own = context.shard(text[:, 1:]).shape[1]
    own = f"process {dist.get_rank()} of {dist.get_world_size()}: {n_own} of {args.seqlen} tokens"
    print(own + "\n", end="", flush=True)  # one write, so that lines of processes do not mix

    for step in range(1, args.steps + 1):
        loss = training_step(model, optimizer, text, context)
        if step == 1 and is_first:
            check(model, alone, loss, text)
        if step in (1, args.steps) and is_first:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
