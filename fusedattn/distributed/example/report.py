"""What rank 0 prints besides progress: who trains what, and how it ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.distributed as dist

from fusedattn import __version__
from fusedattn.cli import machine
from fusedattn.cli.demo import report
from fusedattn.cli.tables import Column, print_table
from fusedattn.distributed.example import processes
from fusedattn.distributed.example.plan import Plan
from fusedattn.distributed.example.training import Losses

if TYPE_CHECKING:
    from rich.console import Console


def introduce(console: Console, plan: Plan, n_parameters: int) -> None:
    """Print the processes, their tokens, the model and the text."""
    from rich.table import Table

    sizes = plan.sizes
    console.print(f"[bold]fusedattn {__version__}[/]: one GPT, trained by {processes.counted()}")
    facts = Table.grid(padding=(0, 2, 0, 0))
    carrier = "NCCL" if plan.device.type == "cuda" else "gloo"
    facts.add_row("processes", f"{dist.get_world_size()}, {carrier}; each on {machine.describe(plan.device)}")
    facts.add_row("attention", f"mode {plan.mode}; {machine.how_it_runs(plan.backend, plan.device)}")
    facts.add_row(
        "tokens", f"{sizes.seqlen:,} in a sequence, {plan.shares.held()} in each process ({plan.shares.balance})"
    )
    facts.add_row(
        "model", f"{n_parameters / 1e6:.1f} M parameters, {sizes.n_layers} layers, {plan.positions} positions"
    )
    facts.add_row("text", f"{len(plan.text.train) + len(plan.text.held_out):,} bytes: {plan.text.source}")
    console.print(facts)
    if not processes.are_launched():
        console.print(f"One process has all tokens. Two share them: {processes.LAUNCH}", style="dim", soft_wrap=True)
    report.headline(console, "Training")
    alone = " Rank 0 also trains a copy alone." if plan.compares else ""
    console.print(f"{sizes.steps} steps of {sizes.batch} x {sizes.seqlen} bytes.{alone}")


def conclude(console: Console, plan: Plan, split: Losses, alone: Losses | None) -> None:
    """Print the losses, beside those of one process alone if it was trained."""
    report.headline(console, "Loss, nats per byte")
    titles = [processes.counted()] if alone is None else [processes.counted(), "one alone", "difference"]
    rows = []
    for i, name in enumerate(("first step", "last step", "held-out text")):
        row = [name, f"{_shown(split)[i]:.4f}"]
        if alone is not None:
            row += [f"{_shown(alone)[i]:.4f}", f"{abs(_shown(split)[i] - _shown(alone)[i]):.1e}"]
        rows.append(row)
    columns = [Column("", no_wrap=True), *(Column(title, justify="right", no_wrap=True) for title in titles)]
    print_table(console, columns, rows, ruled=True)
    if alone is not None:
        console.print(f"Largest difference of a step: [bold]{max(split.differences(alone)):.1e}[/]")
    console.print(f"Tokens of each process: {plan.shares.held()} of {plan.sizes.seqlen:,}")
    console.print(f"Guessing evenly gives a loss of {math.log(256):.3f}.", style="dim")


def _shown(losses: Losses) -> tuple[float, float, float]:
    return losses.steps[0], losses.steps[-1], losses.held_out
