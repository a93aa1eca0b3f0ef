"""``python -m bench prebuilt``: compile and pack the kernels that ``first`` launches, without a GPU."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

from bench.codegen import launches
from bench.first import prebuilt


def run(options: argparse.Namespace) -> int:
    """Return exit status 0, or 1 if a kernel did not compile."""
    jobs, target = prebuilt.all_jobs(), launches.TARGETS[options.arch]
    path = prebuilt.path_of(options.arch, options.out)
    seconds, errors = 0.0, set()
    with tempfile.TemporaryDirectory() as folder:
        found = prebuilt.compile_jobs(jobs, options.arch, Path(folder), options.jobs, options.libtriton)
        for number, job in enumerate(found, 1):
            seconds += job.seconds
            errors |= job.errors
            print(f"{number} of {len(jobs)}: {job.job}: {len(job.kernels)} kernels", flush=True)
        n_kernels = prebuilt.pack(Path(folder), path, prebuilt.identity(target, options.libtriton))
    for error in sorted(errors):
        print(f"not compiled: {error}")
    print(f"{n_kernels} kernels, {seconds / 60:.0f} CPU-minutes, {path.stat().st_size / 1e6:.1f} MB in {path}")
    return 1 if errors else 0
