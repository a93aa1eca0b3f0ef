"""The results so far, in files that stay valid even if the writing process is killed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.report.results import replace


@dataclass(frozen=True)
class Record:
    """The result of one job; `compiled` and `found` count kernels that it compiled and that Triton's cache had."""

    part: str
    name: str
    ok: bool
    text: str = ""
    seconds: float = 0.0
    compiled: int = 0
    found: int = 0
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name


class Records:
    """Lines of JSON, one per record, to which lines are only added; of two with one key the later counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[tuple[str, str], Record] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was being written when its process was killed
            replace(path, whole)
        for line in whole.splitlines():
            record = Record(**json.loads(line))
            self.by_key[record.key] = record

    def add(self, record: Record) -> None:
        """Keep a record; it is on disk when this returns."""
        self.by_key[record.key] = record
        row = asdict(record) | {"figures": {name: _finite(x) for name, x in record.figures.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, part: str) -> list[Record]:
        return [record for record in self.by_key.values() if record.part == part]


def wrong(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if not record.ok]


def _finite(x: float | None) -> float | None:
    """``x`` in four digits; None if it is not finite, which JSON cannot express."""
    return float(f"{x:.4g}") if x is not None and math.isfinite(x) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
