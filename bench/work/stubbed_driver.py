"""Triton's own launchers over a CUDA driver that launches nothing, to measure the host time without a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from fusedattn.virtual_gpu.attention import launches_for

SOURCE = Path(__file__).with_suffix(".c")
MULTIPROCESSORS = 132


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Inside, calls of the kernels with CPU tensors compile for a Hopper GPU and go as far as its driver.

    Raises:
        NotImplementedError: there is no C compiler, which Triton's launchers need, or no NVIDIA backend.
    """
    triton.runtime.driver.set_active(_driver())  # not restored: without a GPU there is no other driver
    with launches_for("sm_90", MULTIPROCESSORS):
        yield


@functools.cache
def _driver() -> Any:
    """Triton's driver without its calls of torch.cuda; loaded once, because a process has one libcuda.so.1."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotImplementedError("C compiler: got none, but Triton's launchers are built by one")
    folder = tempfile.mkdtemp()
    library = Path(folder, "libcuda.so.1")
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    options = ["-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(library)], check=True)
    Path(folder, "libcuda.so").symlink_to(library)  # the name that a linker looks for
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia import driver

    with patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder}):
        utils = driver.CudaUtils()

    class StubbedDriver(driver.CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = utils, driver.CudaLauncher

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return 9, 0

    return StubbedDriver()
