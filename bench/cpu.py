"""``python -m bench.cpu``: time of the torch backend on a CPU as ratios to torch's function and to eager PyTorch.

Processor time of one thread, medians of interleaved runs. Writes ``docs/results/cpu.json`` and the table of
``docs/cpu.md`` in some minutes. ``python -m bench.cpu table`` writes only the table.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measuring.timing import HostStopwatch, Rounds, SetUp, medians
from bench.report.page import table_of, write_block
from fusedattn import attention, biases, masks
from fusedattn.cli.machine import versions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "cpu.md", DOCS / "results" / "cpu.json"

BATCH, NHEADS, HEAD_DIM = 2, 8, 64
LENGTHS = {torch.float32: (64, 256, 1024), torch.bfloat16: (256,)}
ROUNDS = Rounds(least=5, most=60, seconds=3.0)


class Work(NamedTuple):
    """One row of the table: the options of this package and of the two functions it is compared with.

    Attributes:
        poisoned: k and v of this package's call; those of the others have finite padding.
        sdpa: options of ``F.scaled_dot_product_attention``; None if it cannot compute this.
        eager: options of :func:`eager`.
    """

    options: dict[str, Any]
    sdpa: dict[str, Any] | None
    eager: dict[str, Any]
    poisoned: tuple[Tensor, Tensor] | None = None


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention as commonly written; `visible` and `bias` are computed before."""
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return F.dropout(weights, dropout_p) @ v


def works(n: int, k: Tensor, v: Tensor) -> Iterator[tuple[str, Work]]:
    """Every row of the table for `n` tokens, by name."""
    dtype, at = k.dtype, torch.arange(n)[None]
    causal = masks.causal().dense(n, n)
    valid = at < torch.tensor([[n], [n // 2]])
    padding, lost = masks.padding(valid), ~valid[:, None, :, None]
    poisoned = k.masked_fill(lost, math.nan), v.masked_fill(lost, math.nan)
    random_pairs = (torch.rand(n, n) < 0.5) | torch.eye(n, dtype=torch.bool)
    random_scores = torch.rand(BATCH, NHEADS, n, n) < 0.5
    block = max(16, n // 16)
    blocks = torch.rand(n // block, n // block).tril() > 0.5
    blocks |= torch.eye(n // block, dtype=torch.bool)
    sparse = masks.block_sparse(blocks, block)
    bias, sinks = torch.randn(NHEADS, n, n, dtype=dtype), torch.randn(NHEADS, dtype=dtype)
    slopes = torch.rand(NHEADS)
    yield "no mask", Work({}, {}, {})
    yield "causal", Work({"mask": masks.causal()}, {"is_causal": True}, {"visible": causal})
    for name, mask in (
        ("padding of a half of one batch", padding),
        ("window(n/8, 0)", masks.window(n // 8, 0)),
        ("four documents", masks.documents((at // (n // 4)).expand(BATCH, -1))),
        ("prefix_lm", masks.prefix_lm(torch.tensor([n // 2, n // 4]))),
        ("a random mask", masks.boolean(random_pairs)),
        ("a random mask of each head", masks.boolean(random_scores)),
        ("block_sparse, a quarter visible", sparse),
    ):
        dense = mask.dense(n, n)
        yield name, Work({"mask": mask}, {"attn_mask": dense}, {"visible": dense})
    for name, mask in (("NaN in padding", padding), ("NaN in padding, causal", padding & masks.causal())):
        dense = mask.dense(n, n)
        yield name, Work({"mask": mask}, {"attn_mask": dense}, {"visible": dense}, poisoned)
    yield "bias", Work({"bias": bias}, {"attn_mask": bias}, {"bias": bias})
    slanted = biases.alibi(slopes).dense(n, n, dtype=dtype)
    yield "ALiBi", Work({"bias": biases.alibi(slopes)}, {"attn_mask": slanted}, {"bias": slanted})
    for extra, mask, option, visible in (
        ("", masks.full(), {}, None),
        (", causal", masks.causal(), {"is_causal": True}, causal),
    ):
        yield f"return_lse{extra}", Work({"return_lse": True, "mask": mask}, option, {"visible": visible})
        yield f"soft-cap{extra}", Work({"softcap": 20.0, "mask": mask}, None, {"softcap": 20.0, "visible": visible})
        yield f"sinks{extra}", Work({"sinks": sinks, "mask": mask}, None, {"sinks": sinks, "visible": visible})
        dropped = {"dropout_p": 0.1}
        yield f"dropout{extra}", Work(dropped | {"mask": mask}, dropped | option, dropped | {"visible": visible})


def measure() -> Iterator[dict[str, Any]]:
    """A row for each work, dtype and length: time relative to sdpa and to eager, forward and with backward."""
    stopwatch = HostStopwatch(torch.device("cpu"), clock=time.thread_time)
    for dtype, lengths in LENGTHS.items():
        for n in lengths:
            q, k, v, dout = (torch.randn(BATCH, NHEADS, n, HEAD_DIM, dtype=dtype) for _ in range(4))
            for name, work in works(n, k, v):
                row: dict[str, Any] = {"work": name, "dtype": str(dtype).removeprefix("torch."), "seqlen": n}
                for direction in ("forward", "forward and backward"):
                    runs = dict(contestants(work, q, k, v, dout if direction != "forward" else None))
                    for run in runs.values():
                        run()()  # warms up
                    times = medians(runs, stopwatch, ROUNDS)
                    row[direction] = {x: times["fusedattn"] / times[x] for x in times if x != "fusedattn"}
                print(json.dumps(row), flush=True)
                yield row


def contestants(work: Work, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> Iterator[tuple[str, SetUp]]:
    """The functions to time, by name; with the backward if there is a `dout`."""
    mine = (q, *(work.poisoned or (k, v)))

    def ours(*x: Tensor) -> Tensor:
        result = attention(*x, **work.options, backend="torch")
        return result if isinstance(result, Tensor) else result[0]

    called: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any]]] = {
        "fusedattn": (ours, mine, {}),
        "eager": (eager, (q, k, v), work.eager),
    }
    if work.sdpa is not None:
        called["sdpa"] = (F.scaled_dot_product_attention, (q, k, v), work.sdpa)
    for name, (function, given, options) in called.items():
        leaves = [x.detach().clone().requires_grad_(dout is not None) for x in given]

        def run(function: Any = function, leaves: Any = leaves, options: Any = options) -> None:
            out = function(*leaves, **options)
            if dout is not None:
                torch.autograd.grad(out, leaves, dout)

        yield name, lambda run=run: run  # type: ignore[misc]


def table(report: dict[str, Any]) -> str:
    """Markdown: the machine, and for each work its ratio to the faster of the other two."""
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault(row["work"], {})[row["dtype"], row["seqlen"]] = row
    columns = list(dict.fromkeys((row["dtype"], row["seqlen"]) for row in report["rows"]))
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    head = ["work", *(f"{dtype}, {n} tokens" for dtype, n in columns)]
    lines = ([name, *(_cell(by_column[column]) for column in columns)] for name, by_column in rows.items())
    size = f"{report['batch']} batches, {report['nheads']} heads, head_dim {report['head_dim']}"
    return f"{packages}; {size}.\n\n{table_of([head, *lines])}\n"


def _cell(row: dict[str, Any]) -> str:
    return ", ".join(f"{max(row[direction].values()):.2f}" for direction in ("forward", "forward and backward"))


def main() -> None:
    """Measure unless the argument is ``table``, and rewrite the page."""
    if sys.argv[1:] != ["table"]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        report = {"versions": versions(), "batch": BATCH, "nheads": NHEADS, "head_dim": HEAD_DIM}
        RESULTS.write_text(json.dumps(report | {"rows": list(measure())}, indent=1) + "\n", encoding="utf-8")
    write_block(PAGE, table(json.loads(RESULTS.read_text(encoding="utf-8"))), "python -m bench.cpu")


if __name__ == "__main__":
    main()
