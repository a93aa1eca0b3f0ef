"""The function of a mask in the gallery, ``docs/masks.md``."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor


@triton.jit
def checkers(batch, head, q_index, k_index, args):
    """A board of squares of `args[0]` tokens, of which every other one is visible."""
    return (q_index // args[0] + k_index // args[0]) % 2 == 0


def checkers_eager(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]) -> Tensor:
    return (q_index // args[0] + k_index // args[0]) % 2 == 0
