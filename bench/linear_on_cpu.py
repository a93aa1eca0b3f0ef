"""``python -m bench.linear_on_cpu``: time of causal linear attention on a CPU against the length.

Processor time of one thread, medians of interleaved runs, beside ``F.scaled_dot_product_attention``. Writes
``docs/results/linear_on_cpu.json`` and the table of ``docs/linear.md`` in some minutes. ``python -m bench.linear_on_cpu
table`` writes only the table.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measuring.timing import HostStopwatch, Rounds, medians, without_set_up
from bench.report.page import table_of, write_block
from fusedattn import linear_attention
from fusedattn.cli.machine import versions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "linear.md", DOCS / "results" / "linear_on_cpu.json"

NHEADS, HEAD_DIM = 4, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ROUNDS = Rounds(least=3, most=20, seconds=20.0)
DIRECTIONS = {"forward": False, "forward and backward": True}
LINEAR, SOFTMAX = "linear", "softmax"
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    LINEAR: functools.partial(linear_attention, backend="torch"),
    SOFTMAX: functools.partial(F.scaled_dot_product_attention, is_causal=True),
}


def call(function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], backward: bool) -> None:
    """One call, with gradients of q, k and v if asked for."""
    q, k, v, dout = inputs
    if not backward:
        with torch.no_grad():
            function(q, k, v)
        return
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(function(*leaves), leaves, dout)


def measure() -> Iterator[dict[str, Any]]:
    """A row for each direction and length: the time of a token, over that at the least length, and over softmax's."""
    stopwatch = HostStopwatch(torch.device("cpu"), clock=time.thread_time)
    for direction, backward in DIRECTIONS.items():
        runs: dict[tuple[str, int], Callable[[], object]] = {}
        for n in LENGTHS:
            inputs = list(torch.randn(4, 1, NHEADS, n, HEAD_DIM))
            for name, function in FUNCTIONS.items():
                runs[name, n] = functools.partial(call, function, inputs, backward)
        times = medians(without_set_up(runs), stopwatch, ROUNDS)
        for n in LENGTHS:
            of_token = times[LINEAR, n] / n / (times[LINEAR, LENGTHS[0]] / LENGTHS[0])
            row = {"direction": direction, "n": n, "of token": of_token, "ratio": times[LINEAR, n] / times[SOFTMAX, n]}
            print(json.dumps(row), flush=True)
            yield row


def table(report: dict[str, Any]) -> str:
    """Markdown: the versions, and for each length the two ratios of each direction."""
    by = {(row["direction"], row["n"]): row for row in report["rows"]}
    head = ["tokens"]
    for direction in DIRECTIONS:
        head += [f"{direction}, a token", f"{direction}, over softmax"]
    lines = [
        [f"{n:,}", *(f"{by[direction, n][name]:.2f}" for direction in DIRECTIONS for name in ("of token", "ratio"))]
        for n in LENGTHS
    ]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{packages}.\n\n{table_of([head, *lines])}\n"


def main() -> None:
    """Measure unless the argument is ``table``, and rewrite the page."""
    if sys.argv[1:] != ["table"]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        report = {"versions": versions(), "rows": list(measure())}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_block(PAGE, table(json.loads(RESULTS.read_text(encoding="utf-8"))), "python -m bench.linear_on_cpu")


if __name__ == "__main__":
    main()
