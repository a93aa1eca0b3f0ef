"""The kernels under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck and synccheck, on a machine with a GPU.

``python -m tests.tools.sanitize`` runs a few small cases, forward and backward, under each tool, after a kernel with a
planted fault that memcheck must find. Exit status: 0 if nothing else is found, 1 if something is, 2 if the GPU or
compute-sanitizer is missing.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedattn import attention, testing
from fusedattn.testing import Case
from tests.helpers.compiling import ROOT, environment

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 99  # the exit status of compute-sanitizer with findings; Python itself does not use it
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")

# Each feature at least once; more than one tile of each kind, and a partial one.
SUITE = (
    Case("causal, grouped queries", seqlen_q=200, seqlen_k=200, head_dim=64, causal="bottom_right"),
    Case("padding with gaps", seqlen_q=70, seqlen_k=150, head_dim=80, padding="uneven", empty_batch=True),
    Case("left padding, RoPE", seqlen_q=130, seqlen_k=130, head_dim=128, causal="bottom_right", padding="left",
         rope="half"),
    Case("boolean mask", seqlen_q=90, seqlen_k=140, head_dim=64, boolean="full"),
    replace(testing.CASES[-1], seqlen_q=133, seqlen_k=190),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def candidates() -> Iterator[Path]:
    """Paths where compute-sanitizer may be: on PATH, in a CUDA toolkit, in a wheel of NVIDIA's."""
    name = "compute-sanitizer"
    if on_path := shutil.which(name):
        yield Path(on_path)
    toolkits = [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if os.environ.get(key)]
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for toolkit in toolkits:
        yield from (toolkit / "bin" / name, toolkit / name / name)
    for packages in map(Path, (*site.getsitepackages(), site.getusersitepackages())):
        yield from sorted((packages / "nvidia").glob(f"*/bin/{name}"))


def find_sanitizer() -> Path | None:
    """The first candidate that can be run."""
    return next((path for path in candidates() if path.is_file() and os.access(path, os.X_OK)), None)


@dataclass(frozen=True)
class Report:
    """The result of one run of one tool."""

    tool: str
    status: int
    output: str
    seconds: float

    @property
    def summary(self) -> str:
        """The summary line of the tool, if it has one."""
        found = SUMMARY.findall(self.output)
        return found[-1] if found else "no summary"

    @property
    def clean(self) -> bool:
        """Whether the tool ran to its end and found nothing."""
        return self.status == 0 and self.summary != "no summary"

    @property
    def found(self) -> bool:
        """Whether the tool found something."""
        return self.status == FOUND and self.summary != "no summary"


def command(sanitizer: Path, tool: str, what: str) -> list[str]:
    """The command that runs the suite (or the planted fault) under a tool."""
    # Only the process itself, not ptxas, which Triton starts.
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    options += ["--target-processes", "application-only"]
    if tool == "memcheck":
        # Gaps between allocations, so that accesses beyond one are not inside the next; and no reports of calls by
        # which torch and Triton probe the driver.
        options += ["--padding", "65536", "--report-api-errors", "no"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]
    return [str(sanitizer), *options, sys.executable, "-m", "tests.tools.sanitize", what]


# Each tensor has a separate allocation, so that the tools know its bounds and writes.
ALLOCATION = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run_tool(sanitizer: Path, tool: str, what: str) -> Report:
    """Run the suite, or the planted fault, under one tool."""
    start = time.monotonic()
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    result = subprocess.run(command(sanitizer, tool, what), cwd=ROOT, env=environment(**ALLOCATION), **options)
    return Report(tool, result.returncode, result.stdout, time.monotonic() - start)


def run_suite() -> None:
    """Run forward and backward of every case, in every dtype."""
    for case in SUITE:
        for dtype in DTYPES:
            inputs = testing.make_inputs(replace(case, dtype=dtype), "cuda")
            results = testing.run(functools.partial(attention, backend="triton"), inputs)
            torch.cuda.synchronize()
            if any(x.isnan().any() for x in results.values()):
                raise RuntimeError(f"NaN in the results of {replace(case, dtype=dtype)}")


def run_fault() -> None:
    """Read and write far beyond the end of tensors: 4096 rows, although the statistics have one."""
    from fusedattn.backends.triton import launching
    from fusedattn.backends.triton.operands import constants_of
    from fusedattn.kernels import attention_bwd_rows
    from fusedattn.masks import Mask
    from fusedattn.options import Options

    out = torch.ones(1, 1, 4096, 16, dtype=torch.float16, device="cuda")
    row = torch.ones(1, 1, 1, device="cuda")
    options = Options(Mask())
    problem = launching.problem_of(out, out, out, constants_of(options, keep_residual=True))
    attention_bwd_rows.launch(out, out, out, out, None, out, attention_bwd_rows.ForwardRows(row, row, None), problem)
    torch.cuda.synchronize()


def check(sanitizer: Path) -> int:
    """Run everything, print the findings and a table; return the exit status."""
    fault = run_tool(sanitizer, "memcheck", "fault")
    if not fault.found:
        print(fault.output)
        print(f"error: memcheck does not find a planted fault (exit status {fault.status}, {fault.summary})")
        return 1
    reports = []
    for tool in TOOLS:
        print(f"{tool} ...", flush=True)
        reports.append(run_tool(sanitizer, tool, "suite"))
        if not reports[-1].clean:
            print(reports[-1].output)
    for report in reports:
        verdict = "clean" if report.clean else "ERRORS" if report.found else f"failed ({report.status})"
        print(f"{report.tool:<10} {verdict:<12} {report.seconds:6.0f} s  {report.summary}")
    return 0 if all(report.clean for report in reports) else 1


def main(arguments: list[str]) -> int:
    """Run the tools; the arguments ``suite`` and ``fault`` are for the processes that the tools start."""
    if arguments in (["suite"], ["fault"]):
        run_suite() if arguments == ["suite"] else run_fault()
        return 0
    sanitizer = find_sanitizer()
    if torch.version.hip is not None or not torch.cuda.is_available():
        reason = (
            f"no CUDA device for the torch {torch.__version__} of {sys.executable}; this target needs an NVIDIA GPU"
        )
    elif sanitizer is None:
        reason = (
            f"no compute-sanitizer on PATH, in a CUDA toolkit or in the packages of {sys.executable}; "
            "it is part of the CUDA toolkit, and of the wheel nvidia-cuda-sanitizer-api (-cu12 for CUDA 12)"
        )
    else:
        print(f"{sanitizer} on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        return check(sanitizer)
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
