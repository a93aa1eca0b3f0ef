"""Train the reference GPT with fused and with eager attention, from one seed and on the same batches.

    python -m tests.tools.soak [--steps 2000] [--mixed-steps 500]

Training amplifies rounding errors until two runs are as far apart as any two can be, so no fixed tolerance can decide
whether a fused run is right. The measure is eager attention that sums in another order, which is equally right: in the
geometric mean over all windows of steps, the fused run must not depart from eager further than these runs do. The same
model is then trained in float16 (with a scaled loss) and in bfloat16; no gradient may be NaN.

Writes docs/results/soak.json and docs/images/soak.png; exit status 1 if one of these conditions fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import DEVICE, INTERPRETING  # isort: skip  (decides how Triton runs, before anything imports it)

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.report.style import drawing
from fusedattn import fuse, masks
from fusedattn.cli.demo.figure import FUSED, REFERENCE
from fusedattn.cli.machine import versions
from fusedattn.masks import as_mask
from fusedattn.transformer import GPTModel, ScaledDotProductAttention

ROOT = Path(__file__).resolve().parents[2]
VOCAB, SEQLEN, BATCH = 8, 32, 1
LEARNING_RATE = 1e-3
WINDOW = 100  # steps over which differences of the loss are averaged
# The allowed departure of fused from eager, relative to the largest of the eager runs that sum in another order.
DEPARTURE_LIMIT = 1.5


class KeysReversed(ScaledDotProductAttention):
    """Eager attention that sums over the keys from the last to the first."""

    def forward(self, q, k, v, mask=None, *, rope=None, qk_norm=None, cache=None, need_weights=True):
        assert cache is None
        assert qk_norm is None
        if rope is not None:
            q, k = rope.rotate(q, k)
        visible = as_mask(mask).dense(q.shape[2], k.shape[2], device=q.device)
        return super().forward(q, k.flip(2), v.flip(2), masks.boolean(visible.flip(3)), need_weights=need_weights)


class FeaturesReversed(ScaledDotProductAttention):
    """Eager attention whose scores sum over the features from the last to the first."""

    def forward(self, q, k, v, mask=None, *, rope=None, qk_norm=None, cache=None, need_weights=True):
        assert cache is None
        assert qk_norm is None
        if rope is not None:
            q, k = rope.rotate(q, k)
        return super().forward(q.flip(3), k.flip(3), v, mask, need_weights=need_weights)


class BothReversed(KeysReversed, FeaturesReversed):
    """Eager attention with both sums reversed."""


ORDERS = {"keys reversed": KeysReversed, "features reversed": FeaturesReversed, "both reversed": BothReversed}


def make_model(attention: str) -> GPTModel:
    """A model, always with the same weights; `attention` is ``"eager"``, ``"fused"`` or a key of :data:`ORDERS`."""
    torch.manual_seed(0)
    model = GPTModel(VOCAB, d_model=32, n_heads=2, n_layers=2, d_ff=64, n_kv_heads=1, positions="rotary").to(DEVICE)
    if attention == "fused":
        return fuse(model, backend="triton")
    for module in model.modules():
        if attention != "eager" and type(module) is ScaledDotProductAttention:
            module.__class__ = ORDERS[attention]
    return model


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``(ids, valid)``, ``(BATCH, SEQLEN)`` each: random words of a small dictionary, then padding.

    Words share their tokens, so the next token depends on several tokens before it.
    """
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(VOCAB, (n,), generator=generator) for n in (3, 4, 5, 6, 7, 8)]
    for _ in range(steps):
        ids = torch.empty(BATCH, SEQLEN, dtype=torch.long)
        for row in ids:
            order = torch.randint(len(words), (SEQLEN,), generator=generator).tolist()
            row.copy_(torch.cat([words[i] for i in order])[:SEQLEN])
        lengths = torch.randint(SEQLEN // 2, SEQLEN + 1, (BATCH, 1), generator=generator)
        yield ids.to(DEVICE), (torch.arange(SEQLEN) < lengths).to(DEVICE)


@dataclass
class Training:
    """The record of a training: the loss of each step, and the number of steps with non-finite gradients."""

    losses: list[float] = field(default_factory=list)
    nan_gradients: int = 0  # a NaN is always a fault
    overflows: int = 0  # an infinity, which a scaled float16 loss may cause now and then


def train(attention: str, steps: int, dtype: torch.dtype = torch.float32) -> Training:
    """Train with AdamW; with a 16-bit `dtype` under autocast, and in float16 with a scaled loss."""
    model, result = make_model(attention), Training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16, init_scale=2.0**14)
    for ids, valid in batches(steps):
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(ids[:, :-1], valid[:, :-1])
            loss = F.cross_entropy(logits.float()[valid[:, 1:]], ids[:, 1:][valid[:, 1:]])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        result.nan_gradients += int(gradients.isnan().any())
        result.overflows += int(gradients.isinf().any())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        result.losses.append(loss.item())
    return result


def departure(losses: list[float], from_losses: list[float]) -> list[float]:
    """Root mean square of the difference in each window of steps."""
    squares = [(a - b) ** 2 for a, b in zip(losses, from_losses, strict=True)]
    return [math.sqrt(statistics.fmean(squares[i : i + WINDOW])) for i in range(0, len(squares), WINDOW)]


def departure_over_noise(departures: dict[str, list[float]]) -> list[float]:
    """The departure of fused in each window, relative to the largest of the runs in another order."""
    return [fused / max(departures[name][i] for name in ORDERS) for i, fused in enumerate(departures["fused"])]


def soak(steps: int, mixed_steps: int) -> tuple[dict[str, Any], dict[str, Training]]:
    """Run everything; returns the figures, and the float32 trainings by attention."""
    runs = {}
    for attention in ("eager", *ORDERS, "fused"):
        start = time.perf_counter()
        runs[attention] = train(attention, steps)
        print(
            f"float32 {attention}: loss {final(runs[attention]):.4f}, {time.perf_counter() - start:.0f} s", flush=True
        )
    eager = runs["eager"].losses
    departures = {name: departure(run.losses, eager) for name, run in runs.items() if name != "eager"}
    ratios = departure_over_noise(departures)
    figures: dict[str, Any] = {
        "versions": versions(),
        "device": "CPU, through Triton's interpreter" if INTERPRETING else torch.cuda.get_device_name(),
        "steps": steps,
        "first_loss": eager[0],
        "final_loss": {name: final(run) for name, run in runs.items()},
        "last_departure_from_eager": {name: windows[-1] for name, windows in departures.items()},
        "departure_over_noise": {"geometric_mean": statistics.geometric_mean(ratios), "largest": max(ratios)},
        "nan_gradients": runs["fused"].nan_gradients,
        "mixed": {},
    }
    for dtype in (torch.float16, torch.bfloat16):
        fused, plain = train("fused", mixed_steps, dtype), train("eager", mixed_steps, dtype)
        name = str(dtype).removeprefix("torch.")
        figures["mixed"][name] = {
            "steps": mixed_steps,
            "final_loss": {"fused": final(fused), "eager": final(plain)},
            "nan_gradients": fused.nan_gradients,
            "overflows": {"fused": fused.overflows, "eager": plain.overflows},
        }
        print(f"{name}: {figures['mixed'][name]}", flush=True)
    return figures, runs


def final(run: Training) -> float:
    """The mean loss of the last window."""
    return statistics.fmean(run.losses[-WINDOW:])


def faults(figures: dict[str, Any]) -> list[str]:
    """The conditions that fail, as sentences."""
    found = []
    ratio = figures["departure_over_noise"]["geometric_mean"]
    if not ratio <= DEPARTURE_LIMIT:
        found.append(f"fused departs {ratio:.2f} times as far from eager as eager in another order")
    if figures["nan_gradients"]:
        found.append(f"float32: {figures['nan_gradients']} steps with a NaN in the gradient")
    for dtype, run in figures["mixed"].items():
        if run["nan_gradients"]:
            found.append(f"{dtype}: {run['nan_gradients']} steps with a NaN in the gradient")
    return found


def draw(runs: dict[str, Training], path: Path) -> None:
    """Plot the loss of the fused and the eager run, and the departure of each run from eager."""
    eager = runs["eager"].losses
    middles = [i + WINDOW / 2 for i in range(0, len(eager), WINDOW)]
    with drawing((11, 4), 120) as figure:
        left, right = figure.subplots(1, 2)
        for name, color, line in (("eager", REFERENCE, "-"), ("fused", FUSED, (0, (4, 3)))):
            smooth = [statistics.fmean(runs[name].losses[i : i + WINDOW]) for i in range(0, len(eager), WINDOW)]
            left.plot(middles, smooth, label=name, color=color, linewidth=2, linestyle=line)
        left.set(xlabel="step", ylabel="loss (nats per token)", title="Training the reference GPT, float32")
        left.set_ylim(bottom=0)
        left.legend()
        for name, run in runs.items():
            if name != "eager":
                look = {"color": FUSED, "linewidth": 2} if name == "fused" else {"color": REFERENCE, "linewidth": 1}
                label = {"fused": "fused", "keys reversed": "eager, summed in other orders"}.get(name)
                right.plot(middles, departure(run.losses, eager), label=label, **look)
        right.set(xlabel="step", ylabel="difference of the losses (RMS)", yscale="log", title="Departure from eager")
        right.legend()
        figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="float32 steps of each run (default: %(default)s)")
    parser.add_argument("--mixed-steps", type=int, default=500, help="16-bit steps of each run (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 5 * WINDOW:
        parser.error(
            f"--steps: got {options.steps}, allowed are {5 * WINDOW} and more: rounding errors must have grown"
        )
    torch.set_num_threads(1)  # the model is small, and the order of sums must not depend on the machine's load
    figures, runs = soak(options.steps, options.mixed_steps)
    (ROOT / "docs/results/soak.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(runs, ROOT / "docs/images/soak.png")
    print(json.dumps(figures, indent=1))
    found = faults(figures)
    print("\n".join(found) or "fused and eager coincide within the noise of the order of sums; no NaN")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
