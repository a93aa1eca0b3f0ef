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
from bench.report.page import table_of, with_block
from bench.report.style import COLORS, OURS, digest, drawing, save_png

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT, PICTURE = DOCS / "codegen.md", DOCS / "images" / "codegen.png"
REGISTERS = 16  # of a column of the plot
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")


def document(text: str) -> str:
    """`text` with the tables of the baselines between its comments."""
    found = baselines()
    parts = [part for baseline in found for part in (f"### Triton {baseline.triton}", _summary(baseline, found[0]))]
    parts += ["### Main loops for sm_90 in bfloat16", _main_loops(found)]
    parts += ["### Known faults", table_of(_known_faults(found))]
    return with_block(text, "\n\n".join(parts) + "\n", "python -m bench.codegen --update")


def baselines() -> list[Baseline]:
    """All committed baselines, the oldest version first."""
    versions = [path.stem.removeprefix("triton-") for path in FOLDER.glob("triton-*.json")]
    found = [load(version) for version in sorted(versions, key=lambda x: [int(part) for part in x.split(".")])]
    return [baseline for baseline in found if baseline is not None]


def _summary(baseline: Baseline, oldest: Baseline) -> str:
    growth = baseline is not oldest
    lines: list[list[object]] = [
        ["target", "kernels", "known faults", "kernels that spill (most, bytes)", "most registers"]
    ]
    lines[0] += [f"main loops, relative to {oldest.triton}: 16 bits, float32"] if growth else []
    for target in TARGETS:
        rows = _rows_of(baseline, target)
        if not rows:
            continue
        spills = [row["spill_bytes"] for row in rows.values() if row["spill_bytes"]]
        faults = sum(key in rows for key in baseline.known_faults)
        registers = max(row["registers"] for row in rows.values())
        lines.append([target, len(rows), faults, f"{len(spills)} ({max(spills, default=0)})", registers])
        if growth:
            lines[-1].append(f"{_growth(rows, oldest, ('bf16', 'fp16'))}, {_growth(rows, oldest, ('fp32',))}")
    return table_of(lines)


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


def _main_loops(found: list[Baseline]) -> str:
    lines = [["kernel", "head_dim", "features", "tile", *(baseline.triton for baseline in found)]]
    for key, newest in found[-1].entries.items():
        kernel, target, dtype, head_dim, features = key.split(" ")
        if (target, dtype) != ("sm_90", "bf16") or not newest["loop_instructions"]:
            continue
        if "residual" not in features and kernel == "attention_fwd":
            continue  # inference: the same loops with one product less
        rows = (baseline.entries.get(key) for baseline in found)
        lines.append(
            [kernel, head_dim, features, newest["tile"], *("" if row is None else _loops(row) for row in rows)]
        )
    return table_of(lines)


def _loops(row: dict[str, Any]) -> str:
    return f"{row['registers']} regs, {row['ctas_per_sm']} CTAs: {' '.join(map(str, row['loop_instructions']))}"


def _known_faults(found: list[Baseline]) -> Iterator[list[str]]:
    yield ["kernel", "target", "dtype", "head_dim", "features", "tile", "Triton", "fault"]
    for baseline in found:
        for key, faults in baseline.known_faults.items():
            yield [*key.split(" "), baseline.entries[key]["tile"], baseline.triton, "; ".join(faults)]


def _rows_of(baseline: Baseline, target: str) -> dict[str, dict[str, Any]]:
    return {key: row for key, row in baseline.entries.items() if key.split(" ")[1] == target}


def _by_target(baseline: Baseline, column: str) -> dict[str, list[int]]:
    """A column of the kernels of each target that has some."""
    found = {target: [row[column] for row in _rows_of(baseline, target).values()] for target in TARGETS}
    return {target: numbers for target, numbers in found.items() if numbers}


def registers(baseline: Baseline) -> dict[str, list[int]]:
    """By target, registers of a thread in each kernel."""
    return _by_target(baseline, "registers")


def spilling(found: list[Baseline]) -> dict[str, dict[str, float]]:
    """By version of Triton and target, the share of kernels with a spilled register."""
    return {
        baseline.triton: {
            target: sum(n > 0 for n in spilled) / len(spilled)
            for target, spilled in _by_target(baseline, "spill_bytes").items()
        }
        for baseline in found
    }


def description(found: list[Baseline]) -> str:
    """What the picture keeps of the baselines: a test compares it."""
    return digest([registers(found[-1]), spilling(found)])


def draw(found: list[Baseline], path: Path) -> None:
    """Registers of the newest version's kernels, and shares of kernels that spill, by target."""
    of_target, shares = registers(found[-1]), spilling(found)
    most = max(n for numbers in of_target.values() for n in numbers)
    with drawing((9.2, 4.6)) as figure:
        grid = figure.add_gridspec(len(of_target), 2, width_ratios=(1.2, 1))
        panels = [figure.add_subplot(grid[i, 0]) for i in range(len(of_target))]
        for axes, (target, numbers) in zip(panels, of_target.items(), strict=True):
            axes.hist(numbers, range(0, most + REGISTERS, REGISTERS), color=OURS, edgecolor="white", linewidth=0.6)
            axes.set_ylabel(target, rotation=0, ha="right", va="center")
            axes.set_yticks([])
            axes.tick_params(labelbottom=axes is panels[-1])
        panels[0].set_title(f"Kernels by registers, Triton {found[-1].triton}")
        panels[-1].set_xlabel("registers of a thread")
        axes = figure.add_subplot(grid[:, 1])
        for i, ((version, share), color) in enumerate(zip(shares.items(), (COLORS[0], OURS, COLORS[1]), strict=False)):
            places = [list(of_target).index(target) + 0.26 * (i - (len(shares) - 1) / 2) for target in share]
            axes.barh(places, [100 * x for x in share.values()], 0.24, color=color, label=f"Triton {version}")
        axes.set_yticks(range(len(of_target)), list(of_target))
        axes.set(title="Kernels that spill", xlabel="% of the kernels", ylim=(len(of_target) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=len(shares), columnspacing=1, handlelength=1
        )
        save_png(figure, path, description(found))


def write() -> None:
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
    draw(baselines(), PICTURE)


if __name__ == "__main__":
    write()
