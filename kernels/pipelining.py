"""Which loops may copy tiles asynchronously by pointers.

From sm_90 on, products of 64 rows and more are made by units that read shared memory through a proxy of their own.
Between ``cp.async`` and a product that reads what it copied must stand a ``fence.proxy.async`` (PTX ISA, "async
proxy"). Triton before 3.7.1 writes none. Later versions leave it out if the loop's other tile goes through registers,
as it does if its rows are not aligned: the fence of that tile then stands too early. Such loops have one stage, in
which every tile goes through registers.
"""

import torch

from fusedattn.kernels.configs import Arch, TileConfig
from fusedattn.kernels.descriptors import tiles_of
from fusedattn.kernels.launcher import SPECIALIZED
from fusedattn.kernels.versions import TRITON_VERSION

ASYNC_PRODUCTS: tuple[Arch, ...] = ("sm_90", "sm_100")
ASYNC_ROWS = 64  # products of fewer rows are mma.sync, whose operands threads load
FENCES_COPIES = TRITON_VERSION >= (3, 7, 1)


def fenced(
    config: TileConfig, async_products: bool, rows: int, *tiles: torch.Tensor, has_descriptors: bool = False
) -> TileConfig:
    """`config` for a loop over rows of `tiles`, with one stage if Triton would leave out the fence of a copy.

    `async_products`: the dtype and the architecture have such products, at :data:`ASYNC_ROWS` rows and more. `rows`:
    the most rows of a product. `has_descriptors`: the kernel loads full blocks in the style of `config`.
    """
    if not async_products or rows < ASYNC_ROWS:
        return config
    n_copied = sum(map(_is_copied, tiles))
    if n_copied == 0 or (FENCES_COPIES and n_copied == len(tiles)):
        return config
    described = has_descriptors and all(tiles_of(x, config.BOUNDARY, config.style) is not None for x in tiles)
    return config.unpipelined_boundary if described else config.unpipelined


def full_blocks_first(config: TileConfig, async_products: bool) -> bool:
    """Whether dk and dv add full blocks before boundary blocks.

    A loop before another must be pipelined, otherwise the assembler serialises wgmma. Without fences, only loops by
    descriptors are. It does not depend on the alignment of tensors, which therefore changes no sum.
    """
    return async_products and not FENCES_COPIES and config.style == "descriptors"


def _is_copied(x: torch.Tensor) -> bool:
    """Whether a pipelined loop copies tiles of ``x`` asynchronously; in 4 bytes it always does."""
    if x.itemsize >= 4:
        return True
    return x.data_ptr() % SPECIALIZED == 0 and not any(stride % SPECIALIZED for stride in x.stride()[:3])
