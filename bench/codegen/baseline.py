"""The committed figures of each Triton version, and regressions from them.

One JSON file per version, one line per kernel, so that a diff shows which kernels changed and how. Known faults are
listed one by one, with their figures: a new fault, or a known one that grew, is a failure. An entry has the fingerprint
of the kernel that it describes, unless that has a fault which is not known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.codegen.report import Report

FOLDER = Path(__file__).parent.parent / "baselines"
GROWTH = 1.03  # allowed for the instructions of a loop
RENAMED = "is the kernel of another entry; --afresh compiles it"
COLUMNS = (
    "tile",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "ctas_per_sm",
    "hgmma",
    "tensor_core",
    "loop_instructions",
    "fingerprint",
)


@dataclass
class Baseline:
    """Figures and known faults by the key of a report; of calls with sizes of 1, fingerprints alone."""

    triton: str
    known_faults: dict[str, list[str]] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    ones: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprints(self) -> frozenset[str]:
        """Those of all kernels that need not be compiled again."""
        return frozenset((*(entry["fingerprint"] for entry in self.entries.values()), *self.ones.values())) - {""}

    def fingerprint_of(self, key: str) -> str:
        """That of one kernel, or an empty string."""
        return self.ones.get(key) or self.entries.get(key, {}).get("fingerprint", "")

    def with_figures(self, report: Report) -> Report:
        """A report, with the figures of its entry if it has none of its own."""
        entry = self.entries.get(report.key)
        if not report.is_known or entry is None:
            return report
        figures = {name: value for name, value in entry.items() if name not in ("tile", "fingerprint")}
        return replace(report, **figures | {"loop_instructions": tuple(entry["loop_instructions"])})


@dataclass
class Judgement:
    """Faults by the key of a report: new ones, which are failures, and those known to the baseline."""

    new: dict[str, list[str]] = field(default_factory=dict)
    known: dict[str, list[str]] = field(default_factory=dict)


def path_of(triton: str) -> Path:
    return FOLDER / f"triton-{triton}.json"


def load(triton: str) -> Baseline | None:
    path = path_of(triton)
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    entries = {key: dict(zip(content["columns"], row, strict=True)) for key, row in content["entries"].items()}
    return Baseline(content["triton"], content["known_faults"], entries, content["ones"])


def save(baseline: Baseline) -> Path:
    """Write the file of a Triton version: sorted, one line per entry."""

    def block(rows: dict[str, Any]) -> str:
        lines = [f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows, key=_sort_key)]
        return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"

    rows = {key: [entry[column] for column in COLUMNS] for key, entry in baseline.entries.items()}
    path = path_of(baseline.triton)
    path.write_text(
        f'{{\n"triton": {json.dumps(baseline.triton)},\n"columns": {json.dumps(COLUMNS)},\n'
        f'"known_faults": {block(baseline.known_faults)},\n"entries": {block(rows)},\n'
        f'"ones": {block(baseline.ones)}\n}}\n'
    )
    return path


def judge(reports: list[Report], baseline: Baseline | None, complete: set[str]) -> Judgement:
    """The faults of `reports`; for the targets in `complete` these are all reports.

    Without a baseline, only faults of the machine code itself.
    """
    judgement = Judgement()
    for report in reports:
        known = baseline.known_faults.get(report.key, []) if baseline else []
        if baseline is not None and report.is_known:
            faults = known if baseline.fingerprint_of(report.key) == report.fingerprint else [RENAMED]
        else:
            faults = report.faults + (_regressions(report, baseline) if baseline and not report.ones else [])
        for where, selected in (
            (judgement.new, [fault for fault in faults if fault not in known]),
            (judgement.known, [fault for fault in faults if fault in known]),
        ):
            if selected:
                where[report.key] = selected
    for key in _gone(reports, baseline, complete) if baseline else ():
        judgement.new[key] = ["is in the baseline, but nothing launches it"]
    return judgement


def updated(
    reports: list[Report], baseline: Baseline | None, triton: str, complete: set[str], accept_faults: bool
) -> Baseline:
    """A baseline with the figures of `reports`, without known faults that are gone, with new ones if accepted."""
    result = baseline or Baseline(triton)
    for key in _gone(reports, result, complete):
        for rows in (result.entries, result.known_faults, result.ones):
            rows.pop(key, None)
    for report in reports:
        if report.is_known:
            continue
        if report.ones:
            result.ones[report.key] = "" if report.faults else report.fingerprint
            continue
        was_known = result.known_faults.pop(report.key, [])
        known = [fault for fault in report.faults if accept_faults or fault in was_known]
        if known:
            result.known_faults[report.key] = known
        # A kernel with a new fault is compiled again, and fails again.
        fingerprint = report.fingerprint if known == report.faults else ""
        result.entries[report.key] = _entry(report) | {"fingerprint": fingerprint}
    return result


def _entry(report: Report) -> dict[str, Any]:
    values = {column: getattr(report, column) for column in COLUMNS}
    return values | {"loop_instructions": list(report.loop_instructions)}


def _gone(reports: list[Report], baseline: Baseline, complete: set[str]) -> list[str]:
    present = {report.key for report in reports}
    return [key for key in (*baseline.entries, *baseline.ones) if key not in present and key.split(" ")[1] in complete]


def _regressions(report: Report, baseline: Baseline) -> list[str]:
    """Figures that are worse than in the baseline, as sentences."""
    before = baseline.entries.get(report.key)
    if before is None:
        return ["is not in the baseline"]
    if before["tile"] != report.tile:
        return [f"is launched as {report.tile}, in the baseline as {before['tile']}"]
    faults = []
    if report.ctas_per_sm < before["ctas_per_sm"]:
        faults.append(f"fits {report.ctas_per_sm} times on a multiprocessor, {before['ctas_per_sm']} in the baseline")
    loops = before["loop_instructions"]
    if len(loops) != len(report.loop_instructions):
        faults.append(f"has {len(report.loop_instructions)} loops with products, {len(loops)} in the baseline")
    else:
        for now, then in zip(report.loop_instructions, loops, strict=True):
            if now > GROWTH * then:
                faults.append(f"has a loop of {now} instructions, {then} in the baseline ({now / then - 1:+.1%})")
    return faults


def _sort_key(key: str) -> tuple[str, str, str, int, str]:
    kernel, target, dtype, head_dim, features = key.split(" ")
    return target, kernel, dtype, int(head_dim), features
