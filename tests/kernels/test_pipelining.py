"""Loops have one stage where Triton leaves out the fence between a copy and the product that reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedattn.kernels import pipelining
from fusedattn.kernels.configs import TileConfig

POINTERS = TileConfig(64, 64, 4, 3)
DESCRIPTORS = TileConfig(64, 64, 4, 3, "descriptors")


def rows(stride: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Tensor:
    """A tensor of 16 features in rows that begin `stride` elements apart."""
    storage = torch.zeros(offset + 2 * 2 * 8 * stride, dtype=dtype)[offset:]
    return storage.view(2, 2, 8, stride)[..., :16]


ALIGNED, UNALIGNED = rows(32), rows(24)


def stages(config: TileConfig, *tiles: Tensor, has_descriptors: bool = True) -> tuple[int, int]:
    found = pipelining.fenced(config, True, 64, *tiles, has_descriptors=has_descriptors)
    assert (found.BLOCK_M, found.BLOCK_N, found.style) == (config.BLOCK_M, config.BLOCK_N, config.style)
    return found.num_stages, found.BOUNDARY_STAGES


@pytest.mark.parametrize(
    ("tiles", "fences", "by_pointers", "by_descriptors"),
    [
        ((ALIGNED, ALIGNED), True, (3, 2), (3, 2)),
        ((ALIGNED, ALIGNED), False, (1, 1), (3, 1)),
        ((UNALIGNED, UNALIGNED), True, (3, 2), (3, 2)),  # both through registers
        ((UNALIGNED, UNALIGNED), False, (3, 2), (3, 2)),
        ((ALIGNED, UNALIGNED), True, (1, 1), (3, 1)),  # rows of 48 bytes have descriptors
        ((UNALIGNED, ALIGNED), False, (1, 1), (3, 1)),
        ((ALIGNED, rows(20)), True, (1, 1), (1, 1)),  # rows of 40 bytes have none
        ((ALIGNED, rows(32, offset=1)), True, (1, 1), (1, 1)),
        ((rows(32, torch.float32), rows(20, torch.float32)), True, (3, 2), (3, 2)),  # 4 bytes are always copied
        ((rows(32, torch.float32), rows(20, torch.float32)), False, (1, 1), (3, 1)),
        ((ALIGNED, ALIGNED, UNALIGNED), True, (1, 1), (3, 1)),
    ],
)
def test_stages(monkeypatch, tiles, fences, by_pointers, by_descriptors):
    monkeypatch.setattr(pipelining, "FENCES_COPIES", fences)
    assert stages(POINTERS, *tiles) == by_pointers
    assert stages(DESCRIPTORS, *tiles) == by_descriptors
    assert stages(DESCRIPTORS, *tiles, has_descriptors=False) == by_pointers


def test_operands_that_threads_load_need_no_fence(monkeypatch):
    monkeypatch.setattr(pipelining, "FENCES_COPIES", False)
    assert pipelining.fenced(POINTERS, False, 64, ALIGNED, UNALIGNED) is POINTERS
    assert pipelining.fenced(POINTERS, True, 32, ALIGNED, UNALIGNED) is POINTERS


@pytest.mark.parametrize("fences", [True, False])
def test_full_blocks_come_first_if_only_they_are_pipelined(fences: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelining, "FENCES_COPIES", fences)
    assert pipelining.full_blocks_first(DESCRIPTORS, True) is not fences
    assert not pipelining.full_blocks_first(DESCRIPTORS, False)
    assert not pipelining.full_blocks_first(POINTERS, True)
