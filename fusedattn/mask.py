"""A mask as one value, of parts that combine with ``&``; :mod:`fusedattn.masks` has the functions that make one.

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
from fusedattn.mask_parts import (
    ALIGNMENTS,
    Band,
    CausalAlign,
    Documents,
    Layout,
    MaskFunction,
    Prefix,
    check_bool,
)
from fusedattn.patterns import Pattern, whole_of
from fusedattn.shard import WHOLE, Shard

Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to. Build one with the functions of :mod:`fusedattn.masks`.

    Attributes:
        bands: the diagonal bands that a visible pair lies in, all of them (empty: no limit).
        valid: bool ``(batch, seqlen_k)`` or None; keys that are ``False`` are hidden from every query.
        allowed: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``, or None.
        prefix, documents, layout, function: one of each kind, or None.
        tree: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_q)``, or None; see
            :func:`fusedattn.masks.tree`.
        pattern: a sparse pattern, which depends on the lengths of the call, or None.
    """

    bands: frozenset[Band] = frozenset()
    valid: Tensor | None = None
    allowed: Tensor | None = None
    prefix: Prefix | None = None
    documents: Documents | None = None
    layout: Layout | None = None
    function: MaskFunction | None = None
    tree: Tensor | None = None
    pattern: Pattern | None = None

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
                alignments, or different documents, block sizes, functions or sparse patterns.
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
            pattern=_both_patterns(self.pattern, other.pattern),
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
        by_tensor = by_tensor or self.tree is not None or self.pattern is not None
        return not by_tensor and self.prefix is None and self.layout is None and self.function is None

    def band(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
        """``(lower, upper)`` of all bands: query ``i`` sees keys ``i + lower <= j <= i + upper``; None: no limit.

        >>> [mask.band(2, 5) for mask in (masks.causal(), masks.causal("top_left"), masks.window(2, 1))]
        [(None, 3), (None, 0), (1, 4)]
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
            NotImplementedError: the mask has a function without ``eager=``, or a sparse pattern and `lengths`.

        >>> masks.causal().dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        >>> masks.window(1, 0).dense(3, 3)[0, 0].int().tolist()
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
            if self.pattern is not None:
                raise NotImplementedError("mask: got a sparse pattern and batches of different lengths, allowed is one")
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
        if self.pattern is not None:
            whole = whole_of(nheads, seqlen_q, seqlen_k, shard, device)
            at = q_index + shard.first_query + self.pattern.shift(whole)
            allowed.append(self.pattern.pairs(at[:, None], k_index + shard.first_key, whole))
        is_expanded = len(allowed) > 0  # only the tensors so far certainly have all queries and keys
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
        if self.pattern is not None:
            named |= self.pattern.tensors()
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
            None if self.pattern is None else self.pattern.mapped(change),
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
        if self.pattern is not None:
            self.pattern.check(batch, whole_of(nheads, seqlen_q, seqlen_k, shard))


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


def _both_patterns(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is None or b is None or a is b:
        return b if a is None else a
    raise ValueError(
        f"mask: got sparse patterns {type(a).__name__} and {type(b).__name__} to combine, allowed is one; write one of "
        "the two as boolean(m), with m = mask.dense(seqlen_q, seqlen_k)"
    )


def _one_of(a: Part | None, b: Part | None, name: str, instead: str) -> Part | None:
    if a is None or b is None or a is b:
        return b if a is None else a
    raise ValueError(f"mask: got two different masks of {name}() to combine, allowed is one; {instead}")
