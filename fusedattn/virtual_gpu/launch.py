"""From the arguments of a Triton kernel to those of its PTX, and a run of every program of the grid."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.virtual_gpu import ptx
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.groups import Order
from fusedattn.virtual_gpu.instructions.floats import NAN
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.programs import Programs
from fusedattn.virtual_gpu.tensor_map import TensorMap
from fusedattn.virtual_gpu.trace import Trace

LANES = 2048  # threads that run together, about: NumPy costs the same for fewer
_SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}  # Triton's modes of a tensor map


@dataclass(frozen=True)
class Settings:
    """How programs run. Correct code computes the same with all of these, but for `noise` and `truncating`."""

    asynchronous: Literal["early", "late", "random"] = "late"
    programs: Literal["given", "reversed", "random"] = "given"
    schedule: Literal["lockstep", "random"] = "lockstep"  # warps run together, or drift apart as far as barriers allow
    together: bool = True  # several programs at a time, interleaved; else one after the other
    seed: int | None = None
    noise: bool = False
    truncating: bool = False
    strict: bool = False  # what Triton's code does although PTX leaves its result open is an error
    fenced_copies: bool = True  # else wgmma needs no fence after cp.async, as Triton before 3.7.1 writes none
    counting: bool = False  # instructions by warp, products, bytes, sectors and bank conflicts
    tracing: bool = False  # the events that order the work of each warp in time

    def __post_init__(self) -> None:
        for name, allowed in SETTINGS.items():
            value = getattr(self, name)
            if name == "seed":
                known = value is None or (type(value) is int and value >= 0)
            else:
                known = type(value) in map(type, allowed) and value in allowed
            if not known:
                raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(str, allowed))}")


def _allowed(kind: Any) -> tuple[Any, ...]:
    """The values of a setting of this type."""
    return get_args(kind) if get_origin(kind) is Literal else (False, True) if kind is bool else ("None", "0, 1, ...")


SETTINGS = {name: _allowed(kind) for name, kind in get_type_hints(Settings).items()}  # their values


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
            found = programs_of(kernel, n_ctas, self.metadata.shared, self.settings, self.counters)
            self.machines = {n_ctas: found}  # one at most: they are large
        programs = self.machines[n_ctas]
        order = self._order(n_programs, programs.machine.order)
        with np.errstate(all="ignore"):
            for first in range(0, n_programs, n_ctas):
                programs.run(order[first : first + n_ctas], grid, values, maps, memory)
        programs.count()

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
            if isinstance(value, (TensorDescriptor, GluonDescriptor)):
                maps[next(parameters).name] = _tensor_map(value, next(described))
                tensors.append(self._on_cpu(value.base))
                for n in (*value.shape, *value.strides):
                    values[next(parameters).name] = int(n) & 2**64 - 1
                continue
            parameter = next(parameters)
            if isinstance(value, torch.Tensor):
                tensors.append(self._on_cpu(value))
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

    def _on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise TypeError(f"{self.metadata.name}: got a tensor on {tensor.device}, allowed are tensors on the CPU")
        return tensor


def programs_of(kernel: ptx.Kernel, n_ctas: int, shared_bytes: int, settings: Settings, counters: Counters) -> Programs:
    """What runs `n_ctas` programs of a kernel at a time, each with so much shared memory."""
    counters.counting = settings.counting
    counters.trace = Trace() if settings.tracing else None
    machine = Machine(
        kernel,
        n_ctas,
        shared_bytes,
        counters,
        order=Order(settings.asynchronous, settings.seed, settings.schedule),
        products=Products(settings.truncating),
        noise=Noise(settings.noise, settings.seed or 0),
        strict=settings.strict,
        fenced_copies=settings.fenced_copies,
    )
    return Programs(machine)


@lru_cache(maxsize=64)
def parsed(text: str) -> ptx.Kernel:
    return ptx.parse(text)


def _leaves(kinds: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The type and value of each argument that is a parameter: not constants, and the elements of tuples."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, (tuple, list)):
            if any(hasattr(x, "block_shape") for x in value):
                raise NotImplementedError("a tensor descriptor: got one in a tuple, which Triton's launcher refuses")
            yield from _leaves(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _tensor_map(tensor: TensorDescriptor | GluonDescriptor, description: dict[str, Any]) -> TensorMap:
    """What the hardware is told of a tensor; Triton chooses a box, which may be a part of the tile."""
    size, padding = int(description["elem_size"]), getattr(tensor, "padding", "zero")  # Gluon's has it from 3.7 on
    if getattr(tensor, "round_f32_to_tf32", False):  # Triton 3.6 has no such field
        raise NotImplementedError("a tensor descriptor: got round_f32_to_tf32=True, allowed is False")
    if description["fp4_padded"]:
        raise NotImplementedError("a tensor descriptor: got padded elements of 4 bits, allowed are whole bytes")
    if padding == "nan" and size not in NAN:
        raise NotImplementedError(f"a tensor descriptor: got padding='nan' for {tensor.base.dtype}, allowed is 'zero'")
    strides = tuple(int(stride) * size for stride in tensor.strides)
    return TensorMap(
        tensor.base.data_ptr(),
        tuple(map(int, tensor.shape)),
        strides,
        tuple(map(int, description["block_size"])),
        size,
        _SWIZZLES[int(description["swizzle"])],
        tensor.base.is_floating_point(),
        NAN[size] if padding == "nan" else 0,
    )
