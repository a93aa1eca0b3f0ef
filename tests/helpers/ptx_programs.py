"""Run a few lines of PTX as a kernel of the virtual GPU, with every order of asynchronous work and of warps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu import ptx
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.groups import Order
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.programs import Programs
from fusedattn.virtual_gpu.tensor_map import TensorMap

# What a body finds: %t thread, %w warp, %l lane, %c program, %a the shared address of the thread's own word, %o the
# address of the thread's word of the result, %s the begin of shared memory; each tensor and map by its name after "%".
_PREAMBLE = """
.file 1 "body.ptx"
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({parameters}) .reqntid {n_threads}
{{
.reg .pred %p<32>;
.reg .b16 %h<32>;
.reg .b32 %r<512>;
.reg .b64 %d<32>;
.reg .b32 %t, %w, %l, %c, %a, %s, %i, %j;
.reg .b64 %o;
{declarations}
.loc 1 0 0
mov.u32 %t, %tid.x;
shr.u32 %w, %t, 5;
and.b32 %l, %t, 31;
mov.u32 %i, %ctaid.z;
mov.u32 %j, %nctaid.y;
mul.lo.u32 %i, %i, %j;
mov.u32 %j, %ctaid.y;
add.u32 %i, %i, %j;
mov.u32 %j, %nctaid.x;
mul.lo.u32 %i, %i, %j;
mov.u32 %j, %ctaid.x;
add.u32 %c, %i, %j;
mov.u32 %s, global_smem;
shl.b32 %a, %t, 2;
add.u32 %a, %a, %s;
{loads}
mul.lo.u32 %i, %c, {n_threads};
add.u32 %i, %i, %t;
mul.wide.u32 %o, %i, 4;
add.s64 %o, %o, %out;
"""

# Correct code computes the same in all of these.
ORDERS = [
    {"asynchronous": "late"},
    {"asynchronous": "early"},
    *({"asynchronous": "random", "seed": seed, "schedule": "random"} for seed in range(4)),
    {"asynchronous": "late", "seed": 7, "schedule": "random"},
    {"asynchronous": "early", "seed": 8, "schedule": "random"},
]


def kernel_of(body: str, names: list[str], maps: list[str], n_threads: int) -> ptx.Kernel:
    """The kernel of a body, whose places are the lines of the body, from 1 on."""
    parameters = [f".param .u64 {name}" for name in names] + [f".param .align 64 .b8 {name}[128]" for name in maps]
    loads = [f"ld.param.u64 %{name}, [{name}];" for name in names] + [
        f"mov.b64 %{name}, {name};\ncvta.param.u64 %{name}, %{name};" for name in maps
    ]
    text = _PREAMBLE.format(
        parameters=", ".join(parameters),
        n_threads=n_threads,
        declarations="\n".join(f".reg .b64 %{name};" for name in [*names, *maps]),
        loads="\n".join(loads),
    )
    lines = [f".loc 1 {i} 0\n{line}" for i, line in enumerate(body.splitlines(), 1)]
    return _parsed("\n".join([text, *lines, "ret;\n}"]))


_parsed = lru_cache(maxsize=16)(ptx.parse)


def run(
    body: str,
    *,
    n_threads: int = 64,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 4096,
    tensors: Mapping[str, torch.Tensor] | None = None,
    maps: Mapping[str, TensorMap] | None = None,
    n_ctas: int | None = None,
    programs: list[int] | None = None,
    strict: bool = True,
    **order: Any,
) -> np.ndarray[Any, Any]:
    """The words that the threads store at %o, ``(programs, threads)``, as u4; 0 where none is stored."""
    n_programs = grid[0] * grid[1] * grid[2]
    n_ctas = n_ctas or n_programs
    out = torch.zeros(n_programs, n_threads, dtype=torch.int32)
    given = {"out": out, **(tensors or {})}
    kernel = kernel_of(body, list(given), list(maps or {}), n_threads)
    machine = Machine(
        kernel,
        n_ctas,
        shared,
        Counters(),
        order=Order(**order),
        products=Products(),
        noise=Noise(),
        strict=strict,
    )
    memory = GlobalMemory(given.values())
    numbers = programs or list(range(n_programs))
    values = {name: x.data_ptr() for name, x in given.items()}
    runner = Programs(machine)
    with np.errstate(all="ignore"):
        for first in range(0, n_programs, n_ctas):
            runner.run(numbers[first : first + n_ctas], grid, values, dict(maps or {}), memory)
    return out.numpy().view("u4")


def run_all(body: str, **arguments: Any) -> np.ndarray[Any, Any]:
    """The result of :func:`run`, the same in all orders; tensors of the arguments are as at the beginning for each."""
    before = {name: x.clone() for name, x in arguments.get("tensors", {}).items()}
    results = []
    for order in ORDERS:
        for name, x in before.items():
            arguments["tensors"][name].copy_(x)
        results.append([run(body, **arguments, **order), *(x.clone() for x in arguments.get("tensors", {}).values())])
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    return results[0][0]


def fails(
    error: type[Exception], body: str, *marks: str, says: str = "", orders: Any = ORDERS, **arguments: Any
) -> None:
    """In all orders, the body raises the error, whose message names the lines that end with ``// mark``."""
    lines = body.splitlines()
    for order in orders:
        with pytest.raises(error) as caught:
            run(body, **arguments, **order)
        assert type(caught.value) is error, caught.value
        assert says in str(caught.value), caught.value
        found = set(map(int, re.findall(r"body\.ptx:(\d+)", str(caught.value))))
        expected = {i for i, line in enumerate(lines, 1) if line.split("//")[-1].strip() in marks}
        assert found == expected, (str(caught.value), expected)
