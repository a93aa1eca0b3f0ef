"""Sizes of the tiles of the kernels for Hopper, by head_dim. Measured at head_dim 128 only."""

from dataclasses import dataclass

ROWS = 64  # of a product, for each group of warps
FEWEST_QUERIES = 1024  # with fewer, a program has too little work to hide its beginning and its end


@dataclass(frozen=True)
class HopperConfig:
    """What a group walks over: blocks of `BLOCK` rows, of which `STAGES` are in shared memory at a time."""

    BLOCK: int
    STAGES: int


# Shared memory for tiles: STAGES blocks of two tensors, and 128 rows of one (forward) or two.
FORWARD = {64: HopperConfig(128, 2), 128: HopperConfig(128, 2), 256: HopperConfig(64, 2)}
DKDV = {64: HopperConfig(64, 2), 128: HopperConfig(64, 2)}  # at 256, sums of 64 rows exceed the registers
DQ = {64: HopperConfig(64, 3), 128: HopperConfig(64, 3)}  # at 256, tiles exceed shared memory
