"""Inputs and tolerances for the tests of torch's scaled_dot_product_attention, and a tensor class that overrides it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import DEVICE, INTERPRETING

# A GPU's kernels have no float64.
DTYPE = torch.float64 if INTERPRETING else torch.float32
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11} if INTERPRETING else {"rtol": 1e-3, "atol": 1e-4}

normal = partial(torch.randn, dtype=DTYPE, device=DEVICE)


class Overriding(Tensor):
    """A tensor with functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})
