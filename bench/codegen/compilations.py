"""The list of compilations, in order, and the report of each kernel."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
import triton

from bench.codegen import launches, machine_code, ones, ttgir
from bench.codegen.loops import WARP_GROUP
from bench.codegen.machine_code import MachineCode
from bench.codegen.occupancy import ctas_per_sm
from bench.codegen.register_budget import Plan
from bench.codegen.report import Report
from bench.tuning.slots import holding_one_pass
from fusedattn.kernels import configs
from fusedattn.kernels.hopper_configs import FORWARD, ROWS

T = TypeVar("T")
R = TypeVar("R")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
HEAD_DIMS = (64, 128, 256)  # one for each entry of the config table but the last
ALL = ("plain", "causal", "causal+rope", "all but boolean", "all")
HEAVIEST = ALL[-2:]
ONE_PASS = tuple(name for name in launches.FEATURES if name.startswith("one pass"))
HOPPER = tuple(name for name in launches.FEATURES if name.startswith("hopper"))  # by the kernels in Gluon
WHOLE = tuple(name for name in launches.FEATURES if name not in (*ALL, *ONE_PASS, *HOPPER, "latent"))

# dtype -> the head_dims and features that are compiled in it. fp16 and bf16 differ only in the names of instructions;
# tf32, which the user must allow, runs the configs of fp32.
EVERYTHING: dict[str, tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]] = {
    "bf16": (
        (HEAD_DIMS, ALL),
        ((128,), WHOLE),
        ((64, 256), ("bias", "biased", "everything", "few queries", "some queries", "decode")),
        ((64, 256), ("cache", "cache of e4m3", "cache of e4m3, chunk")),
        ((64, 256), ("linear", "norm", "fp8")),
        ((64,), ONE_PASS),
        ((512,), ("causal", "everything", "decode")),
        ((launches.KEYS,), ("latent",)),
        (tuple(FORWARD), HOPPER),
    ),
    "fp16": (((128,), (*HEAVIEST, "linear", "hopper, padding")),),
    "fp32": (
        (HEAD_DIMS, ALL),
        ((64,), WHOLE),
        ((128, 256), ("decode", "linear", "norm")),
        ((512,), ("causal", "decode")),
    ),
    "tf32": ((HEAD_DIMS, (*HEAVIEST, "linear")),),
}
QUICK: dict[str, tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]] = {
    "bf16": (
        (HEAD_DIMS, (*HEAVIEST, "decode")),
        ((128,), ("bias", "biased", "scores", "everything", "cache", "cache of e4m3, chunk")),
        ((64,), ("biased", "one pass, padding")),
        (HEAD_DIMS, ("linear", "norm")),
        ((128,), ("norm across heads", "fp8, tensor", "fp8, packed", "fp8, scores")),
        (HEAD_DIMS, ("fp8",)),
        (tuple(FORWARD), ("hopper", "hopper, causal+rope")),
        ((128,), ("hopper, packed",)),
    ),
    "fp32": ((HEAD_DIMS, (*HEAVIEST, "decode", "linear", "norm")),),
}
OF_ONES: dict[configs.Arch, tuple[str, ...]] = {"sm_90": ("bf16", "fp32"), "gfx942": ("bf16",)}


@dataclass(frozen=True)
class Case:
    """Calls of attention() that share a compiler process: one (target, dtype, head_dim), several feature sets.

    Empty `kernels` means all. `inference` names the features that are also called without gradients: in 16 bits, that
    forward is another kernel. `config` replaces the table's config for every kernel. With `ones` the features are
    those of calls with sizes of 1.
    """

    target: configs.Arch
    dtype: str
    head_dim: int
    features: tuple[str, ...]
    kernels: tuple[str, ...]
    inference: tuple[str, ...]
    config: configs.TileConfig | None = None
    ones: bool = False


def cases(options: argparse.Namespace) -> list[Case]:
    """All cases of a command, or (--quick) those of the tests, narrowed by the options that are not empty.

    Features are compiled at the head_dims that are listed for them, or at those that `options` names.
    """
    found = []
    plan = QUICK if options.quick else EVERYTHING
    for target, dtype in itertools.product(options.target, options.dtype or plan):
        if dtype == "tf32" and launches.TARGETS[target].backend == "hip":
            continue  # the package computes in float32 there
        planned: dict[int, tuple[str, ...]] = {}
        for its_head_dims, its_features in plan.get(dtype, EVERYTHING[dtype]):
            planned |= {head_dim: planned.get(head_dim, ()) + its_features for head_dim in its_head_dims}
        if options.head_dim:
            planned = {n: tuple(options.features) or planned.get(n, HEAVIEST) for n in options.head_dim}
        for head_dim, names in planned.items():
            chosen = tuple(name for name in names if not options.features or name in options.features)
            if target not in launches.FP8_TARGETS:
                chosen = tuple(name for name in chosen if not name.startswith("fp8"))
            if target != "sm_90":
                chosen = tuple(name for name in chosen if name not in HOPPER)
            inference = HOPPER if options.quick else (*HEAVIEST, *HOPPER)
            if chosen:
                found.append(Case(target, dtype, head_dim, chosen, tuple(options.kernel), inference))
    if not found:
        raise SystemExit("--features: none of them is listed for these dtypes; --head-dim compiles them all the same")
    return found


def cases_of_ones(options: argparse.Namespace) -> Iterator[Case]:
    """The calls with sizes of 1, for targets that represent the others."""
    for target in options.target:
        for dtype, name in itertools.product(OF_ONES.get(target, ()), ones.ONES):
            if not options.dtype or dtype in options.dtype:
                yield Case(target, dtype, ones.head_dim_of(name), (name,), tuple(options.kernel), (), ones=True)


def compile_all(selected: list[Case], jobs: int, known: frozenset[str] = frozenset()) -> list[Report]:
    """The reports of all cases, in their order; each kernel once. Those of kernels that are `known` have no figures."""
    reports: dict[str, Report] = {}
    compiled = in_processes(functools.partial(compile_case, known=known), selected, jobs)
    for report in itertools.chain.from_iterable(compiled):
        if reports.setdefault(report.key, report) != report:
            raise RuntimeError(f"two different compilations are both called {report.key}: name what differs")
    return list(reports.values())


def in_processes(function: Callable[[T], R], items: Iterable[T], jobs: int) -> Iterator[R]:
    """The results of a function for the items, in order, from `jobs` processes; from this process if `jobs` is 1."""
    if jobs == 1:
        yield from map(function, items)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from pool.map(function, items)


def compile_case(case: Case, sizes: launches.Sizes | None = None, known: frozenset[str] = frozenset()) -> list[Report]:
    """The reports of the kernels that the calls of a case launch, with other than the usual sizes if given.

    `known` are fingerprints of kernels that need not be compiled to machine code.
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with launches.compiling(case.target, case.kernels, known) as found, _configured(case):
            for name in case.features:
                features = ones.ONES[name] if case.ones else launches.FEATURES[name]
                for training in _modes(case, name):
                    launches.call(case.head_dim, DTYPES[case.dtype], features, training=training, sizes=sizes)
        return [_report(case, launch) for launch in found]


def _modes(case: Case, features: str) -> tuple[bool, ...]:
    """Whether a call has gradients: once with them, if there is a backward, and once without, if that differs."""
    if not configs.has_backward(case.target, case.head_dim, DTYPES[case.dtype]):
        return (False,)
    return (True, False) if features in case.inference else (True,)


@contextmanager
def _configured(case: Case) -> Iterator[None]:
    """Inside, every launch has the config of a case, if it has one; the backward uses the fields that it has."""
    config = case.config
    if config is None:
        # By pointers, one pass has no config.
        with holding_one_pass() if case.target == "sm_90" else nullcontext():
            yield
    else:
        backward = replace(config, persistent=0)
        with (
            patch.object(configs, "lookup", lambda *asked: configs.KernelConfigs(config, backward, backward, backward)),
            patch.object(configs, "lookup_few_queries", lambda *asked: configs.FewQueries(config, configs.SPLIT)),
        ):
            yield


def _report(case: Case, launch: launches.Launch) -> Report:
    # Not every kernel depends on the dtype and head_dim of the case.
    is_gluon = launch.boxes is not None
    typed = "ACC" in launch.constants or is_gluon
    config = _config(launch)
    report = Report(
        kernel=launch.kernel,
        target=case.target,
        head_dim=case.head_dim if typed else 0,
        dtype=case.dtype if typed else "any",
        features="+".join(launch.features) or "plain",
        config=config,
        has_products="PRECISION" in launch.constants or is_gluon,
        plan=Plan(config["num_warps"], *launch.constants["REGISTERS"]) if is_gluon else None,
        fingerprint=launch.fingerprint,
        error=launch.error,
        ones="+".join(case.features).replace(" ", "-") if case.ones else "",
    )
    if launch.compiled is None:
        return replace(report, is_known=not launch.error)
    code = machine_code_of(launch)
    metadata = launch.compiled.metadata
    return replace(
        report,
        **vars(code),
        shared_bytes=metadata.shared,
        ctas_per_sm=ctas_per_sm(
            case.target, code.registers, metadata.shared, metadata.num_warps, getattr(metadata, "tmem_size", None) or 0
        ),
        transposed_products=ttgir.transposed_products(launch.compiled.asm["ttgir"]),
        rearranged_products=ttgir.rearranged_products(launch.compiled.asm["ttgir"]),
    )


def machine_code_of(launch: launches.Launch) -> MachineCode:
    """Figures of a compiled launch."""
    if "amdgcn" in launch.compiled.asm:
        return machine_code.of_amdgcn(launch.compiled.asm["amdgcn"])
    tools = Path(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    return machine_code.of_cubin(launch.compiled.asm["cubin"], launch.log, tools)


def _config(launch: launches.Launch) -> dict[str, int]:
    """Tile, warps, stages and style, as chosen by the launcher."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK", "BOUNDARY")
    tile = {name: value for name, value in launch.constants.items() if name in names and value > 1}
    metadata = launch.compiled.metadata if launch.compiled else None
    options = {"num_warps": 4, "num_stages": 0} | launch.options
    if metadata is not None:
        options = {name: getattr(metadata, name, value) for name, value in options.items()}
    if launch.boxes is not None:
        return options | _tile_of_gluon(launch, options["num_warps"])
    style = {
        "descriptors": launch.has_descriptors,
        "pipelined": launch.constants.get("PIPELINED", False),
        "persistent": launch.is_persistent,
    }
    return tile | options | {name: 1 for name, value in style.items() if value}


def _tile_of_gluon(launch: launches.Launch, warps: int) -> dict[str, int]:
    """The rows of a program, and of a block that it visits. One group of warps requests tiles, the others own rows.

    The number of groups is unknown if the kernel fails to compile.
    """
    boxes, own = launch.boxes or {}, ROWS * (warps // WARP_GROUP - 1)
    walks_over_queries = launch.kernel.endswith("dkdv")
    tile = {"BLOCK_M": boxes["q"], "BLOCK_N": own} if walks_over_queries else {"BLOCK_M": own, "BLOCK_N": boxes["k"]}
    return {name: rows for name, rows in tile.items() if rows} | {"num_stages": launch.constants["STAGES"]}
