"""``torchrun --nproc-per-node 2 -m fusedattn.distributed.example``: train on sequences that processes share."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

import torch.distributed as dist

from fusedattn.cli.demo import report as demo_report
from fusedattn.cli.errors import CommandError
from fusedattn.distributed.example import figure, processes, report
from fusedattn.distributed.example.plan import Plan, context_of, plan_of
from fusedattn.distributed.example.training import Training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process of the command and return its exit status."""
    try:
        with processes.group():
            return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the processes do not meet, or do not part
        return processes.fail(error)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        plan = processes.together(lambda: plan_of(arguments))
        processes.check_same("--text", zlib.crc32(plan.text.train.numpy().tobytes()))
    except CommandError as error:
        processes.say_once(f"{processes.PROGRAM}: error: {error}")
        return 2
    try:
        _train(plan)
    except Exception as error:  # the launcher ends the other processes
        return processes.fail(error)
    return 0


def _train(plan: Plan) -> None:
    training = Training(plan, context_of(plan))
    if dist.get_rank() > 0:
        training.outcome([step.loss for step in training.steps()])
        return
    from rich.console import Console

    console = Console(highlight=False)
    report.introduce(console, plan, training.n_parameters)
    losses = demo_report.show_training(console, training.steps(), plan.sizes.steps)
    split, alone = training.outcome(losses)
    report.conclude(console, plan, split, alone)
    title = f"A GPT trained by {processes.counted()}: mode {plan.mode}, {plan.shares.balance}"
    figure.draw(plan.out, title, plan.shares, split, alone, processes.counted())
    demo_report.headline(console, "Figure")
    console.print(str(plan.out), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
