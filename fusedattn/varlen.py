"""Attention over sequences of different lengths, packed one behind the other without padding."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fusedattn import checks, reference_varlen
from fusedattn.backends.torch import sdpa
from fusedattn.backends.triton import autograd
from fusedattn.biases import Bias
from fusedattn.masks import Mask
from fusedattn.options import Packed
from fusedattn.prepare import autocast, checked, with_positive_scale
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.support import Backend


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    mask: Mask | Tensor | None = ...,
    rope: Rope | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    score_mod: ScoreMod | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    backend: Backend | None = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    mask: Mask | Tensor | None = ...,
    rope: Rope | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    score_mod: ScoreMod | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    backend: Backend | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: Backend | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fusedattn.attention` of each of several sequences, packed one behind the other; differentiable.

    On a GPU nothing waits for `cu_seqlens_q` and `cu_seqlens_k`, nor checks them; the ``torch`` backend reads them.

    Args:
        q: ``(total_q, nheads_q, head_dim)``, dtypes and strides as of ``attention``.
        k: ``(total_k, nheads_kv, head_dim)``.
        v: ``(total_k, nheads_kv, head_dim_v)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(n_sequences + 1,)`` on the device of q; sequence ``i`` has the queries
            ``cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1`` and likewise keys. They begin with 0 and do not decrease;
            what lies behind the last belongs to no sequence.
        max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds (queries beyond would be left out); by default the
            lengths of all together, for which more programs are launched than needed.
        mask, rope, bias, score_mod: as for ``attention``; queries and keys are counted from the start of their
            sequence, and masks are aligned with its end. What there is for each batch is here for each sequence, with
            ``max_seqlen_q`` and ``max_seqlen_k`` for the lengths, except what there is for each token:
            ``padding(valid)`` is ``(1, total_k)``, ``documents`` and positions are ``(1, total)``. Tables of rope are
            shared by all; queries that come before the first key of theirs are NaN on a GPU.
        scale, softcap, sinks, dropout_p, dropout_seed, deterministic, return_lse, backend: as for ``attention``.

    Returns:
        out ``(total_q, nheads_q, head_dim_v)``; with ``return_lse`` also lse ``(nheads_q, total_q)``. Queries of no
        sequence have out 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``attention``; on a CPU also where the lengths are wrong.
    """
    if others:
        raise checks.unknown_argument("attention_varlen", others)
    q, k, v = autocast(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: got {got}, allowed is three dimensions, (total, nheads, head_dim)")
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    packed = Packed(
        cu_seqlens_q,
        cu_seqlens_k,
        q.shape[2] if max_seqlen_q is None else max_seqlen_q,
        k.shape[2] if max_seqlen_k is None else max_seqlen_k,
    )
    checks.check_packed(packed, q, k)
    options, backend = checked(
        q, k, v, packed, mask=mask, rope=rope, bias=bias, scale=scale, softcap=softcap, score_mod=score_mod,
        sinks=sinks, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    q, options = with_positive_scale(q, options)
    lse: Tensor | None
    if backend == "triton":
        out, lse = autograd.attention(q, k, v, options, deterministic=deterministic, packed=packed)
    else:
        attend = functools.partial(sdpa.attention, return_lse=return_lse)
        out, lse = reference_varlen.attention(q, k, v, options, packed, attend=attend)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse and lse is not None else out


def any_nested(*tensors: Tensor) -> bool:
    """Whether any of them is nested."""
    for x in tensors:  # noqa: SIM110  (of every call, and a generator takes longer)
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


def nested_attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
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
