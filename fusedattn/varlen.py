"""Attention over sequences of different lengths, packed without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from fusedattn import backends, call_checks
from fusedattn.biases import Bias, as_bias
from fusedattn.fp8 import FP8
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.options import Keywords, Options, Packed
from fusedattn.prepare import prepared, scale_of
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.support import Backend

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    cache: KVCache | None = ...,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    **keywords: Unpack[Keywords],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    cache: KVCache | None = ...,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    cache: KVCache | None = ...,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    cache: KVCache | None = ...,
    return_lse: Literal[True],
    return_max: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    cache: KVCache | None = None,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
    num_splits: int | None = None,
    precision: FP8 | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    backend: Backend | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`fusedattn.attention` of each of several packed sequences; differentiable.

    On a GPU `cu_seqlens_q` and `cu_seqlens_k` are neither waited for nor checked; the ``torch`` backend reads them.

    Args:
        q: ``(total_q, nheads_q, head_dim)``, dtypes and strides as for ``attention``.
        k: ``(total_k, nheads_kv, head_dim)``.
        v: ``(total_k, nheads_kv, head_dim_v)``.
        cache: a :class:`fusedattn.KVCache` of n_sequences, in place of k, v, cu_seqlens_k and max_seqlen_k, which are
            then None. The other arguments follow :func:`fusedattn.attention` with a cache: ``padding(valid)`` is
            ``(n_sequences, capacity)``, positions of keys are ``(capacity,)``; there are no documents.
        cu_seqlens_q, cu_seqlens_k: int32 ``(n_sequences + 1,)`` on the device of q; sequence ``i`` has the queries
            ``cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1``, and its keys likewise. They begin with 0 and do not
            decrease; tokens behind the last entry belong to no sequence.
        max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds (queries beyond would be left out); by default
            total_q and total_k, which launch more programs than needed.
        mask, rope, bias, score_mod: as for ``attention``. Queries and keys are counted from the start of their
            sequence, and masks are aligned with its end. Tensors with one entry per batch have one per sequence here,
            with lengths ``max_seqlen_q`` and ``max_seqlen_k``. Tensors with one entry per token are packed:
            ``padding(valid)`` is ``(1, total_k)``, ``documents`` and positions are ``(1, total)``. All sequences share
            the tables of rope; on a GPU, queries at positions before their sequence's first key are NaN.
        scale, qk_norm, softcap, sinks: as for ``attention``.
        dropout_p, dropout_seed, deterministic, num_splits: as for ``attention``.
        precision, return_lse, return_max, backend: as for ``attention``.

    Returns:
        out ``(total_q, nheads_q, head_dim_v)``; with ``return_lse`` also lse ``(nheads_q, total_q)``, and with
        ``return_max`` also the largest scores, likewise. Queries that belong to no sequence have out 0, and lse and
        largest ``-inf``.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``attention``; on a CPU also if the lengths are wrong.
    """
    if others:
        raise call_checks.unknown_argument("attention_varlen", others)
    options = Options(
        as_mask(mask), rope, as_bias(bias), scale_of(scale, q), softcap, score_mod, sinks, dropout_p, dropout_seed,
        deterministic, return_lse, return_max, cache=cache, num_splits=num_splits, qk_norm=qk_norm,
        precision=precision,
    )  # fmt: skip
    cu_seqlens, max_seqlens = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return options.returned(*_packed_attention(q, k, v, cu_seqlens, max_seqlens, options, backend))


def _packed_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: tuple[Tensor, Tensor | None],
    max_seqlens: tuple[int | None, int | None],
    options: Options,
    backend: Backend | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(out, lse, largest)`` of :func:`attention_varlen`, from collected arguments; None if not asked for."""
    cache = options.cache
    if cache is not None and (cu_seqlens[1] is not None or max_seqlens[1] is not None):
        raise ValueError("cu_seqlens_k, max_seqlen_k: got values together with cache, allowed is None")
    q, seqlen_k = _heads_first("q", q), 0
    if cache is None:
        if cu_seqlens[1] is None:
            raise TypeError("cu_seqlens_k: got NoneType, allowed is a torch.int32 tensor, and None with a cache")
        k, v = _heads_first("k", k), _heads_first("v", v)
        seqlen_k = k.shape[2]
    elif isinstance(cache, KVCache):  # anything else is refused below
        seqlen_k = cache.capacity
    longest = (n if most is None else most for n, most in zip((q.shape[2], seqlen_k), max_seqlens, strict=True))
    options.packed = Packed(*cu_seqlens, *longest)
    q, k, v, backend = prepared(q, k, v, options, backend)
    out, *of_rows = backends.attention(q, k, v, options, backend)
    lse, largest = (None if x is None else x[0] for x in of_rows)
    return out[0].transpose(0, 1), lse, largest


def _heads_first(name: str, x: Any) -> Tensor:
    """``(total, nheads, head_dim)`` as ``(1, nheads, total, head_dim)``."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: got {got}, allowed is three dimensions, (total, nheads, head_dim)")
    return x.transpose(0, 1)[None]


def are_nested(q: Any, k: Any, v: Any) -> bool:
    """Whether these are nested tensors.

    Raises:
        ValueError: only some are nested, or a layout is not torch.jagged, or one is not ragged in seqlen alone.
    """
    for x in (q, k, v):
        if isinstance(x, Tensor) and x.is_nested:
            _check_nested(q, k, v)
            return True
    return False


def _check_nested(q: Any, k: Any, v: Any) -> None:
    if k is None:
        raise ValueError(
            "q: got a nested tensor without k, allowed with a cache are a dense tensor, and packed queries in "
            "attention_varlen"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not getattr(x, "is_nested", False):
            got = "a dense tensor" if isinstance(x, Tensor) else type(x).__name__
            others = "as k and v are" if name == "q" else "as q is"
            raise ValueError(f"{name}: got {got}, allowed is a nested tensor, {others}")
        if x.layout != torch.jagged:
            raise ValueError(f"{name}: got the layout {x.layout}, allowed is torch.jagged")
        if x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            raise ValueError(
                f"{name}: got a nested tensor of shape {tuple(x.shape)}, allowed is (batch, nheads, seqlen, head_dim), "
                "ragged in seqlen and without gaps"
            )


def nested_attention(
    q: Any, k: Any, v: Any, options: Options, backend: Backend | None
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`fusedattn.attention` of nested tensors ``(batch, nheads, seqlen, head_dim)``, ragged in seqlen."""
    offsets_q, offsets_k = q.offsets(), k.offsets()
    longest_q, longest_k = _longest(q), _longest(k)
    q, k, v = (x.transpose(1, 2).values() for x in (q, k, v))
    cu_seqlens = offsets_q.to(torch.int32), offsets_k.to(torch.int32)
    out, *of_rows = _packed_attention(q, k, v, cu_seqlens, (longest_q, longest_k), options, backend)

    def nested(x: Tensor) -> Tensor:
        """``x``, ``(total, nheads, ...)``, as a nested tensor."""
        return torch.nested.nested_tensor_from_jagged(x, offsets_q, max_seqlen=longest_q).transpose(1, 2)

    lse, largest = (None if x is None else nested(x.transpose(0, 1)) for x in of_rows)
    return options.returned(nested(out), lse, largest)


def _longest(x: Any) -> int | None:
    """The longest length in a nested tensor; None if a compiler would have to read the lengths."""
    longest: int | None = x._maybe_max_seqlen if torch.compiler.is_compiling() else x._get_max_seqlen()
    return longest
