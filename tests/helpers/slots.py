"""Slots and a tile for the tests of tuning."""

from __future__ import annotations

import torch

from bench.tuning.slots import Part, Slot
from fusedattn.kernels import configs
from fusedattn.kernels.configs import TileConfig

TILE = TileConfig(64, 32, 4, 1, BOUNDARY=16)


def slot(part: Part, head_dim: int = 16, dtype: torch.dtype = torch.float16, work: configs.Work = "streamed") -> Slot:
    return Slot(part, work, dtype, head_dim)
