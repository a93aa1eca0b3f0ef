"""Scales of quantised tensors: which numbers share one, and how it follows from the largest of them.

A tensor is ``(..., tokens, features)``. Numbers in a group of so many tokens by so many features of one head share a
scale; a group at the end may be smaller. :class:`Quantisation` names the format, the group and the rule of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.low_precision.formats import E2M1, E4M3, Format, rounded

SMALLEST_POWER, LARGEST_POWER = -127, 127  # exponents of an E8M0 scale

Rule = Callable[[Tensor, Format], Tensor]


def float32_scales(largest: Tensor, format: Format) -> Tensor:
    """A scale of each group, from its largest magnitude: this becomes the largest number of the format."""
    return largest / format.largest


def tensor_scale(largest: Tensor, format: Format) -> Tensor:
    """One scale for all groups of all heads."""
    return (largest.amax() / format.largest).expand_as(largest)


def powers_below(largest: Tensor, format: Format) -> Tensor:
    """Powers of two: the exponent of the largest number becomes the largest of the format (OCP MX v1.0, section 6.3).

    Numbers between the largest of the format and the next power of two are cut off.
    """
    return _power_of_two(torch.frexp(largest).exponent - 1 - format.largest_exponent).to(largest)


def powers_above(largest: Tensor, format: Format) -> Tensor:
    """The least powers of two with which no number is cut off (Mishra et al., 2025)."""
    mantissa, exponent = torch.frexp(largest / format.largest)
    return _power_of_two(torch.where(mantissa == 0.5, exponent - 1, exponent)).to(largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """The nearest one that an E8M0 scale may be."""
    exponent = exponent.clamp(SMALLEST_POWER, LARGEST_POWER)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def e4m3_scales(largest: Tensor, format: Format) -> Tensor:
    """Those of :func:`float32_scales`, rounded to e4m3; at most 448."""
    return rounded(largest / format.largest, E4M3)


def two_level_scales(largest: Tensor, format: Format) -> Tensor:
    """Numbers of e4m3 times one number for the tensor (NVFP4), with which the largest of them is 448."""
    whole = tensor_scale(largest, format) / E4M3.largest
    return torch.where(whole > 0, e4m3_scales(largest / whole, format), 0.0) * whole


def unit_scales(largest: Tensor, format: Format) -> Tensor:
    """One scale whatever the numbers are, for numbers in [0, 1]."""
    return torch.full_like(largest, 1.0 / format.largest)


def two_level_unit_scales(largest: Tensor, format: Format) -> Tensor:
    """Numbers of e4m3 times one that makes 448 of the scale of 1, for numbers in [0, 1] (SageAttention3, 2025)."""
    whole = 1.0 / (format.largest * E4M3.largest)
    return e4m3_scales(largest / whole, format) * whole


def unscaled(largest: Tensor, format: Format) -> Tensor:
    """Scales of 1."""
    return torch.ones_like(largest)


@dataclass(frozen=True)
class Quantisation:
    """How a tensor is rounded.

    Attributes:
        format: of the codes.
        rule: the scales that follow from the largest magnitude in each group.
        tokens, features: the sides of a group; None: all of a head.
    """

    format: Format
    rule: Rule
    tokens: int | None = None
    features: int | None = None

    @property
    def transposed(self) -> Quantisation:
        """The same along the other side: for v, whose product with the weights sums over tokens."""
        return replace(self, tokens=self.features, features=self.tokens)


def by_tensor(format: Format) -> Quantisation:
    """One scale for a tensor."""
    return Quantisation(format, tensor_scale)


def by_block(format: Format, tokens: int = 128) -> Quantisation:
    """One scale for so many tokens of a head (FlashAttention-3, 2024: those of a tile)."""
    return Quantisation(format, float32_scales, tokens=tokens)


def by_token(format: Format) -> Quantisation:
    """One scale for each token of a head."""
    return Quantisation(format, float32_scales, tokens=1)


def by_channel(format: Format) -> Quantisation:
    """One scale for each feature of a head, over all tokens (SageAttention2, 2024: for v)."""
    return Quantisation(format, float32_scales, features=1)


def mx(format: Format, rule: Rule = powers_below) -> Quantisation:
    """Groups of 32 features with powers of two as scales: MXFP8, MXFP4 (OCP MX v1.0, 2023)."""
    return Quantisation(format, rule, tokens=1, features=32)


def nvfp4(rule: Rule = two_level_scales) -> Quantisation:
    """Groups of 16 features in e2m1 with scales in e4m3, times a number for the tensor (NVIDIA, 2025)."""
    return Quantisation(E2M1, rule, tokens=1, features=16)


def of_weights(format: Format) -> Quantisation:
    """The weights of a softmax, relative to the largest of their row: 1 becomes the largest number of the format."""
    return Quantisation(format, unit_scales, tokens=1, features=1)


def quantised(x: Tensor, how: Quantisation) -> Tensor:
    """The numbers that the codes of ``x`` stand for: codes times scales.

    Args:
        x: ``(batch, nheads, tokens, features)``, float32 or float64.
        how: the format and its scales.

    Returns:
        The shape and dtype of x. Scales are computed in that dtype, from finite numbers alone. A NaN or infinity is
        NaN. Groups of zeros, or whose scale rounds to 0, are 0.
    """
    if x.numel() == 0:
        return x
    groups = grouped(x, how)
    scale = how.rule(largest_of(groups), how.format)
    numbers = torch.where(scale > 0, rounded(groups / scale, how.format), 0.0) * scale
    numbers = torch.where(groups.isfinite(), numbers, torch.nan)
    return numbers.flatten(-4, -3).flatten(-2, -1)[..., : x.shape[-2], : x.shape[-1]]


def grouped(x: Tensor, how: Quantisation) -> Tensor:
    """``x`` as ``(batch, nheads, groups, tokens of a group, groups, features of a group)``, filled up with zeros."""
    n, d = x.shape[-2:]
    tokens, features = how.tokens or n, how.features or d
    padded = F.pad(x, (0, -d % features, 0, -n % tokens))
    return padded.unflatten(-1, (-1, features)).unflatten(-3, (-1, tokens))


def largest_of(groups: Tensor) -> Tensor:
    """The largest finite magnitude in each group, with sides of 1."""
    sizes = groups.abs()
    return torch.where(sizes < math.inf, sizes, 0.0).amax(dim=(-3, -1), keepdim=True)
