"""Show the demo's results: in a terminal, or as plain lines without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fusedattn import testing
from fusedattn.cli.demo.timing import Comparison, Cost
from fusedattn.cli.demo.training import Step
from fusedattn.cli.demo.verify import Kind
from fusedattn.cli.tables import Column, print_table

if TYPE_CHECKING:
    from rich.console import Console


NARROW = 64  # characters; too few for a bar beside the numbers of a step


def is_live(console: Console) -> bool:
    """Whether printed lines can still change."""
    return console.is_terminal and not console.is_dumb_terminal


def headline(console: Console, title: str) -> None:
    """Print the title of a stage."""
    from rich.text import Text

    console.print()
    console.rule(Text(title, style="bold"), align="left", style="dim")


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """Show a spinner beside `what` and erase it afterwards; without a terminal, show nothing."""
    with console.status(what) if is_live(console) else contextlib.nullcontext():
        yield


def show_agreement(console: Console, kinds: Sequence[Kind]) -> None:
    """Print one row per kind of tensor."""
    titles = ["tensors", "max error\nreference", "max error\nfused", f"max\n≤ {testing.MAX_FACTOR}"]
    titles += [f"mean\n≤ {testing.MEAN_FACTOR}", "budget\nused"]
    columns = [
        Column("", no_wrap=True),
        *(Column(title, justify="right", no_wrap=True, vertical="bottom") for title in titles),
        Column("", no_wrap=True),
    ]
    rows = [
        (
            kind.name,
            str(kind.n_tensors),
            f"{kind.reference:.1e}",
            f"{kind.fused:.1e}",
            f"{kind.ratios.max:.2f}",
            f"{kind.ratios.mean:.2f}",
            f"{100 * kind.used:.0f}%" if kind.used < 9.99 else ">999%",
            "[green]ok[/]" if kind.ok else "[bold red]FAIL[/]",
        )
        for kind in kinds
    ]
    print_table(console, columns, rows, ruled=True)


def show_training(console: Console, steps: Iterable[Step], total: int) -> list[float]:
    """Show progress while training runs; returns the losses."""
    return _bar(console, steps, total) if is_live(console) else _lines(console, steps, total)


def _lines(console: Console, steps: Iterable[Step], total: int) -> list[float]:
    losses = []
    due = {round(total * tenth / 10) for tenth in range(11)} | {1}
    for step in steps:
        losses.append(step.loss)
        if step.number in due:
            console.print(_progress(step, total))
    return losses


def _bar(console: Console, steps: Iterable[Step], total: int) -> list[float]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    losses, last = [], ""
    columns = [BarColumn(bar_width=None), TextColumn("{task.description}"), TimeRemainingColumn()]
    if console.width < NARROW:
        columns = columns[1:2]
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task(f"step 0/{total}", total=total)
        for step in steps:
            losses.append(step.loss)
            last = _progress(step, total)
            progress.update(task, completed=step.number, description=last)
    console.print(last)
    return losses


def _progress(step: Step, total: int) -> str:
    speed = f"{step.tokens_per_second:8,.0f} tokens/s" if step.tokens_per_second else ""
    return f"step {step.number:>{len(str(total))}}/{total}  loss {step.loss:.3f}  {speed}".rstrip()


def show_sample(console: Console, prompt: str, continuation: str) -> None:
    """Print the prompt and its continuation by the model."""
    from rich.padding import Padding
    from rich.text import Text

    for title, text in (("Held-out text:", prompt), ("The model goes on:", continuation)):
        console.print(title, style="dim")
        console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def show_costs(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print one row per sequence length."""
    titles = ["sequence\nlength", "reference\nms", "fused\nms", "reference\n/ fused"]
    titles += ["reference\nMiB", "fused\nMiB", "reference\n/ fused"]
    rows = [
        (
            str(c.seqlen),
            *_row(c.reference.milliseconds, c.fused.milliseconds, c),
            *_row(c.reference.mebibytes, c.fused.mebibytes, c),
        )
        for c in comparisons
    ]
    print_table(console, [Column(title, justify="right", no_wrap=True) for title in titles], rows, ruled=True)


def _row(reference: float | None, fused: float | None, costs: Comparison) -> tuple[str, str, str]:
    ratio = f"{reference / fused:.1f}x" if reference and fused else ""
    return _cell(reference, costs.reference), _cell(fused, costs.fused), ratio


def _cell(value: float | None, cost: Cost) -> str:
    if value is None:
        return "out of memory" if cost.seconds is None else "n/a"
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"
