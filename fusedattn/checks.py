"""Arguments that no backend could make sense of: every error names the argument, what it got, what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.masks import Mask
from fusedattn.rope import Rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("triton", "torch")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k, v are tensors of one attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a torch.Tensor")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, allowed are {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, allowed is the dtype of q, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, allowed is the device of q, {q.device}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, allowed is four dimensions, (batch, nheads, seqlen, head_dim)"
            )
    batch, nheads_q, _, head_dim = q.shape
    nheads_kv = k.shape[1]
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch:
            raise ValueError(f"{name}: got batch {x.shape[0]}, allowed is that of q, {batch}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"v: got (nheads_kv, seqlen_k) {tuple(v.shape[1:3])}, allowed is that of k, {tuple(k.shape[1:3])}"
        )
    if k.shape[3] != head_dim:
        raise ValueError(f"k: got head_dim {k.shape[3]}, allowed is that of q, {head_dim}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[3] == 0:
            raise ValueError(f"{name}: got head_dim 0, allowed is 1 and more")
        if x.stride(3) != 1 and x.shape[3] > 1 and x.numel() > 0:
            raise ValueError(
                f"{name}: got strides {x.stride()}, allowed are any whose last is 1 (head_dim contiguous); "
                f"pass {name}.contiguous()"
            )
    if nheads_kv == 0 or nheads_q % nheads_kv:
        raise ValueError(
            f"q, k: got nheads_q = {nheads_q} and nheads_kv = {nheads_kv}, "
            "allowed are nheads_q divisible by nheads_kv (GQA, MQA)"
        )


def check_mask(mask: Mask, q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless the mask fits the shapes and lies on the device of q."""
    mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    for name, x in (("padding(valid)", mask.valid), ("boolean(m)", mask.allowed)):
        if x is not None and x.device != q.device:
            raise ValueError(f"mask: got {name} on {x.device}, allowed is the device of q, {q.device}")


def check_rope(rope: Rope, q: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError unless the tables and positions fit the shapes and lie on the device of q."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: got {type(rope).__name__}, allowed are fusedattn.Rope and None")
    rope.check(q.shape[0], q.shape[2], k.shape[2], q.shape[3])
    for name in ("cos", "sin", "positions_q", "positions_k"):
        x = getattr(rope, name)
        if x is not None and x.device != q.device:
            raise ValueError(f"rope.{name}: got device {x.device}, allowed is the device of q, {q.device}")


def check_bias(bias: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError unless bias broadcasts over the scores."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias: got {got}, allowed is a floating-point tensor (a bool mask goes into mask=)")
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    try:
        fits = torch.broadcast_shapes(bias.shape, full) == full
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"bias: got shape {tuple(bias.shape)}, allowed are those that broadcast to "
            f"(batch, nheads_q, seqlen_q, seqlen_k) = {full}"
        )


def check_number(name: str, x: float, lowest: float, highest: float, allowed: str) -> None:
    """Raise TypeError unless ``x`` is a number, ValueError unless ``lowest <= x <= highest`` (which no NaN is)."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: got {type(x).__name__}, allowed is a float ({allowed})")
    if not lowest <= x <= highest:
        raise ValueError(f"{name}: got {x}, allowed is {allowed}")


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is a known name or None."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed are {', '.join(map(repr, BACKENDS))} and None")
