"""Attention in few bits: what it computes, in eager PyTorch, so that its error can be measured without a kernel.

Every operand of the two products (q, k, v and the weights) is rounded to codes of 8 or 4 bits times scales; the
products are summed in float32. A kernel that multiplies the codes themselves must agree with these numbers. Nothing
here is fast, and nothing has gradients.

    >>> import torch
    >>> from fusedattn import low_precision, masks
    >>> q, k, v = torch.randn(3, 1, 4, 200, 64)
    >>> out, lse = low_precision.attention(q, k, v, low_precision.RECIPES["fp8, blocks"], mask=masks.causal())
"""

from fusedattn.low_precision.attention import Recipe, attention
from fusedattn.low_precision.formats import BFLOAT16, E2M1, E4M3, E5M2, INT8, Format, rounded
from fusedattn.low_precision.recipes import RECIPES
from fusedattn.low_precision.rotation import hadamard, rotated
from fusedattn.low_precision.scaling import (
    Quantisation,
    by_block,
    by_channel,
    by_tensor,
    by_token,
    e4m3_scales,
    float32_scales,
    mx,
    nvfp4,
    of_weights,
    powers_above,
    powers_below,
    quantised,
    tensor_scale,
    two_level_scales,
    two_level_unit_scales,
    unit_scales,
    unscaled,
)
from fusedattn.low_precision.smoothing import mean_of_blocks, mean_of_tokens

__all__ = [
    "BFLOAT16",
    "E2M1",
    "E4M3",
    "E5M2",
    "INT8",
    "RECIPES",
    "Format",
    "Quantisation",
    "Recipe",
    "attention",
    "by_block",
    "by_channel",
    "by_tensor",
    "by_token",
    "e4m3_scales",
    "float32_scales",
    "hadamard",
    "mean_of_blocks",
    "mean_of_tokens",
    "mx",
    "nvfp4",
    "of_weights",
    "powers_above",
    "powers_below",
    "quantised",
    "rotated",
    "rounded",
    "tensor_scale",
    "two_level_scales",
    "two_level_unit_scales",
    "unit_scales",
    "unscaled",
]
