"""From docs/results/hopper.json to the tables of docs/performance.md, the diagram and the list of candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.codegen import timing_diagram
from bench.codegen.estimate import ITEMSIZE, Kernel, Workload, estimate
from bench.codegen.hardware import MACHINES
from bench.report.page import table_of, write_block

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "hopper.json"
DOCUMENT = ROOT / "docs" / "performance.md"
CANDIDATES = ROOT / "bench" / "candidates" / "hopper.json"
MEASURED = ROOT / "bench" / "results" / "nvidia-h200" / "hopper" / "kernels-daa48f2.jsonl"
PROTOTYPES = MEASURED.with_name("prototypes.jsonl")
SOURCE = "python -m bench.codegen.hopper"
# Variants that a GPU has compared with the table's, at COMPARED_AT tokens without a mask: part, config, options; the
# file, the problem, and the names of both in it.
COMPARED_AT = 16384
COMPARED: list[tuple[str, list[list[Any]], list[list[Any]], Path, str, tuple[str, str]]] = [
    ("fwd", [["BLOCK", 64]], [], PROTOTYPES, "fwd causal=False N=16384 B=1 H=16", ("F3late-64", "F3late")),
    ("fwd", [], [["turns", False]], MEASURED, "fwd D=128 full N=16384 B=1 H=16:16", ("noturns", "hopper")),
    ("fwd", [], [["persistent", False]], MEASURED, "fwd D=128 full N=16384 B=1 H=16:16", ("onetile", "hopper")),
    (
        *("fwd", [], [["turns", False], ["persistent", False]], MEASURED, "fwd D=128 full N=16384 B=1 H=16:16"),
        ("noturns onetile", "hopper"),
    ),
    ("dq", [["BLOCK", 128], ["STAGES", 2]], [], PROTOTYPES, "bwd causal=False N=16384 B=1 H=16", ("dq128", "dq64")),
]
H200 = MACHINES["sm_90"]
TILE = 128
OPERATIONS = {"fwd": 4, "dkdv": 8, "dq": 6}  # for each pair and feature
TOKENS, FEATURES, SEQLENS = 16384, 2048, (1024, 2048, 4096, 8192, 16384)
RANKED_AT = 8192  # tokens
PARTS = {"fwd": "forward", "dkdv": "dk and dv", "dq": "dq"}
Entry = dict[str, Any]


def load(path: Path = RESULTS) -> Entry:
    found: Entry = json.loads(path.read_text(encoding="utf-8"))
    return found


def workload(seqlen: int, head_dim: int, *, causal: bool) -> Workload:
    return Workload(TOKENS // seqlen, FEATURES // head_dim, 1, seqlen, seqlen, head_dim, causal)


def seconds(entry: Entry, problem: Workload) -> float:
    """The seconds of one kernel for a call, by what a block and a tile take.

    Programs with a tile each wait for memory at their beginning and at their end, persistent ones do not.
    """
    variant = entry["variant"]
    by_keys = variant["part"] == "dkdv"
    start = entry["tile"] + (0 if entry["persistent"] else 2 * H200.hbm_latency)
    rows, columns = (entry["rows"], TILE) if by_keys else (TILE, entry["rows"])
    kernel = Kernel(rows, columns, entry["rows"], 1, entry["block"], entry["block"], by_keys, start)
    return estimate(kernel, problem, H200).seconds


def rows_seconds(problem: Workload) -> float:
    """The seconds of the first part of the backward, which reads out and dout."""
    return (
        2
        * problem.batch
        * problem.nheads_q
        * problem.seqlen_q
        * problem.head_dim
        * ITEMSIZE
        / H200.hbm_bytes_per_second
    )


def rate(operations: float, time: float) -> float:
    """In TFLOP/s."""
    return operations / time / 1e12


def _chosen(results: Entry, part: str, head_dim: int, *, causal: bool, training: bool = False) -> Entry | None:
    """The fit of the table's config."""
    wanted = {"part": part, "head_dim": head_dim, "causal": causal, "training": training, "config": [], "options": []}
    return next((x for x in results["fits"] if x["variant"] == wanted), None)


def _general(results: Entry, part: str, problem: Workload) -> float | None:
    for x in results["general"]:
        if (x["part"], x["head_dim"], x["causal"]) == (part, problem.head_dim, problem.causal):
            return estimate(Kernel(**x["kernel"]), problem, H200).seconds
    return None


def measured() -> dict[tuple[str, bool, int], dict[str, float]]:
    """TFLOP/s on an H200 at head_dim 128: by direction, causal and tokens, of each contestant."""
    found: dict[tuple[str, bool, int], dict[str, float]] = {}
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        name, times = json.loads(line)
        words = name.split()
        if words[0] in ("fwd", "bwd") and words[1] == "D=128" and words[-1] == "H=16:16":
            key = words[0], words[2] == "causal", int(words[3].removeprefix("N="))
            found.setdefault(key, {contestant: x[1] for contestant, x in times.items()})
    return found


def calls(results: Entry, head_dim: int) -> Iterator[Iterable[object]]:
    """Cells: predicted and measured speeds of calls."""
    yield (
        *("tokens", "mask", "direction", "predicted", "measured", "measured / predicted"),
        *("general: predicted", "measured", "measured / predicted", "cuDNN: measured"),
    )
    on_gpu = measured() if head_dim == TILE else {}
    for direction, causal in (("fwd", False), ("fwd", True), ("bwd", False), ("bwd", True)):
        for seqlen in SEQLENS:
            problem = workload(seqlen, head_dim, causal=causal)
            parts = ("fwd",) if direction == "fwd" else ("dkdv", "dq")
            fits = [_chosen(results, part, head_dim, causal=causal) for part in parts]
            others = [_general(results, part, problem) for part in parts]
            besides = 0.0 if direction == "fwd" else rows_seconds(problem)
            operations = problem.operations * (1 if direction == "fwd" else 2.5)
            ours = None if None in fits else rate(operations, besides + sum(seconds(x, problem) for x in fits if x))
            bound = None if None in others else rate(operations, besides + sum(x for x in others if x))
            times = on_gpu.get((direction, causal, seqlen), {})
            yield (
                *(f"{seqlen:,}", "causal" if causal else "none", "forward" if direction == "fwd" else "backward"),
                *_compared(ours, times.get("hopper")),
                *_compared(bound, times.get("general")),
                _cell(times.get("cudnn")),
            )


def _compared(predicted: float | None, found: float | None) -> tuple[str, str, str]:
    ratio = "" if predicted is None or found is None else f"{found / predicted:.2f}"
    return _cell(predicted), _cell(found), ratio


def _cell(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}"


def described(variant: Entry) -> str:
    """What differs from the table's config."""
    config = [f"{name} {x}" for name, x in variant["config"]]
    options = [name if x else f"no {name}" for name, x in variant["options"]]
    options = [{"no persistent": "one tile in a program", "no turns": "without turns"}.get(x, x) for x in options]
    return ", ".join([*config, *options]) or "as in the table"


def ranked(results: Entry) -> list[Entry]:
    """Variants without a mask and without results for a backward: of each part and head_dim, the fastest first."""
    found = []
    for entry in results["fits"]:
        variant = entry["variant"]
        if variant["causal"] or variant["training"]:
            continue
        problem = workload(RANKED_AT, variant["head_dim"], causal=False)
        operations = problem.operations * OPERATIONS[variant["part"]] / OPERATIONS["fwd"]
        speed = rate(operations, seconds(entry, problem))
        found.append({"variant": variant, "predicted": round(speed, 1), **_figures(entry)})
    order = {part: i for i, part in enumerate(PARTS)}

    def place(x: Entry) -> tuple[int, int, float, int, int]:
        variant = x["variant"]
        changes = len(variant["config"]) + len(variant["options"])
        return order[variant["part"]], variant["head_dim"], -x["predicted"], x["spill_bytes"], changes

    return sorted(found, key=place)


def _figures(entry: Entry) -> Entry:
    return {
        "block": entry["block"],
        "busy": round(entry["busy"], 3),
        "spill_bytes": entry["spill_bytes"],
        "shared_bytes": entry["shared_bytes"],
    }


def variants(results: Entry) -> Iterator[Iterable[object]]:
    """Cells: the ranked variants."""
    yield (
        *("rank", "kernel", "head_dim", "variant", "TFLOP/s", "clocks of a block", "of its tensor core"),
        *("tensor core busy", "spilled bytes"),
    )
    rank, before = 0, None
    for entry in ranked(results):
        variant = entry["variant"]
        place = variant["part"], variant["head_dim"]
        rank = rank + 1 if place == before else 1
        before = place
        fitted = next(x for x in results["fits"] if x["variant"] == variant)
        yield (
            *(rank, PARTS[variant["part"]], variant["head_dim"], described(variant), f"{entry['predicted']:.0f}"),
            *(f"{entry['block']:.0f}", f"{product_clocks(fitted):.0f}", f"{entry['busy']:.0%}", entry["spill_bytes"]),
        )


def product_clocks(entry: Entry) -> float:
    """The clocks of the tensor core for the products that a block needs."""
    variant = entry["variant"]
    operations = OPERATIONS[variant["part"]] * TILE * entry["rows"] * variant["head_dim"]
    return operations / 2 / H200.wgmma_macs


def comparisons(results: Entry) -> Iterator[Iterable[object]]:
    """Cells: how fast variants are in relation to the table's config, as predicted and as measured."""
    yield "kernel", "variant", "predicted", "measured"
    problem = workload(COMPARED_AT, TILE, causal=False)
    for part, config, options, path, name, (changed, usual) in COMPARED:
        own = _chosen(results, part, TILE, causal=False)
        wanted = {"config": config, "options": options}
        variant = next((x for x in results["fits"] if own and x["variant"] == own["variant"] | wanted), None)
        if own is None or variant is None:
            continue
        times = dict(map(json.loads, path.read_text(encoding="utf-8").splitlines()))[name]
        predicted = seconds(own, problem) / seconds(variant, problem)
        yield (
            PARTS[part],
            described(variant["variant"]),
            f"{predicted:.2f}",
            f"{times[changed][1] / times[usual][1]:.2f}",
        )


def figures(results: Entry) -> str:
    """The tables in Markdown."""
    head_dims = sorted({x["variant"]["head_dim"] for x in results["fits"]} & {TILE})
    parts = []
    for head_dim in head_dims:
        parts += [
            f"Calls at head_dim {head_dim}, {TOKENS:,} tokens in all and nheads x head_dim {FEATURES:,}, in TFLOP/s "
            f"(Triton {results['triton']}):",
            table_of(calls(results, head_dim)),
        ]
    parts += [
        f"Speeds of variants in relation to the table's config, without a mask, at {COMPARED_AT:,} tokens; those "
        "measured with another block were prototypes:",
        table_of(comparisons(results)),
    ]
    parts += [f"Variants, without a mask, at {RANKED_AT:,} tokens:", table_of(variants(results))]
    left_out = [f"{_name(x['variant'])}: {x['reason']}" for x in results["left_out"]]
    if left_out:
        parts.append("Left out: " + "; ".join(left_out) + ".")
    return "\n\n".join(parts) + "\n"


def _name(variant: Entry) -> str:
    causal = ", causal" if variant["causal"] else ""
    training = ", training" if variant["training"] else ""
    return f"{PARTS[variant['part']]} at {variant['head_dim']} ({described(variant)}{causal}{training})"


def write(results: Entry) -> None:
    """Rewrite everything that is made from results."""
    write_block(DOCUMENT, figures(results), SOURCE)
    CANDIDATES.write_text("[\n" + ",\n".join(map(json.dumps, ranked(results))) + "\n]\n", encoding="utf-8")
    timing_diagram.draw(timing_diagram.PATH, results["diagram"])
