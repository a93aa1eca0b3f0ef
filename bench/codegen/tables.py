"""The tables of docs/codegen.md, from the committed baselines.

    python -m bench.codegen.tables

rewrites them, as --update of ``bench.codegen`` does; a test checks that they are current.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.codegen.baseline import FOLDER, Baseline, load
from bench.codegen.loops import LOOPS
from bench.report.page import with_block

DOCUMENT = Path(__file__).parents[2] / "docs" / "codegen.md"
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")


def document(text: str) -> str:
    """`text` with the tables of the baselines between its comments."""
    return with_block(text, "\n".join(tables(baselines())) + "\n")


def baselines() -> list[Baseline]:
    """All committed baselines, the oldest version first."""
    versions = [path.stem.removeprefix("triton-") for path in FOLDER.glob("triton-*.json")]
    found = [load(version) for version in sorted(versions, key=lambda x: [int(part) for part in x.split(".")])]
    return [baseline for baseline in found if baseline is not None]


def tables(found: list[Baseline]) -> Iterator[str]:
    """Lines of Markdown."""
    for baseline in found:
        yield f"### Triton {baseline.triton}"
        yield ""
        yield from _summary(baseline, found[0])
        yield ""
    yield "### Main loops for sm_90 in bfloat16"
    yield ""
    yield from _main_loops(found)
    yield ""
    yield "### Known faults"
    yield ""
    yield from _known_faults(found)


def _summary(baseline: Baseline, oldest: Baseline) -> Iterator[str]:
    growth = baseline is not oldest
    yield (
        "| target | kernels | known faults | kernels that spill (most, bytes) | most registers |"
        + (f" main loops, relative to {oldest.triton}: 16 bits, float32 |" if growth else "")
    )
    yield "| --- | --- | --- | --- | --- |" + (" --- |" if growth else "")
    for target in TARGETS:
        rows = {key: row for key, row in baseline.entries.items() if key.split(" ")[1] == target}
        if not rows:
            continue
        spills = [row["spill_bytes"] for row in rows.values() if row["spill_bytes"]]
        faults = sum(key in rows for key in baseline.known_faults)
        registers = max(row["registers"] for row in rows.values())
        line = f"| {target} | {len(rows)} | {faults} | {len(spills)} ({max(spills, default=0)}) | {registers} |"
        if growth:
            line += f" {_growth(rows, oldest, ('bf16', 'fp16'))}, {_growth(rows, oldest, ('fp32',))} |"
        yield line


def _growth(rows: dict[str, dict], oldest: Baseline, dtypes: tuple[str, ...]) -> str:
    """Geometric mean of the main loop's length relative to the oldest version, over kernels that both have."""
    ratios = [
        _main_loop(key, row) / _main_loop(key, oldest.entries[key])
        for key, row in rows.items()
        if key.split(" ")[2] in dtypes
        and row["loop_instructions"]
        and oldest.entries.get(key, {}).get("tile") == row["tile"]
        and oldest.entries[key]["loop_instructions"]
    ]
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "none"


def _main_loop(key: str, row: dict[str, Any]) -> int:
    """Instructions of the loop over full blocks; of the first loop if there is none."""
    lengths = row["loop_instructions"]
    names = LOOPS.get(key.split(" ")[0], {}).get(len(lengths), ())
    return lengths[names.index("full") if "full" in names else 0]


def _main_loops(found: list[Baseline]) -> Iterator[str]:
    yield "| kernel | head_dim | features | tile | " + " | ".join(x.triton for x in found) + " |"
    yield "| --- | --- | --- | --- |" + " --- |" * len(found)
    keys = [key for key, row in found[-1].entries.items() if " sm_90 bf16 " in key and row["loop_instructions"]]
    for key in keys:
        kernel, _, _, head_dim, features = key.split(" ")
        if "residual" not in features and kernel == "attention_fwd":
            continue  # inference: the same loops with one product less
        cells = []
        for baseline in found:
            row = baseline.entries.get(key)
            cells.append(
                f"{row['registers']} regs, {row['ctas_per_sm']} CTAs: {' '.join(map(str, row['loop_instructions']))}"
                if row
                else ""
            )
        yield f"| {kernel} | {head_dim} | {features} | {found[-1].entries[key]['tile']} | {' | '.join(cells)} |"


def _known_faults(found: list[Baseline]) -> Iterator[str]:
    yield "| kernel | target | dtype | head_dim | features | tile | Triton | fault |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for baseline in found:
        for key, faults in baseline.known_faults.items():
            tile = baseline.entries[key]["tile"]
            yield f"| {' | '.join(key.split(' '))} | {tile} | {baseline.triton} | {'; '.join(faults)} |"


def write() -> None:
    """Rewrite the document."""
    DOCUMENT.write_text(document(DOCUMENT.read_text()))


if __name__ == "__main__":
    write()
