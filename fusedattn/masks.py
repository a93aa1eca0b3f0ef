"""Attention masks as one value: ``True`` means "may attend", and masks combine with ``&``.

A :class:`Mask` is a description, not a ``(seqlen_q, seqlen_k)`` tensor. :meth:`Mask.dense` writes the tensor
out, and that tensor *defines* the mask: eager code multiplies by it, and the kernels, which read the parts
directly to skip what is hidden, are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CausalAlign = Literal["bottom_right", "top_left"]

_ALIGNMENTS = ("bottom_right", "top_left")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to. Build one with the functions of this module.

    Attributes:
        causal: the alignments of the causal constraints in force (empty: not causal).
        valid: bool ``(batch, seqlen_k)`` or None; keys that are ``False`` are hidden from every query.
        allowed: bool, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``, or None.
    """

    causal: frozenset[CausalAlign] = frozenset()
    valid: Tensor | None = None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        for align in self.causal:
            if align not in _ALIGNMENTS:
                raise ValueError(f"align: got {align!r}, allowed are {_ALIGNMENTS}")
        if self.valid is not None:
            _check_bool(self.valid, "valid")
            if self.valid.dim() != 2:
                raise ValueError(f"valid: got shape {tuple(self.valid.shape)}, allowed is (batch, seqlen_k)")
        if self.allowed is not None:
            _check_bool(self.allowed, "m")
            if self.allowed.dim() > 4:
                raise ValueError(
                    f"m: got shape {tuple(self.allowed.shape)}, "
                    "allowed is at most (batch, nheads_q, seqlen_q, seqlen_k)"
                )

    def __and__(self, other: Mask) -> Mask:
        """A query attends where both masks allow it."""
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            causal=self.causal | other.causal,
            valid=_both(self.valid, other.valid, "valid"),
            allowed=_both(self.allowed, other.allowed, "allowed"),
        )

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked by construction (a padding mask that happens to be all True counts as one)."""
        return not self.causal and self.valid is None and self.allowed is None

    def diagonal(self, seqlen_q: int, seqlen_k: int) -> int | None:
        """The causal offset: query ``i`` sees keys ``j <= i + diagonal``; None when not causal.

        >>> causal("bottom_right").diagonal(2, 5), causal("top_left").diagonal(2, 5)
        (3, 0)
        """
        if not self.causal:
            return None
        return min(0 if align == "top_left" else seqlen_k - seqlen_q for align in self.causal)

    def dense(self, seqlen_q: int, seqlen_k: int, *, device: torch.device | str | None = None) -> Tensor:
        """The bool tensor that defines this mask, ``(batch or 1, nheads_q or 1, seqlen_q, seqlen_k)``.

        >>> causal().dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        if device is None:
            device = next((t.device for t in (self.valid, self.allowed) if t is not None), None)
        dense = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        diagonal = self.diagonal(seqlen_q, seqlen_k)
        if diagonal is not None:
            dense = dense.tril(diagonal)
        if self.valid is not None:
            dense = dense & self.valid[:, None, None, :]
        if self.allowed is not None:
            dense = dense & self.allowed
        return dense

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on ``device``."""
        return Mask(
            self.causal,
            None if self.valid is None else self.valid.to(device),
            None if self.allowed is None else self.allowed.to(device),
        )

    def check(self, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raise ValueError where a tensor of this mask does not fit the shape of the attention."""
        if self.valid is not None and tuple(self.valid.shape) != (batch, seqlen_k):
            raise ValueError(
                f"mask: padding(valid) must have shape (batch, seqlen_k) = {(batch, seqlen_k)}, "
                f"got {tuple(self.valid.shape)}"
            )
        if self.allowed is not None:
            full = (batch, nheads, seqlen_q, seqlen_k)
            got = tuple(self.allowed.shape)
            if len(got) > 4 or any(g not in (1, f) for g, f in zip(reversed(got), reversed(full), strict=False)):
                raise ValueError(
                    f"mask: boolean(m) must be broadcastable to (batch, nheads_q, seqlen_q, seqlen_k) = {full}, "
                    f"got {got}"
                )


def full() -> Mask:
    """Every query attends to every key."""
    return Mask()


def causal(align: CausalAlign = "bottom_right") -> Mask:
    """Queries do not look ahead.

    The two alignments differ when ``seqlen_q != seqlen_k``. ``"bottom_right"`` lets the last query see every
    key (query ``i`` sees ``j <= i + seqlen_k - seqlen_q``), which is what decoding with a cache needs and what
    FlashAttention means. ``"top_left"`` lets query ``i`` see ``j <= i``, as ``is_causal`` of torch does.

    Raises:
        ValueError: ``align`` is neither.
    """
    return Mask(causal=frozenset({align}))


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


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Accept what callers pass as a mask: a :class:`Mask`, a bool tensor (True = attend), or None (see all)."""
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return boolean(mask)
    raise TypeError(f"mask: got {type(mask).__name__}, allowed are fusedattn.masks.Mask, a bool tensor, None")


def _check_bool(t: Tensor, name: str) -> None:
    if not isinstance(t, Tensor) or t.dtype != torch.bool:
        got = f"a {t.dtype} tensor" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}, allowed is a torch.bool tensor (True = attend)")


def _both(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise ValueError(f"mask: cannot combine `{name}` of shapes {tuple(a.shape)} and {tuple(b.shape)}") from None
    return a & b
