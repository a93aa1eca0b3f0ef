"""Recipes of the literature, and steps on the way to them."""

from __future__ import annotations

from dataclasses import replace

from fusedattn.low_precision.attention import Recipe
from fusedattn.low_precision.formats import BFLOAT16, E2M1, E4M3, E5M2, INT8, Format
from fusedattn.low_precision.scaling import (
    Quantisation,
    by_block,
    by_channel,
    by_tensor,
    by_token,
    e4m3_scales,
    mx,
    nvfp4,
    of_weights,
    powers_above,
    two_level_unit_scales,
    unscaled,
)

BLOCK = 128  # queries or keys of a tile


def _alike(how: Quantisation, format: Format = E4M3) -> Recipe:
    """q, k and v with the same scales, the weights with a fixed one."""
    return Recipe(how, how, how, of_weights(format))


def _microscaled(how: Quantisation, weights: Quantisation | None = None) -> Recipe:
    """Groups along the numbers that a product sums: features of q and k, tokens of v, keys of the weights."""
    return Recipe(how, how, how.transposed, how if weights is None else weights)


_BFLOAT16 = Quantisation(BFLOAT16, unscaled, tokens=1, features=1)
_FP8 = _alike(by_block(E4M3, BLOCK))
_NVFP4 = _microscaled(nvfp4(), nvfp4(e4m3_scales))
_NVFP4_TWO_LEVELS = _microscaled(nvfp4(), nvfp4(two_level_unit_scales))

RECIPES: dict[str, Recipe] = {
    "bfloat16": Recipe(_BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16),
    "fp8, tensor": _alike(by_tensor(E4M3)),
    "fp8, blocks": _FP8,
    "fp8, blocks, rotated": replace(_FP8, rotate=True),  # FlashAttention-3
    "fp8, blocks, smooth k": replace(_FP8, smooth_k=True),
    "fp8, blocks, both": replace(_FP8, rotate=True, smooth_k=True),
    "fp8 e5m2, blocks": _alike(by_block(E5M2, BLOCK), E5M2),
    "int8 and fp8, smooth k": Recipe(  # SageAttention2, with int8
        by_block(INT8, BLOCK), by_block(INT8, BLOCK), by_channel(E4M3), of_weights(E4M3), smooth_k=True
    ),
    "MXFP8": _microscaled(mx(E4M3)),
    "MXFP8, scales up": _microscaled(mx(E4M3, powers_above)),
    "fp4, tokens": Recipe(by_token(E2M1), by_token(E2M1), by_channel(E2M1), of_weights(E2M1)),
    "MXFP4": _microscaled(mx(E2M1)),
    "MXFP4, scales up": _microscaled(mx(E2M1, powers_above)),
    "NVFP4": _NVFP4,
    "NVFP4, two levels": _NVFP4_TWO_LEVELS,
    "NVFP4, two levels, rotated": replace(_NVFP4_TWO_LEVELS, rotate=True),
    "NVFP4, two levels, smooth k": replace(_NVFP4_TWO_LEVELS, smooth_k=True),
    "NVFP4, two levels, smooth q, k": replace(  # SageAttention3
        _NVFP4_TWO_LEVELS, smooth_k=True, smooth_q=BLOCK
    ),
}
