"""The table of predictions in docs/performance.md: what limits each kernel, and how fast it could be at best.

    python -m bench.codegen.predictions [--target sm_90] [--head-dim 128] [--features plain] [--update]

compiles the kernels, without a GPU, and prints the table; --update writes it to the page. The figures are those of
bench/codegen/model.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import triton

from bench.codegen import compilations
from bench.codegen.hardware import MACHINES, Machine
from bench.codegen.launches import FEATURES
from bench.codegen.model import Bound, bound
from bench.codegen.report import Report
from bench.page import with_block

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
COMMAND = "python -m bench.codegen.predictions"
PREDICTED = ("plain", "causal+rope", "bias", "all")

# Operations of a pair of a query and a key and one feature: of the products that the kernel has to do.
OPERATIONS = {"attention_fwd": 4, "attention_bwd_dkdv": 8, "attention_bwd_dq": 6}
USUAL_BACKWARD = 10  # as it is usually counted, of both kernels together
# What the innermost loops with products are, by how many a kernel has.
LOOPS = {
    "attention_fwd": {3: ("full", "boundary", "repair"), 2: ("boundary", "repair")},
    "attention_bwd_dkdv": {2: ("boundary", "full"), 1: ("boundary",)},
    "attention_bwd_dq": {3: ("full", "boundary", "repair"), 2: ("boundary", "repair")},
}
RESOURCES = ("tensor", "mufu", "alu", "issue", "shared", "L2")


@dataclass(frozen=True)
class Prediction:
    """Of one kernel: the bound of each of its loops, by what it is."""

    report: Report
    bounds: dict[str, Bound]
    machine: Machine

    @property
    def main(self) -> str:
        """The loop that most blocks run; kernels that read a mask for each pair have but the one for boundaries."""
        return "full" if "full" in self.bounds else "boundary"

    @property
    def flops(self) -> float:
        """Operations a second of the main loop, at best."""
        return self._operations / self.machine.seconds(self.bounds[self.main].clocks) * self.machine.multiprocessors

    @property
    def _operations(self) -> int:
        config = self.report.config
        return OPERATIONS[self.report.kernel] * config["BLOCK_M"] * config["BLOCK_N"] * self.report.head_dim

    @property
    def repeated(self) -> float:
        """Multiply-adds that the main loop does, over those that it has to do; 0 without matrix instructions."""
        names = LOOPS[self.report.kernel][len(self.report.loops)]
        macs = self.report.loops[names.index(self.main)].macs * self.report.config["num_warps"]
        return 2 * macs / self._operations


def predict(report: Report) -> Prediction:
    """What the model says of a compiled attention kernel.

    Raises:
        NotImplementedError: the number of its loops is none that a kernel of this name is known to have.
    """
    names = LOOPS[report.kernel].get(len(report.loops))
    if names is None:
        allowed = " or ".join(map(str, LOOPS[report.kernel]))
        raise NotImplementedError(f"loops of {report.key}: got {len(report.loops)}, allowed {allowed}")
    config = report.config
    machine = MACHINES[report.target]  # type: ignore[index]
    itemsize = 2 if report.dtype in ("bf16", "fp16") else 4
    walked = config["BLOCK_M" if report.kernel == "attention_bwd_dkdv" else "BLOCK_N"]
    bounds = {
        name: bound(
            loop,
            machine,
            warps=config["num_warps"],
            ctas=report.ctas_per_sm,
            stages=config["num_stages"],
            fetched_bytes=2 * walked * report.head_dim * itemsize if loop.counts["tma"] else 0,
        )
        for name, loop in zip(names, report.loops, strict=True)
    }
    return Prediction(report, bounds, machine)


def table(predictions: list[Prediction]) -> Iterator[str]:
    """Lines of Markdown: those of a kernel together, the fastest first."""
    yield (
        "| kernel | head_dim | features | tile | main loop | CTAs | clocks of a tile | "
        + " | ".join(RESOURCES)
        + " | limit | next | products | boundary tile | TFLOP/s at best | rank |"
    )
    yield "| --- |" * 5 + " --- |" * (11 + len(RESOURCES) - 1)
    for kernel in OPERATIONS:
        of_kernel = sorted((x for x in predictions if x.report.kernel == kernel), key=lambda x: -x.flops)
        for rank, prediction in enumerate(of_kernel, 1):
            yield _row(prediction, rank)


def _row(x: Prediction, rank: int) -> str:
    found, report = x.bounds[x.main], x.report
    loop = report.loops[LOOPS[report.kernel][len(report.loops)].index(x.main)]
    cells = [
        report.kernel,
        report.head_dim,
        report.features,
        report.tile,
        f"{loop.style}, {loop.overlapped:.0%} beside wgmma" if loop.counts["wgmma"] else loop.style,
        report.ctas_per_sm,
        f"{found.clocks:.0f}",
        *(f"{found.resources[name]:.0f}" for name in RESOURCES),
        *found.limiters,
        f"{x.repeated:.2f}",
        f"{x.bounds['boundary'].clocks:.0f}",
        f"{x.flops / 1e12:.0f}",
        rank,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def backward(predictions: list[Prediction]) -> Iterator[str]:
    """Lines of Markdown: both kernels of the backward together, as the backward is usually counted."""
    yield "| head_dim | features | TFLOP/s at best | share of dk and dv in the time |"
    yield "| --- | --- | --- | --- |"
    by_key: dict[tuple[int, str], dict[str, Prediction]] = {}
    for x in predictions:
        if x.report.kernel != "attention_fwd":
            by_key.setdefault((x.report.head_dim, x.report.features), {})[x.report.kernel] = x
    for (head_dim, features), pair in by_key.items():
        if len(pair) == 2:
            each = {kernel: OPERATIONS[kernel] / x.flops for kernel, x in pair.items()}
            total = sum(each.values())
            share = each["attention_bwd_dkdv"] / total
            yield f"| {head_dim} | {features} | {USUAL_BACKWARD / total / 1e12:.0f} | {share:.0%} |"


def figures(predictions: list[Prediction], target: str) -> str:
    """The part of the page."""
    machine = MACHINES[target]  # type: ignore[index]
    lines = [
        f"{target} with {machine.multiprocessors} multiprocessors at {machine.hertz / 1e9:.3f} GHz (at most "
        f"{machine.peak / 1e12:.0f} TFLOP/s), Triton {triton.__version__}, bfloat16.",
        "",
        *table(predictions),
        "",
        *backward(predictions),
    ]
    return "\n".join(lines) + "\n"


def compiled(target: str, head_dims: list[int], features: list[str], jobs: int) -> list[Report]:
    """The attention kernels in bfloat16, and the forward without gradients and other features too."""
    cases = [
        compilations.Case(target, "bf16", head_dim, tuple(features), tuple(OPERATIONS), ("plain",))  # type: ignore[arg-type]
        for head_dim in head_dims
    ]
    return compilations.compile_all(cases, jobs)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=list(MACHINES), default="sm_90")
    parser.add_argument("--head-dim", action="append", type=int, default=[], help="default: 64, 128 and 256")
    parser.add_argument("--features", action="append", choices=list(FEATURES), default=[], help="default: four of them")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes; default: 2")
    parser.add_argument("--update", action="store_true", help=f"write it to {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    reports = compiled(
        options.target,
        options.head_dim or list(compilations.HEAD_DIMS),
        options.features or list(PREDICTED),
        options.jobs,
    )
    text = figures([predict(report) for report in reports if not report.error], options.target)
    if options.update:
        DOCUMENT.write_text(with_block(DOCUMENT.read_text(), text, COMMAND))
    else:
        print(text)
    return int(any(report.error for report in reports))


if __name__ == "__main__":
    sys.exit(main())
