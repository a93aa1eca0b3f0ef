"""``python -m bench first``: the first tests on a GPU, in order of importance, in calls that may be interrupted.

Every kernel once, both styles of the forward, the error budget of every feature, then the timings of the goals.
Compiling takes most of the time, so many processes work on small problems; after them a single process is timed.
"""

from __future__ import annotations

import argparse

from fusedattn.cli import machine


def run(options: argparse.Namespace) -> int:
    """Return exit status 0, or 1 if anything failed, in this call or one before it."""
    device = machine.choose_device(options.device)
    machine.choose_how_triton_runs(device)
    from bench.first import driver  # it imports Triton

    return driver.run(options, device)
