"""Predictions for the kernels for Hopper: clocks of a block, speeds of calls, and variants to measure on a GPU.

    python -m bench.codegen.hopper [--part fwd] [--head-dim 128] [--update]

compiles the kernels with every config of a small grid, replays them on the timeline, and prints tables, without a GPU.
--update writes docs/results/hopper.json, and from it the tables of docs/performance.md, the diagram of docs/kernels.md
and the ranked list bench/candidates/hopper.json. Results of parts and head_dims that were not asked for stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import triton

from bench.codegen import compilations, hopper_tables, predictions, timing_diagram
from bench.codegen.hopper_replay import TABLES, Fit, Variant, compiled, fit, programs
from fusedattn.kernels.hopper_configs import HopperConfig

GRID = {"BLOCK": (64, 128), "STAGES": (2, 3)}  # values to try of fields of HopperConfig
OPTIONS = (("turns", False),), (("persistent", False),), (("turns", False), ("persistent", False))
DRAWN = Variant("fwd", 128)
DRAWN_BLOCKS = 12


def variants(parts: list[str], head_dims: list[int]) -> Iterator[Variant]:
    """All variants: first the table's configs, without a mask, causal and in training; then changes of them."""
    own = [(part, n) for part in parts for n in TABLES[part] if not head_dims or n in head_dims]
    for part, n in own:
        yield from (Variant(part, n), Variant(part, n, causal=True))
        if part == "fwd" and n == DRAWN.head_dim:
            yield from (Variant(part, n, training=True), Variant(part, n, causal=True, training=True))
    tried = {field.name: GRID[field.name] for field in fields(HopperConfig) if field.name in GRID}
    for part, n in own:
        usual = vars(TABLES[part][n])
        for values in itertools.product(*tried.values()):
            changes = tuple((name, x) for name, x in zip(tried, values, strict=True) if x != usual[name])
            if changes:
                yield Variant(part, n, config=changes)
        if part == "fwd":
            yield from (Variant(part, n, options=x) for x in OPTIONS)


def attempt(variant: Variant) -> Fit | str:
    """The fit of a variant, or why there is none."""
    try:
        return fit(variant)
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"{name}{error}".splitlines()[0]


def general(head_dims: list[int]) -> list[dict[str, Any]]:
    """What the model of one loop says of the general kernels, as keyword arguments of estimate.Kernel."""
    found = []
    for head_dim, features in itertools.product(head_dims, ("plain", "causal")):
        kernels = tuple(predictions.OPERATIONS)
        case = compilations.Case("sm_90", "bf16", head_dim, (features,), kernels, ())
        for report in compilations.compile_case(case):
            part = {"attention_fwd": "fwd", "attention_bwd_dkdv": "dkdv", "attention_bwd_dq": "dq"}[report.kernel]
            kernel = asdict(predictions.predict(report).kernel)
            found.append({"part": part, "head_dim": head_dim, "causal": features == "causal", "kernel": kernel})
    return found


def diagram() -> dict[str, Any]:
    """The bars of the timing diagram, and what it says in its title."""
    block = fit(DRAWN)
    [program] = programs(DRAWN, compiled(DRAWN), 1, DRAWN_BLOCKS)
    return {
        "head_dim": DRAWN.head_dim,
        "block": block.block,
        "busy": block.busy,
        "bars": timing_diagram.bars(program.timeline, program.actions, block.block),
    }


def merged(known: dict[str, Any], found: dict[str, Any], chosen: list[Variant]) -> dict[str, Any]:
    """New results, and those that are known of other variants, in the order of :func:`variants`."""
    order = [json.dumps(asdict(x)) for x in variants(list(TABLES), [])]
    again = {json.dumps(asdict(x)) for x in chosen}

    def both(name: str, key: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
        kept = [x for x in known.get(name, []) if key(x) in order and key(x) not in again]
        return sorted(kept + found[name], key=lambda x: order.index(key(x)))

    def variant(x: dict[str, Any]) -> str:
        return json.dumps(x["variant"])

    return found | {name: both(name, variant) for name in ("fits", "left_out")}


def save(path: Path, found: dict[str, Any]) -> None:
    """Write results, an entry of a list on each line."""
    parts = []
    for name, x in found.items():
        if isinstance(x, list):
            inside = ",\n".join(f"  {json.dumps(entry)}" for entry in x)
            parts.append(f" {json.dumps(name)}: [\n{inside}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(x)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.codegen.hopper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=list(TABLES), default=[], help="default: all")
    parser.add_argument("--head-dim", action="append", type=int, default=[], help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: 2")
    parser.add_argument("--update", action="store_true", help="write results, tables, diagram and candidates")
    options = parser.parse_args(arguments)
    chosen = list(variants(options.part or list(TABLES), options.head_dim))
    fits, left_out = [], []
    for variant, found in zip(chosen, compilations.in_processes(attempt, chosen, options.jobs), strict=True):
        print(variant, found if isinstance(found, str) else f"{found.block:.0f} clocks", file=sys.stderr)
        if isinstance(found, str):
            left_out.append({"variant": asdict(variant), "reason": found})
        else:
            fits.append(asdict(found))
    results: dict[str, Any] = {"triton": triton.__version__, "fits": fits, "left_out": left_out}
    results["general"] = general([DRAWN.head_dim])
    if options.update:
        results = merged(hopper_tables.load() if hopper_tables.RESULTS.exists() else {}, results, chosen)
    else:
        print(hopper_tables.figures(results))
        return 0
    results["diagram"] = diagram()
    save(hopper_tables.RESULTS, results)
    hopper_tables.write(hopper_tables.load())
    return 0


if __name__ == "__main__":
    sys.exit(main())
