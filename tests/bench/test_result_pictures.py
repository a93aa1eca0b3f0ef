"""The plots of docs/accuracy.md and docs/codegen.md show the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from bench import accuracy
from bench.codegen import tables
from bench.codegen.baseline import Baseline
from bench.report.style import digest, drawn_from

MOST_BYTES = 60_000


def row(case: str, share: float | None, ok: bool | None) -> dict[str, object]:
    return {"case": case, "dtype": "float32", "used": share, "ok": ok}


def test_the_plot_of_accuracy_is_current() -> None:
    committed = json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))
    assert drawn_from(accuracy.PICTURE) == digest(accuracy.used(committed)), "run: python -m bench.accuracy"


def test_cases_that_a_function_cannot_run_have_no_point_and_infinite_shares_have_one() -> None:
    peer = {"name": "flex", "features": [row("a", 0.5, True), row("b", None, None), row("c", None, False)]}
    report = {"features": [row("a", 0.25, True)], "against": [peer]}
    assert accuracy.used(report) == {"float32": {"fusedattn": [0.25], "flex": [0.5, float("inf")]}}


def test_the_plot_of_machine_code_is_current() -> None:
    found = tables.baselines()
    assert drawn_from(tables.PICTURE) == tables.description(found), "run: python -m bench.codegen.tables"


def test_registers_and_spills_are_counted_by_target() -> None:
    kernels = (("sm_80", 64, 0), ("sm_80", 255, 8), ("sm_90", 128, 0))
    entries = {f"k{i} {t} bf16 64 f": {"registers": n, "spill_bytes": b} for i, (t, n, b) in enumerate(kernels)}
    baseline = Baseline(triton="3.7.1", entries=entries, known_faults={})
    assert tables.registers(baseline) == {"sm_80": [64, 255], "sm_90": [128]}
    assert tables.spilling([baseline]) == {"3.7.1": {"sm_80": 0.5, "sm_90": 0.0}}


@pytest.mark.parametrize("name", ["accuracy", "codegen"])
def test_the_scripts_draw(name: str, tmp_path: Path) -> None:
    path, committed = tmp_path / "drawn.png", {"accuracy": accuracy.PICTURE, "codegen": tables.PICTURE}[name]
    if name == "accuracy":
        accuracy.draw(json.loads(accuracy.RESULTS.read_text(encoding="utf-8")), path)
    else:
        tables.draw(tables.baselines(), path)
    with Image.open(path) as drawn, Image.open(committed) as before:
        assert drawn.size == before.size
        assert len(drawn.convert("RGB").getcolors()) > 8, "the picture is empty"
    assert drawn_from(path) == drawn_from(committed)
    assert committed.stat().st_size < MOST_BYTES
    assert f"images/{name}.png" in (accuracy.DOCS / f"{name}.md").read_text(encoding="utf-8")
