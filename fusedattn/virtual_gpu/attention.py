"""``attention()`` on CPU tensors, computed by the compiled kernels of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton

from fusedattn import prepare, support
from fusedattn.kernels import devices, problem
from fusedattn.kernels.configs import Arch
from fusedattn.virtual_gpu.driver import ARCHS, VirtualGPU, virtual_gpu

_CAPABILITIES = {arch: int(arch.removeprefix("sm_")) for arch in ARCHS.values()}
MULTIPROCESSORS = 3  # few, so that small inputs give a persistent program several tiles


@contextmanager
def launches_for(arch: Arch, multiprocessors: int = MULTIPROCESSORS) -> Iterator[None]:
    """Inside, ``backend="triton"`` takes CPU tensors, and launches are those for `arch`."""
    with (
        patch.object(devices, "arch_of", lambda device: arch),
        patch.object(devices, "capability_of", lambda device: _capability_of(arch)),
        patch.object(problem, "multiprocessors", lambda device: multiprocessors),
        patch.object(support, "_is_gpu", lambda device: device.type == "cpu"),
        patch.object(prepare, "_known", {}),  # no check made here counts outside, or the other way round
    ):
        yield


def _capability_of(arch: Arch) -> tuple[int, int] | None:
    """The compute capability of an architecture; None for AMD's."""
    name, _, number = arch.partition("_")
    return divmod(int(number), 10) if name == "sm" else None


@contextmanager
def compiled_attention(arch: Arch, **settings: Any) -> Iterator[VirtualGPU]:
    """Inside, ``attention(..., backend="triton")`` computes CPU tensors by the PTX of its kernels for `arch`.

    `settings` are fields of :class:`~fusedattn.virtual_gpu.launch.Settings`. Call ``backward()`` inside too. All
    threads of the process are affected.

    Raises:
        ValueError: an `arch` other than sm_80, sm_86 and sm_90, or a setting's value that is not allowed.
        TypeError: an unknown setting.
        RuntimeError: the kernels are interpreted, because TRITON_INTERPRET is set.
    """
    if arch not in _CAPABILITIES:
        raise ValueError(f"arch: got {arch!r}, allowed are {', '.join(_CAPABILITIES)}")
    with virtual_gpu(_CAPABILITIES[arch], **settings) as gpu, launches_for(arch), triton.knobs.runtime.scope():
        # A launch that Triton reports is not repeated by address alone: the bounds of its tensors are known.
        triton.knobs.runtime.launch_enter_hook.add(_ignore)
        try:
            yield gpu
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(_ignore)


def _ignore(metadata: object) -> None:
    pass
