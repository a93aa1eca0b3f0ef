"""The instructions of PTX, by what they do; each module enters its own into one table."""

from fusedattn.virtual_gpu.instructions import (
    barriers,
    comparisons,
    conversions,
    copies,
    float8,
    floats,
    global_accesses,
    integers,
    matrices,
    parameters,
    shared_accesses,
    warps,
    wgmma,
)
from fusedattn.virtual_gpu.instructions.builders import build, unknown

__all__ = [
    "barriers",
    "build",
    "comparisons",
    "conversions",
    "copies",
    "float8",
    "floats",
    "global_accesses",
    "integers",
    "matrices",
    "parameters",
    "shared_accesses",
    "unknown",
    "warps",
    "wgmma",
]
