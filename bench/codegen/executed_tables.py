"""The tables of docs/codegen.md of what the kernels execute, from docs/results/executed.json.

    python -m bench.codegen.executed_tables

rewrites them, as --update of ``bench.codegen.executed`` does; a test checks that they are current.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.codegen.tables import DOCUMENT
from bench.report.page import table_of, with_block

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "executed.json"
COMMAND = "python -m bench.codegen.executed"
KINDS = ("products", "exponentials", "float", "integer", "moves", "shuffles", "shared", "global", "synchronisation")
MAIN = ("full", "boundary", "1")  # names of the loop that most blocks run, the first that there is
SHOWN_OFFENDERS = 24


def load() -> dict[str, dict[str, Any]]:
    """The committed counts, by the key of a report."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def document(text: str) -> str:
    """`text` with the tables between its comments."""
    entries = load()
    parts = [
        "One iteration of the main loop in bfloat16: instructions of a warp, bytes of a program. `x of y` is what runs "
        "and what the model assumes.",
        table_of(rows({key: entry for key, entry in entries.items() if key.split(" ")[2] == "bf16"})),
        "Accesses that need more passes of shared memory, or sectors of global memory, than their bytes would fill:",
        table_of(offenders(entries)),
    ]
    return with_block(text, "\n\n".join(parts) + "\n", COMMAND)


def rows(entries: dict[str, dict[str, Any]]) -> Iterator[Iterable[object]]:
    """The cells of the main loop of each kernel."""
    yield (
        *("kernel", "target", "head_dim", "call", "tile", *KINDS, "instructions in SASS", "1000 multiply-adds"),
        *("exponentials of MUFU", "barriers", "KiB of global memory", "KiB of shared memory"),
        *("sectors, ideal", "passes, ideal"),
    )
    for key, entry in entries.items():
        kernel, target, _, head_dim, _ = key.split(" ")
        loop = next((entry["loops"][name] for name in MAIN if name in entry.get("loops", {})), None)
        if loop is not None:
            yield kernel, target, head_dim, entry["call"], entry["tile"], *_cells(loop)


def _cells(loop: dict[str, Any]) -> Iterator[object]:
    issued, model = loop["issued"], loop["model"]
    yield from (f"{issued.get(kind, 0):g}" for kind in KINDS)
    yield f"{model['instructions']:g}" if model else ""
    yield _beside(loop["multiply_adds"], model.get("multiply_adds"), 1000)
    yield _beside(issued.get("exponentials", 0), model.get("mufu"))
    yield _beside(loop["barriers"], model.get("barriers"))
    yield _beside(loop["memory_bytes"], model.get("memory_bytes"), 1024)
    yield _beside(loop["shared_bytes"], model.get("shared_bytes"), 1024)
    for space in ("global", "shared"):
        of_space = [t for where, t in loop["traffic"].items() if where.startswith(space)]
        yield f"{sum(t[2] for t in of_space):.0f}, {sum(t[3] for t in of_space):.0f}"


def _beside(executed: float | None, assumed: float | None, unit: int = 1) -> str:
    """Both figures; the first is unknown for bytes of a loop in which no iteration fetches."""
    shown = "?" if executed is None else f"{executed / unit:.4g}"
    return shown if assumed is None else f"{shown} of {assumed / unit:.4g}"


def offenders(entries: dict[str, dict[str, Any]]) -> Iterator[Iterable[object]]:
    """The worst places: of each kernel, access and place the call in which it has the largest share."""
    yield "kernel", "target", "dtype", "head_dim", "call", "access", "place", "needed, times the ideal", "share"
    worst: dict[tuple[str, ...], tuple[float, list[object]]] = {}
    for key, entry in entries.items():
        kernel, target, dtype, head_dim, _ = key.split(" ")
        for where, place, needed, ideal, share in entry["offenders"]:
            excess = share * (1 - ideal / needed)
            cells = [kernel, target, dtype, head_dim, entry["call"], where, place, f"{needed / ideal:.1f}"]
            group = (kernel, target, where, place)
            if group not in worst or excess > worst[group][0]:
                worst[group] = excess, [*cells, f"{share:.0%}"]
    for _, cells in sorted(worst.values(), key=lambda x: -x[0])[:SHOWN_OFFENDERS]:
        yield cells


def write() -> None:
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
