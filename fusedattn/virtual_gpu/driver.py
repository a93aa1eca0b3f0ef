"""A Triton driver without a device: kernels are compiled to PTX, and a launch runs that PTX on tensors of the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from fusedattn.kernels import devices
from fusedattn.kernels.configs import Arch
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.launch import SETTINGS, Launcher, Settings

_NUMBERS = itertools.count()
ARCHS: dict[int, Arch] = {80: "sm_80", 86: "sm_86", 89: "sm_86", 90: "sm_90"}  # by capability, in the kernels' tables
SHARED_MEMORY = {capability: devices.SHARED_MEMORY[arch] for capability, arch in ARCHS.items()}


@dataclass
class VirtualGPU:
    """A GPU of one architecture; what Triton asks of a driver, and the counters of each kernel that ran."""

    capability: int
    settings: Settings = field(default_factory=Settings)
    counters: dict[str, Counters] = field(default_factory=dict)
    rewrite: Any = None  # a function of (name, PTX) that returns other PTX, to plant faults
    number: int = field(default_factory=_NUMBERS.__next__)
    starters: list[_Starter] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """The number under which Triton keeps compiled kernels: another for each GPU, which may rewrite them."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        """What Triton times configs with."""
        raise NotImplementedError("triton.autotune: the virtual GPU has no times; launch one config")

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @property
    def utils(self) -> VirtualGPU:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.capability], "multiprocessor_count": 2, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Triton's handles of a module: (module, function, registers, spills, most threads)."""
        text = binary.decode()
        text = self.rewrite(name, text) if self.rewrite is not None else text
        return binary, text, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        """Triton 3.9 says when it needs a module no longer."""

    def launcher_cls(self, source: Any, metadata: Any) -> _Starter:
        self.starters.append(_Starter(self, source, metadata))
        return self.starters[-1]

    def forget(self) -> None:
        """Give back the memory of the kernels that ran, and remove them from Triton's caches."""
        for starter in self.starters:
            starter.launcher = None
            starter.source.fn.device_caches.pop(self.number, None)


@dataclass
class _Starter:
    """What Triton calls for a launch."""

    gpu: VirtualGPU
    source: Any
    metadata: Any
    launcher: Launcher | None = None

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: str, packed: Any, of_launch: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        if self.launcher is None:
            counters = self.gpu.counters.setdefault(self.metadata.name, Counters())
            self.launcher = Launcher(self.source, self.metadata, function, self.gpu.settings, counters)
        self.launcher.launch((x, y, z), arguments)


@contextmanager
def virtual_gpu(capability: int = 90, settings: Settings | None = None, **changes: Any) -> Iterator[VirtualGPU]:
    """Inside, Triton compiles for this GPU, and a launch runs the PTX on CPU tensors.

    `changes` are fields of :class:`Settings`. Kernels are compiled without NVIDIA's assembler, into a cache of their
    own. A kernel must have been decorated while TRITON_INTERPRET was not set. All threads of the process are affected.

    Raises:
        ValueError: an architecture other than 80, 86, 89 and 90, or a setting's value that is not allowed.
        TypeError: an unknown setting.
        RuntimeError: TRITON_INTERPRET is set.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: got 1, allowed is unset: interpreted kernels are not compiled")
    if capability not in SHARED_MEMORY:
        allowed = ", ".join(map(str, SHARED_MEMORY))
        raise ValueError(f"capability: got {capability}, allowed are {allowed}")
    if unknown := changes.keys() - SETTINGS.keys():
        raise TypeError(f"settings: got {', '.join(sorted(unknown))}, allowed are {', '.join(SETTINGS)}")
    gpu = VirtualGPU(capability, replace(settings or Settings(), **changes))
    with (
        patch.object(triton.runtime.driver, "_active", gpu),
        patch.object(CUDABackend, "make_cubin", lambda self, text, *rest: text.encode()),
        triton.knobs.cache.scope(),
    ):
        triton.knobs.cache.dir = f"{triton.knobs.cache.dir}/virtual_gpu"
        try:
            yield gpu
        finally:
            gpu.forget()
