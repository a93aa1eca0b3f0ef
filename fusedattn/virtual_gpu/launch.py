"""From the arguments of a Triton kernel to those of its PTX, and a run of every program of the grid."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.virtual_gpu import ptx
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.groups import Order
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.programs import Programs
from fusedattn.virtual_gpu.tensor_map import TensorMap

LANES = 2048  # threads that run together, about: NumPy costs the same for fewer
_SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}  # Triton's modes of a tensor map


def _fences_copies() -> bool:
    """Whether this Triton puts a fence between cp.async and wgmma: since 3.7.1 (triton-lang/triton#10537)."""
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) >= (3, 7, 1)


@dataclass(frozen=True)
class Settings:
    """How programs run. Correct code computes the same with all of these, but for `noise` and `truncating`."""

    asynchronous: Literal["early", "late", "random"] = "late"
    programs: Literal["given", "reversed", "random"] = "given"
    together: bool = True  # several programs at a time, interleaved; else one after the other
    seed: int | None = None
    noise: bool = False
    truncating: bool = False
    strict: bool = False  # rules of PTX that Triton's code breaks, and NVIDIA's assembler repairs, are errors
    fenced_copies: bool = field(default_factory=_fences_copies)  # else wgmma needs none after cp.async
    counting: bool = False  # bytes, sectors and bank conflicts


@dataclass
class Launcher:
    """Launches of one compiled kernel."""

    source: Any  # Triton's ASTSource
    metadata: Any
    text: str
    settings: Settings
    counters: Counters
    machines: dict[int, Programs] = field(default_factory=dict)

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Run all programs, on the tensors among the arguments."""
        kernel = parsed(self.text)
        values, maps, tensors = self._flat(kernel, arguments)
        memory = GlobalMemory(tensors)
        n_programs = grid[0] * grid[1] * grid[2]
        if not n_programs:
            return
        n_ctas = self._n_ctas(kernel, n_programs)
        if n_ctas not in self.machines:
            self.machines = {n_ctas: self._programs(kernel, n_ctas)}  # one at most: they are large
        programs = self.machines[n_ctas]
        order = self._order(n_programs, programs.machine.order)
        with np.errstate(all="ignore"):
            for first in range(0, n_programs, n_ctas):
                programs.run(order[first : first + n_ctas], grid, values, maps, memory)
        programs.count()

    def _programs(self, kernel: ptx.Kernel, n_ctas: int) -> Programs:
        settings = self.settings
        self.counters.accesses = settings.counting
        machine = Machine(
            kernel,
            n_ctas,
            self.metadata.shared,
            self.counters,
            order=Order(settings.asynchronous, settings.seed),
            products=Products(settings.truncating),
            noise=Noise(settings.noise, settings.seed or 0),
            strict=settings.strict,
            fenced_copies=settings.fenced_copies,
        )
        return Programs(machine)

    def _n_ctas(self, kernel: ptx.Kernel, n_programs: int) -> int:
        """Programs that run together, so that all batches are nearly full."""
        if not self.settings.together:
            return 1
        most = max(1, LANES // kernel.n_threads)
        return -(-n_programs // -(-n_programs // most))

    def _order(self, n_programs: int, order: Order) -> list[int]:
        numbers = np.arange(n_programs)
        if self.settings.programs == "reversed":
            numbers = numbers[::-1]
        elif self.settings.programs == "random":
            numbers = order.random.permutation(n_programs)
        return [int(n) for n in numbers]

    def _flat(
        self, kernel: ptx.Kernel, arguments: Sequence[Any]
    ) -> tuple[dict[str, int], dict[str, TensorMap], list[torch.Tensor]]:
        """The values of the kernel's parameters, its tensor maps and all its tensors."""
        described = iter(getattr(self.metadata, "tensordesc_meta", None) or [])
        values: dict[str, int] = {}
        maps: dict[str, TensorMap] = {}
        tensors: list[torch.Tensor] = []
        parameters = iter(kernel.parameters)
        for kind, value in _leaves(tuple(self.source.signature.values()), arguments):
            if isinstance(value, TensorDescriptor):
                maps[next(parameters).name] = _tensor_map(value, next(described))
                tensors.append(value.base)
                for n in (*value.shape, *value.strides):
                    values[next(parameters).name] = int(n) & 2**64 - 1
                continue
            parameter = next(parameters)
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                values[parameter.name] = value.data_ptr()
            elif kind.startswith("*"):
                raise TypeError(f"{self.metadata.name}: got {type(value).__name__} for {kind}, allowed are tensors")
            elif kind.startswith("fp"):
                values[parameter.name] = int.from_bytes(
                    struct.pack({"fp32": "<f", "fp64": "<d"}[kind], value), "little"
                )
            else:
                values[parameter.name] = int(value) & (1 << 8 * parameter.n_bytes) - 1
        for parameter in parameters:  # scratch memory, which no kernel here has
            values[parameter.name] = 0
        if getattr(self.metadata, "global_scratch_size", 0):
            raise NotImplementedError(f"{self.metadata.name}: needs scratch memory")
        return values, maps, tensors


@lru_cache(maxsize=64)
def parsed(text: str) -> ptx.Kernel:
    return ptx.parse(text)


def _leaves(kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The type and value of each argument that is a parameter: not constants, and the elements of tuples."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, (tuple, list)):
            yield from _leaves(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _tensor_map(tensor: TensorDescriptor, description: dict[str, Any]) -> TensorMap:
    """What the hardware is told of a tensor; Triton chooses a box, which may be a part of the tile."""
    size = int(description["elem_size"])
    strides = tuple(int(stride) * size for stride in tensor.strides)
    return TensorMap(
        tensor.base.data_ptr(),
        tuple(map(int, tensor.shape)),
        strides,
        tuple(map(int, description["block_size"])),
        size,
        _SWIZZLES[int(description["swizzle"])],
        tensor.base.is_floating_point(),
    )
