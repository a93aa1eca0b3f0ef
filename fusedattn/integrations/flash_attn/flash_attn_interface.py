"""The functions of ``flash_attn.flash_attn_interface``, with its argument names, layouts and return values.

They accept more than ``flash_attn`` does: float32 and CPU tensors, any head_dim, values with a different head_dim,
dropout with a soft-cap, gradients of ``alibi_slopes`` and of ``softmax_lse``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedattn.attention import attention
from fusedattn.dropout import draw_seed
from fusedattn.integrations.flash_attn import paging
from fusedattn.integrations.flash_attn.arguments import (
    NO_WINDOW,
    check_shape,
    options_of,
    whole,
    with_contiguous_features,
)
from fusedattn.integrations.flash_attn.dmask import s_dmask, s_dmask_packed
from fusedattn.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from fusedattn.varlen import attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fusedattn.attention` with the arguments of ``flash_attn_func``; differentiable.

    Masks are aligned to the bottom right: query ``i`` stands at key ``i + seqlen_k - seqlen_q``.

    Args:
        q: ``(batch, seqlen_q, nheads, head_dim)``; float16, bfloat16, float32 (float64 on a CPU). Like k and v, copied
            only if its last dimension is not contiguous.
        k: ``(batch, seqlen_k, nheads_k, head_dim)``; ``nheads`` is a multiple of ``nheads_k``.
        v: ``(batch, seqlen_k, nheads_k, head_dim_v)``.
        dropout_p: as for :func:`fusedattn.attention`; the seed is drawn from torch's generator.
        softmax_scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        causal: a query does not see keys behind its own.
        window_size: ``(left, right)``: the number of keys that a query sees before and behind its own, negative for no
            limit; right is 0 if `causal`.
        softcap: bound of the scores, before the bias; 0 and less for none.
        alibi_slopes: float32 ``(nheads,)`` or ``(batch, nheads)``; ``-slope * |i + seqlen_k - seqlen_q - j|`` is added
            to the score of query ``i`` and key ``j``.
        deterministic: no effect: results are always the same on every run.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out, ``(batch, seqlen_q, nheads, head_dim_v)``, contiguous. With `return_attn_probs`
        ``(out, softmax_lse, S_dmask)``. softmax_lse is ``(batch, nheads, seqlen_q)``, float32, the natural logarithm,
        of the scores after softcap and slopes. S_dmask is ``(batch, nheads, seqlen_q, seqlen_k)`` with dropout: the
        weights before dropout, negative if dropped, written out for tests, without a gradient. Without dropout it is
        an empty tensor, as in ``flash_attn``.

        A query that sees nothing has out 0 and softmax_lse ``-inf`` (``+inf`` in ``flash_attn`` 2), and causes no
        gradient.

    Raises:
        TypeError, ValueError: as :func:`fusedattn.attention`.
        NotImplementedError: likewise.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_shape(name, x, "(batch, seqlen, nheads, head_dim)")
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = (with_contiguous_features(x).transpose(1, 2) for x in (q, k, v))
    if not return_attn_probs:
        return attention(q, k, v, **options).transpose(1, 2).contiguous()
    if dropout_p > 0.0:
        options["dropout_seed"] = draw_seed(q.device)
    out, lse = attention(q, k, v, **options, return_lse=True)
    weights = s_dmask(q, k, lse, **options) if dropout_p > 0.0 else q.new_empty(0)
    return out.transpose(1, 2).contiguous(), lse, weights


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor; otherwise the same.

    Args:
        q: ``(batch, seqlen_q, nheads, head_dim)``.
        kv: ``(batch, seqlen_k, 2, nheads_k, head_dim)``, which is not copied.
    """
    check_shape("kv", kv, "(batch, seqlen_k, 2, nheads_k, head_dim)", 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with queries, keys and values in one tensor; otherwise the same.

    Args:
        qkv: ``(batch, seqlen, 3, nheads, head_dim)``, which is not copied.
    """
    check_shape("qkv", qkv, "(batch, seqlen, 3, nheads, head_dim)", 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of each of several packed sequences; differentiable.

    Args:
        q: ``(total_q, nheads, head_dim)``.
        k: ``(total_k, nheads_k, head_dim)``; with `block_table` ``(num_blocks, page_block_size, nheads_k, head_dim)``.
        v: likewise, with ``head_dim_v``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``; sequence ``b`` has the tokens
            ``cu_seqlens[b] .. cu_seqlens[b + 1] - 1``. On a GPU they are neither waited for nor checked.
        max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds; queries beyond would be left out. A tensor is
            waited for.
        block_table: int32 ``(batch, max_num_blocks_per_seq)``: the pages of the keys and values of each sequence, in
            order; pages may have any size. They are read in place. With gradients, S_dmask or autocast the used tokens
            are copied, into room for ``batch * max_seqlen_k`` tokens, or for all tokens of the table if that is less.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as for
            :func:`flash_attn_func`, for each sequence.

    Returns:
        out, ``(total_q, nheads, head_dim_v)``; with `return_attn_probs` ``(out, softmax_lse, S_dmask)``, softmax_lse
        ``(nheads, total_q)``, S_dmask with dropout ``(batch, nheads, max_seqlen_q, max_seqlen_k)``, which waits for
        the lengths. Queries that belong to no sequence see nothing: out 0, softmax_lse ``-inf``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_attn_func` and :func:`fusedattn.attention_varlen`.
    """
    cached = "(total_k, nheads_k, head_dim)"
    if block_table is not None:
        cached = "(num_blocks, page_block_size, nheads_k, head_dim)"
    for name, x, shape in (("q", q, "(total_q, nheads, head_dim)"), ("k", k, cached), ("v", v, cached)):
        check_shape(name, x, shape)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    max_seqlen_q, max_seqlen_k = whole("max_seqlen_q", max_seqlen_q), whole("max_seqlen_k", max_seqlen_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    has_weights = return_attn_probs and dropout_p > 0.0
    inputs: tuple[Any, ...]
    if block_table is not None and not has_weights and _reads_in_place(q, k, v, alibi_slopes):
        options["cache"] = paging.cache_of(k, v, block_table, cu_seqlens_k, max_seqlen_k)
        inputs = (with_contiguous_features(q), None, None, cu_seqlens_q, None, max_seqlen_q)
    else:
        if block_table is not None:
            k, v = paging.packed(k, v, block_table, cu_seqlens_k, max_seqlen_k)
        inputs = (*(with_contiguous_features(x) for x in (q, k, v)), *lengths)
    if not return_attn_probs:
        return attention_varlen(*inputs, **options).contiguous()
    if has_weights:
        options["dropout_seed"] = draw_seed(q.device)
    out, lse = attention_varlen(*inputs, **options, return_lse=True)
    weights = s_dmask_packed(inputs[0], inputs[1], lse, *lengths, **options) if has_weights else q.new_empty(0)
    return out.contiguous(), lse, weights


def _reads_in_place(*tensors: Tensor | None) -> bool:
    """Whether attention to these can read a cache: a cache has no gradients, and autocast does not cast it."""
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)
    return not needs_gradient and not torch._C._is_any_autocast_enabled()


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor; otherwise the same.

    Args:
        q: ``(total_q, nheads, head_dim)``.
        kv: ``(total_k, 2, nheads_k, head_dim)``, which is not copied.
    """
    check_shape("kv", kv, "(total_k, 2, nheads_k, head_dim)", 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with queries, keys and values in one tensor; otherwise the same.

    Args:
        qkv: ``(total, 3, nheads, head_dim)``, which is not copied.
    """
    check_shape("qkv", qkv, "(total, 3, nheads, head_dim)", 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
