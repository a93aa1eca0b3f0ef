"""Which backend runs a call, and every reason why one would not."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fusedattn.masks import Mask
from fusedattn.rope import Rope

Backend = Literal["triton", "torch"]

MAX_HEAD_DIM = 256


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, through its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def default_backend(device: torch.device) -> Backend:
    """What ``backend=None`` means: Triton on a GPU, or where it is interpreted; torch otherwise."""
    return "triton" if device.type == "cuda" or interpreting() else "torch"


def not_supported_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> list[str]:
    """Every reason why ``attention`` with these arguments would raise NotImplementedError; empty if it would run.

    The arguments are those of :func:`fusedattn.attention` and are taken to be valid in themselves. Every mask,
    every rope, every scale and ``return_lse`` run on both backends today.
    """
    reasons = []
    if bias is not None:
        reasons.append("bias: got a tensor, allowed is None (not implemented yet)")
    if softcap is not None:
        reasons.append(f"softcap: got {softcap}, allowed is None (not implemented yet)")
    if dropout_p:
        reasons.append(f"dropout_p: got {dropout_p}, allowed is 0.0 (not implemented yet)")
    if v.shape[-1] != q.shape[-1]:
        reasons.append(
            f"v: got head_dim {v.shape[-1]}, allowed is that of q and k, {q.shape[-1]} (not implemented yet)"
        )
    if (backend or default_backend(q.device)) == "triton":
        reasons += _triton_reasons(q)
    return reasons


def _triton_reasons(q: Tensor) -> list[str]:
    reasons = []
    if q.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"head_dim: got {q.shape[-1]}, allowed are 1 .. {MAX_HEAD_DIM} with backend 'triton'")
    if not _has_triton():
        return [
            *reasons,
            "backend: got 'triton', but Triton is not installed (it exists for Linux)",
        ]
    if interpreting():
        if q.device.type not in ("cpu", "cuda"):
            reasons.append(f"device: got {q.device}, allowed are cpu and cuda where TRITON_INTERPRET=1 is set")
        return reasons
    if q.device.type != "cuda":
        return [
            *reasons,
            f"device: got {q.device}, allowed is a GPU with backend 'triton' (set TRITON_INTERPRET=1 before "
            "starting Python to run the kernels on a CPU, slowly)",
        ]
    if q.dtype == torch.float64:
        reasons.append(
            "dtype: got torch.float64, allowed are float16, bfloat16, float32 with backend 'triton' on a GPU"
        )
    from fusedattn.kernels import configs

    try:
        configs.arch_of(q.device)
    except NotImplementedError as error:
        reasons.append(str(error))
    return reasons


@lru_cache
def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None
        return False
