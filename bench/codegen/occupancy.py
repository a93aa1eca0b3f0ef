"""The number of programs (CTAs) of a kernel that fit on one multiprocessor at a time.

The rules are those of NVIDIA's occupancy calculator (CUDA C++ Programming Guide, "Compute Capabilities") and of AMD's
CDNA3 instruction set manual, "Wave resources".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multiprocessor:
    """The resources of one multiprocessor; sizes in bytes. Registers are 32-bit values per lane of each of its four
    schedulers; a warp takes them in steps of `register_step`."""

    warps: int
    programs: int
    shared_bytes: int
    reserved_bytes: int  # of shared memory, per program
    lane_registers: int
    register_step: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024, 1024, 512, 8),
    "sm_86": Multiprocessor(48, 16, 100 * 1024, 1024, 512, 8),
    "sm_90": Multiprocessor(64, 32, 228 * 1024, 1024, 512, 8),
    "sm_100": Multiprocessor(64, 32, 228 * 1024, 1024, 512, 8),
    "gfx942": Multiprocessor(32, 16, 64 * 1024, 0, 512, 8),
}
SCHEDULERS = 4
TENSOR_MEMORY_COLUMNS = 512  # of sm_100


def _round_up(x: int, step: int) -> int:
    return -(-x // step) * step


def ctas_per_sm(target: str, registers: int, shared_bytes: int, warps: int, tensor_memory_columns: int = 0) -> int:
    """The number of programs of `warps` warps that one multiprocessor of `target` holds; 0 if none fits."""
    sm = MULTIPROCESSORS[target]
    warps_by_registers = SCHEDULERS * (sm.lane_registers // _round_up(max(registers, 1), sm.register_step))
    limits = [sm.programs, min(sm.warps, warps_by_registers) // warps]
    per_program = _round_up(shared_bytes, 128) + sm.reserved_bytes
    if per_program:
        limits.append(sm.shared_bytes // per_program)
    if tensor_memory_columns:
        limits.append(TENSOR_MEMORY_COLUMNS // tensor_memory_columns)
    return min(limits)
