"""``python -m bench.low_precision``: the error of attention in few bits, on real activations and on drawn ones.

Compares every recipe of ``fusedattn.low_precision`` with float64 on drawn numbers, on the layers of a GPT that is
trained first and on those of the sentence encoder all-MiniLM-L6-v2; then measures what the whole models lose. Writes
``docs/results/low_precision.json``, ``docs/images/low-precision.png`` and the tables of ``docs/low-precision.md`` in
ten minutes. ``python -m bench.low_precision table`` measures nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from bench.low_precision import models, problems
from bench.low_precision.page import draw, tables
from bench.low_precision.problems import Problem
from bench.report.page import write_block
from fusedattn.cli.machine import versions
from fusedattn.low_precision import RECIPES, Recipe
from fusedattn.transformer import GPTModel

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, RESULTS, PICTURE = (
    DOCS / name for name in ("low-precision.md", "results/low_precision.json", "images/low-precision.png")
)
OPERANDS = {"q and k": ("q", "k"), "v": ("v",), "weights": ("weights",)}
IN_PARTS = ("fp8, blocks", "NVFP4", "NVFP4, two levels")


def only(recipe: Recipe, names: tuple[str, ...]) -> Recipe:
    """The recipe with no other operands rounded."""
    parts: dict[str, Any] = {name: None for name in ("q", "k", "v", "weights") if name not in names}
    return replace(recipe, **parts)


PARTS = {f"{name}: {operands}": only(RECIPES[name], names) for name in IN_PARTS for operands, names in OPERANDS.items()}


def measured(source: str, found: list[Problem]) -> Iterator[dict[str, Any]]:
    """A row for each attention and recipe; and, as ``statistics``, what the activations are like."""
    for layer, problem in enumerate(found):
        yield {"source": source, "layer": layer, "statistics": problems.statistics_of(problem)}
        for row in problems.errors_of(problem, RECIPES | PARTS):
            yield {"source": source, "layer": layer, **row}
    print(f"{source}: {len(found)} measured", flush=True)


def losses(model: GPTModel, text: Any) -> dict[str, float]:
    """The loss of the GPT on held-out text, exact and by each recipe."""
    found = {}
    for name, recipe in {"exact": Recipe(), **RECIPES}.items():
        found[name] = models.loss_by(model, text, problems.attend_by(recipe))
        print(f"loss, {name}: {found[name]:.4f}", flush=True)
    return found


def cosines(encoder: models.Encoder) -> dict[str, list[float]]:
    """For each recipe, the cosine of each text's embedding with the exact one."""
    exact = encoder.embeddings(problems.attend_by(Recipe()))
    return {
        name: F.cosine_similarity(encoder.embeddings(problems.attend_by(recipe)).double(), exact.double()).tolist()
        for name, recipe in RECIPES.items()
    }


def measure() -> dict[str, Any]:
    """Everything that the page shows."""
    encoder = models.Encoder()
    rows = [
        *measured("normal", [problems.normal()]),
        *measured("outliers", [problems.with_outliers()]),
        *measured("MiniLM", encoder.problems()),
    ]
    model, text = models.trained_gpt()
    rows += measured("GPT", models.problems_of_gpt(model, text))
    return {
        "versions": versions(),
        "text": text.source,
        "rows": [row for row in rows if "recipe" in row],
        "statistics": [row for row in rows if "statistics" in row],
        "losses": losses(model, text),
        "cosines": cosines(encoder),
    }


def shortened(x: Any) -> Any:
    """The same with six digits of each number."""
    if isinstance(x, dict):
        return {key: shortened(value) for key, value in x.items()}
    if isinstance(x, list):
        return [shortened(value) for value in x]
    return float(f"{x:.6g}") if isinstance(x, float) and x < 0.99 else x


def main() -> None:
    """Measure unless the argument is ``table``, draw, and rewrite the page."""
    if sys.argv[1:] != ["table"]:
        report = json.dumps(shortened(measure()), separators=(",", ":"))
        RESULTS.write_text(report.replace("},{", "},\n{") + "\n", encoding="utf-8")
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    draw(report, PICTURE)
    write_block(PAGE, tables(report), "python -m bench.low_precision")


if __name__ == "__main__":
    main()
