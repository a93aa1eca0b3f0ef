"""Attention over all keys from attentions of the same queries over parts of the keys, in eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedattn.call_checks import DTYPES
from fusedattn.parts import sum_of_parts


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the attention over all keys, from those over disjoint sets of keys; differentiable.

    With the weight of a part, the sum of its softmax terms over that of all parts::

        lse = logsumexp_i lse_i
        out = sum_i exp(lse_i - lse) out_i

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1. The parts may be prefixes
    that sequences share, chunks of a prompt, or the keys of other devices (ring attention). Results can be merged again
    with further parts.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    >>> parts = [fusedattn.attention(q, k[:, :, i], v[:, :, i], return_lse=True) for i in (slice(5), slice(5, 8))]
    >>> out, lse = merge(*zip(*parts))
    >>> torch.allclose(out, fusedattn.attention(q, k, v), atol=1e-5)
    True

    Args:
        outs: the outputs, at least one: ``(batch, nheads_q, seqlen_q, head_dim_v)``, or any shape that ends in
            head_dim_v; float16, bfloat16, float32 or float64. Shape, dtype and device are the same for all.
        lses: the lse of each, of the shape of out without head_dim_v, float32 (float64 for float64), on its device.
            :func:`fusedattn.attention_varlen` returns ``(nheads_q, total_q)``: pass ``lse.T``.

    Sinks count once in the softmax: pass ``sinks=`` to the attention of one part alone. With dropout, each part needs a
    seed of its own. Each part counts its own keys from 0: ``masks.causal()`` aligns the last query with the last key of
    the part, and ``rope`` needs explicit positions.

    Returns:
        out, in the shape and dtype of outs, and lse, in those of lses. They are computed in float32 (float64 for
        float64), and out is rounded once. Derivatives of first and second order go to all outs and lses.

        A part whose lse is ``-inf`` adds nothing to a row, whatever its out there. If all are ``-inf``, out is 0,
        lse is ``-inf``, and all gradients are 0. If an lse is ``+inf`` or NaN, out and lse of this row are NaN.

    Raises:
        TypeError, ValueError: there is no part, or the numbers, shapes, dtypes or devices do not fit; the message names
            the argument, the value it got and the values that are allowed.
    """
    _check(outs, lses)
    out, lse = sum_of_parts(outs, lses)
    return out.to(outs[0].dtype), lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError unless these are parts of one attention."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence):
            raise TypeError(f"{name}: got {type(parts).__name__}, allowed is a sequence of tensors, such as a list")
        for i, x in enumerate(parts):
            if not isinstance(x, Tensor) or x.is_nested:
                got = "a nested tensor" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name}[{i}]: got {got}, allowed is a dense torch.Tensor")
    if not outs:
        raise ValueError("outs: got no tensor, allowed are one and more")
    if len(lses) != len(outs):
        raise ValueError(f"lses: got {len(lses)} tensors, allowed are as many as outs, {len(outs)}")
    first = outs[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"outs[0]: got {first.dtype}, allowed are {', '.join(map(str, DTYPES))}")
    if first.dim() == 0:
        raise ValueError("outs[0]: got shape (), allowed are shapes that end in head_dim_v")
    of_lse = torch.promote_types(first.dtype, torch.float32)
    for name, parts, shape, dtype, model in (
        ("outs", outs, first.shape, first.dtype, "outs[0]"),
        ("lses", lses, first.shape[:-1], of_lse, "outs[0] without head_dim_v"),
    ):
        for i, x in enumerate(parts):
            if x.shape != shape:
                raise ValueError(f"{name}[{i}]: got shape {tuple(x.shape)}, allowed is that of {model}, {tuple(shape)}")
            if x.dtype != dtype:
                raise TypeError(f"{name}[{i}]: got {x.dtype}, allowed is {dtype}, with outs[0] of {first.dtype}")
            if x.device != first.device:
                raise ValueError(f"{name}[{i}]: got device {x.device}, allowed is that of outs[0], {first.device}")
