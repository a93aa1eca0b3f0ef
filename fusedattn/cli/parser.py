"""Options and help texts. The module of a command, with its imports, loads only when that command runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusedattn import __version__
from fusedattn.cli.check import COMPILED, DTYPES
from fusedattn.cli.demo.settings import CPU, GPU

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  python -m fusedattn demo            a GPT with fused attention learns real text
  python -m fusedattn check           the error of the kernels on this machine
  python -m fusedattn info --shape 2,32,8,4096,4096,128 --dtype bfloat16
                                      which backends run it, and why others do not

exit status: 0 success; 1 an error outside its budget; 2 wrong usage;
130 interrupted
"""

_DEMO = """\
Fuse the reference GPT; show that its loss, logits and every gradient agree with
the original; train it on real text; sample from it; compare its time and memory
with the original at growing sequence lengths.

Without a GPU the model trains on the torch backend, and the Triton kernels are
compared through Triton's interpreter; that takes a few minutes.
"""

_DEMO_EXAMPLES = """\
examples:
  python -m fusedattn demo               on the source of Python's own library
  python -m fusedattn demo --text book.txt --steps 1000
  python -m fusedattn demo --quick       a quick look
"""

_CHECK = """\
Measure the error of attention against float64, feature by feature. In the
output, lse and each gradient it may be at most 1.5 times (largest), 1.1 times
(mean) and 1.5 times (worst row) that of eager PyTorch in the same dtype; one
unit in the last place is always allowed.

With --against, another function solves the same problems beside the kernels:
  torch.sdpa-math, torch.sdpa-flash, torch.sdpa-efficient, torch.sdpa-cudnn
                   one backend of F.scaled_dot_product_attention
  flex             FlexAttention: compiled, on a CPU eager
  package.module:function
                   your own function, called like fusedattn.attention with
                   (q, k, v, mask=, rope=, scale=, return_lse=) and, if a case
                   has it, bias=, softcap=, score_mod=, sinks=, dropout_p= and
                   dropout_seed=
Such a function raises NotImplementedError, or lacks the argument, for a case
that it cannot run; the table gives the reason. It does not affect the exit
status.

Without a GPU the kernels run through Triton's interpreter; that takes two to
seven minutes, or a third of that with --quick.

With --compiled sm_80 or sm_90, Triton compiles the kernels for that GPU, and
their PTX runs on the CPU: products of its matrix units, asynchronous copies and
barriers too. A race, a read of uninitialised memory or an address outside of a
tensor is an error. In float32, eager PyTorch is computed as on a GPU too. That
takes about four minutes in one dtype.
"""

_CHECK_EXAMPLES = """\
examples:
  python -m fusedattn check --feature rope --dtype bfloat16
  python -m fusedattn check --against sdpa-flash --against mine:attention
  python -m fusedattn check --json > budget.json
  python -m fusedattn check --compiled sm_90 --dtype bfloat16

The JSON has every tensor, and the worst of each feature and of each tensor; a
ratio that is not finite is null.
"""

_INFO = """\
Show versions, GPUs, the default backends and the reasons, environment variables
with their effect, and limits of the versions. With --shape, also show which
backends run that attention: the launch configuration, or every reason why not.
"""

_INFO_EXAMPLES = """\
examples:
  python -m fusedattn info
  python -m fusedattn info --shape 1,8,8,1024,1024,64 --softcap 30
  TRITON_INTERPRET=1 python -m fusedattn info --shape 1,8,8,1024,1024,64
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser; ``options.run(options)`` runs the chosen command and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedattn",
        description="Fused scaled-dot-product attention for PyTorch: demonstrate it, check it, show what runs here.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusedattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{demo,check,info}", title="commands")
    _add_demo(commands)
    _add_check(commands)
    _add_info(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    parser = _add(commands, "demo", "fuse a GPT, compare, train, sample, measure", _DEMO, _DEMO_EXAMPLES)
    parser.add_argument("--text", metavar="PATH", help="a file or a folder to train on (default: Python's own library)")
    parser.add_argument(
        "--steps", metavar="N", type=positive, help=f"training steps (default: {CPU.steps}, on a GPU {GPU.steps})"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="fusedattn-demo", help="folder for the figure (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=seed, default=0, help="seed of the model and the text (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    _add_device(parser)

    def run(options: argparse.Namespace) -> int:
        from fusedattn.cli.demo import command

        return command.run(options)

    parser.set_defaults(run=run)


def _add_check(commands: _Commands) -> None:
    parser = _add(commands, "check", "measure the error of the kernels on this machine", _CHECK, _CHECK_EXAMPLES)
    parser.add_argument("--feature", metavar="SUBSTRING", default="", help="only cases with this in their name")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be repeated (default: all three)")
    parser.add_argument(
        "--backend", choices=("triton", "torch"), default="triton", help="backend to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--against", metavar="FUNCTION", action="append", default=[], help="function to compare with; may be repeated"
    )
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="seed of the inputs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="run each case in one dtype, taken in turn")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--compiled", choices=COMPILED, metavar="ARCH", help=f"run the kernels compiled for {' or '.join(COMPILED)}"
    )
    _add_device(parser)

    def run(options: argparse.Namespace) -> int:
        from fusedattn.cli.check import command

        return command.run(options)

    parser.set_defaults(run=run)


def _add_info(commands: _Commands) -> None:
    parser = _add(commands, "info", "show versions, and which backend runs a case", _INFO, _INFO_EXAMPLES)
    parser.add_argument(
        "--shape",
        metavar="B,HQ,HKV,SQ,SK,D",
        type=_shape,
        help="batch, heads of q, heads of k and v, queries, keys, head_dim",
    )
    parser.add_argument("--dtype", choices=(*DTYPES, "float64"), default="float32", help="default: %(default)s")
    parser.add_argument("--bias", action="store_true", help="with an additive bias")
    parser.add_argument("--softcap", metavar="X", type=_positive_float, help="with scores capped at X")
    parser.add_argument("--dropout", metavar="P", type=_probability, default=0.0, help="with dropout of probability P")
    _add_device(parser)

    def run(options: argparse.Namespace) -> int:
        from fusedattn.cli import info

        return info.run(options)

    parser.set_defaults(run=run)


def _add(commands: _Commands, name: str, purpose: str, description: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1, ... or cpu (default: a GPU if there is one)")


def positive(text: str) -> int:
    """An option that is a whole number from 1 on."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are whole numbers from 1 on")
    return number


def seed(text: str) -> int:
    """An option that is a seed of torch."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are whole numbers from 0 to 2^63 - 1")
    return number


def _positive_float(text: str) -> float:
    return _float(text, lambda x: 0.0 < x < math.inf, "positive numbers")


def _probability(text: str) -> float:
    return _float(text, lambda x: 0.0 <= x < 1.0, "0 <= P < 1")


def _float(text: str, is_allowed: Callable[[float], bool], allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_allowed(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are {allowed}")
    return number


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != 6:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are six numbers, B,HQ,HKV,SQ,SK,D")
    return tuple(positive(part) for part in parts)
