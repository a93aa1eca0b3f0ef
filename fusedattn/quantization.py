"""Formats of quantised keys and values: codes of 8 or 4 bits, multiplied by float32 scales.

A token of one head has one scale, the largest magnitude of its features over the largest code; in 4 bits, each group of
its features has one. Scales may also be given, one for all tokens of a row of the cache. Codes are rounded to nearest,
ties to even; numbers beyond the largest code become that code. Scales below the smallest normal number, whose
reciprocals may be infinite, count as 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """A format: its name in the kernels, its largest code, and the codes in one element of the tensor."""

    name: str
    largest: float
    per_element: int = 1


FORMATS = {
    torch.float8_e4m3fn: Format("e4m3", 448.0),
    torch.float8_e5m2: Format("e5m2", 57344.0),
    torch.int8: Format("int8", 127.0),
    torch.uint8: Format("int4", 7.0, per_element=2),
}


SMALLEST_SCALE = 2.0**-126


def scales_of(x: Tensor, dtype: torch.dtype, n_groups: int = 1) -> Tensor:
    """The scales of ``x``, ``(..., head_dim)``, for codes of `dtype`: float32 ``(..., n_groups)``.

    A group is ``head_dim / n_groups`` adjacent features. The scale of a group is NaN unless all of its features are
    finite.
    """
    largest = x.float().unflatten(-1, (n_groups, -1)).abs().amax(dim=-1)
    scale = torch.where(largest < torch.inf, largest / FORMATS[dtype].largest, torch.nan)
    return torch.where(scale < SMALLEST_SCALE, 0.0, scale)


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of ``x``, ``(..., head_dim)``, for scales that broadcast to ``(..., n_groups)``.

    A NaN stays one in the formats that have it, and is 0 in the others. All codes are 0 where the scale is NaN, or
    below the smallest normal number.
    """
    largest = FORMATS[dtype].largest
    scale = _of_features(scale, x.shape[-1])
    # By a product with the reciprocal, as in the kernels.
    code = torch.where(scale >= SMALLEST_SCALE, x.float() * (1.0 / scale), 0.0).clamp(-largest, largest)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return code.to(dtype)
    code = code.nan_to_num(0.0).round()
    if dtype == torch.int8:
        return code.to(dtype)
    low, high = (code + 8.0).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def dequantised(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers of codes, float32 ``(..., head_dim)``; scales broadcast to ``(..., n_groups)``."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
    return codes.float() * _of_features(scale, codes.shape[-1])


def _of_features(scale: Tensor, head_dim: int) -> Tensor:
    """The scale of each feature, or of all."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(head_dim // scale.shape[-1], dim=-1)
