"""``python -m bench.decoding_on_cpu``: time of one query per sequence and a cache, as ratios to torch's function.

Processor time of one thread, medians of interleaved runs. Writes ``docs/results/decoding_on_cpu.json`` and the table of
``docs/cpu.md`` in some minutes. ``python -m bench.decoding_on_cpu table`` writes only the table.
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
from fusedattn import KVCache, attention
from fusedattn.cli.machine import versions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "cpu.md", DOCS / "results" / "decoding_on_cpu.json"

NHEADS_Q, NHEADS_KV, HEAD_DIM, LENGTH, CAPACITY = 32, 8, 128, 4096, 4608
BATCHES, DTYPES = (1, 4), (torch.float32, torch.bfloat16)
ROUNDS = Rounds(least=5, most=30, seconds=3.0)
GATHERED, VIEWS = "gathered", "views"  # the names of torch's function on a copy of the pages, and on views


def caches(batch: int, dtype: torch.dtype) -> Iterator[tuple[str, KVCache, dict[str, Any]]]:
    """Caches full of noise, their names, and options of the call."""
    lengths = torch.full((batch,), LENGTH, dtype=torch.int32)

    def noise(cache: KVCache) -> KVCache:
        for x in (cache.k, cache.v):
            if cache.format is None:
                x.normal_()
            else:
                x.view(torch.uint8).random_(0, 120)
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                scale.fill_(0.01)
        return cache

    def contiguous(dtype: torch.dtype) -> KVCache:
        sizes = batch, NHEADS_KV, CAPACITY, HEAD_DIM
        return noise(KVCache.contiguous(*sizes, dtype=dtype, lengths=lengths))

    yield "contiguous", contiguous(dtype), {}
    yield "contiguous, `return_lse`", contiguous(dtype), {"return_lse": True}
    yield "contiguous, soft-cap", contiguous(dtype), {"softcap": 20.0}
    for size in (16, 64):
        n_pages = batch * CAPACITY // size
        table = torch.randperm(n_pages).int().view(batch, -1)
        sizes = n_pages, size, NHEADS_KV, HEAD_DIM
        yield f"pages of {size} in random order", noise(KVCache.paged(table, *sizes, dtype=dtype, lengths=lengths)), {}
    for codes, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "e4m3"), (torch.uint8, "int4")):
        yield f"contiguous, {name}", contiguous(codes), {}


def gathered(q: Tensor, cache: KVCache) -> Tensor:
    """Torch's function on a copy of the tokens of a paged cache."""
    assert cache.block_table is not None
    pages = cache.block_table[:, : LENGTH // cache.k.shape[2]].long()
    k, v = (x[pages].transpose(1, 2).flatten(2, 3) for x in (cache.k, cache.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def measure() -> Iterator[dict[str, Any]]:
    """A row for each cache, dtype and batch: time relative to torch's function on a copy and on views."""
    stopwatch = HostStopwatch(torch.device("cpu"), clock=time.thread_time)
    for dtype in DTYPES:
        for batch in BATCHES:
            q = torch.randn(batch, NHEADS_Q, 1, HEAD_DIM, dtype=dtype)
            runs: dict[str, Callable[[], object]] = {}
            for name, cache, options in caches(batch, dtype):
                runs[name] = functools.partial(attention, q, cache=cache, backend="torch", **options)
                if name == "contiguous":
                    k, v = (x[:, :, :LENGTH] for x in (cache.k, cache.v))
                    runs[VIEWS] = functools.partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
                if name.startswith("pages of 16"):
                    runs[GATHERED] = functools.partial(gathered, q, cache)
            for run in runs.values():
                run()  # warms up
            times = medians(without_set_up(runs), stopwatch, ROUNDS)
            for name in runs:
                if name not in (GATHERED, VIEWS):
                    ratios = {other: times[name] / times[other] for other in (GATHERED, VIEWS)}
                    row = {"cache": name, "dtype": str(dtype).removeprefix("torch."), "batch": batch, **ratios}
                    print(json.dumps(row), flush=True)
                    yield row


def table(report: dict[str, Any]) -> str:
    """Markdown: the versions, and for each cache its two ratios."""
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault(row["cache"], {})[row["dtype"], row["batch"]] = row
    columns = list(dict.fromkeys((row["dtype"], row["batch"]) for row in report["rows"]))
    head = ["cache", *(f"{dtype}, {batch} sequence{'s' * (batch > 1)}" for dtype, batch in columns)]
    lines = (
        [name, *(f"{by[column][GATHERED]:.2f}, {by[column][VIEWS]:.2f}" for column in columns)]
        for name, by in rows.items()
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{packages}.\n\n{table_of([head, *lines])}\n"


def main() -> None:
    """Measure unless the argument is ``table``, and rewrite the page."""
    if sys.argv[1:] != ["table"]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        report = {"versions": versions(), "rows": list(measure())}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_block(PAGE, table(json.loads(RESULTS.read_text(encoding="utf-8"))), "python -m bench.decoding_on_cpu")


if __name__ == "__main__":
    main()
