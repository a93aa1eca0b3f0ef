"""``python -m tests.tools.figures`` writes the generated parts of three pages.

The figures of docs/testing.md come from docs/results/ and bench/baselines/, those of docs/virtual-gpu.md from
docs/results/, the layers of docs/architecture.md from the import law.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report.page import table_of, with_block, write_block
from tests.helpers import import_law

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/testing.md"
VIRTUAL_GPU = ROOT / "docs/virtual-gpu.md"
ARCHITECTURE = ROOT / "docs/architecture.md"


def with_figures(page: str) -> str:
    """The page with the committed figures between its markers."""
    return with_block(page, table_of([("what", "figure"), *figures()]) + "\n")


def figures() -> Iterator[tuple[str, str]]:
    """Pairs of a quantity and its figure."""
    yield from _accuracy(_results("accuracy"))
    yield from _fuzz("fuzzing", _results("fuzz"))
    yield from _fuzz("fuzzing, caches", _results("fuzz_caches"))
    yield from _mutants(_results("mutants"))
    yield from _soak(_results("soak"))
    yield from _compiled(_results("compiled"))
    for path in sorted((ROOT / "bench/baselines").glob("*.json")):
        yield from _machine_code(json.loads(path.read_text(encoding="utf-8")))


def _results(name: str) -> Any:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))


def _accuracy(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kept = sum(row["ok"] for row in report["features"])
    used = max(row["used"] for row in report["results"])
    yield (
        "error budget",
        f"{kept} of {len(report['features'])} (case, dtype) pairs keep it; the worst tensor uses {used:.0%} of it",
    )


def _fuzz(what: str, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    dtypes = ", ".join(f"{number} in {dtype}" for dtype, number in report["by_dtype"].items())
    refused = report["of_these"].get("refused")
    to_refuse = "" if refused is None else f", {refused} of them calls that must be refused"
    yield what, f"{report['problems']} problems ({dtypes}){to_refuse}, {len(report['failures'])} failures"


def _mutants(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    fate = {"killed": report["killed"], "shown to change nothing": len(report["equivalent"])}
    fate["survived"] = len(report["survived"])
    yield f"{report['planted']} planted faults", ", ".join(f"{number} {what}" for what, number in fate.items())


def _soak(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ratio, losses = report["departure_over_noise"], report["final_loss"]
    yield (
        f"soak, {report['steps']} steps in float32",
        f"loss from {report['first_loss']:.3f} to {losses['fused']:.3f} fused, {losses['eager']:.3f} eager; the fused "
        f"run departs from eager {ratio['geometric_mean']:.2f} times as far as eager with another order of sums does",
    )
    for dtype, run in report["mixed"].items():
        yield (
            f"soak, {run['steps']} steps in {dtype}",
            f"{run['nan_gradients']} steps with a NaN gradient; loss {run['final_loss']['fused']:.3f} fused, "
            f"{run['final_loss']['eager']:.3f} eager",
        )


def _compiled(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for version, result in results.items():
        solved, total = (sum(group[name] for group in result["groups"]) for name in ("within", "problems"))
        yield (
            f"compiled kernels, Triton {version}",
            f"{solved} of {total} problems keep the error budget on the virtual GPU; the worst tensor uses "
            f"{max(group['used'] for group in result['groups']):.0%} of it",
        )


def compiled_tables(results: dict[str, Any]) -> str:
    """What the virtual GPU ran, in Markdown: by Triton and architecture, then by group of problems."""
    head = ("Triton", "architecture", "problems", "within the budget", "most used", "programs", "instructions")
    by_arch: list[tuple[object, ...]] = [head]
    by_group: list[tuple[object, ...]] = [("problems", "dtype", *results)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for version, result in results.items():
        for arch in dict.fromkeys(group["arch"] for group in result["groups"]):
            of_arch = [group for group in result["groups"] if group["arch"] == arch]
            n = {
                name: sum(group[name] for group in of_arch)
                for name in ("problems", "within", "programs", "instructions")
            }
            used = f"{max(group['used'] for group in of_arch):.0%}"
            numbers = (
                n["problems"],
                n["within"],
                used,
                f"{n['programs']:,}",
                f"{n['instructions'] / 1e6:,.0f} million",
            )
            by_arch.append((version, arch, *numbers))
        for group in result["groups"]:
            row = cells.setdefault((group["group"], group["dtype"]), {})
            before = f"{row[version]}; " if version in row else ""
            row[version] = f"{before}{group['arch']}: {group['within']} of {group['problems']}, {group['used']:.0%}"
    by_group += [
        (group, dtype, *(row.get(version, "") for version in results)) for (group, dtype), row in cells.items()
    ]
    kernels = ", ".join(
        f"`{name}`" for name in dict.fromkeys(n for result in results.values() for n in result["kernels"])
    )
    return (
        f"{table_of(by_arch)}\n\nThe kernels that ran: {kernels}.\n\nBy group: problems within the budget, and the "
        f"largest share of the budget that a tensor uses.\n\n{table_of(by_group)}"
    )


def _machine_code(baseline: dict[str, Any]) -> Iterator[tuple[str, str]]:
    known = baseline["known_faults"]
    yield (
        f"machine code, Triton {baseline['triton']}",
        f"{len(baseline['entries'])} kernels compiled, {len(known)} with known faults",
    )


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    write_block(VIRTUAL_GPU, compiled_tables(_results("compiled")) + "\n")
    write_block(ARCHITECTURE, import_law.table() + "\n")
