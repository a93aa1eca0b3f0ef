"""Launch configurations of the forward of e4m3 codes, as kernels/configs.py has those of all other kernels.

A product of bytes sums at least 32 of them, so a tile has that many keys. It does not go on into the accumulators of
the values (kernels/fp8.py), so those need registers of their own. Every tile lies within a block of 128 tokens.
"""

from fusedattn.kernels.configs import Arch, TileConfig, Work

LEAST_KEYS = 32

_T = TileConfig

# fmt: off
# Largest head_dim -> config by the work on each pair, on every GPU that has these products: no kernel spills on one.
TILES: dict[int, dict[Work, TileConfig]] = {
    64: {"streamed": _T(128, 64, 8, 3), "pairwise": _T(128, 64, 8, 3),
         "scored": _T(64, 64, 8, 3), "combined": _T(64, 32, 8, 3, BOUNDARY=32)},
    128: {"streamed": _T(128, 64, 8, 3), "pairwise": _T(64, 64, 8, 3),
          "scored": _T(64, 32, 8, 3, BOUNDARY=32), "combined": _T(32, 32, 8, 2, BOUNDARY=32)},
    256: {"streamed": _T(64, 32, 8, 3, BOUNDARY=32), "pairwise": _T(32, 32, 8, 2, BOUNDARY=32),
          "scored": _T(32, 32, 8, 2, BOUNDARY=32), "combined": _T(16, 32, 8, 1, BOUNDARY=32)},
}
# fmt: on

INTERPRETER = _T(32, 32, 4, 1, BOUNDARY=32)


def lookup_fp8(arch: Arch, head_dim: int, work: Work) -> TileConfig:
    """The config of a forward; TILES has no head_dim beyond its largest, and biased calls get the scored tiles."""
    if arch == "interpreter":
        return INTERPRETER
    work = "scored" if work == "biased" else work
    return next(tiles[work] for largest, tiles in TILES.items() if head_dim <= largest)
