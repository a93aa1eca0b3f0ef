"""Attention masks as one value: ``True`` means "may attend", and masks combine with ``&``.

A :class:`Mask` is a description, not a ``(seqlen_q, seqlen_k)`` tensor. :meth:`Mask.dense` writes the tensor
out, and that tensor *defines* the mask: eager code multiplies by it. The kernels read the parts directly, to skip
hidden blocks, and are tested against the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import functions, indices
from fusedattn.mask_parts import ALIGNMENTS, check_bool
from fusedattn.mask_parts import Band as Band
from fusedattn.mask_parts import CausalAlign as CausalAlign
from fusedattn.mask_parts import Documents as Documents
from fusedattn.mask_parts import Layout as Layout
from fusedattn.mask_parts import MaskFunction as MaskFunction
from fusedattn.mask_parts import Prefix as Prefix
from fusedattn.shard import WHOLE, Shard

Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to. Build one with the functions of this module.

    Attributes:
        bands: the diagonal bands that a visible pair lies in, all of them (empty: no limit).
        valid: bool ``(batch, seqlen_k)`` or None; keys that are ``False`` are hidden from every query.
        allowed: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``, or None.
        prefix, documents, layout, function: one of each kind, or None.
        tree: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_q)``, or None; see :func:`tree`.
    """

    bands: frozenset[Band] = frozenset()
    valid: Tensor | None = None
    allowed: Tensor | None = None
    prefix: Prefix | None = None
    documents: Documents | None = None
    layout: Layout | None = None
    function: MaskFunction | None = None
    tree: Tensor | None = None

    def __post_init__(self) -> None:
        if self.valid is not None:
            check_bool(self.valid, "valid")
            if self.valid.dim() != 2:
                raise ValueError(f"valid: got shape {tuple(self.valid.shape)}, allowed is (batch, seqlen_k)")
        for m, keys in ((self.allowed, "seqlen_k"), (self.tree, "seqlen_q")):
            if m is not None:
                check_bool(m, "m")
                if m.dim() > 4:
                    raise ValueError(
                        f"m: got shape {tuple(m.shape)}, allowed is at most (batch, nheads_q, seqlen_q, {keys})"
                    )

    def __and__(self, other: Mask) -> Mask:
        """A query sees the keys that both masks allow.

        Raises:
            ValueError: the shapes of two tensors do not fit each other; the masks have prefixes of different
                alignments, or different documents, block sizes or functions.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            bands=self.bands | other.bands,
            valid=_both(self.valid, other.valid, "valid"),
            allowed=_both(self.allowed, other.allowed, "allowed"),
            prefix=_both_prefixes(self.prefix, other.prefix),
            documents=_one_of(
                self.documents, other.documents, "documents", "number the pairs of ids, as in ids_a * n_b + ids_b"
            ),
            layout=_both_layouts(self.layout, other.layout),
            function=_one_of(
                self.function, other.function, "function", "write one function that does the work of both"
            ),
            tree=_both(self.tree, other.tree, "tree"),
        )

    def __bool__(self) -> bool:
        """Raise TypeError: ``a and b`` would silently be ``b``."""
        raise TypeError(
            "mask: got 'and', 'or', 'not' or 'if' on a mask; a & b lets a query attend to the keys that both allow"
        )

    def __or__(self, other: object) -> Mask:
        """Raise NotImplementedError: the key blocks to visit cannot be derived from a union."""
        raise NotImplementedError("mask: got '|', allowed are '&' and masks.boolean(a.dense(...) | b.dense(...))")

    __ror__ = __or__

    def __invert__(self) -> Mask:
        """Raise NotImplementedError, as ``|`` does."""
        raise NotImplementedError("mask: got '~', allowed are '&' and masks.boolean(~mask.dense(...))")

    @property
    def is_full(self) -> bool:
        """Whether the mask has no part that could hide a pair (a padding mask is one, even if it is all True)."""
        return self.only_bands and not self.bands

    @property
    def only_bands(self) -> bool:
        """Whether the mask has no parts but bands."""
        by_tensor = self.valid is not None or self.allowed is not None or self.documents is not None
        by_tensor = by_tensor or self.tree is not None
        return not by_tensor and self.prefix is None and self.layout is None and self.function is None

    def band(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
        """``(lower, upper)`` of all bands: query ``i`` sees keys ``i + lower <= j <= i + upper``; None: no limit.

        >>> causal("bottom_right").band(2, 5), causal("top_left").band(2, 5), window(2, 1).band(2, 5)
        ((None, 3), (None, 0), (1, 4))
        """
        shifts = [(band, _shift(band.align, seqlen_q, seqlen_k)) for band in self.bands]
        lower = [shift - band.left for band, shift in shifts if band.left is not None]
        upper = [shift + band.right for band, shift in shifts if band.right is not None]
        return max(lower) if lower else None, min(upper) if upper else None

    def dense(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        rows: Tensor | slice | None = None,
        keys: Tensor | slice | None = None,
        batch: int | None = None,
        nheads: int | None = None,
        shard: Shard = WHOLE,
        lengths: tuple[Tensor, Tensor] | None = None,
        device: torch.device | str | None = None,
        expand: bool = True,
    ) -> Tensor:
        """The bool tensor that defines this mask, ``(batch or 1, nheads_q or 1, seqlen_q, seqlen_k)``.

        Args:
            seqlen_q, seqlen_k: of the attention.
            rows, keys: which queries and keys to write out, int64 ``(n,)`` or a slice; all by default. Alignments
                remain those of the whole mask.
            batch, nheads: the number of batches and of query heads; only a mask with a function needs them.
            shard: the part of a larger attention that this is.
            lengths: the number of queries and of keys in each batch, int ``(batch,)``, if batches differ in length; at
                most ``seqlen_q`` and ``seqlen_k``. Alignments follow these lengths; pairs beyond them are not hidden.
            device: by default that of the mask's tensors, or torch's default if it has none.
            expand: with False, a dimension of queries or keys on which the mask does not depend may have size 1, and
                the result may share memory with a tensor of this mask.

        Raises:
            NotImplementedError: the mask has a function without ``eager=``.

        >>> causal().dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        >>> window(1, 0).dense(3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        if device is None:
            device = next((x.device for x in self.tensors().values()), None)
        q_index = indices.select(seqlen_q, rows, device)
        k_index = indices.select(seqlen_k, keys, device)
        i, j = q_index[:, None] + shard.first_query, k_index + shard.first_key
        whole_q, whole_k = shard.lengths(seqlen_q, seqlen_k)
        shifts: dict[str, Any] = {align: _shift(align, whole_q, whole_k) for align in ALIGNMENTS}
        if lengths is not None:
            shifts["bottom_right"] = (lengths[1] - lengths[0])[:, None, None, None]
        allowed: list[Tensor] = []
        for band in self.bands:
            if band.left is not None:
                allowed.append(j >= i + (shifts[band.align] - band.left))
            if band.right is not None:
                allowed.append(j <= i + (shifts[band.align] + band.right))
        if self.prefix is not None:
            behind = j <= i + shifts[self.prefix.align]
            allowed.append(behind | (j < self.prefix.lengths[:, None, None, None]))
        if self.documents is not None:
            ids_q = indices.part_of(self.documents.q[:, None, :, None], rows, None)
            ids_k = indices.part_of(self.documents.k[:, None, None, :], None, keys)
            allowed.append(ids_q == ids_k)
        is_expanded = bool(allowed)  # only the tensors so far certainly have all queries and keys
        if self.layout is not None:
            allowed.append(self.layout.dense(q_index, k_index))
        if self.valid is not None:
            allowed.append(indices.part_of(self.valid[:, None, None, :], None, keys))
        if self.allowed is not None:
            allowed.append(indices.part_of(self.allowed, rows, keys))
        if self.tree is not None:
            allowed.append(_among_newest(self.tree, rows, j - shifts["bottom_right"], whole_q))
        if self.function is not None:
            allowed.append(self.function.dense(batch, nheads, q_index, k_index, shard))
        if not allowed or (expand and not is_expanded):
            allowed.append(torch.ones(q_index.shape[0], k_index.shape[0], dtype=torch.bool, device=device))
        dense = functools.reduce(torch.bitwise_and, allowed)
        return dense[(None,) * (4 - dense.dim())]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of this mask, under the name of the argument that it was passed as."""
        named = {"padding(valid)": self.valid, "boolean(m)": self.allowed, "tree(m)": self.tree}
        if self.prefix is not None:
            named["prefix_lm(lengths)"] = self.prefix.lengths
        if self.documents is not None:
            named["documents(ids_q)"], named["documents(ids_k)"] = self.documents.q, self.documents.k
        if self.layout is not None:
            named["block_sparse(blocks)"] = self.layout.blocks
        if self.function is not None:
            named |= functions.tensors_of(self.function.args, "function")
        return {name: x for name, x in named.items() if x is not None}

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on ``device``."""
        return self.mapped(lambda x: x.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """The same mask with ``change(x)`` in place of each tensor."""
        prefix, documents, layout, function = self.prefix, self.documents, self.layout, self.function
        if prefix is not None:
            prefix = Prefix(change(prefix.lengths), prefix.align)
        if documents is not None:
            documents = Documents(change(documents.q), change(documents.k))
        if layout is not None:
            layout = Layout(change(layout.blocks), layout.block_q, layout.block_k)
        if function is not None:
            function = MaskFunction(function.function, function.eager, functions.mapped_args(function.args, change))
        return Mask(
            self.bands,
            None if self.valid is None else change(self.valid),
            None if self.allowed is None else change(self.allowed),
            prefix,
            documents,
            layout,
            function,
            None if self.tree is None else change(self.tree),
        )

    def check(self, batch: int, nheads: int, seqlen_q: int, seqlen_k: int, shard: Shard = WHOLE) -> None:
        """Raise ValueError if a tensor of this mask does not fit the shape of the attention."""
        exact: list[tuple[str, Tensor, str, tuple[int, ...]]] = []
        if self.valid is not None:
            exact.append(("padding(valid)", self.valid, "(batch, seqlen_k)", (batch, seqlen_k)))
        if self.prefix is not None:
            exact.append(("prefix_lm(lengths)", self.prefix.lengths, "(batch,)", (batch,)))
        if self.documents is not None:
            exact.append(("documents(ids_q)", self.documents.q, "(batch, seqlen_q)", (batch, seqlen_q)))
            exact.append(("documents(ids_k)", self.documents.k, "(batch, seqlen_k)", (batch, seqlen_k)))
        for name, x, dimensions, shape in exact:
            if tuple(x.shape) != shape:
                raise ValueError(f"mask: {name}: got shape {tuple(x.shape)}, allowed is {dimensions} = {shape}")
        if self.allowed is not None:
            full = (batch, nheads, seqlen_q, seqlen_k)
            _check_broadcast(self.allowed, "boolean(m)", "(batch, nheads_q, seqlen_q, seqlen_k)", full)
        if self.tree is not None:
            full = (batch, nheads, seqlen_q, shard.lengths(seqlen_q, seqlen_k)[0])
            _check_broadcast(self.tree, "tree(m)", "(batch, nheads_q, seqlen_q, seqlen_q)", full)
        if self.layout is not None:
            block_q, block_k = self.layout.block_q, self.layout.block_k
            _check_broadcast(
                self.layout.blocks,
                "block_sparse(blocks)",
                f"(batch, nheads_q, ceil(seqlen_q / {block_q}), ceil(seqlen_k / {block_k}))",
                (batch, nheads, -(-seqlen_q // block_q), -(-seqlen_k // block_k)),
            )


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


def _shift(align: CausalAlign, seqlen_q: int, seqlen_k: int) -> int:
    return seqlen_k - seqlen_q if align == "bottom_right" else 0


def _among_newest(m: Tensor, rows: Tensor | slice | None, newest: Tensor, n: int) -> Tensor:
    """The tree `m` of keys that are counted from the first of the newest `n`; older keys, below 0, are visible.

    Args:
        newest: int64 ``(n_keys,)`` or ``(batch, 1, 1, n_keys)``.
    """
    columns = indices.part_of(m, rows, None).expand(-1, -1, -1, n)
    columns = F.pad(columns, (1, 0), value=True)  # the first column stands for all older keys
    return torch.take_along_dim(columns, indices.four_dimensional((newest + 1).clamp(0, n)), dim=3)


def _check_broadcast(t: Tensor, name: str, dimensions: str, full: tuple[int, ...]) -> None:
    got = tuple(t.shape)
    if len(got) > 4 or any(g not in (1, f) for g, f in zip(reversed(got), reversed(full), strict=False)):
        raise ValueError(f"mask: {name}: got shape {got}, allowed are shapes that broadcast to {dimensions} = {full}")


def _fitting(a: Tensor, b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"mask: {name}: got shapes {got} to combine, allowed are shapes that broadcast") from None
    return a, b


def _both(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    a, b = _fitting(a, b, name)
    return a & b


def _both_prefixes(a: Prefix | None, b: Prefix | None) -> Prefix | None:
    if a is None or b is None:
        return b if a is None else a
    if a.align != b.align:
        raise ValueError(
            f"mask: got prefix_lm of align {a.align!r} and {b.align!r} to combine, allowed is one alignment; "
            "write one of the two as boolean(m)"
        )
    return Prefix(torch.minimum(*_fitting(a.lengths, b.lengths, "lengths")), a.align)


def _both_layouts(a: Layout | None, b: Layout | None) -> Layout | None:
    if a is None or b is None:
        return b if a is None else a
    sizes = (a.block_q, a.block_k), (b.block_q, b.block_k)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"mask: got block_sparse of block sizes {sizes[0]} and {sizes[1]} to combine, allowed is one size for "
            "both; repeat the blocks of the larger one (repeat_interleave)"
        )
    first, second = _fitting(a.blocks, b.blocks, "blocks")
    return Layout(first & second, a.block_q, a.block_k)


def _one_of(a: Part | None, b: Part | None, name: str, instead: str) -> Part | None:
    if a is None or b is None or a is b:
        return b if a is None else a
    raise ValueError(f"mask: got two different masks of {name}() to combine, allowed is one; {instead}")
