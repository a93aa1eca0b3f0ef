"""Launch bodies of PTX with every order of asynchronous work and of warps; errors name the lines of a body."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu.launch import parsed
from fusedattn.virtual_gpu.ptx import Kernel
from fusedattn.virtual_gpu.tensor_map import TensorMap
from tests.helpers.ptx_kernels import REGISTERS, launch, module

# What a body finds: %t thread, %w warp, %l lane, %c program, %a the shared address of the thread's own word, %o the
# address of the thread's word of the result, %s the begin of shared memory; each tensor and map by its name after "%".
_OWN = ".reg .b32 %t, %w, %l, %c, %a, %s, %i, %j; .reg .b64 %o;"
_BEFORE = """
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31;
mov.u32 %i, %ctaid.z; mov.u32 %j, %nctaid.y; mov.u32 %c, %ctaid.y; mad.lo.u32 %i, %i, %j, %c;
mov.u32 %j, %nctaid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %c, %i, %j, %c;
mov.u32 %s, global_smem; shl.b32 %a, %t, 2; add.u32 %a, %a, %s;
mov.u32 %j, %ntid.x; mad.lo.u32 %i, %c, %j, %t; mul.wide.u32 %o, %i, 4; add.s64 %o, %o, %out;
"""

# Correct code computes the same in all of these.
ORDERS = [
    {"asynchronous": "late"},
    {"asynchronous": "early"},
    *({"asynchronous": "random", "seed": seed, "schedule": "random"} for seed in range(4)),
    {"asynchronous": "late", "seed": 7, "schedule": "random"},
    {"asynchronous": "early", "seed": 8, "schedule": "random"},
]

OUT = "st.global.b32 [%o], %r2;"
# Threads of %p2 change a word of a tensor %x.
STORE_X = "@%p2 st.global.b32 [%x+{at}], 7; // write"
ADD_X = "@%p2 red.global.gpu.relaxed.add.u32 [%x+{at}], 7; // write"


def body_of(*lines: str) -> str:
    return "\n".join(lines)


def kernel_of(body: str, tensors: Iterable[str] = (), maps: Iterable[str] = (), *, n_threads: int = 64) -> Kernel:
    """The kernel of a body, whose places are the lines of the body, from 1 on; a tensor "out" is the result."""
    tensors, maps = ["out", *tensors], list(maps)
    loads = [f"ld.param.u64 %{name}, [{name}];" for name in tensors]
    loads += [f"mov.b64 %{name}, {name}; cvta.param.u64 %{name}, %{name};" for name in maps]
    lines = [f".loc 1 {i} 0\n{line}" for i, line in enumerate(body.splitlines(), 1)]
    registers = f"{REGISTERS} {_OWN} .reg .b64 {', '.join(f'%{name}' for name in [*tensors, *maps])};"
    text = "\n".join([".loc 1 0 0", *loads, _BEFORE, *lines])
    return parsed(module(text, tensors, maps, n_threads=n_threads, registers=registers))


def run(
    body: str,
    *,
    n_threads: int = 64,
    grid: tuple[int, int, int] = (1, 1, 1),
    tensors: Mapping[str, torch.Tensor] | None = None,
    maps: Mapping[str, TensorMap] | None = None,
    **arguments: Any,
) -> np.ndarray[Any, Any]:
    """The words that the threads store at %o, ``(programs, threads)``, as u4; 0 where none is stored."""
    out, tensors = torch.zeros(math.prod(grid), n_threads, dtype=torch.int32), tensors or {}
    kernel = kernel_of(body, tensors, maps or {}, n_threads=n_threads)
    launch(kernel, {"out": out, **tensors}, maps, grid=grid, **{"shared_bytes": 4096, "strict": True} | arguments)
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
