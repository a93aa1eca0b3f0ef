"""Check and time variants of the kernels for Hopper, on this machine's GPU.

    python -m bench.tuning.hopper [--part fwd] [--head-dim 128] [--keep 8] [--budget 600] [--out FILE]

takes the table's config and the best of bench/candidates/hopper.json, which ``python -m bench.codegen.hopper --update``
ranks without a GPU. Each is checked against the error budget in a process of its own; those that keep it take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from bench.codegen.hopper_replay import Variant, configured
from bench.codegen.hopper_tables import CANDIDATES, described
from bench.measuring import environment
from bench.measuring.timing import Budget, DeviceStopwatch
from bench.tuning import trial
from bench.tuning.slots import Part, Slot
from fusedattn.cli import machine
from fusedattn.cli.errors import CommandError
from fusedattn.kernels import configs, hopper

KEPT = 8  # for each kernel and head_dim, besides the table's


@dataclass(frozen=True)
class HopperSlot(Slot):
    """A kernel for Hopper at a head_dim; its candidates are variants."""

    @contextmanager
    def holding(self, candidate: Any) -> Iterator[None]:
        """Inside, calls run the kernels for Hopper, this one as a :class:`~bench.codegen.hopper_replay.Variant`."""
        lookup = configs.lookup
        with (
            configured(candidate),
            hopper.choosing("all"),
            patch.object(hopper, "FEWEST_QUERIES", 1),
            # Recorded launches are those of the function that looks configs up.
            patch.object(configs, "lookup", lambda *asked: lookup(*asked)),
        ):
            yield


def slot_of(part: str, head_dim: int) -> HopperSlot:
    return HopperSlot(cast(Part, part), "streamed", torch.bfloat16, head_dim)


def candidates(source: Path, kept: int = KEPT) -> dict[HopperSlot, dict[str, Variant]]:
    """By slot and name: the table's config first, then the best."""
    found: dict[HopperSlot, dict[str, Variant]] = {}
    for entry in json.loads(source.read_text(encoding="utf-8")):
        given = entry["variant"]
        changes = {name: tuple(map(tuple, given[name])) for name in ("config", "options")}
        found.setdefault(slot_of(given["part"], given["head_dim"]), {})[described(given)] = Variant(**given | changes)
    for slot, names in found.items():
        own = Variant(slot.part, slot.head_dim)
        best = [(name, x) for name, x in names.items() if x != own][:kept]
        found[slot] = {described({"config": [], "options": []}): own, **dict(best)}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the ranking of each slot, and write all timings; return 1 if a config of the table is not correct."""
    parser = argparse.ArgumentParser(prog="python -m bench.tuning.hopper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", default=[], help="fwd, dkdv, dq; default: all")
    parser.add_argument("--head-dim", action="append", type=int, default=[], help="default: all")
    parser.add_argument("--keep", type=int, default=KEPT, help=f"variants besides the table's; default: {KEPT}")
    parser.add_argument("--budget", type=float, help="seconds; default: no limit")
    parser.add_argument("--jobs", type=int, default=4, help="processes that check; default: 4")
    parser.add_argument("--out", type=Path, default=Path("hopper-tune.json"))
    options = parser.parse_args(arguments)
    try:
        device = machine.choose_device("cuda")
    except CommandError as error:
        parser.error(str(error))
    budget, status = Budget(options.budget), 0
    report: dict[str, Any] = {"environment": environment.describe(device, None), "slots": {}}
    for slot, names in candidates(CANDIDATES, options.keep).items():
        if slot.part not in (options.part or [slot.part]) or slot.head_dim not in (options.head_dim or [slot.head_dim]):
            continue
        given = cast(Any, names)
        wrong = trial.wrong(slot, given, device, options.jobs, budget)
        correct = {name: x for name, x in given.items() if name not in wrong}
        timings = trial.timed(slot, correct, device, DeviceStopwatch, budget)
        report["slots"][slot.name] = {"wrong": wrong} | {name: x.as_object() for name, x in timings.items()}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(slot.name)
        for name, gain in trial.ranked(timings):
            print(f"  {gain:.3f}  {name}{'  beyond noise' if trial.is_faster(timings, name) else ''}")
        for name, reason in wrong.items():
            print(f"  wrong: {name}: {reason}")
        status |= next(iter(names)) in wrong
    return status


if __name__ == "__main__":
    sys.exit(main())
