"""``python -m bench.variants_on_cpu``: one small GPT, trained on one text with softmax, linear and sparse attention.

Measures the loss on held-out text, and the processor time of one thread and the peak memory of a forward and backward
at several lengths. Writes ``docs/results/variants_on_cpu.json``, ``docs/images/variants.png`` and the table of
``docs/variants.md`` in a quarter of an hour. ``python -m bench.variants_on_cpu table`` measures nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.measuring.timing import HostStopwatch, Rounds, medians, without_set_up
from bench.report.page import table_of, write_block
from bench.report.style import drawing
from fusedattn import fuse, masks
from fusedattn.cli.demo import corpus, settings, training
from fusedattn.cli.demo.memory import peak_memory
from fusedattn.cli.machine import versions
from fusedattn.transformer import GPTModel

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS, PICTURE = (
    DOCS / name for name in ("variants.md", "results/variants_on_cpu.json", "images/variants.png")
)

SETTINGS = replace(settings.CPU, n_layers=2, seqlen=512, batch=4, steps=200, lengths=(512, 1024, 2048, 4096))
VARIANTS: dict[str, str | masks.Mask] = {
    "softmax": "softmax",
    "linear": "linear",
    "strided(32)": masks.strided(32),
    "fixed(32, 4)": masks.fixed(32, 4),
    "dilated(32, 0, 4)": masks.dilated(32, 0, 4),
    "bigbird(32)": masks.bigbird(32, causal=True),
}
ROUNDS = Rounds(least=3, most=10, seconds=40.0)
COLORS = ("#2b2b2b", "#0b6e6e", "#d1743c", "#7a5195", "#4878a8", "#b0a030")


def model_of(variant: str) -> GPTModel:
    """The model, with the same initial weights for every variant."""
    torch.manual_seed(0)
    model = GPTModel(
        256,
        SETTINGS.d_model,
        SETTINGS.n_heads,
        SETTINGS.n_layers,
        max_len=max(SETTINGS.lengths),
        positions="rotary",
        attention=VARIANTS[variant],
    )
    return fuse(model, backend="torch")


def train(variant: str, text: corpus.Corpus) -> dict[str, Any]:
    """The loss of every step, and that of the held-out text at the end, in nats per byte."""
    model, generator = model_of(variant), torch.Generator().manual_seed(0)
    losses = [step.loss for step in training.train(model, text, SETTINGS, SETTINGS.steps, generator)]
    return {"losses": losses, "held_out": training.held_out_loss(model, text, SETTINGS)}


def step_of(variant: str, text: corpus.Corpus, seqlen: int) -> Callable[[], None]:
    """A forward and backward of one sequence."""
    model = model_of(variant)
    (batch,) = corpus.spread_batches(text.train, 1, 1, seqlen, torch.device("cpu"))

    def step() -> None:
        training.loss_of(model, batch).backward()

    step()  # warms up, and makes the gradients
    return step


def costs(text: corpus.Corpus) -> list[dict[str, Any]]:
    """For each variant and length: time relative to softmax, and peak memory in MiB."""
    stopwatch, rows = HostStopwatch(torch.device("cpu"), clock=time.thread_time), []
    for seqlen in SETTINGS.lengths:
        steps = {variant: step_of(variant, text, seqlen) for variant in VARIANTS}
        times = medians(without_set_up(steps), stopwatch, ROUNDS)
        for variant, step in steps.items():
            with peak_memory(torch.device("cpu")) as peak:
                step()
            assert peak.bytes is not None, "peak memory is known on Linux with glibc"
            row = {
                "variant": variant,
                "n": seqlen,
                "time": times[variant] / times["softmax"],
                "memory": peak.bytes / 2**20,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def draw(report: dict[str, Any]) -> None:
    """The losses, and time and memory against the length, as a PNG."""
    from matplotlib.ticker import LogLocator

    with drawing((12, 4.2), 150) as figure:
        of_loss, of_time, of_memory = figure.subplots(1, 3)
        for color, (variant, found) in zip(COLORS, report["training"].items(), strict=True):
            losses = torch.tensor(found["losses"])
            smooth = losses.unfold(0, 15, 1).mean(1)
            of_loss.plot(range(8, 8 + len(smooth)), smooth, color=color, label=f"{variant}: {found['held_out']:.3f}")
            rows = [row for row in report["costs"] if row["variant"] == variant]
            lengths = [row["n"] for row in rows]
            of_time.plot(lengths, [row["time"] for row in rows], "o-", color=color)
            of_memory.plot(lengths, [row["memory"] for row in rows], "o-", color=color)
        of_loss.set(title="Training", xlabel="step", ylabel="loss (nats per byte), mean of 15 steps")
        of_loss.legend(title="held-out text, at the end")
        of_time.set(title="Time of a step", ylabel="relative to softmax")
        of_memory.set(title="Peak memory of a step", ylabel="MiB", yscale="log")
        for axes in (of_time, of_memory):
            axes.set_xscale("log", base=2)
            axes.set_xticks(SETTINGS.lengths, [f"{n:,}" for n in SETTINGS.lengths])
            axes.set(xlabel="tokens")
            axes.minorticks_off()
        of_memory.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        of_memory.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        of_time.set_ylim(bottom=0)
        figure.savefig(PICTURE)


def table(report: dict[str, Any]) -> str:
    """Markdown: the versions, and for each variant its loss, and time and memory at each length."""
    by = {(row["variant"], row["n"]): row for row in report["costs"]}
    head = [
        "attention",
        "loss",
        *(f"time, {n:,}" for n in SETTINGS.lengths),
        *(f"MiB, {n:,}" for n in SETTINGS.lengths),
    ]
    lines = [
        [
            f"`{variant}`",
            f"{found['held_out']:.3f}",
            *(f"{by[variant, n]['time']:.2f}" for n in SETTINGS.lengths),
            *(f"{by[variant, n]['memory']:.0f}" for n in SETTINGS.lengths),
        ]
        for variant, found in report["training"].items()
    ]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{packages}. Text: {report['text']}.\n\n{table_of([head, *lines])}\n"


def main() -> None:
    """Measure unless the argument is ``table``, draw, and rewrite the page."""
    if sys.argv[1:] != ["table"]:
        torch.set_num_threads(1)
        text = corpus.read_corpus(None, SETTINGS.seqlen)
        trained = {}
        for variant in VARIANTS:
            trained[variant] = train(variant, text)
            print(variant, trained[variant]["held_out"], flush=True)
        report = {"versions": versions(), "text": text.source, "training": trained, "costs": costs(text)}
        RESULTS.write_text(json.dumps(report) + "\n", encoding="utf-8")
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    draw(report)
    write_block(PAGE, table(report), "python -m bench.variants_on_cpu")


if __name__ == "__main__":
    main()
