"""Attention masks as one value: ``True`` means "may attend", and masks combine with ``&``.

Each function makes a :class:`Mask`, which is a description, not a ``(seqlen_q, seqlen_k)`` tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedattn.mask import Mask
from fusedattn.mask_parts import Band as Band
from fusedattn.mask_parts import CausalAlign as CausalAlign
from fusedattn.mask_parts import Documents as Documents
from fusedattn.mask_parts import Layout as Layout
from fusedattn.mask_parts import MaskFunction as MaskFunction
from fusedattn.mask_parts import Prefix as Prefix
from fusedattn.sparse_masks import (
    bigbird,
    block_diffusion,
    dilated,
    fixed,
    mean_pooled_scores,
    neighborhood,
    selected_blocks,
    sliding_tiles,
    strided,
    top_blocks,
)

__all__ = [
    "Mask",
    "as_mask",
    "bigbird",
    "block_diffusion",
    "block_sparse",
    "boolean",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "full",
    "function",
    "mean_pooled_scores",
    "neighborhood",
    "padding",
    "prefix_lm",
    "selected_blocks",
    "sliding_tiles",
    "strided",
    "top_blocks",
    "tree",
    "window",
]


def full() -> Mask:
    """Every query attends to every key."""
    return Mask()


def causal(align: CausalAlign = "bottom_right") -> Mask:
    """A query sees its own key and those before it.

    The two alignments differ when ``seqlen_q != seqlen_k``. ``"bottom_right"`` lets the last query see every
    key (query ``i`` sees ``j <= i + seqlen_k - seqlen_q``), as decoding with a cache needs and FlashAttention
    does. ``"top_left"`` lets query ``i`` see ``j <= i``, as ``is_causal`` of torch does.

    Raises:
        ValueError: ``align`` is unknown.
    """
    return Mask(bands=frozenset({Band(None, 0, align)}))


def window(left: int | None, right: int | None, align: CausalAlign = "bottom_right") -> Mask:
    """A sliding window: query ``i`` sees its own key, ``left`` keys before it and ``right`` keys behind it.

    Its own key is ``i + seqlen_k - seqlen_q`` for ``"bottom_right"``, as in FlashAttention's
    ``window_size=(left, right)``, and ``i`` for ``"top_left"``. Beltagy et al., "Longformer" (2020);
    Mistral's window of ``w`` keys is ``window(w - 1, 0)``.

    Args:
        left, right: 0 and more, or None for no limit on that side (FlashAttention's -1).

    Raises:
        TypeError: ``left`` or ``right`` is not an int.
        ValueError: ``left`` or ``right`` is negative, or ``align`` is unknown.
    """
    band = Band(left, right, align)
    for name, x in (("left", left), ("right", right)):
        if x is not None and x < 0:
            raise ValueError(f"{name}: got {x}, allowed are 0 and more, and None (no limit)")
    return Mask() if left is None and right is None else Mask(bands=frozenset({band}))


def prefix_lm(lengths: Tensor, align: CausalAlign = "bottom_right") -> Mask:
    """Causal, but every query also sees the first ``lengths[batch]`` keys (Raffel et al., 2020, section 3.2.1).

    Args:
        lengths: int32 or int64 ``(batch,)``; 0 and less is causal, ``seqlen_k`` and more is full.
        align: as for :func:`causal`.

    Raises:
        TypeError: ``lengths`` is not an integer tensor.
        ValueError: ``lengths`` is not one-dimensional, or ``align`` is unknown.
    """
    return Mask(prefix=Prefix(lengths, align))


def padding(valid: Tensor) -> Mask:
    """Keys with ``valid == False`` are hidden from every query of their batch.

    Args:
        valid: bool ``(batch, seqlen_k)``; any pattern (right-, left-, unevenly padded). True = a real token.

    Raises:
        TypeError: ``valid`` is not a bool tensor.
        ValueError: ``valid`` is not two-dimensional.
    """
    return Mask(valid=valid)


def boolean(m: Tensor) -> Mask:
    """An arbitrary mask, in the polarity of ``F.scaled_dot_product_attention``: True = attend.

    Args:
        m: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``.

    Raises:
        TypeError: ``m`` is not a bool tensor (additive float masks are a bias, not a mask).
        ValueError: ``m`` has more than four dimensions.
    """
    return Mask(allowed=m)


def documents(ids_q: Tensor, ids_k: Tensor | None = None) -> Mask:
    """Packed sequences: a query sees the keys whose id equals its own.

    Args:
        ids_q: int32 or int64 ``(batch, seqlen_q)``; any numbers in any order.
        ids_k: int32 or int64 ``(batch, seqlen_k)``; ``ids_q`` by default.

    Raises:
        TypeError: the ids are not an integer tensor.
        ValueError: the ids are not two-dimensional.
    """
    return Mask(documents=Documents(ids_q, ids_q if ids_k is None else ids_k))


def block_sparse(blocks: Tensor, block_size: int | tuple[int, int]) -> Mask:
    """Whole blocks of pairs are visible or hidden (Child et al., "Sparse Transformers", 2019).

    Args:
        blocks: bool, broadcastable to ``(batch, nheads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``.
        block_size: ``(block_q, block_k)``, positive multiples of 16, or one number for both.

    Raises:
        TypeError: ``blocks`` is not a bool tensor, or ``block_size`` is not one or two ints.
        ValueError: ``blocks`` has more than four dimensions, or ``block_size`` is not a positive multiple of 16.
    """
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size: got {block_size}, allowed are an int and two ints, (block_q, block_k)")
    return Mask(layout=Layout(blocks, *sizes))


def function(fn: Any, eager: Callable[..., Tensor] | None = None, args: tuple[Any, ...] = ()) -> Mask:
    """A query sees the keys for which ``fn`` returns True; see :class:`MaskFunction`.

    Args:
        fn: ``@triton.jit`` function ``fn(batch, head, q_index, k_index, args)`` -> bool tile.
        eager: the same in torch, for the ``torch`` backend and for :meth:`Mask.dense`.
        args: tensors, ints and floats, passed to both.

    Raises:
        TypeError: ``fn`` is not a ``@triton.jit`` function, ``eager`` is not a function, or ``args`` not such a tuple.
    """
    return Mask(function=MaskFunction(fn, eager, args))


def tree(m: Tensor) -> Mask:
    """Queries see all older keys, and those of the newest ``seqlen_q`` keys that ``m`` shows them.

    The queries are the newest tokens: query ``i`` stands at key ``i + shift``, with ``shift = seqlen_k - seqlen_q``. It
    sees key ``j`` iff ``j < shift`` or ``m[..., i, j - shift]``; with more queries than keys, the first key has column
    ``-shift``. Speculative decoding verifies a tree of draft tokens in one call if ``m[i, j]`` says whether
    token ``j`` is token ``i`` or one of its ancestors (Miao et al., "SpecInfer", 2024; Cai et al., "Medusa", 2024).

    Args:
        m: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_q)``. For packed sequences, broadcastable to
            ``(n_sequences, nheads_q, max_seqlen_q, max_seqlen_q)``: each sequence uses its first rows and columns.

    Raises:
        TypeError: ``m`` is not a bool tensor.
        ValueError: ``m`` has more than four dimensions.
    """
    return Mask(tree=m)


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Convert an argument ``mask=`` to a :class:`Mask`: accepts one, a bool tensor (True = attend), or None (full)."""
    if mask is None:
        return _FULL
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            instead = "bias= adds it to the scores" if mask.is_floating_point() else "mask.bool() makes one of 0 and 1"
            raise TypeError(f"mask: got a {mask.dtype} tensor, allowed is a bool tensor, True = attend; {instead}")
        return boolean(mask)
    raise TypeError(f"mask: got {type(mask).__name__}, allowed are fusedattn.masks.Mask, a bool tensor, None")


_FULL = Mask()
