"""Rotary position embedding with the arguments of ``flash_attn.layers.rotary``.

Computed by :func:`fusedattn.apply_rope` in eager PyTorch, in float32 (float64 for float64), and rounded once. To rotate
inside the attention, pass ``rope=`` to :func:`fusedattn.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedattn.integrations.flash_attn.arguments import check_shape
from fusedattn.integrations.flash_attn.packing import places
from fusedattn.readable import can_read
from fusedattn.rope import apply_rope


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first ``rotary_dim`` features; differentiable. Token ``i`` of a sequence has position ``offset + i``.

    Args:
        x: ``(batch, seqlen, nheads, head_dim)``, or with `cu_seqlens` ``(total, nheads, head_dim)``.
        cos, sin: floating-point ``(seqlen_rotary, rotary_dim / 2)``.
        interleaved: pair features ``2i`` and ``2i + 1`` rather than ``i`` and ``i + rotary_dim / 2``.
        inplace: write the result to `x`. A leaf gets the gradient with respect to its values before the call.
        seqlen_offsets: int, or int32 or int64 ``(batch,)``.
        cu_seqlens: int32 or int64 ``(batch + 1,)``, where sequences begin; tokens of no sequence stay as they are.
        max_seqlen: a length that no sequence exceeds; needed with `cu_seqlens`.

    Returns:
        Shape and dtype of `x`. With `inplace`, `x` itself, or a tensor on its memory if `x` is a leaf that requires
        grad. On a GPU, where nothing waits for offsets, NaN for a position outside the tables.

    Raises:
        TypeError, ValueError: an argument is wrong or does not fit; on a CPU also positions outside the tables.
    """
    rotated = _rotated("x", x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    if not inplace:
        return rotated
    return _IntoLeaf.apply(rotated, x) if _is_differentiated_leaf(x) else x.copy_(rotated)  # type: ignore[no-untyped-call]


def _is_differentiated_leaf(x: Tensor) -> bool:
    return x.is_leaf and x.requires_grad and torch.is_grad_enabled()


class _IntoLeaf(torch.autograd.Function):
    """Write a result to a leaf, which torch's own functions refuse; gradients are those of the result."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, leaf: Tensor) -> Tensor:
        return leaf.detach().copy_(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys in place; arguments, errors and gradients as for :func:`apply_rotary_emb`.

    Args:
        qkv: ``(batch, seqlen, 3, nheads, head_dim)``, or ``(batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim)``.
        cos_k, sin_k: tables of the keys; by default those of the queries.
        num_heads_q: needed for a `qkv` of four dimensions.

    Returns:
        `qkv`, or a tensor on its memory if it is a leaf that requires grad.
    """
    if isinstance(qkv, Tensor) and qkv.dim() == 4:
        if num_heads_q is None or not 0 < num_heads_q < qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q: got {num_heads_q} for qkv of shape {tuple(qkv.shape)}, allowed are numbers of query "
                "heads that leave as many heads for keys as for values"
            )
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        heads_q: int | slice
        heads_k: int | slice
        heads_q, heads_k = slice(num_heads_q), slice(num_heads_q, num_heads_q + num_heads_k)
    else:
        check_shape("qkv", qkv, "(batch, seqlen, 3, nheads, head_dim)", 3)
        heads_q, heads_k = 0, 1
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    rotated_q = _rotated("qkv", qkv[:, :, heads_q], cos, sin, interleaved, seqlen_offsets)
    rotated_k = _rotated("qkv", qkv[:, :, heads_k], cos_k, sin_k, interleaved, seqlen_offsets)
    return _with_parts(qkv, (heads_q, rotated_q), (heads_k, rotated_k))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate keys in place; arguments, errors and gradients as for :func:`apply_rotary_emb`.

    Args:
        kv: ``(batch, seqlen, 2, nheads, head_dim)``.

    Returns:
        `kv`, or a tensor on its memory if it is a leaf that requires grad.
    """
    check_shape("kv", kv, "(batch, seqlen, 2, nheads, head_dim)", 2)
    return _with_parts(kv, (0, _rotated("kv", kv[:, :, 0], cos, sin, interleaved, seqlen_offsets)))


def _with_parts(x: Tensor, *parts: tuple[int | slice, Tensor]) -> Tensor:
    """``x`` with some heads overwritten, in place."""
    is_leaf = _is_differentiated_leaf(x)
    whole = x.clone() if is_leaf else x
    for heads, part in parts:
        whole[:, :, heads].copy_(part)
    return _IntoLeaf.apply(whole, x) if is_leaf else whole  # type: ignore[no-untyped-call]


def _rotated(
    name: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    dimensions = "(batch, seqlen, nheads, head_dim)" if cu_seqlens is None else "(total, nheads, head_dim)"
    check_shape(name, x, dimensions)
    check_tables(cos, sin, x)
    if cu_seqlens is not None and (max_seqlen is None or cu_seqlens.dim() != 1):
        raise ValueError(
            f"cu_seqlens, max_seqlen: got shape {tuple(cu_seqlens.shape)} and {max_seqlen}, allowed are (batch + 1,) "
            "and an int"
        )
    batch, longest = x.shape[:2] if cu_seqlens is None else (cu_seqlens.shape[0] - 1, max_seqlen)
    _check_offsets(offsets, batch, 0 if longest is None else longest, cos)

    if cu_seqlens is None:
        starts = offsets[:, None] if isinstance(offsets, Tensor) else offsets
        positions = (starts + torch.arange(x.shape[1], device=x.device)).expand(batch, -1)
        inside = None
    else:
        sequence, positions, inside = places(cu_seqlens, x.shape[0])
        positions = positions + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
        positions = positions.masked_fill(~inside, 0)
    _check_positions(positions, inside, cos)

    # Each token as one sequence, (tokens, nheads, 1, head_dim), so that the result has the memory layout of x.
    tokens = x.flatten(0, -3)[:, :, None]
    rotated = apply_rope(tokens, cos, sin, positions.reshape(-1, 1), interleaved=interleaved).reshape(x.shape)
    return rotated if inside is None else torch.where(inside[:, None, None], rotated, x)


def check_tables(cos: Tensor, sin: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError unless these are tables that rotate heads like those of x, on its device."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            got = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{name}: got {got}, allowed is a floating-point tensor")
        if table.device != x.device:
            raise ValueError(f"{name}: got device {table.device}, allowed is that of x, {x.device}")
    if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        raise ValueError(
            f"cos, sin: got shapes {tuple(cos.shape)} and {tuple(sin.shape)}, allowed is one shape, (seqlen_rotary, "
            f"rotary_dim / 2), with rotary_dim of at most head_dim = {x.shape[-1]}"
        )


def _check_offsets(offsets: int | Tensor, batch: int, seqlen: int, cos: Tensor) -> None:
    if isinstance(offsets, Tensor):
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"seqlen_offsets: got {offsets.dtype}, allowed are an int and a tensor of torch.int32")
        if tuple(offsets.shape) != (batch,):
            raise ValueError(f"seqlen_offsets: got shape {tuple(offsets.shape)}, allowed is (batch,) = {(batch,)}")
    elif not 0 <= offsets <= cos.shape[0] - seqlen:
        raise ValueError(
            f"seqlen_offsets: got {offsets} for sequences of up to {seqlen} tokens, allowed are positions "
            f"0 .. {cos.shape[0] - 1} (the rows of cos and sin)"
        )


def _check_positions(positions: Tensor, inside: Tensor | None, cos: Tensor) -> None:
    """Raise ValueError if a position is not in the tables; only on a CPU, because on a GPU the check would wait."""
    if not can_read(positions):
        return
    used = positions if inside is None else positions[inside]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < cos.shape[0]:
        raise ValueError(
            f"seqlen_offsets: got positions {int(used.min())} .. {int(used.max())}, allowed are 0 .. "
            f"{cos.shape[0] - 1} (the rows of cos and sin)"
        )
