"""Candidate configs for a slot: those of a grid whose machine code has no fault, the most promising first.

A GPU can show one fault to be harmless: registers of products in flight (bench/codegen/in_flight.py). Some configs with
it are timed too, in places of their own.

The cross-compiler finds candidates without a GPU. They are kept in bench/candidates, one file per architecture and
version of Triton, so that a GPU is needed only for timing.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton

from bench.codegen import compilations
from bench.codegen.loops import LOOPS
from bench.codegen.report import Report
from bench.tuning.slots import Candidate, Part, Slot
from fusedattn.cli.errors import CommandError
from fusedattn.kernels.configs import Arch, FewQueries, Style, TileConfig, Work

KEPT = 12  # per slot
KEPT_IN_FLIGHT = 3  # one with registers in flight for each 3 of the others

KERNELS: dict[Part, tuple[str, ...]] = {
    "fwd": ("attention_fwd",),
    "few": ("attention_fwd",),
    "dkdv": ("attention_bwd_dkdv",),
    "one_pass": ("attention_bwd_dkdv",),
    "dq": ("attention_bwd_dq", "attention_bwd_dbias", "attention_bwd_drelative", "attention_bwd_learned"),
}
# Features that must compile without a fault, the hardest first: if that fails, nothing else is compiled.
FEATURES: dict[Work, tuple[str, ...]] = {
    "streamed": ("all but boolean", "plain", "causal+rope", "packed"),
    "pairwise": ("all", "ranges", "blocks"),
    "biased": ("biased", "bias"),
    "scored": ("scores", "dropout"),
    "combined": ("everything",),
}
ONE_PASS = ("one pass, padding", "one pass", "one pass, packed")
FEW = ("decode", "few queries")
NAMES = {torch.bfloat16: ("bf16",), torch.float16: ("fp16",), torch.float32: ("fp32", "tf32")}

WARPS, STAGES, BOUNDARIES, SPLITS = (4, 8), (1, 2, 3), (64, 32, 16), (256, 512, 1024)


@dataclass(frozen=True)
class Found:
    """A config that compiles well: the most registers of its kernels, the fewest programs on a multiprocessor at a
    time, and the bound of bench/codegen/model.py in TFLOP/s, or None if the model has none.

    With `in_flight`, its code touches registers of products that may be running. Such a config must not go into the
    table until a GPU has shown that its results equal those of other configs.
    """

    config: TileConfig
    registers: int
    ctas_per_sm: int
    predicted: float | None
    in_flight: bool = False


def tile(candidate: Candidate) -> str:
    """A candidate in short: queries x keys, warps, stages, style, boundary blocks, and further options."""
    if candidate is None:
        return "two kernels"
    if isinstance(candidate, FewQueries):
        return f"{tile(candidate.config)},split {candidate.split}"
    config = candidate
    block = f"{config.BLOCK_M}x{config.BLOCK_N}"
    parts = [f"{block},{config.num_warps},{config.num_stages},{config.style},{config.BOUNDARY}"]
    if config.BOUNDARY_STAGES != TileConfig.BOUNDARY_STAGES:
        parts.append(f"boundary stages {config.BOUNDARY_STAGES}")
    parts += ["persistent"] if config.persistent else []
    parts += ["queries rotated before"] if config.prerotate_q else []
    parts += [f"inference stages {config.inference_stages}"] if config.inference_stages else []
    return ",".join(parts)


def grid(slot: Slot, arch: Arch) -> Iterator[TileConfig]:
    """Tiles to try, each with the widest boundary blocks."""
    is_small = slot.dtype.itemsize == 4 or slot.head_dim > 128
    rows: tuple[int, ...] = (16, 32, 64) if is_small else (64, 128)
    columns: tuple[int, ...] = (16, 32, 64) if is_small else (32, 64, 128)
    if slot.part in ("dkdv", "one_pass"):  # a program keeps its tile of keys, and moves that of queries
        rows, columns = columns, rows
    if slot.part == "few":
        rows, columns = (32 if slot.head_dim <= 128 and slot.dtype.itemsize == 2 else 16,), (16, 32, 64, 128)
    stages = (*STAGES, 4, 5) if slot.part == "few" else STAGES
    styles: tuple[Style, ...] = ("pointers",)
    if arch in ("sm_90", "sm_100") and slot.part != "few":
        styles = ("pointers", "descriptors", "pipelined") if slot.part == "fwd" else ("pointers", "descriptors")
    for style, block_m, block_n, warps, n_stages in itertools.product(styles, rows, columns, WARPS, stages):
        yield TileConfig(block_m, block_n, warps, n_stages, style)


def clean(slot: Slot, arch: Arch, tiles: Iterable[TileConfig], jobs: int, done: Callable[[], object]) -> list[Found]:
    """The tiles whose kernels have no certain fault, each with the widest boundary blocks that allow it, the best by
    the model first; without a model, those with more programs on a multiprocessor. Calls `done` after each tile."""
    found: list[Found] = []
    for forms in compilations.in_processes(functools.partial(clean_forms, slot, arch), tiles, jobs):
        found += forms
        done()
    return sorted(found, key=lambda x: (-(x.predicted or 0.0), -x.ctas_per_sm))


def clean_forms(slot: Slot, arch: Arch, config: TileConfig) -> list[Found]:
    """A tile with the widest boundary blocks with which its machine code has no certain fault, if any; and the same
    with persistent programs, if the kernel has them."""
    walked = config.BLOCK_M if slot.part in ("dkdv", "one_pass") else config.BLOCK_N
    for boundary in (size for size in BOUNDARIES if size <= max(walked, min(BOUNDARIES))):
        tried = replace(config, BOUNDARY=boundary)
        reports = _reports(slot, arch, tried)
        faulty = [report for report in reports if report.certain_faults]
        if not faulty:
            forms = [_found(tried, reports)] if reports else []
            if forms and tried.style == "pipelined" and slot.work == "streamed":
                persistent = replace(tried, persistent=1)
                reports = _reports(slot, arch, persistent)
                forms += [] if any(report.certain_faults for report in reports) else [_found(persistent, reports)]
            return forms
        if not all(map(_is_of_boundary, faulty)):
            break
    return []


def _is_of_boundary(report: Report) -> bool:
    """Whether the only faults are spills, none of them in the loop over full blocks."""
    names = LOOPS.get(report.kernel, {}).get(len(report.loop_spills))
    if names is None or len(report.certain_faults) > 1 or not report.spill_bytes:
        return False
    return not any(spills for name, spills in zip(names, report.loop_spills, strict=True) if name == "full")


def _reports(slot: Slot, arch: Arch, config: TileConfig) -> list[Report]:
    """Reports of all kernels that must have no certain fault, up to the first that has one."""
    found: dict[str, Report] = {}
    forward = slot.part in ("fwd", "few")
    steps = [(x, forward) for x in {"one_pass": ONE_PASS, "few": FEW}.get(slot.part, FEATURES[slot.work])]
    if forward:  # it also runs without results for the backward; most tiles fail with them
        steps.insert(0, (steps[0][0], False))
    for features, inference in steps:
        found |= {report.key: report for report in _compiled(slot, arch, config, features, inference)}
        if any(report.certain_faults for report in found.values()):
            break
    return list(found.values())


def _compiled(slot: Slot, arch: Arch, config: TileConfig, features: str, inference: bool) -> list[Report]:
    """Reports of the kernels with results kept for the backward, and (inference) also without."""
    names = NAMES[slot.dtype][:1] if arch == "gfx942" else NAMES[slot.dtype]
    kernels, ran_without = KERNELS[slot.part], (features,) if inference else ()
    cases = [compilations.Case(arch, x, slot.head_dim, (features,), kernels, ran_without, config) for x in names]
    return [report for case in cases for report in compilations.compile_case(case)]


def _found(config: TileConfig, reports: list[Report]) -> Found:
    rates = list(_predicted(reports))
    return Found(
        config,
        registers=max(report.registers for report in reports),
        ctas_per_sm=min(report.ctas_per_sm for report in reports),
        predicted=round(statistics.geometric_mean(rates) / 1e12, 1) if rates else None,
        in_flight=any(report.touches for report in reports),
    )


def _predicted(reports: list[Report]) -> Iterator[float]:
    """Operations per second at best, for kernels that the model supports."""
    from bench.codegen.predictions import predict

    for report in reports:
        try:
            yield predict(report).flops
        except (KeyError, NotImplementedError):  # another kernel, another GPU, products in pieces
            continue


def to_time(slot: Slot, arch: Arch, found: list[Found], kept: int = KEPT) -> dict[str, Candidate]:
    """Candidates by name: the table's own first, then the best without a fault, then the best of those that touch
    registers in flight."""
    candidates: list[Candidate] = [slot.config(arch)]
    if slot.part == "one_pass":
        candidates.append(None)
    splits = SPLITS if slot.part == "few" else ()
    n_configs = -(-kept // max(len(splits), 1))
    sound, doubtful = ([x.config for x in found if x.in_flight == in_flight] for in_flight in (False, True))
    tried = sound[:n_configs] + doubtful[: -(-n_configs // KEPT_IN_FLIGHT)]
    candidates += [FewQueries(config, split) for config in tried for split in splits] if splits else tried
    return {tile(candidate): candidate for candidate in candidates}


def in_flight(names: Mapping[str, Candidate], found: list[Found]) -> list[str]:
    """The names of candidates that touch registers of products that may be running."""
    doubtful = {x.config for x in found if x.in_flight}
    return [name for name, x in names.items() if (x.config if isinstance(x, FewQueries) else x) in doubtful]


def path(arch: Arch, folder: Path) -> Path:
    """The file of an architecture and the installed Triton."""
    return folder / f"{arch}-triton-{triton.__version__}.json"


def save(target: Path, found: dict[str, list[Found]]) -> None:
    """Write candidates by the name of the slot, replacing earlier ones of these slots."""
    known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    known |= {name: [_as_object(x) for x in each] for name, each in found.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(x)}" for x in known[name]) + "\n ]"
        for name in sorted(known)
    )
    target.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def load(source: Path, slot: Slot) -> list[Found] | None:
    """The candidates of a slot; None if they have not been searched for.

    Raises:
        CommandError: the file was not written by :func:`save`.
    """
    try:
        known = json.loads(source.read_text(encoding="utf-8")) if source.exists() else {}
        found = known.get(slot.name)
        return None if found is None else [Found(**x | {"config": TileConfig(**x["config"])}) for x in found]
    except (TypeError, ValueError, KeyError) as error:
        raise CommandError(f"{source}: got no file of python -m bench tune --compile ({error})") from error


def _as_object(found: Found) -> dict[str, Any]:
    """The fields that differ from a config without options, for JSON."""
    config = {f.name: getattr(found.config, f.name) for f in fields(TileConfig)}
    usual = {f.name: f.default for f in fields(TileConfig)}
    known = {name: x for name, x in asdict(found).items() if name != "in_flight" or x}
    return known | {"config": {name: x for name, x in config.items() if x != usual[name]}}
