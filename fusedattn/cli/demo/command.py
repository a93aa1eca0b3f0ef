"""``demo``: fuse a model, check that its results are the same, train it, sample from it, measure it."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from fusedattn import __version__, fuse
from fusedattn.cli import machine
from fusedattn.cli.demo import corpus, report, training, verify
from fusedattn.cli.demo.corpus import Corpus
from fusedattn.cli.demo.settings import Agreement, Settings, settings_for
from fusedattn.cli.demo.threads import choose_threads
from fusedattn.cli.errors import CommandError
from fusedattn.support import Backend
from fusedattn.transformer import GPTModel

if TYPE_CHECKING:
    from rich.console import Console

    from fusedattn.cli.demo.timing import Comparison


def run(options: argparse.Namespace) -> int:
    """Return exit status 0 if the fused model agrees with the reference, else 1."""
    missing = [package for package in ("rich", "matplotlib") if importlib.util.find_spec(package) is None]
    if missing:
        raise CommandError(f"{' and '.join(missing)} not installed: pip install 'fusedattn[demo]'")
    from rich.console import Console

    device = machine.choose_device(options.device)
    machine.choose_how_triton_runs(device)
    settings = settings_for(device, options.quick)
    steps = options.steps or settings.steps
    problems = machine.triton_problems(device)
    if problems and settings.backend == "triton":
        raise CommandError(machine.no_triton(problems) + " (--device cpu needs no GPU)")
    folder = _make_folder(options.out)
    text = corpus.read_corpus(options.text, settings.seqlen)

    console = Console(highlight=False)
    console.print(f"[bold]fusedattn {__version__}[/]: fused attention in a reference GPT")
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    max_len = max(settings.seqlen + settings.sample, *settings.lengths)
    reference = verify.build_model(settings, settings.n_layers, max_len, device)
    model = fuse(copy.deepcopy(reference), backend=cast(Backend, settings.backend))
    if device.type == "cpu":
        _choose_threads(model, text, settings)
    _introduce(console, device, settings, text, problems)
    agree = _compare(console, settings, text, device, generator, problems)
    losses, held_out = _train(console, model, text, settings, steps, generator)
    _sample(console, model, text, settings, options.seed)
    comparisons = _measure(console, reference, model, text, settings)
    _draw(console, folder / "fusedattn-demo.png", settings, device, losses, held_out, comparisons)
    if not agree:
        console.print("\n[bold red]The fused model is outside the error budget; see above.[/]")
    return 0 if agree else 1


def _make_folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out: cannot make the folder {name!r}: {error.strerror}") from None
    return folder


def _choose_threads(model: GPTModel, text: Corpus, settings: Settings) -> None:
    device = model.embedding.weight.device
    batch = next(corpus.spread_batches(text.train, 1, settings.batch, settings.seqlen, device))
    choose_threads(lambda: training.loss_of(model, batch).backward())
    model.zero_grad(set_to_none=True)


def _introduce(
    console: Console, device: torch.device, settings: Settings, text: Corpus, problems: Sequence[str]
) -> None:
    from rich.table import Table

    versions = machine.versions()
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row("machine", machine.describe(device))
    facts.add_row("versions", f"torch {versions['torch']}, Triton {versions['triton']}, Python {versions['python']}")
    if settings.backend == "triton":
        precision = "" if settings.autocast is None else " in bfloat16 (autocast)"
        facts.add_row("training", f"Triton kernels, compiled for this GPU,{precision}")
    else:
        facts.add_row("training", "no GPU: the torch backend of fusedattn, float32")
        facts.add_row("kernels", "not verified: " + "; ".join(problems) if problems
                      else "the Triton kernels themselves are verified through Triton's interpreter")  # fmt: skip
    facts.add_row("text", f"{len(text.train) + len(text.held_out):,} bytes: {text.source}")
    console.print(facts)


def _compare(
    console: Console,
    settings: Settings,
    text: Corpus,
    device: torch.device,
    generator: torch.Generator,
    problems: Sequence[str],
) -> bool:
    report.headline(console, "Does the fused model compute the same?")
    console.print(
        "The reference model, its fused copy, and the reference in float64 see the same text. An error is the "
        "distance from float64, relative to the size (rms) of its tensor; max, mean: fused over reference."
    )
    agree = True
    for agreement in settings.agreements:
        if agreement.backend == "triton" and problems:
            console.print("Triton kernels: not compared; " + "; ".join(problems), markup=False)
            continue
        what = _describe(agreement, device)
        console.print()
        console.print(what, style="bold")
        with report.working(console, "comparing"):
            kinds = verify.verify(agreement, settings, text, device, generator)
        report.show_agreement(console, kinds)
        within = all(kind.ok for kind in kinds)
        n_gradients = sum(kind.n_tensors for kind in kinds if kind.name.startswith("grad"))
        verdict = "[green]within the budget[/]" if within else "[bold red]outside the budget[/]"
        console.print(f"Loss, logits and the gradients of all {n_gradients} parameters: {verdict}.")
        agree = agree and within
    return agree


def _describe(agreement: Agreement, device: torch.device) -> str:
    how = machine.how_it_runs(cast(Backend, agreement.backend), device)
    what = f"{how}, {str(agreement.dtype).removeprefix('torch.')}; "
    what += (
        f"{_layers(agreement.n_layers)}, {agreement.n_batches} batches of {agreement.batch} x {agreement.seqlen} tokens"
    )
    return what + (", padded" if agreement.padded else "")


def _train(
    console: Console, model: GPTModel, text: Corpus, settings: Settings, steps: int, generator: torch.Generator
) -> tuple[list[float], float]:
    report.headline(console, "Training the fused model")
    n_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{n_parameters / 1e6:.1f} M parameters, {_layers(settings.n_layers)}; "
        f"batches of {settings.batch} x {settings.seqlen} bytes; {steps} steps."
    )
    before = training.held_out_loss(model, text, settings)
    losses = report.show_training(console, training.train(model, text, settings, steps, generator), steps)
    after = training.held_out_loss(model, text, settings)
    console.print(
        f"Loss on held-out text: {before:.3f} before, [bold]{after:.3f}[/] after (nats per byte; "
        f"guessing evenly gives {math.log(256):.3f})."
    )
    return losses, after


def _sample(console: Console, model: GPTModel, text: Corpus, settings: Settings, seed: int) -> None:
    report.headline(console, "A sample")
    generator = torch.Generator(model.embedding.weight.device).manual_seed(seed)
    report.show_sample(console, *training.sample(model, text, settings, generator))


def _measure(
    console: Console, reference: GPTModel, model: GPTModel, text: Corpus, settings: Settings
) -> list[Comparison]:
    from fusedattn.cli.demo import timing

    device = model.embedding.weight.device
    report.headline(console, "Time and memory, forward and backward")
    with report.working(console, f"measuring, up to {settings.lengths[-1]} tokens"):
        comparisons = list(timing.measure(reference, model, text, settings.lengths, settings.autocast))
    report.show_costs(console, comparisons)
    note = "Whole model, batch 1. Medians of interleaved runs; peak memory beyond the model itself."
    if device.type == "cpu":
        note += " These are times of this CPU, on the torch backend: they say nothing about a GPU."
    console.print(note, style="dim")
    return comparisons


def _draw(
    console: Console,
    path: Path,
    settings: Settings,
    device: torch.device,
    losses: Sequence[float],
    held_out: float,
    comparisons: Sequence[Comparison],
) -> None:
    from fusedattn.cli.demo import figure

    how = machine.how_it_runs(cast(Backend, settings.backend), device)
    title = f"GPT with fused attention: {how}, {machine.describe(device)}"
    try:
        figure.draw(path, title, losses, held_out, comparisons)
    except OSError as error:
        raise CommandError(f"--out: cannot write {str(path)!r}: {error.strerror}") from None
    report.headline(console, "Figure")
    console.print(str(path), markup=False, soft_wrap=True)


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"
