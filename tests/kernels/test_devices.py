"""Names of GPUs in the config table, tested without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusedattn.kernels import configs, devices


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "sm_80"), ((8, 7), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_86"), ((9, 0), "sm_90"),
        ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((11, 0), "sm_100"), ((12, 0), "sm_86"),
    ],
)  # fmt: skip
def test_nvidia(monkeypatch, capability, expected):
    """Consumer GPUs of every generation have less shared memory than data-center GPUs."""
    major, minor = capability
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=major, minor=minor))
    assert devices._gpu_arch.__wrapped__(0) == expected


@pytest.mark.parametrize("capability", [(7, 5), (7, 0)])
def test_nvidia_before_ampere(monkeypatch, capability):
    major, minor = capability
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=major, minor=minor))
    with pytest.raises(NotImplementedError, match=rf"device: got compute capability \({major}, {minor}\), allowed"):
        devices._gpu_arch.__wrapped__(0)


def test_amd(monkeypatch):
    name = "gfx942:sramecc+:xnack-"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=name, major=9, minor=4)
    )
    assert devices._gpu_arch.__wrapped__(0) == "gfx942"
    name = "gfx1100"
    with pytest.raises(NotImplementedError, match="device: got gfx1100, allowed are gfx942 and gfx950"):
        devices._gpu_arch.__wrapped__(0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
def test_backward_whose_tiles_exceed_shared_memory(arch):
    """float32 above head_dim 256, on the GPUs with the least shared memory."""
    missing = [
        (head_dim, dtype)
        for head_dim in (64, 256, 264, 512)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        if not configs.has_backward(arch, head_dim, dtype)
    ]
    assert missing == ([(264, torch.float32), (512, torch.float32)] if arch == "sm_86" else [])
