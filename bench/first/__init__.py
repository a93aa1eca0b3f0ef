"""``python -m bench first``: what a machine with a GPU is asked first, in the order of worth, in calls that may be cut.

Every kernel once, both styles of the forward, the error budget of every feature, then the goals' timings. Compiling is
what takes time, so that many processes work on small problems; one alone, after them, is timed.
"""

from __future__ import annotations

import argparse

from fusedattn.cli import machine


def run(options: argparse.Namespace) -> int:
    """Exit status 0, or 1 where anything was wrong, in this call or one before it."""
    device = machine.choose_device(options.device)
    machine.choose_how_triton_runs(device)
    from bench.first import driver  # which imports Triton

    return driver.run(options, device)
