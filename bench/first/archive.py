"""``python -m bench prebuilt``: compile and pack the kernels that ``first`` launches, without a GPU."""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

from bench.codegen import launches
from bench.codegen.compilations import in_processes
from bench.first import plan, prebuilt
from bench.first.jobs import Before


def run(options: argparse.Namespace) -> int:
    """Return exit status 0, or 1 if a kernel did not compile."""
    # The slowest first, so that the processes end together.
    jobs = sorted(plan.jobs("cuda"), key=lambda job: not isinstance(job, Before))
    path = prebuilt.path_of(options.arch, options.out)
    seconds, errors = 0.0, set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = partial(prebuilt.compile_job, arch=options.arch, folder=folder, libtriton=options.libtriton)
        for number, job in enumerate(in_processes(one, jobs, options.jobs), 1):
            seconds += job.seconds
            errors |= job.errors
            print(f"{number} of {len(jobs)}: {job.job}: {len(job.kernels)} kernels", flush=True)
        identity = prebuilt.identity(launches.TARGETS[options.arch], options.libtriton)
        n_kernels = prebuilt.pack(folder, path, identity)
    for error in sorted(errors):
        print(f"not compiled: {error}")
    print(f"{n_kernels} kernels, {seconds / 60:.0f} CPU-minutes, {path.stat().st_size / 1e6:.1f} MB in {path}")
    return 1 if errors else 0
