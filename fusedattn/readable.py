"""Whether the numbers in a tensor can be read, at what cost: some checks and fast paths need more than its shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def can_read(x: Tensor) -> bool:
    """Whether values of ``x`` can be read without waiting for a GPU or breaking a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


def is_readable(*tensors: Tensor) -> bool:
    """Whether Python can read values: not under a compiler or tracer, not in ``torch.func.vmap``, not without data."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    functorch = torch._C._functorch
    for x in tensors:
        if x.is_meta:
            return False
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                return False
            x = functorch.get_unwrapped(x)
    return True
