"""The options of the command."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import torch.distributed as dist

from fusedattn.cli.errors import CommandError
from fusedattn.cli.parser import positive, seed
from fusedattn.distributed.context import BALANCES, Mode
from fusedattn.distributed.example import processes
from fusedattn.distributed.example.sizes import CPU, GPU

_DESCRIPTION = """\
Train the reference GPT on real text. Each process has some of the tokens of
every sequence, and attention is to the tokens of all. On CPUs, rank 0 also
trains the same model alone, and the losses are compared step by step.

torchrun starts the processes. Without it there is one.
"""

_EXAMPLES = f"""\
examples:
  {processes.LAUNCH}
  torchrun --nproc-per-node 4 -m fusedattn.distributed.example --mode ulysses
  {processes.PROGRAM}

exit status: 0 success; 1 a process failed; 2 wrong usage; 130 interrupted.
That of torchrun is 1 if a process has another than 0.
"""

MODES: dict[str, Mode | tuple[Mode, Mode]] = {
    "ring": "ring",
    "all_gather": "all_gather",
    "ulysses": "ulysses",
    "ring+ulysses": ("ring", "ulysses"),
    "all_gather+ulysses": ("all_gather", "ulysses"),
}


class _Parser(argparse.ArgumentParser):
    """All processes parse the same arguments; one of them prints."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)

    def print_help(self, file: Any = None) -> None:
        if dist.get_rank() == 0:
            super().print_help(file)


def build_parser() -> argparse.ArgumentParser:
    """The parser. It raises CommandError for wrong options."""
    parser = _Parser(
        prog=processes.PROGRAM,
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="ring", help="how keys and values get to queries (default: %(default)s)")
    add("--balance", choices=BALANCES, help="the tokens of a process (default: zigzag; with ulysses contiguous)")
    add("--steps", metavar="N", type=positive, help=f"training steps (default: {CPU.steps}, on GPUs {GPU.steps})")
    add("--seqlen", metavar="N", type=positive, help=f"sequence length (default: {CPU.seqlen}, on GPUs {GPU.seqlen})")
    add("--text", metavar="PATH", help="a file or a folder to train on (default: Python's own library)")
    add("--positions", choices=("rotary", "learned", "sinusoidal"), default="rotary", help="default: %(default)s")
    add("--compare", action=argparse.BooleanOptionalAction, help="train alone too (default: on CPUs)")
    add("--out", metavar="PICTURE.png", default="fusedattn-demo/distributed.png", help="default: %(default)s")
    add("--seed", metavar="N", type=seed, default=0, help="seed of the model and the text (default: %(default)s)")
    add("--backend", choices=("torch", "triton"), help="of attention (default: torch, on GPUs triton)")
    add("--device", choices=("cpu", "cuda"), help="default: GPUs if there are any")
    return parser
