"""The assembler that turns kernels for Hopper into machine code.

ptxas 12.8, which Triton 3.6 and 3.7 use for sm_90, can lose the value that a register has in the first iteration of a
loop: it copies the address of a wgmma operand into that register at the end of each iteration, but not before the loop.
Outputs were wrong. Releases from 12.9 on do not. Triton brings one as the assembler for Blackwell: docs/decisions/0032.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import knobs

from fusedattn.kernels.versions import release

SOUND = (12, 9)  # the oldest release that may assemble kernels for sm_90

_one_at_a_time = threading.RLock()  # Triton's choice holds for all threads


@contextmanager
def sound_assembler() -> Iterator[None]:
    """Inside, Triton compiles for the current device by an assembler without this fault.

    Raises:
        NotImplementedError: there is none whose code the driver can load.
    """
    if not _is_hopper():
        yield
        return
    path = choose(knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell, _driver_release())
    with _one_at_a_time, knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        yield


def _is_hopper() -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch == 90


def choose(own: Any, other: Any, driver: int | None) -> str:
    """The path of the assembler for sm_90: Triton's `own` or, if that is too old, its `other`, for Blackwell.

    `driver` is the major release of CUDA that the driver supports, or None if code is not loaded here.

    Raises:
        NotImplementedError: the first is too old, and the second is too old or too new for the driver.
    """
    if release(own.version) >= SOUND:
        return own.path
    if release(other.version) >= SOUND and (driver is None or driver >= release(other.version)[0]):
        return other.path
    supported = "" if driver is None else f", and the driver supports CUDA {driver}"
    raise NotImplementedError(
        f"ptxas: got release {own.version} ({own.path}), allowed are releases from 12.9 on, because earlier ones make "
        f"wrong code for sm_90. Triton also has release {other.version}{supported}. Install a newer driver, or name "
        "another ptxas with TRITON_PTXAS_PATH"
    )


def _driver_release() -> int | None:
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return ask() // 1000 if ask is not None and torch.cuda.is_available() else None
