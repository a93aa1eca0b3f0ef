"""The table of predictions in docs/performance.md: the limit of each kernel, and a bound of its speed.

    python -m bench.codegen.predictions [--target sm_90] [--head-dim 128] [--features plain] [--tile 128x64,8,3]
                                        [--update]

compiles the kernels, without a GPU, and prints the tables; --update writes them to the page. --tile tries a config that
is not the table's: queries x keys, warps, stages. The figures are those of bench/codegen/model.py and estimate.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import triton
import triton.language as tl

from bench.codegen import compilations
from bench.codegen.estimate import ITEMSIZE, Kernel, Workload, estimate, rotation_break_even, rotation_seconds
from bench.codegen.hardware import MACHINES, SCHEDULERS, Machine
from bench.codegen.launches import FEATURES
from bench.codegen.loops import LANES, LOOPS, Loop
from bench.codegen.model import Bound, bound
from bench.codegen.report import Report
from bench.report.page import table_of, write_block
from fusedattn.kernels.configs import Arch, Style, TileConfig
from fusedattn.kernels.primitives import block_d, is_wide

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
COMMAND = "python -m bench.codegen.predictions"
PREDICTED = ("plain", "causal+rope", "bias", "all", "one pass", "one pass, causal+rope")

# Operations per pair of query and key and per feature, of the products that the kernel must compute.
OPERATIONS = {"attention_fwd": 4, "attention_bwd_dkdv": 8, "attention_bwd_dq": 6}
BACKWARD = ("attention_bwd_dkdv", "attention_bwd_dq")
ONE_PASS_OPERATIONS = 10  # of attention_bwd_dkdv if it also adds up dq
TOTAL_BYTES = 4  # of an element of that sum
TOKENS, FEATURES_IN_ALL, SEQLENS = 16384, 2048, (1024, 2048, 4096, 8192, 16384)
SHOWN = ("plain", "causal+rope")
ROTATION_STEPS = 4  # widen, multiply, multiply and add, round; loads and shared memory are not counted
RESOURCES = ("tensor", "mufu", "alu", "issue", "shared", "L2")


@dataclass(frozen=True)
class Prediction:
    """The bounds of one kernel, by the name of the loop."""

    report: Report
    bounds: dict[str, Bound]
    machine: Machine

    @property
    def main(self) -> str:
        """The loop that most blocks run; kernels that read a mask for each pair have only the loop for boundaries."""
        return "full" if "full" in self.bounds else "boundary"

    @property
    def boundary(self) -> Bound:
        """The bound of blocks at the boundary of a mask; if one loop runs all blocks, that of this loop."""
        return self.bounds.get("boundary", self.bounds[self.main])

    @property
    def flops(self) -> float:
        """Operations per second of the main loop, at best."""
        return self._operations / self.machine.seconds(self.bounds[self.main].clocks) * self.machine.multiprocessors

    @property
    def one_pass(self) -> bool:
        return is_one_pass(self.report)

    @property
    def kernel(self) -> Kernel:
        """The kernel for estimates; without a loop for full blocks, that for boundaries runs them too."""
        config = self.report.config
        return Kernel(
            config["BLOCK_M"],
            config["BLOCK_N"],
            self.report.boundary,
            self.report.ctas_per_sm,
            self.bounds[self.main].program_clocks,
            self.boundary.program_clocks,
            by_keys=self.report.kernel == "attention_bwd_dkdv",
        )

    @property
    def _operations(self) -> int:
        report = self.report
        rows, columns = report.config["BLOCK_M"], report.config["BLOCK_N"]
        if self.main == "boundary":
            rows, columns = (report.boundary, columns) if report.walks_over == "BLOCK_M" else (rows, report.boundary)
        operations = ONE_PASS_OPERATIONS if self.one_pass else OPERATIONS[report.kernel]
        return operations * rows * columns * report.head_dim

    @property
    def repeated(self) -> float:
        """Multiply-adds of the main loop, relative to the required ones; 0 without matrix instructions."""
        names = LOOPS[self.report.kernel][len(self.report.loops)]
        macs = self.report.loops[names.index(self.main)].macs * self.report.config["num_warps"]
        return 2 * macs / self._operations


def is_one_pass(report: Report) -> bool:
    """Whether a kernel adds up dq besides its own dk and dv."""
    return "one-pass" in report.features.split("+")


def in_pieces(report: Report) -> bool:
    """Whether boundary blocks read a piece of the features at a time, as is_wide of the kernels says."""
    return bool(is_wide(tl.float32, block_d(report.head_dim), "tf32" if report.dtype == "tf32" else "ieee"))


def predict(report: Report) -> Prediction:
    """The model's prediction for a compiled attention kernel.

    Raises:
        NotImplementedError: its products are computed in pieces, in separate loops, or the number of its loops is
            unknown for a kernel of this name.
    """
    if report.kernel in BACKWARD and in_pieces(report):
        raise NotImplementedError(f"head_dim of {report.key}: got {report.head_dim}, allowed are those of whole tiles")
    names = LOOPS[report.kernel].get(len(report.loops))
    if names is None:
        allowed = " or ".join(map(str, LOOPS[report.kernel]))
        raise NotImplementedError(f"loops of {report.key}: got {len(report.loops)}, allowed {allowed}")
    config = report.config
    machine = MACHINES[report.target]  # type: ignore[index]
    bounds: dict[str, Bound] = {}
    for name, loop in zip(names, report.loops, strict=True):
        fetched = fetched_bytes(report, loop, name)
        bounds[name] = bound(loop, machine, config["num_warps"], report.ctas_per_sm, fetched)
    return Prediction(report, bounds, machine)


def fetched_bytes(report: Report, loop: Loop, name: str) -> int:
    """Bytes that TMA moves in an iteration of the loop of this name: loads of tiles, and additions to dq."""
    itemsize = 2 if report.dtype in ("bf16", "fp16") else 4
    moved = 2 * itemsize if loop.counts["tma"] else 0  # of q and dout, or k and v
    moved += TOTAL_BYTES if loop.counts["tma add"] else 0
    walked = report.boundary if name == "boundary" else report.config[report.walks_over]
    return walked * report.head_dim * moved


def table(predictions: list[Prediction]) -> Iterator[Iterable[object]]:
    """The cells of each row, grouped by kernel, the fastest first."""
    yield (
        *("rank", "kernel", "head_dim", "features", "tile", "main loop", "CTAs", "TFLOP/s at best", "limit", "next"),
        *("clocks", *RESOURCES, "products", "boundary"),
    )
    for kernel in OPERATIONS:
        for one_pass in (False, True):
            of_kernel = [x for x in predictions if x.report.kernel == kernel and x.one_pass == one_pass]
            for rank, prediction in enumerate(sorted(of_kernel, key=lambda x: -x.flops), 1):
                yield _cells(prediction, rank)


def _cells(x: Prediction, rank: int) -> list[object]:
    found, report = x.bounds[x.main], x.report
    loop = report.loops[LOOPS[report.kernel][len(report.loops)].index(x.main)]
    return [
        rank,
        report.kernel,
        report.head_dim,
        report.features,
        report.tile,
        f"{loop.style}, {loop.overlapped:.0%} beside wgmma" if loop.counts["wgmma"] else loop.style,
        report.ctas_per_sm,
        f"{x.flops / 1e12:.0f}",
        *found.limiters,
        f"{found.clocks:.0f}",
        *(f"{found.resources[name]:.0f}" for name in RESOURCES),
        f"{x.repeated:.2f}",
        f"{x.boundary.clocks:.0f}",
    ]


def problems(predictions: list[Prediction], machine: Machine) -> Iterator[Iterable[object]]:
    """Cells: whole calls, with and without a causal mask, of heads with 16 * 128 features in all."""
    yield (
        *("head_dim", "features", "seqlen", "batch", "forward: TFLOP/s at best", "waves", "filled"),
        *("backward: TFLOP/s at best", "share of dk and dv", "in one pass", "rotating before, of the forward"),
    )
    for head_dim, features in sorted({(x.report.head_dim, _called(x)) for x in predictions}):
        of_call = [x for x in predictions if (x.report.head_dim, _called(x)) == (head_dim, features)]
        # If queries are rotated before, the forward kernel does not have the feature "rope".
        prerotate_q = not any(x.report.kernel == "attention_fwd" for x in of_call)
        if prerotate_q:
            forwards = [x for x in predictions if x.report.kernel == "attention_fwd" and x.report.head_dim == head_dim]
            of_call += [x for x in forwards if _called(x) == features.removesuffix("+rope")]
        together = next((x for x in of_call if x.one_pass), None)
        of_call = [x for x in of_call if not x.one_pass]
        if features not in SHOWN or not set(BACKWARD) < {x.report.kernel for x in of_call}:
            continue
        for seqlen in SEQLENS:
            nheads = FEATURES_IN_ALL // head_dim
            problem = Workload(TOKENS // seqlen, nheads, 1, seqlen, seqlen, head_dim, causal=features != "plain")
            found = {x.report.kernel: estimate(x.kernel, problem, machine) for x in of_call}
            forward = found["attention_fwd"]
            backward = sum(found[kernel].seconds for kernel in BACKWARD)
            rotating = (1 + prerotate_q) * rotation_seconds(problem, machine) / forward.seconds  # k, and q
            yield (
                *(head_dim, features, seqlen, problem.batch, f"{problem.operations / forward.seconds / 1e12:.0f}"),
                *(f"{forward.waves:.1f}", f"{forward.filled:.0%}"),
                f"{2.5 * problem.operations / backward / 1e12:.0f}",
                f"{found['attention_bwd_dkdv'].seconds / backward:.0%}",
                "" if together is None else f"{_one_pass_flops(together, problem, machine) / 1e12:.0f}",
                f"{rotating:.1%}" if "rope" in features else "",
            )


def _one_pass_flops(x: Prediction, problem: Workload, machine: Machine) -> float:
    """Operations per second of a backward in one pass, including zeroing its sum and reading it once more."""
    rows = problem.batch * problem.nheads_q * problem.seqlen_q
    moved = rows * problem.head_dim * (2 * TOTAL_BYTES + ITEMSIZE)
    seconds = estimate(x.kernel, problem, machine).seconds + moved / machine.hbm_bytes_per_second
    return 2.5 * problem.operations / seconds


def _called(x: Prediction) -> str:
    """The features of the call, without those about results kept for the backward and about its sums."""
    return "+".join(name for name in x.report.features.split("+") if name not in ("residual", "one-pass")) or "plain"


def figures(predictions: list[Prediction], target: Arch) -> str:
    machine = MACHINES[target]
    training = [x for x in predictions if x.report.kernel in BACKWARD or "residual" in x.report.features.split("+")]
    parts = [
        f"{target} with {machine.multiprocessors} multiprocessors at {machine.hertz / 1e9:.3f} GHz (at most "
        f"{machine.peak / 1e12:.0f} TFLOP/s), Triton {triton.__version__}, bfloat16. One tile of each kernel, in "
        "clocks of a multiprocessor:",
        table_of(table(predictions)),
        f"Whole calls in training, of {TOKENS} tokens and heads with {FEATURES_IN_ALL} features in all:",
        table_of(problems(training, machine)),
        "\n".join(rotations(predictions, machine)),
    ]
    return "\n\n".join(parts) + "\n"


def rotations(predictions: list[Prediction], machine: Machine) -> Iterator[str]:
    """A sentence for each head_dim: up to which size rotating k in the loop of the forward could pay."""
    for x in predictions:
        if x.report.kernel == "attention_fwd" and x.report.features == "plain":
            tile = x.kernel
            least = tile.block_n * x.report.head_dim * ROTATION_STEPS / LANES / SCHEDULERS
            rows = rotation_break_even(tile.block_m, tile.block_n, least, x.report.head_dim, machine)
            yield (
                f"- head_dim {x.report.head_dim}: rotating k in the loop of the forward, at {ROTATION_STEPS} "
                f"instructions for each element and nothing else, costs more than a kernel that rotates it once from "
                f"seqlen_q * group = {rows:.0f} on."
            )


def tile_config(text: str) -> TileConfig:
    """Parse "128x64,8,3,pipelined,32,persistent": queries x keys, warps, stages, and optional fields."""
    match = re.fullmatch(rf"(\d+)x(\d+),(\d+),(\d+)(?:,({'|'.join(get_args(Style))}))?(?:,(\d+))?(,persistent)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"got {text}, allowed is e.g. 128x64,8,3 or 128x64,8,3,pipelined,32,persistent"
        )
    block_m, block_n, warps, stages, style, boundary, persistent = match.groups()
    options: dict[str, Any] = {"style": style, "BOUNDARY": int(boundary or 0), "persistent": int(bool(persistent))}
    chosen = {name: x for name, x in options.items() if x}
    return TileConfig(int(block_m), int(block_n), int(warps), int(stages), **chosen)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them; return exit code 1 if a kernel does not compile or does not fit."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=list(MACHINES), default="sm_90")
    parser.add_argument("--head-dim", action="append", type=int, default=[], help="default: 64, 128 and 256")
    parser.add_argument("--features", action="append", choices=list(FEATURES), default=[], help="default: six of them")
    parser.add_argument("--tile", type=tile_config, help="a config for every kernel, instead of the table's")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes; default: 2")
    parser.add_argument("--update", action="store_true", help=f"write them to {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    # The forward also without gradients or features.
    what = (tuple(options.features or PREDICTED), tuple(OPERATIONS), ("plain",), options.tile)
    head_dims = options.head_dim or compilations.HEAD_DIMS
    cases = [compilations.Case(options.target, "bf16", head_dim, *what) for head_dim in head_dims]
    reports = compilations.compile_all(cases, options.jobs)
    left_out = [report for report in reports if report.error or not report.ctas_per_sm]
    for report in left_out:
        print(f"{report.key} {report.tile}: {report.error or 'does not fit on a multiprocessor'}", file=sys.stderr)
    text = figures([predict(report) for report in reports if report not in left_out], options.target)
    if options.update:
        write_block(DOCUMENT, text, COMMAND)
    else:
        print(text)
    return int(bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
