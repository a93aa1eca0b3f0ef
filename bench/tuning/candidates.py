"""Configs that a slot might have: those of a grid whose machine code has no fault, the most promising first.

Found without a GPU, by the cross-compiler, and kept in bench/candidates, a file for each architecture and version of
Triton, so that a GPU is asked for nothing but what it alone can say.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from bench.codegen import compilations
from bench.codegen.report import Report
from bench.tuning.slots import Candidate, Part, Slot
from fusedattn.cli.errors import CommandError
from fusedattn.kernels.configs import Arch, FewQueries, Style, TileConfig, Work

KEPT = 12  # of a slot

KERNELS: dict[Part, tuple[str, ...]] = {
    "fwd": ("attention_fwd", "attention_fwd_specialized"),
    "few": ("attention_fwd",),
    "dkdv": ("attention_bwd_dkdv",),
    "one_pass": ("attention_bwd_dkdv",),
    "dq": ("attention_bwd_dq", "attention_bwd_dbias", "attention_bwd_drelative", "attention_bwd_learned"),
}
# What must compile without a fault, the hardest first: where that fails, nothing else is compiled.
FEATURES: dict[Work, tuple[str, ...]] = {
    "streamed": ("all but boolean", "plain", "causal+rope", "packed"),
    "dense": ("all", "ranges", "blocks"),
    "scored": ("scores", "bias", "dropout"),
    "combined": ("everything",),
}
ONE_PASS = ("one pass, padding", "one pass", "one pass, packed")
FEW = ("decode", "few queries")
NAMES = {torch.bfloat16: ("bf16",), torch.float16: ("fp16",), torch.float32: ("fp32", "tf32")}

WARPS, STAGES, EDGES, SPLITS = (4, 8), (1, 2, 3), (64, 32, 16), (256, 512, 1024)


@dataclass(frozen=True)
class Found:
    """A config that compiles well: the most registers of its kernels, the fewest programs of one on a multiprocessor
    at a time, and what bench/codegen/model.py says of them, in TFLOP/s at best, or None where it says nothing."""

    config: TileConfig
    registers: int
    ctas_per_sm: int
    predicted: float | None


def tile(candidate: Candidate) -> str:
    """In short: queries x keys, warps, stages, style, boundary blocks, and what else there is."""
    if candidate is None:
        return "two kernels"
    if isinstance(candidate, FewQueries):
        return f"{tile(candidate.config)},split {candidate.split}"
    config = candidate
    parts = [f"{config.BLOCK_M}x{config.BLOCK_N},{config.num_warps},{config.num_stages},{config.style},{config.EDGE}"]
    parts += [f"edge stages {config.EDGE_STAGES}"] if config.EDGE_STAGES != TileConfig.EDGE_STAGES else []
    parts += ["persistent"] if config.persistent else []
    parts += ["turned before"] if config.turned_before else []
    return ",".join(parts)


def grid(slot: Slot, arch: Arch) -> Iterator[TileConfig]:
    """Tiles to try, each with the widest boundary blocks."""
    is_small = slot.dtype.itemsize == 4 or slot.head_dim > 128
    rows: tuple[int, ...] = (16, 32, 64) if is_small else (64, 128)
    columns: tuple[int, ...] = (16, 32, 64) if is_small else (32, 64, 128)
    if slot.part in ("dkdv", "one_pass"):  # the tile of keys stays, that of queries moves
        rows, columns = columns, rows
    if slot.part == "few":
        rows, columns = (32 if slot.head_dim <= 128 and slot.dtype.itemsize == 2 else 16,), (16, 32, 64, 128)
    stages = (*STAGES, 4, 5) if slot.part == "few" else STAGES
    styles: tuple[Style, ...] = ("pointers",)
    if arch in ("sm_90", "sm_100") and slot.part != "few":
        styles = ("pointers", "descriptors", "pipelined") if slot.part == "fwd" else ("pointers", "descriptors")
    for style, block_m, block_n, warps, n_stages in itertools.product(styles, rows, columns, WARPS, stages):
        yield TileConfig(block_m, block_n, warps, n_stages, style)
        if style == "pipelined" and slot.work == "streamed":
            yield TileConfig(block_m, block_n, warps, n_stages, style, persistent=1)
    if slot.part == "fwd" and slot.work == "streamed" and arch == "sm_90" and slot.dtype.itemsize == 2:
        for block_n, n_stages in itertools.product(columns, (2, 3)):
            yield TileConfig(128, block_n, 4, n_stages, "specialized")


def clean(slot: Slot, arch: Arch, tiles: Iterable[TileConfig], jobs: int) -> list[Found]:
    """Those whose kernels have no fault, each with the widest boundary blocks that allow it, the best by the model
    first."""
    judged = functools.partial(widest_clean, slot, arch)
    if jobs == 1:
        found = list(map(judged, tiles))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(judged, tiles))
    return sorted(filter(None, found), key=lambda x: -(x.predicted or 0.0))


def widest_clean(slot: Slot, arch: Arch, config: TileConfig) -> Found | None:
    """A tile with the widest boundary blocks with which nothing is wrong with its machine code, if there is one."""
    walked = config.BLOCK_M if slot.part in ("dkdv", "one_pass") else config.BLOCK_N
    for edge in (edge for edge in EDGES if edge <= max(walked, min(EDGES))):
        tried = replace(config, EDGE=edge)
        reports: list[Report] = []
        for features in _features(slot):
            reports += _compiled(slot, arch, tried, features)
            if any(report.faults for report in reports):
                break
        else:
            return _found(slot, tried, reports)
    return None


def _features(slot: Slot) -> tuple[str, ...]:
    return {"one_pass": ONE_PASS, "few": FEW}.get(slot.part, FEATURES[slot.work])


def _compiled(slot: Slot, arch: Arch, config: TileConfig, features: str) -> list[Report]:
    inference = (features,) if slot.part in ("fwd", "few") else ()
    names = NAMES[slot.dtype][:1] if arch == "gfx942" else NAMES[slot.dtype]
    kernels = KERNELS[slot.part]
    cases = [compilations.Case(arch, x, slot.head_dim, (features,), kernels, inference, config) for x in names]
    found = [report for case in cases for report in compilations.compile_case(case)]
    # Specialised, a forward that its kernel does not take runs by all warps alike, which is another candidate.
    return [r for r in found if config.style != "specialized" or r.kernel == "attention_fwd_specialized"]


def _found(slot: Slot, config: TileConfig, reports: list[Report]) -> Found | None:
    if not reports:
        return None
    rates = list(_predicted(reports))
    return Found(
        config,
        registers=max(report.registers for report in reports),
        ctas_per_sm=min(report.ctas_per_sm for report in reports),
        predicted=round(statistics.geometric_mean(rates) / 1e12, 1) if rates else None,
    )


def _predicted(reports: list[Report]) -> Iterator[float]:
    """Operations a second at best, of kernels that the model knows."""
    from bench.codegen.predictions import predict

    for report in reports:
        try:
            yield predict(report).flops
        except (KeyError, NotImplementedError):  # another kernel, another GPU, products in pieces
            continue


def to_time(slot: Slot, arch: Arch, found: list[Found], kept: int = KEPT) -> dict[str, Candidate]:
    """By what it is called: the table's own first, then the best of those found."""
    candidates: list[Candidate] = [slot.config(arch)]
    if slot.part == "one_pass":
        candidates.append(None)
    for x in found[:kept]:
        candidates += [FewQueries(x.config, split) for split in SPLITS] if slot.part == "few" else [x.config]
    return {tile(candidate): candidate for candidate in candidates}


def path(arch: Arch, folder: Path) -> Path:
    """The file of an architecture and the installed Triton."""
    return folder / f"{arch}-triton-{triton.__version__}.json"


def save(target: Path, found: dict[str, list[Found]]) -> None:
    """Write candidates by the name of the slot, over those that were there for it."""
    known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    known |= {name: [_as_object(x) for x in each] for name, each in found.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(x)}" for x in known[name]) + "\n ]"
        for name in sorted(known)
    )
    target.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def load(source: Path, slot: Slot) -> list[Found]:
    """Those of a slot.

    Raises:
        CommandError: the file is missing, or does not have the slot.
    """
    try:
        return [_from_object(x) for x in json.loads(source.read_text(encoding="utf-8"))[slot.name]]
    except (OSError, KeyError, ValueError) as error:
        raise CommandError(f"{source}: no candidates for {slot.name}; --compile finds them ({error})") from error


def _as_object(found: Found) -> dict[str, Any]:
    """What differs from a config without options."""
    config = {f.name: getattr(found.config, f.name) for f in fields(TileConfig)}
    usual = {f.name: f.default for f in fields(TileConfig)}
    return asdict(found) | {"config": {name: x for name, x in config.items() if x != usual[name]}}


def _from_object(found: dict[str, Any]) -> Found:
    return Found(**found | {"config": TileConfig(**found["config"])})
