"""The reference GPT, trained with its tokens split among processes, has the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedattn import fuse
from fusedattn.distributed import Context
from fusedattn.transformer import GPTModel
from tests.distributed.processes import NEEDS_PROCESSES, in_processes
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

STEPS, BATCH, LENGTH, VOCABULARY = 50, 2, 37, 29
MODES = ("ring", "all_gather", "ulysses")


def train(mode: str | None, positions: str) -> list[float]:
    """The loss of each step; with a mode, the tokens of each batch are split among the processes."""
    torch.manual_seed(0)
    model = fuse(GPTModel(VOCABULARY, 32, 4, 2, max_len=LENGTH, positions=positions, n_kv_heads=2), backend="torch")
    context = None
    if mode is not None:
        group = dist.group.WORLD
        assert group is not None
        context = Context(group, mode=mode)  # type: ignore[arg-type]
        model = fuse(model, backend="torch", context=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        ids = (starts + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        losses.append(_step(model, optimizer, ids, context))
    return losses


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, context: Context | None) -> float:
    inputs, targets = ids[:, :-1], ids[:, 1:]
    n_tokens = targets.numel()
    if context is not None:
        inputs, targets = context.shard(inputs), context.shard(targets)
    logits = model(inputs).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / n_tokens
    optimizer.zero_grad()
    loss.backward()
    total = loss.detach().clone()
    if context is not None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
    optimizer.step()
    return total.item()


@quick.only(world=4, positions="rotary", mode="ring")  # of two, both neighbours are the same
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal"])
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_one_process(tmp_path: Path, world: int, positions: str, mode: str) -> None:
    expected = torch.tensor(train(None, positions))
    assert expected[-1] < 0.7 * expected[0], "nothing was learned"
    for found in in_processes(world, tmp_path, train, mode, positions):
        assert (torch.tensor(found) - expected).abs().max() < 2e-5
