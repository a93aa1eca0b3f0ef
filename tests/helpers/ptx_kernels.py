"""Kernels of PTX by hand, and their launches on the virtual GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.launch import Settings, parsed, programs_of
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Kernel
from fusedattn.virtual_gpu.tensor_map import TensorMap

REGISTERS = ".reg .pred %p<32>; .reg .b16 %rs<40>; .reg .b32 %r<512>; .reg .b64 %rd<40>;"
REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}  # of so many bits


def module(
    body: str,
    tensors: Iterable[str] = (),
    maps: Iterable[str] = (),
    *,
    n_threads: int = 128,
    registers: str = REGISTERS,
) -> str:
    """The PTX of a kernel whose parameters are addresses of tensors, and tensor maps."""
    parameters = [f".param .u64 {name}" for name in tensors] + [f".param .align 64 .b8 {name}[128]" for name in maps]
    return (
        '.file 1 "body.ptx"\n.extern .shared .align 16 .b8 global_smem[];\n'
        f".visible .entry kernel({', '.join(parameters)})\n.reqntid {n_threads}\n{{\n{registers}\n{body}\nret;\n}}\n"
    )


def launch(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    maps: Mapping[str, TensorMap] | None = None,
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    n_ctas: int | None = None,
    order: Sequence[int] = (),
    shared_bytes: int = 0,
    **settings: Any,
) -> Machine:
    """Run the programs of a grid, all or `n_ctas` at a time, in the order of their numbers or in another."""
    n_programs = math.prod(grid)
    n_ctas, order = n_ctas or n_programs, order or range(n_programs)
    programs = programs_of(kernel, n_ctas, shared_bytes, Settings(**settings), Counters())
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    memory = GlobalMemory(tensors.values())
    with np.errstate(all="ignore"):
        for first in range(0, n_programs, n_ctas):
            programs.run(order[first : first + n_ctas], grid, addresses, dict(maps or {}), memory)
    programs.count()
    return programs.machine


def run(
    body: str, *tensors: torch.Tensor, n_threads: int = 128, registers: str = REGISTERS, **arguments: Any
) -> Machine:
    """Launch a kernel of nothing but this body, whose parameters p0, p1, ... are the addresses of the tensors."""
    named = {f"p{i}": x for i, x in enumerate(tensors)}
    return launch(parsed(module(body, named, n_threads=n_threads, registers=registers)), named, **arguments)


# The address of element tid of 16 bytes: of p0 in %rd2, of p1 in %rd4.
ADDRESSES = """
mov.u32 %r1, %tid.x; mul.wide.u32 %rd5, %r1, 16;
ld.param.b64 %rd1, [p0]; add.s64 %rd2, %rd1, %rd5; ld.param.b64 %rd3, [p1]; add.s64 %rd4, %rd3, %rd5;
"""


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
