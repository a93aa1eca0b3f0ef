"""The problems that the compiled kernels solve on the virtual GPU, by groups; and the solution of one.

Import this only where kernels are compiled: not in a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.tuning.slots import holding_one_pass
from fusedattn import FP8, attention, testing
from fusedattn.kernels import configs, hopper
from fusedattn.kernels.versions import TRITON_VERSION
from fusedattn.masks import CausalAlign
from fusedattn.testing import Case, FP8Case, Ratios, fp8
from fusedattn.virtual_gpu.attention import MULTIPROCESSORS, compiled_attention, launches_for
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.eager import gpu_eager, tf32_eager
from tests.helpers import compiled_caches, packed_problems
from tests.helpers.compiled_caches import CacheProblem
from tests.helpers.packed_problems import Lengths

ARCHS: tuple[configs.Arch, ...] = ("sm_90", "sm_80")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
HEAD_DIMS = (64, 128, 256)  # entries of the config table; the last one, 512, has few problems

# More than one full block of keys and queries, and a part of one.
LONG = Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=200, seqlen_k=328, head_dim=64)


@dataclass(frozen=True)
class Problem:
    """A case on an architecture; `forward` changes fields of the forward's config, `settings` those of the GPU."""

    group: str
    arch: configs.Arch
    case: Case
    tf32: bool = False
    forward: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = True
    packed: bool = False
    lengths: Lengths = ()  # of packed sequences, of which `case` has the sums
    multiprocessors: int = MULTIPROCESSORS
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return "tf32" if self.tf32 else str(self.case.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        parts = [self.group, self.arch, self.dtype]
        parts += [self.case.name or f"head_dim {self.case.head_dim}"]
        if self.group == "hopper":
            parts += [
                f"{self.case.seqlen_q} x {self.case.seqlen_k}",
                *([f"packed {self.lengths}"] * bool(self.lengths)),
            ]
        parts += [f"{name}={value}" for name, value in {**self.forward, **self.settings}.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Solution:
    """The share of its budget that each tensor uses, and what each kernel executed."""

    ratios: dict[str, Ratios]
    counters: dict[str, Counters]

    @property
    def used(self) -> float:
        """By the tensor that uses most."""
        return max(x.used for x in self.ratios.values())


# Asynchronous work early, late and at random, while warps drift apart.
_DRIFTING = tuple(
    {"asynchronous": order, "schedule": "random", "seed": seed, "programs": programs}
    for seed, (order, programs) in enumerate((("early", "given"), ("late", "reversed"), ("random", "random")))
)

DRAWS = 15  # of a float32 problem that is beyond its budget: chance decides more there (docs/testing.md)


def solve(problem: Problem | CacheProblem) -> Solution:
    """Solve a problem by compiled kernels; each tensor by the median, if there are several draws of the inputs."""
    if isinstance(problem, CacheProblem):
        return Solution(*compiled_caches.solve(problem))
    solution = _solve(problem)
    if problem.dtype != "float32" or solution.used <= 1.0:
        return solution
    seeds = range(problem.case.seed + 1, problem.case.seed + DRAWS)
    draws = [solution, *(_solve(replace(problem, case=replace(problem.case, seed=seed))) for seed in seeds)]
    medians = {
        name: sorted((draw.ratios[name] for draw in draws), key=lambda ratios: ratios.used)[DRAWS // 2]
        for name in solution.ratios
    }
    return Solution(medians, solution.counters)


def _solve(problem: Problem) -> Solution:
    inputs = testing.make_inputs(problem.case, torch.device("cpu"))
    lengths = _lengths_of(problem)
    attend: Callable[..., Any] = partial(packed_problems.packed, lengths) if lengths else attention
    function = partial(attend, backend="triton", deterministic=problem.deterministic)
    with (
        compiled_attention(problem.arch, **problem.settings) as gpu,
        launches_for(problem.arch, problem.multiprocessors),
        _forward_config(problem.forward),
        _one_pass(problem),
        _by_hopper(problem),
        _float32_products("high" if problem.tf32 else "highest"),
    ):
        if isinstance(problem.case, FP8Case):
            found = fp8.run_fp8(problem.case, inputs, "triton")
        else:
            found = testing.run(function, inputs)
    if problem.group == "hopper" and "hopper_fwd" not in gpu.counters and not _is_refused(problem.case):
        raise AssertionError("the kernels for Hopper did not run")
    return Solution(_judged(problem, inputs, found), gpu.counters)


def _is_refused(case: Case) -> bool:
    return case.padding is not None and TRITON_VERSION < (3, 7)


def _judged(problem: Problem, inputs: testing.Inputs, found: testing.Results) -> dict[str, Ratios]:
    """The share of the budget of each result. In float32 its unit is the error of eager PyTorch on a GPU."""
    if isinstance(problem.case, FP8Case):
        return fp8.compare_fp8(problem.case, inputs, found)
    if problem.lengths:
        reference = partial(packed_problems.each, problem.lengths)
        truth, eager = testing.run(reference, inputs.to(torch.float64)), testing.run(reference, inputs)
        return testing.compare_results(found, truth, eager, inputs.q.dtype)
    eager_on_gpu = {"float32": gpu_eager, "tf32": tf32_eager}.get(problem.dtype, contextlib.nullcontext)
    with eager_on_gpu():
        eager = testing.baseline(inputs)
    return testing.compare_results(found, testing.golden(inputs), eager, inputs.q.dtype, testing.bias_terms(inputs))


@contextlib.contextmanager
def _forward_config(changes: dict[str, Any]) -> Iterator[None]:
    table = configs.lookup

    def changed(*asked: Any) -> configs.KernelConfigs:
        found = table(*asked)
        return replace(found, fwd=replace(found.fwd, **changes))

    with patch.object(configs, "lookup", changed) if changes else contextlib.nullcontext():
        yield


def _one_pass(problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Gradients in one pass, for which no table has a config, where they may be in any order."""
    tried = problem.arch == "sm_90" and problem.case.head_dim <= 64 and not problem.deterministic
    return holding_one_pass() if tried else contextlib.nullcontext()


def _by_hopper(problem: Problem) -> contextlib.AbstractContextManager[None]:
    """The kernels for Hopper, for short sequences too, in the group of that name; else the general kernels."""
    return hopper.choosing("all" if problem.group == "hopper" else None)


@contextlib.contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _lengths_of(problem: Problem) -> Lengths:
    """Of packed sequences: those of the problem, or a batch, with an empty sequence after the first."""
    if problem.lengths or not problem.packed:
        return problem.lengths
    one = (problem.case.seqlen_q, problem.case.seqlen_k)
    return [one, (0, 0), *[one] * (problem.case.batch - 1)]


def problems() -> Iterator[Problem | CacheProblem]:
    """All problems."""
    for arch in ARCHS:
        yield from _features(arch)
        yield from _styles(arch)
        yield from _lengths(arch)
        yield from _orders(arch)
        yield from _hopper(arch)
        yield from _fp8(arch)
        yield from compiled_caches.problems(arch)


def _features(arch: configs.Arch) -> Iterator[Problem]:
    """Every shared case, in every dtype."""
    for dtype in DTYPES:
        for case in testing.CASES:
            yield Problem("features", arch, replace(case, dtype=dtype))
    for case in testing.CASES:
        yield Problem("features", arch, replace(case, dtype=torch.float32), tf32=True)


def _styles(arch: configs.Arch) -> Iterator[Problem]:
    """Every way to load and multiply tiles, with a loop of full blocks and a boundary."""
    styles: tuple[configs.Style, ...] = ("pointers", "descriptors", "pipelined") if arch == "sm_90" else ("pointers",)
    for head_dim in HEAD_DIMS:
        for i, style in enumerate(styles):
            # The table's tile at 256 is meant for descriptors; two stages of copies by pointers do not fit.
            forward = {"style": style} | (
                {"num_stages": 1} if (arch, style, head_dim) == ("sm_90", "pointers", 256) else {}
            )
            case = replace(LONG, head_dim=head_dim, causal="bottom_right", dtype=HALVES[i % 2], rope="half")
            yield Problem("styles", arch, case, forward=forward)
            case = replace(LONG, head_dim=head_dim, padding="uneven", batch=2, dtype=HALVES[(i + 1) % 2])
            yield Problem("styles", arch, case, forward={**forward, "persistent": 1})
    for head_dim, dtype in ((64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16)):
        for changes in ({"causal": "bottom_right", "rope": "half"}, {"padding": "left"}, {}):
            case = replace(LONG, head_dim=head_dim, dtype=dtype, **changes)  # type: ignore[arg-type]
            yield Problem("one pass", arch, case, deterministic=False)
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (64, torch.float32), (256, torch.bfloat16)):
        case = replace(LONG, head_dim=head_dim, dtype=dtype, batch=2, causal="top_left", seqlen_q=150, rope="half")
        yield Problem("packed", arch, replace(case, window=(90, 0)), packed=True)
    for head_dim in HEAD_DIMS:
        for seqlen_q, dtype in ((1, torch.bfloat16), (8, torch.float16), (1, torch.float32)):
            case = Case(batch=2, nheads_q=8, nheads_kv=2, seqlen_q=seqlen_q, seqlen_k=1100, head_dim=head_dim)
            case = replace(case, causal="bottom_right", padding="right", rope="half", dtype=dtype)
            yield Problem("few queries", arch, case)


def _lengths(arch: configs.Arch) -> Iterator[Problem]:
    """Lengths that tiles divide, and others."""
    lengths = ((256, 256), (129, 257), (63, 191))
    for head_dim in (*HEAD_DIMS, 512):
        for dtype, tf32 in (*((dtype, False) for dtype in DTYPES), (torch.float32, True)):
            for seqlen_q, seqlen_k in lengths if head_dim < 512 else lengths[-1:]:
                case = replace(LONG, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype)
                yield Problem("lengths", arch, replace(case, causal="bottom_right"), tf32=tf32)


def _orders(arch: configs.Arch) -> Iterator[Problem]:
    """Orders of programs, warps and asynchronous work, and the errors that the hardware may have."""
    many: list[dict[str, Any]] = [
        {"asynchronous": "early"},
        *({"asynchronous": "random", "programs": "random", "seed": seed} for seed in range(3)),
        {"programs": "reversed"},
        {"together": False},
        {"noise": True, "truncating": True},
    ]
    for head_dim in HEAD_DIMS:
        case = replace(LONG, head_dim=head_dim, causal="bottom_right", rope="half", dtype=torch.bfloat16)
        for settings in many:
            yield Problem("orders", arch, case, settings=settings)
    for settings in many[:-1]:
        case = replace(LONG, causal="bottom_right", dtype=torch.float16)
        yield Problem("orders", arch, case, deterministic=False, settings=settings)


def _hopper(arch: configs.Arch) -> Iterator[Problem]:
    """The kernels in Gluon: lengths of one to three tiles, masks, groups of heads, and orders of everything."""
    if arch != "sm_90":
        return
    base = replace(LONG, head_dim=128, dtype=torch.bfloat16)
    lengths = ((128, 128), (256, 256), (384, 384), (132, 257), (100, 300), (301, 77), (66, 1))
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        case = replace(base, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=HALVES[i % 2])
        for causal in (None, "bottom_right", "top_left"):
            yield Problem("hopper", arch, replace(case, causal=causal))
    square = replace(base, seqlen_q=320, seqlen_k=320, causal="bottom_right")
    yield Problem("hopper", arch, replace(square, window=(100, 0)))
    yield Problem("hopper", arch, replace(square, window=(100, 40), causal=None, dtype=torch.float16))
    for padding in ("right", "left", "uneven"):
        yield Problem("hopper", arch, replace(square, padding=padding, batch=2))
    yield Problem("hopper", arch, replace(square, batch=3, seqlen_q=150), packed=True)
    yield Problem("hopper", arch, replace(square, batch=2, seqlen_q=231, rope="half", window=(90, 0)), packed=True)
    yield Problem("hopper", arch, replace(square, prefix=True, batch=2, seqlen_k=350))
    yield Problem("hopper", arch, replace(square, prefix=True, batch=2, causal="top_left", padding="left"))
    yield Problem("hopper", arch, replace(square, qk_norm="per_head", rope="half", dtype=torch.float16))
    yield Problem("hopper", arch, replace(square, rope="half", nheads_q=4))
    yield Problem("hopper", arch, replace(square, rope="interleaved", rotary_dim=40, dtype=torch.float16, causal=None))
    for settings in (
        {"asynchronous": "early"},
        *({"asynchronous": "random", "programs": "random", "schedule": "random", "seed": seed} for seed in range(4)),
        {"programs": "reversed", "together": False},
        {"noise": True, "truncating": True},
    ):
        for case in (square, replace(square, causal=None, seqlen_k=300, dtype=torch.float16)):
            yield Problem("hopper", arch, case, settings=settings)
    for head_dim, dtype in itertools.product((64, 256), HALVES):
        case = replace(square, head_dim=head_dim, dtype=dtype, seqlen_q=301, seqlen_k=330)
        yield Problem("hopper", arch, replace(case, causal=None))
        yield Problem("hopper", arch, replace(case, seqlen_q=330, seqlen_k=201, padding="uneven", batch=2))
        yield Problem("hopper", arch, replace(case, window=(100, 20), rope="half"), settings=_DRIFTING[2])
        yield Problem("hopper", arch, replace(case, batch=2, seqlen_q=230, rope="interleaved"), packed=True)
    yield from _ends()


def _ends() -> Iterator[Problem]:
    """Where the kernels for Hopper begin and end, in three orders: every wait must have its arrival.

    One to three tiles of queries and of keys, and a few rows more or less; ranges without keys; packed sequences,
    which may be empty. Without a mask, one program walks over all tiles, or each tile has a program.
    """
    one = replace(LONG, nheads_q=1, head_dim=128, dtype=torch.bfloat16)
    several = replace(one, nheads_q=2)
    tiles = itertools.product((128, 256, 384), (128, 256, 384), (-4, 0, 4), (-1, 0, 1))
    shapes = [(m + more_m, n + more_n) for m, n, more_m, more_n in tiles]
    causal: tuple[CausalAlign, ...] = ("bottom_right", "top_left")
    for i, (seqlen_q, seqlen_k) in enumerate(shapes):
        case, order = replace(one, seqlen_q=seqlen_q, seqlen_k=seqlen_k), i + i // 3 + i // 9
        yield Problem("hopper", "sm_90", replace(case, causal=causal[i % 2]), settings=_DRIFTING[order % 3])
        multiprocessors = 1 if i // 3 % 2 else 6
        yield Problem("hopper", "sm_90", case, multiprocessors=multiprocessors, settings=_DRIFTING[(order + 1) % 3])
    empty = [
        replace(several, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=align)
        for (seqlen_q, seqlen_k), align in itertools.product(((260, 1), (388, 129), (129, 60)), (None, *causal))
    ]
    empty += [
        replace(one, batch=2, seqlen_q=132, seqlen_k=200, padding="right", empty_batch=True),
        replace(one, batch=2, seqlen_q=260, seqlen_k=200, padding="left", empty_batch=True, causal="bottom_right"),
        replace(one, seqlen_q=300, seqlen_k=100, window=(50, 0)),  # the first tile of queries sees nothing
        replace(one, seqlen_q=300, seqlen_k=100, window=(20, 0), causal="top_left"),  # nor does the last
    ]
    sequences = ([(130, 200), (0, 0), (3, 5), (70, 0), (0, 66), (129, 1)], [(0, 9), (66, 66)], [(1, 260), (260, 1)])
    for settings in _DRIFTING:
        for case in empty:
            yield Problem("hopper", "sm_90", case, settings=settings)
        for lengths, align in itertools.product(sequences, (None, *causal)):
            seqlen_q, seqlen_k = (sum(n) for n in zip(*lengths, strict=True))
            case = replace(several, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=align)
            yield Problem("hopper", "sm_90", case, lengths=tuple(lengths), settings=settings)


def _fp8(arch: configs.Arch) -> Iterator[Problem]:
    """The forward in 8 bits: every shared case, every tile of its configs, and orders of everything."""
    if arch != "sm_90":
        return
    for case, dtype in itertools.product(testing.FP8_CASES, DTYPES):
        yield Problem("fp8", arch, replace(case, dtype=dtype))
    long = FP8Case(**{**vars(LONG), "dtype": torch.bfloat16, "rope": "half", "causal": "bottom_right"})
    for head_dim, boolean in itertools.product(HEAD_DIMS, (None, "full")):
        yield Problem("fp8", arch, replace(long, head_dim=head_dim, boolean=boolean))  # type: ignore[arg-type]
    for settings in (
        {"asynchronous": "early"},
        *({"asynchronous": "random", "programs": "random", "schedule": "random", "seed": seed} for seed in range(3)),
        {"programs": "reversed", "together": False},
        {"noise": True},
    ):
        for precision in (FP8(rotate=True), FP8("tensor")):
            yield Problem("fp8", arch, replace(long, precision=precision, padding="uneven"), settings=settings)


def quick_problems() -> Iterator[Problem | CacheProblem]:
    """A few of them: each style and kernel once."""
    base = replace(LONG, nheads_q=1, dtype=torch.bfloat16)
    causal = replace(base, causal="bottom_right", rope="half", seqlen_q=140)
    for arch in ARCHS:
        yield Problem("styles", arch, causal)
        yield Problem("one pass", arch, causal, deterministic=False, settings={"asynchronous": "random"})
    yield Problem("styles", "sm_90", replace(base, padding="left"), forward={"style": "pipelined", "persistent": 1})
    hopper_case = replace(base, nheads_q=2, head_dim=128, causal="bottom_right")
    yield Problem("hopper", "sm_90", hopper_case, settings={"asynchronous": "random", "schedule": "random"})
    yield Problem("hopper", "sm_90", replace(hopper_case, causal=None, dtype=torch.float16))
    packed = replace(hopper_case, head_dim=64, batch=2, seqlen_q=230, seqlen_k=230, window=(90, 0), rope="half")
    yield Problem("hopper", "sm_90", packed, packed=True)
    yield Problem("features", "sm_90", testing.CASES[-1])
    mixed = next(case for case in testing.CASES if case.name == "values of 16 features, keys of 24")
    yield Problem("features", "sm_90", replace(mixed, dtype=torch.bfloat16))  # one tile is copied, one in registers
    few = replace(base, seqlen_q=1, seqlen_k=600, nheads_q=4, padding="right", dtype=torch.float16)
    yield Problem("few queries", "sm_90", few, settings={"asynchronous": "early"})
    fp8_case = replace(testing.FP8_CASES[-1], nheads_q=2, nheads_kv=1, dtype=torch.bfloat16)
    yield Problem("fp8", "sm_90", fp8_case, settings={"asynchronous": "random", "schedule": "random"})
    yield CacheProblem("sm_90", torch.float16, "e4m3")
    yield CacheProblem("sm_80", torch.bfloat16, "int4, groups of 4", seqlen_q=70)
