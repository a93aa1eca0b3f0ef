"""Checks of arguments, for any backend: every error names the argument, the value it got and the allowed values."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.biases import Bias
from fusedattn.masks import Mask
from fusedattn.options import Packed
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("triton", "torch")


# Argument names of other attention functions, and the replacement to suggest.
WORDS = {
    "is_causal": "mask=masks.causal('top_left'), torch's alignment, or mask=masks.causal(), which aligns the ends",
    "causal": "mask=masks.causal()",
    "attn_mask": "mask= for a bool tensor (True = attend), bias= for a floating-point one",
    "attention_mask": "mask=masks.padding(attention_mask.bool()) for a mask of keys, mask= for one of pairs",
    "key_padding_mask": "mask=masks.padding(~key_padding_mask)",
    "window_size": "mask=masks.window(left, right)",
    "attn_bias": "bias=",
    "alibi_slopes": "bias=biases.alibi(slopes)",
    "softmax_scale": "scale=",
    "scaling": "scale=",
    "dropout": "dropout_p=",
    "enable_gqa": "nothing: the numbers of heads decide the grouping",
}


def unknown_argument(function: str, others: dict[str, object]) -> TypeError:
    """The error for an argument that `function` does not have; suggests a replacement if one is known."""
    name = next(iter(others))
    near = WORDS.get(name)
    return TypeError(
        f"{function}: got an unknown argument {name}=; " + (f"write {near}" if near else "help() lists the known ones")
    )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k and v fit each other."""
    if _are_alike(q, k, v):
        return
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
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
    batch_k, nheads_kv, seqlen_k, head_dim_k = k.shape
    batch_v, nheads_v, seqlen_v, _ = v.shape
    for name, size in (("k", batch_k), ("v", batch_v)):
        if size != batch:
            raise ValueError(f"{name}: got batch {size}, allowed is that of q, {batch}")
    if nheads_kv != nheads_v or seqlen_k != seqlen_v:
        raise ValueError(
            f"v: got (nheads_kv, seqlen_k) {tuple(v.shape[1:3])}, allowed is that of k, {tuple(k.shape[1:3])}"
        )
    if head_dim_k != head_dim:
        raise ValueError(f"k: got head_dim {head_dim_k}, allowed is that of q, {head_dim}")
    for name, x in named:
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


def _are_alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v certainly fit each other: a fast test that nearly every call passes."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    shape_q, shape_k, shape_v, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.device
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        return False
    batch, nheads_q, _, head_dim = shape_q
    batch_k, nheads_kv, seqlen_k, head_dim_k = shape_k
    batch_v, nheads_v, seqlen_v, head_dim_v = shape_v
    return (
        batch == batch_k == batch_v
        and nheads_kv == nheads_v
        and seqlen_k == seqlen_v
        and head_dim == head_dim_k > 0
        and head_dim_v > 0
        and nheads_kv > 0
        and nheads_q % nheads_kv == 0
        and k.dtype == v.dtype == dtype
        and dtype in DTYPES
        and k.device == v.device == device
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


def check_packed(packed: Packed, q: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError unless these are sequences of q and k; makes only checks without a GPU sync."""
    for name, x in (("cu_seqlens_q", packed.cu_seqlens_q), ("cu_seqlens_k", packed.cu_seqlens_k)):
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {got}, allowed is a torch.int32 tensor")
        if x.dim() != 1 or x.shape[0] < 1 or not x.is_contiguous():
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is (n_sequences + 1,), contiguous")
        if x.shape != packed.cu_seqlens_q.shape:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, allowed is that of cu_seqlens_q, "
                f"{tuple(packed.cu_seqlens_q.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, allowed is the device of q, {q.device}")
    for side, cu_seqlens, longest, total in (
        ("q", packed.cu_seqlens_q, packed.max_seqlen_q, q.shape[2]),
        ("k", packed.cu_seqlens_k, packed.max_seqlen_k, k.shape[2]),
    ):
        if isinstance(longest, float | bool):
            raise TypeError(f"max_seqlen_{side}: got {type(longest).__name__}, allowed is an int")
        if longest < 0:
            raise ValueError(f"max_seqlen_{side}: got {longest}, allowed are 0 and more")
        if q.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_stops(side, cu_seqlens.tolist(), longest, total)


def _check_stops(side: str, stops: list[int], longest: int, total: int) -> None:
    lengths = [stop - start for start, stop in itertools.pairwise(stops)]
    if stops[0] != 0 or min(lengths, default=0) < 0 or stops[-1] > total:
        raise ValueError(
            f"cu_seqlens_{side}: got {stops}, allowed begins with 0, does not decrease, and ends with at most "
            f"total_{side} = {total}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{side}: got {longest}, allowed are the longest length, {max(lengths)}, and more")


def check_mask(mask: Mask, q: Tensor, k: Tensor, packed: Packed | None = None) -> None:
    """Raise ValueError unless the mask fits the shapes and lies on the device of q."""
    if mask.only_bands:  # bands fit any shape
        return
    if packed is None:
        mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    else:
        by_token = Mask(valid=mask.valid, documents=mask.documents)
        by_token.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        by_sequence = replace(mask, valid=None, documents=None)
        by_sequence.check(packed.n_sequences, q.shape[1], packed.max_seqlen_q, packed.max_seqlen_k)
    _check_device("mask", mask.tensors(), q)


def check_rope(rope: Rope, q: Tensor, k: Tensor, packed: Packed | None = None) -> None:
    """Raise TypeError or ValueError unless the tables and positions fit the shapes and lie on the device of q."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: got {type(rope).__name__}, allowed are fusedattn.Rope and None")
    batch, _, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    rope.check_shapes(batch, seqlen_q, seqlen_k, head_dim)
    if packed is None:
        rope.check_lengths(seqlen_q, seqlen_k)
    elif q.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths_q, lengths_k = (x.diff().tolist() for x in (packed.cu_seqlens_q, packed.cu_seqlens_k))
        for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
            rope.check_lengths(length_q, length_k)
    # sin is on the device of cos.
    for name, x in (("cos", rope.cos), ("positions_q", rope.positions_q), ("positions_k", rope.positions_k)):
        if x is not None and x.device != q.device:
            raise ValueError(f"rope.{name}: got device {x.device}, allowed is the device of q, {q.device}")


def check_bias(bias: Bias, q: Tensor, k: Tensor, packed: Packed | None = None) -> None:
    """Raise ValueError unless the bias fits the scores and lies on the device of q."""
    if packed is None:
        bias.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    else:
        bias.check(packed.n_sequences, q.shape[1], packed.max_seqlen_q, packed.max_seqlen_k)
    _check_device("bias", bias.tensors(), q)


def check_score_mod(score_mod: ScoreMod, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``score_mod`` is a ScoreMod whose tensors lie on the device of q."""
    if not isinstance(score_mod, ScoreMod):
        raise TypeError(f"score_mod: got {type(score_mod).__name__}, allowed are fusedattn.ScoreMod and None")
    _check_device("score_mod", score_mod.tensors(), q)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless there is one floating-point sink for each head of q."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks: got {got}, allowed is a floating-point tensor")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, allowed is (nheads_q,) = {(q.shape[1],)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: got device {sinks.device}, allowed is the device of q, {q.device}")


def check_dropout_p(dropout_p: float) -> None:
    """Raise TypeError or ValueError unless ``dropout_p`` is a probability below 1."""
    check_number("dropout_p", dropout_p, 0.0, 1.0 - sys.float_info.epsilon, "0 <= dropout_p < 1")


def check_deterministic(deterministic: bool) -> None:
    """Raise TypeError unless ``deterministic`` is a bool."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, allowed is a bool")


def check_dropout_seed(seed: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless the seed is one int64 number on the device of q."""
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        got = seed.dtype if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"dropout_seed: got {got}, allowed is a torch.int64 tensor")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"dropout_seed: got shape {tuple(seed.shape)}, allowed is (1,)")
    if seed.device != q.device:
        raise ValueError(f"dropout_seed: got device {seed.device}, allowed is the device of q, {q.device}")


def check_number(name: str, x: float, lowest: float, highest: float, allowed: str) -> None:
    """Raise TypeError unless ``x`` is a number, ValueError unless ``lowest <= x <= highest`` (NaN never is)."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: got {type(x).__name__}, allowed is a float ({allowed})")
    if not lowest <= x <= highest:
        raise ValueError(f"{name}: got {x}, allowed is {allowed}")


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is a known name or None."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed are {', '.join(map(repr, BACKENDS))} and None")


def _check_device(owner: str, tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{owner}: got {name} on {x.device}, allowed is the device of q, {q.device}")
