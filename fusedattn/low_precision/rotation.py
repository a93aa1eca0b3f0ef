"""Rotation of q and k, which spreads an outlier over all features and leaves their products unchanged.

QuaRot (Ashkboos et al., 2024); FlashAttention-3 (Shah et al., 2024), section 3.3, "incoherent processing".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """``x H``, with the orthonormal Hadamard matrix of Sylvester.

    Args:
        x: ``(..., n)``, n a power of two.

    Returns:
        The shape and dtype of x, computed by ``n log2(n)`` additions for each row.

    Raises:
        ValueError: n is not a power of two.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"x: got {n} features, allowed are powers of two")
    half = 1
    while half < n:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x / math.sqrt(n)


def signs(n: int) -> Tensor:
    """Signs of features, float32 ``(n,)``: without them, equal features would become one.

    They follow from the number of the feature, so that a kernel can compute them. With these coefficients, no row of a
    Hadamard matrix of 32 to 512 features resembles them more than by chance.
    """
    d = torch.arange(n)
    return 1.0 - 2.0 * ((57 * d * d + 17 * d + 97) % 509 % 2).float()


def rotated(x: Tensor) -> Tensor:
    """``x`` with signs of its features changed, times a Hadamard matrix.

    Args:
        x: ``(..., head_dim)``, floating-point.

    Returns:
        ``(..., n)``, n the next power of two from 32 on: features beyond head_dim count as 0. Products of two rows are
        kept.
    """
    head_dim = x.shape[-1]
    n = max(32, 1 << (head_dim - 1).bit_length())
    return hadamard(F.pad(x, (0, n - head_dim)) * signs(n).to(x))
