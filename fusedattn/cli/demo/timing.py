"""Time and peak memory of a training step, reference and fused, at growing sequence lengths."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusedattn.cli.demo.corpus import Batch, Corpus, spread_batches
from fusedattn.cli.demo.memory import Peak, peak_memory
from fusedattn.cli.demo.training import autocast, loss_of
from fusedattn.transformer import GPTModel

MAX_REPEATS, MIN_REPEATS, ENOUGH_SECONDS = 9, 3, 4.0


@dataclass(frozen=True)
class Cost:
    """The cost of forward and backward of one model at batch 1; None if it could not be measured."""

    seconds: float | None  # None: out of memory
    peak_bytes: int | None  # beyond the model and its inputs

    @property
    def milliseconds(self) -> float | None:
        """The time in ms."""
        return None if self.seconds is None else 1e3 * self.seconds

    @property
    def mebibytes(self) -> float | None:
        """The memory in MiB."""
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


@dataclass(frozen=True)
class Comparison:
    """Both models at one sequence length."""

    seqlen: int
    reference: Cost
    fused: Cost


def measure(
    reference: GPTModel,
    fused: GPTModel,
    text: Corpus,
    lengths: tuple[int, ...],
    dtype: torch.dtype | None,
) -> Iterator[Comparison]:
    """One comparison per length: the medians of interleaved runs."""
    device = reference.embedding.weight.device
    models = (reference, fused)
    for seqlen in lengths:
        if len(text.train) <= seqlen:
            return
        batch = next(spread_batches(text.train, 1, 1, seqlen, device))
        if seqlen == lengths[0]:
            for model in models:  # a first step, so that its one-time loads are not measured
                _timed_step(model, batch, dtype)
        peaks = [_try(model, batch, dtype) for model in models]
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(MAX_REPEATS):
            for model, peak, seconds in zip(models, peaks, times, strict=True):
                if peak is not None:
                    seconds.append(_timed_step(model, batch, dtype))
            if repeat + 1 >= MIN_REPEATS and sum(map(sum, times)) > ENOUGH_SECONDS:
                break
        costs = [
            Cost(None, None) if peak is None else Cost(statistics.median(seconds), peak.bytes)
            for peak, seconds in zip(peaks, times, strict=True)
        ]
        yield Comparison(seqlen, *costs)


def _try(model: GPTModel, batch: Batch, dtype: torch.dtype | None) -> Peak | None:
    """The peak memory of a step; None if it runs out of memory."""
    device = batch.ids.device
    with contextlib.suppress(torch.OutOfMemoryError):
        with peak_memory(device) as peak:
            _timed_step(model, batch, dtype)
        return peak
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return None


def _timed_step(model: GPTModel, batch: Batch, dtype: torch.dtype | None) -> float:
    device = batch.ids.device
    _wait(device)
    start = time.perf_counter()
    with autocast(device, dtype):
        loss = loss_of(model, batch)
    loss.backward()
    _wait(device)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
