"""Nested tensors of torch, in the jagged layout: packed sequences by another name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedattn.varlen import attention_varlen


def among(*tensors: Tensor) -> bool:
    """Whether any of them is nested."""
    for x in tensors:  # noqa: SIM110  (of every call, and a generator takes longer)
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fusedattn.attention` of nested tensors ``(batch, nheads, seqlen, head_dim)``, ragged in seqlen.

    Raises:
        ValueError: some are dense, or of another layout, or ragged elsewhere.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_nested:
            raise ValueError(f"{name}: got a dense tensor, allowed is a nested one, as q is" if name != "q" else
                             "q: got a dense tensor, allowed is a nested one, as k and v are")  # fmt: skip
        if x.layout != torch.jagged:
            raise ValueError(f"{name}: got the layout {x.layout}, allowed is torch.jagged")
        if x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            raise ValueError(
                f"{name}: got a nested tensor of shape {tuple(x.shape)}, allowed is (batch, nheads, seqlen, head_dim), "
                "ragged in seqlen and without gaps"
            )
    offsets_q, offsets_k = q.offsets(), k.offsets()
    packed: list[Any] = [x.transpose(1, 2).values() for x in (q, k, v)]
    longest_q, longest_k = _longest(q), _longest(k)
    packed += [offsets_q.to(torch.int32), offsets_k.to(torch.int32), longest_q, longest_k]
    out, lse = attention_varlen(*packed, return_lse=True, **options)
    out, lse = (
        torch.nested.nested_tensor_from_jagged(x, offsets_q, max_seqlen=longest_q).transpose(1, 2)
        for x in (out, lse.transpose(0, 1))
    )
    return (out, lse) if return_lse else out


def _longest(x: Any) -> int | None:
    """The longest length in a nested tensor; None where a compiler would have to read the lengths to know."""
    longest: int | None = x._maybe_max_seqlen if torch.compiler.is_compiling() else x._get_max_seqlen()
    return longest
