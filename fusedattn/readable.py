"""Checks of values, rather than of shapes, need to read them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def can_read(x: Tensor) -> bool:
    """Whether values of ``x`` can be read without waiting for a GPU or breaking a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)
