"""Attention whose products multiply numbers of 8 bits.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022); Shah et al., "FlashAttention-3" (2024), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scales = Literal["block", "tensor"]

MAX_HEAD_DIM_OF_FP8 = 256
KEYS_OF_FP8 = 32  # that a product of 8 bits sums


@dataclass(frozen=True)
class FP8:
    """q, k, v and the weights are rounded to e4m3, whose numbers have 4 significant bits; without gradients.

    q and k are normalised and rotated by their positions before. Sums, the softmax and its sum are in float32, and the
    weights that it divides by their sum are rounded relative to the largest of their row so far.
    :func:`fusedattn.low_precision.attention` defines the result. Its error is about sixteen times that of bfloat16
    (``docs/low-precision.md``).

    Attributes:
        scales: the numbers that share a scale, which maps the largest finite magnitude of them to 448: ``"block"``, 128
            tokens of a head, or ``"tensor"``, all of q, all of k and all of v. Keys and values that ``masks.padding``
            hides do not count; other tokens do, even for queries that do not see them.
        rotate: multiply q and k by a Hadamard matrix first, which spreads outliers over all features and keeps their
            products. It helps if outliers are few. If the same feature is the largest in every token, and products
            depend on the others, it makes the error larger.

    A NaN or infinity reaches no query that does not see it, as without FP8; queries near it may round weights relative
    to another score. Numbers below ``2^-10`` times their scale become 0, and so do those of a scale below ``2^-126``.

    Raises:
        ValueError: `scales` is unknown.
        TypeError: `rotate` is no bool.
    """

    scales: Scales = "block"
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.scales not in get_args(Scales):
            raise ValueError(f"precision.scales: got {self.scales!r}, allowed are 'block' and 'tensor'")
        if not isinstance(self.rotate, bool):
            raise TypeError(f"precision.rotate: got {type(self.rotate).__name__}, allowed are True and False")
