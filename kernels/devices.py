"""The name of a device in the config table, and its resources."""

from functools import lru_cache

import torch
import triton

from fusedattn.kernels.configs import Arch

# Shared memory one program may use, in bytes.
SHARED_MEMORY: dict[Arch, int] = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}

# Bytes of the level-2 cache that the heads that run side by side may fill: about half of it.
L2_BYTES: dict[Arch, int] = {
    "sm_80": 20 * 2**20,
    "sm_86": 3 * 2**20,
    "sm_90": 24 * 2**20,
    "sm_100": 60 * 2**20,
    "gfx942": 2 * 2**20,
    "interpreter": 16 * 2**10,
}


def arch_of(device: torch.device) -> Arch:
    """The config table's name for a device.

    Raises:
        NotImplementedError: the table has no entry for the device.
    """
    if triton.knobs.runtime.interpret:
        return "interpreter"
    return _gpu_arch(device.index if device.index is not None else torch.cuda.current_device())


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for others."""
    return _gpu_capability(device.index if device.index is not None else torch.cuda.current_device())


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`; few in the interpreter, so that small inputs still give a program several tiles."""
    if triton.knobs.runtime.interpret:
        return 3
    return _gpu_multiprocessors(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache
def _gpu_capability(index: int) -> tuple[int, int] | None:
    properties = torch.cuda.get_device_properties(index)
    return None if torch.version.hip is not None else (properties.major, properties.minor)


@lru_cache
def _gpu_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@lru_cache
def _gpu_arch(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        if properties.gcnArchName.startswith(("gfx942", "gfx950")):
            return "gfx942"
        raise NotImplementedError(f"device: got {properties.gcnArchName}, allowed are gfx942 and gfx950")
    capability = (properties.major, properties.minor)
    if capability in ((8, 0), (8, 7)):
        return "sm_80"
    if properties.major == 9:
        return "sm_90"
    if properties.major in (10, 11):
        return "sm_100"
    if capability >= (8, 6):  # Ada, consumer Ampere and consumer Blackwell: less shared memory
        return "sm_86"
    raise NotImplementedError(f"device: got compute capability {capability}, allowed are (8, 0) and above")
