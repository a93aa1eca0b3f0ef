"""The sizes of the demo: for a laptop's CPU in minutes, for a GPU, and for a quick look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Agreement:
    """One comparison of the fused model with the reference."""

    backend: str
    dtype: torch.dtype
    n_layers: int
    batch: int
    seqlen: int
    n_batches: int
    padded: bool = False


@dataclass(frozen=True)
class Sizes:
    """A model and its training."""

    d_model: int
    n_heads: int
    n_layers: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Settings(Sizes):
    """The demo's model, training and measurements."""

    sample: int  # tokens to generate
    lengths: tuple[int, ...]  # lengths of the timed sequences
    agreements: tuple[Agreement, ...]
    backend: str
    autocast: torch.dtype | None = None


CPU = Settings(
    d_model=128,
    n_heads=4,
    n_layers=4,
    seqlen=128,
    batch=8,
    steps=350,
    learning_rate=3e-3,
    sample=320,
    lengths=(256, 512, 1024, 2048),
    agreements=(
        Agreement("torch", torch.float32, n_layers=4, batch=8, seqlen=128, n_batches=4),
        Agreement("triton", torch.float32, n_layers=2, batch=2, seqlen=64, n_batches=4, padded=True),
    ),
    backend="torch",
)
CPU_QUICK = replace(
    CPU,
    d_model=64,
    n_heads=2,
    n_layers=2,
    seqlen=64,
    batch=8,
    steps=30,
    sample=80,
    lengths=(64, 128, 256),
    agreements=(
        Agreement("torch", torch.float32, n_layers=2, batch=8, seqlen=64, n_batches=6),
        Agreement("triton", torch.float32, n_layers=1, batch=2, seqlen=32, n_batches=6, padded=True),
    ),
)
GPU = Settings(
    d_model=512,
    n_heads=8,
    n_layers=8,
    seqlen=512,
    batch=32,
    steps=600,
    learning_rate=1e-3,
    sample=480,
    lengths=(512, 1024, 2048, 4096, 8192),
    agreements=(
        Agreement("triton", torch.float32, n_layers=8, batch=8, seqlen=512, n_batches=4, padded=True),
        Agreement("triton", torch.bfloat16, n_layers=8, batch=8, seqlen=512, n_batches=4, padded=True),
    ),
    backend="triton",
    autocast=torch.bfloat16,
)
GPU_QUICK = replace(
    GPU,
    d_model=256,
    n_heads=4,
    n_layers=4,
    seqlen=256,
    batch=16,
    steps=100,
    sample=120,
    lengths=(256, 512, 1024),
    agreements=(
        Agreement("triton", torch.float32, n_layers=4, batch=4, seqlen=256, n_batches=4, padded=True),
        Agreement("triton", torch.bfloat16, n_layers=4, batch=4, seqlen=256, n_batches=4, padded=True),
    ),
)


def settings_for(device: torch.device, quick: bool) -> Settings:
    """The sizes for a device."""
    if device.type == "cuda":
        return GPU_QUICK if quick else GPU
    return CPU_QUICK if quick else CPU
