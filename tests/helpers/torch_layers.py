"""Sizes and comparisons for the tests of torch's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETING

backends = pytest.mark.parametrize("backend", BACKENDS)
WARNINGS = (
    "ignore:Support for mismatched",
    "ignore:The PyTorch API of nested tensors",
    "ignore:enable_nested_tensor is True",
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
    "ignore:.*TensorFloat32 tensor cores",
)

BATCH, HEADS, HEAD_DIM, SEQLEN_Q, SEQLEN_K = 2, 2, 8, 5, 7
WIDTH = HEADS * HEAD_DIM


def exact(backend: str) -> torch.dtype:
    """The dtype in which the backend rounds least."""
    return torch.float64 if INTERPRETING or backend == "torch" else torch.float32


def assert_same(actual: Any, expected: Any) -> None:
    """Check equality up to rounding; None equals None."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            tolerance = 1e-10 if b.dtype == torch.float64 else 2e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
