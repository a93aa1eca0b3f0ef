"""Run a few lines of PTX on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.groups import Order
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.programs import Programs
from fusedattn.virtual_gpu.ptx import parse

REGISTERS = ".reg .pred %p<20>; .reg .b16 %rs<40>; .reg .b32 %r<80>; .reg .b64 %rd<40>;"


def module(body: str, n_parameters: int = 0, n_threads: int = 128, registers: str = REGISTERS) -> str:
    """The PTX of a kernel k with parameters p0, p1, ... of 64 bits."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(n_parameters))
    return f".visible .entry k({parameters})\n.reqntid {n_threads}\n{{\n{registers}\n{body}\nret;\n}}\n"


def run(
    body: str,
    *tensors: torch.Tensor,
    n_threads: int = 128,
    shared_bytes: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    registers: str = REGISTERS,
    asynchronous: Any = "late",
    truncating: bool = False,
    noise: bool = False,
    seed: int | None = None,
    strict: bool = False,
) -> Machine:
    """Run all programs of a grid together; p0, p1, ... are the addresses of the tensors. Returns the machine."""
    kernel = parse(module(body, len(tensors), n_threads, registers))
    n_programs = grid[0] * grid[1] * grid[2]
    machine = Machine(
        kernel,
        n_programs,
        shared_bytes,
        Counters(),
        order=Order(asynchronous, seed),
        products=Products(truncating),
        noise=Noise(noise, seed or 0),
        strict=strict,
    )
    parameters = {f"p{i}": x.data_ptr() for i, x in enumerate(tensors)}
    with np.errstate(all="ignore"):
        Programs(machine).run(range(n_programs), grid, parameters, {}, GlobalMemory(tensors))
    return machine


def evaluate(
    code: str,
    results: int | Sequence[int],
    settings: Mapping[str, Any] | None = None,
    **operands: tuple[int, Sequence[int]],
) -> list[Any]:
    """What `code` computes in register %d, or in %d and %e, of so many bits each.

    Operands are (bits, values), one value for each thread, in registers of their names; predicates have one bit.
    `settings` are those of :func:`run`.
    """
    widths = dict(zip("de", [results] if isinstance(results, int) else results, strict=False))
    n = max(len(values) for _, values in operands.values())
    n_threads = -(-n // 32) * 32
    tensors = [_tensor(bits, values, n_threads) for bits, values in operands.values()]
    outs = [torch.zeros(n_threads, dtype=_STORED[bits]) for bits in widths.values()]
    registers = widths | {name: bits for name, (bits, _) in operands.items()}
    declared = " ".join(f".reg .{'pred' if bits == 1 else f'b{bits}'} %{name};" for name, bits in registers.items())
    loads = [_move("ld", i, name, bits) for i, (name, (bits, _)) in enumerate(operands.items())]
    stores = [_move("st", len(tensors) + i, name, bits) for i, (name, bits) in enumerate(widths.items())]
    lines = ["mov.u32 %lane, %tid.x;", *loads, code, *stores]
    run("\n".join(lines), *tensors, *outs, n_threads=n_threads, registers=f"{declared} {_OWN}", **settings or {})
    columns = [
        [value & (1 << bits) - 1 for value in out[:n].tolist()] for out, bits in zip(outs, widths.values(), strict=True)
    ]
    return columns[0] if isinstance(results, int) else list(zip(*columns, strict=True))


_OWN = ".reg .b32 %lane; .reg .b16 %flag; .reg .b64 %at;"
_STORED = {1: torch.int16, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _tensor(bits: int, values: Sequence[int], n_threads: int) -> torch.Tensor:
    width = max(bits, 16)
    signed = [(value + (1 << width - 1)) % (1 << width) - (1 << width - 1) for value in values]
    return torch.tensor(signed + [0] * (n_threads - len(signed)), dtype=_STORED[bits])


def _move(direction: str, i: int, name: str, bits: int) -> str:
    """PTX that loads a register from element `lane` of tensor `i`, or stores it there."""
    width = max(bits, 16)
    address = f"ld.param.b64 %at, [p{i}]; mad.wide.u32 %at, %lane, {width // 8}, %at;"
    access = f"{direction}.global.b{width}"
    if direction == "ld":
        return (
            f"{address} {access} %flag, [%at]; setp.ne.b16 %{name}, %flag, 0;"
            if bits == 1
            else (f"{address} {access} %{name}, [%at];")
        )
    return (
        f"{address} selp.b16 %flag, 1, 0, %{name}; {access} [%at], %flag;"
        if bits == 1
        else (f"{address} {access} [%at], %{name};")
    )


# The address of element tid of 16 bytes: of p0 in %rd2, of p1 in %rd4.
ADDRESSES = """
mov.u32 %r1, %tid.x; mul.wide.u32 %rd5, %r1, 16;
ld.param.b64 %rd1, [p0]; add.s64 %rd2, %rd1, %rd5; ld.param.b64 %rd3, [p1]; add.s64 %rd4, %rd3, %rd5;
"""


REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
