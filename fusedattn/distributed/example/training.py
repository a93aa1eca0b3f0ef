"""Training: by all processes, each with its tokens, and by one alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedattn import fuse
from fusedattn.cli.demo import corpus
from fusedattn.cli.demo.corpus import Batch
from fusedattn.cli.demo.settings import Sizes
from fusedattn.cli.demo.training import Step, optimizer_of
from fusedattn.distributed import Context
from fusedattn.distributed.example.plan import Plan
from fusedattn.transformer import GPTModel


@dataclass(frozen=True)
class Losses:
    """Nats per byte: of every step, and of the held-out text in the end."""

    steps: list[float]
    held_out: float

    def differences(self, other: Losses) -> list[float]:
        """The distances of the losses of every step."""
        return [abs(mine - its) for mine, its in zip(self.steps, other.steps, strict=True)]


class Learner:
    """A model and its optimizer. With a context, the tokens of each batch are split among its processes."""

    def __init__(self, model: GPTModel, sizes: Sizes, context: Context | None) -> None:
        self.model = model
        self._context = context
        self._optimizer, self._schedule = optimizer_of(model, sizes.learning_rate, sizes.steps)

    def step(self, batch: Batch) -> float:
        """Learn from a batch, and return its loss."""
        self.model.train()
        self._optimizer.zero_grad()
        share = self._share_of_loss(batch)
        share.backward()
        if self._context is not None:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return self._total(share)

    @torch.no_grad()
    def loss(self, batches: Iterator[Batch]) -> float:
        """The mean loss of batches."""
        self.model.eval()
        total, n_tokens = 0.0, 0
        for batch in batches:
            total += self._total(self._share_of_loss(batch)) * batch.ids.numel()
            n_tokens += batch.ids.numel()
        return total / n_tokens

    def _share_of_loss(self, batch: Batch) -> Tensor:
        """What the tokens of this process add to the mean over the tokens of the batch."""
        ids, targets = batch.ids, batch.targets  # (batch, seqlen)
        if self._context is not None:
            ids, targets = self._context.shard(ids), self._context.shard(targets)
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / batch.ids.numel()

    def _total(self, share: Tensor) -> float:
        total = share.detach().clone()
        if self._context is not None:
            dist.all_reduce(total)
        return total.item()


class Training:
    """All processes train one model; if the plan compares, rank 0 also trains it alone."""

    def __init__(self, plan: Plan, context: Context) -> None:
        torch.manual_seed(plan.seed)  # the same parameters in every process
        self._plan, sizes = plan, plan.sizes
        model = GPTModel(
            256, sizes.d_model, sizes.n_heads, sizes.n_layers, max_len=sizes.seqlen, positions=plan.positions
        ).to(plan.device)  # fmt: skip
        self._alone: Learner | None = None
        self._losses_alone: list[float] = []
        if plan.compares and dist.get_rank() == 0:
            self._alone = Learner(fuse(copy.deepcopy(model), backend=plan.backend), sizes, None)
        self._split = Learner(fuse(model, backend=plan.backend, context=context), sizes, context)
        self.n_parameters: int = sum(parameter.numel() for parameter in model.parameters())

    def steps(self) -> Iterator[Step]:
        """Train on random batches, the same in every process; yields after every step."""
        sizes, device = self._plan.sizes, self._plan.device
        generator = torch.Generator().manual_seed(self._plan.seed)
        for number in range(1, sizes.steps + 1):
            batch = corpus.random_batch(self._plan.text.train, sizes.batch, sizes.seqlen, generator, device)
            loss = self._split.step(batch)
            if self._alone is not None:
                self._losses_alone.append(self._alone.step(batch))
            yield Step(number, loss, 0.0)

    def outcome(self, losses: list[float]) -> tuple[Losses, Losses | None]:
        """The losses of all processes, of which `losses` are those of the steps, and of one alone."""
        split = Losses(losses, self._split.loss(self._held_out()))
        if self._alone is None:
            return split, None
        return split, Losses(self._losses_alone, self._alone.loss(self._held_out()))

    def _held_out(self) -> Iterator[Batch]:
        sizes = self._plan.sizes
        return corpus.spread_batches(self._plan.text.held_out, 8, sizes.batch, sizes.seqlen, self._plan.device)
