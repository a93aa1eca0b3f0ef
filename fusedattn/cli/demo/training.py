"""Training, evaluation and sampling of the demo's model."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from fusedattn.cli.demo import corpus
from fusedattn.cli.demo.corpus import Batch, Corpus
from fusedattn.cli.demo.settings import Settings
from fusedattn.transformer import GPTModel

WARMUP = 0.1  # share of the steps
PROMPT = 64  # bytes


@dataclass(frozen=True)
class Step:
    """One step of training: its loss in nats per byte, and the tokens per second since the first step ended."""

    number: int
    loss: float
    tokens_per_second: float


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """``torch.autocast``, or nothing if ``dtype`` is None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_of(model: GPTModel, batch: Batch) -> Tensor:
    """Mean cross-entropy, nats per token."""
    return F.cross_entropy(model(batch.ids).flatten(0, 1).float(), batch.targets.flatten())


def train(model: GPTModel, text: Corpus, settings: Settings, steps: int, generator: torch.Generator) -> Iterator[Step]:
    """Train; yields after every step."""
    device = model.embedding.weight.device
    optimizer, schedule = optimizer_of(model, settings.learning_rate, steps)
    model.train()
    start, spoken = 0.0, 0
    for number in range(1, steps + 1):
        batch = corpus.random_batch(text.train, settings.batch, settings.seqlen, generator, device)
        with autocast(device, settings.autocast):
            loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        value = loss.item()
        if number == 1:  # the first step compiles, and is not counted
            start = time.perf_counter()
        else:
            spoken += batch.ids.numel()
        elapsed = time.perf_counter() - start
        yield Step(number, value, spoken / elapsed if spoken else 0.0)


def optimizer_of(model: GPTModel, learning_rate: float, steps: int) -> tuple[AdamW, LambdaLR]:
    """AdamW, and its learning rate over so many steps: a linear warm-up, then a cosine decay."""
    optimizer = AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: _factor(step, steps))


def _factor(step: int, steps: int) -> float:
    """The factor of the learning rate: linear up, then a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


@torch.no_grad()
def held_out_loss(model: GPTModel, text: Corpus, settings: Settings, n_batches: int = 8) -> float:
    """Mean loss, nats per byte, over the held-out text."""
    device = model.embedding.weight.device
    model.eval()
    total, n_tokens = 0.0, 0
    for batch in corpus.spread_batches(text.held_out, n_batches, settings.batch, settings.seqlen, device):
        with autocast(device, settings.autocast):
            total += loss_of(model, batch).item() * batch.ids.numel()
        n_tokens += batch.ids.numel()
    return total / n_tokens


def sample(model: GPTModel, text: Corpus, settings: Settings, generator: torch.Generator) -> tuple[str, str]:
    """A piece of held-out text, and its continuation by the model."""
    device = model.embedding.weight.device
    held_out = bytes(text.held_out[:4096].tolist())
    start = min(held_out.find(b"\n") + 1, len(text.held_out) - 1)  # the first whole line
    prompt = text.held_out[start : start + PROMPT].to(device).long()[None]
    with autocast(device, settings.autocast):
        tokens = model.generate(prompt, settings.sample, temperature=0.8, top_k=40, generator=generator)
    both = bytes(tokens[0].tolist())
    return _readable(both[: prompt.shape[1]]), _readable(both[prompt.shape[1] :])


def _readable(text: bytes) -> str:
    """The text with control characters, which could move the cursor, replaced by the replacement character."""
    decoded = text.decode(errors="replace").replace("\r\n", "\n").expandtabs(4)
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in decoded)
