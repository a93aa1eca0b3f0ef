"""Rotary position embedding: tables, positions, and the eager rotation.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). Feature pair ``(a, b)`` of
the token at position ``p`` is turned by the angle ``p * theta_i``::

    a' = a cos - b sin        b' = b cos + a sin

so that ``q . k`` depends on positions only through their difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """Cos/sin tables, the pairing of features, and the positions of queries and keys.

    Attributes:
        cos, sin: float32 ``(n_positions, rotary_dim / 2)``, or ``(batch, n_positions, rotary_dim / 2)`` for
            tables that differ per batch. float32 whatever the dtype of q: positions and frequencies lose
            their meaning in lower precision at long context. They may be scaled (YaRN, LongRoPE): the
            backward applies the transpose of the rotation, not its inverse.
        interleaved: False pairs feature ``i`` with ``i + rotary_dim / 2`` (Llama, GPT-NeoX); True pairs
            ``2i`` with ``2i + 1`` (GPT-J, RoFormer).
        positions_q, positions_k: int32 or int64, ``(seqlen,)`` or ``(batch, seqlen)``, rows of the tables.
            By default keys count from 0 and the last query stands at the last key, as in the bottom-right
            causal mask.

    Only the first ``rotary_dim <= head_dim`` features of a head are rotated.

    Raises:
        TypeError: a table is not float32, or positions are not integers.
        ValueError: the shapes do not fit.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            table = getattr(self, name)
            if not isinstance(table, Tensor) or table.dtype != torch.float32:
                got = table.dtype if isinstance(table, Tensor) else type(table).__name__
                raise TypeError(f"rope.{name}: got {got}, allowed is a torch.float32 tensor")
        self._check_constant()
        if self.cos.shape != self.sin.shape or self.cos.dim() not in (2, 3):
            raise ValueError(
                f"rope: got cos {tuple(self.cos.shape)} and sin {tuple(self.sin.shape)}, allowed is one shape, "
                "(n_positions, rotary_dim / 2) or (batch, n_positions, rotary_dim / 2)"
            )
        if self.cos.device != self.sin.device:
            raise ValueError(f"rope: got cos on {self.cos.device} and sin on {self.sin.device}, allowed is one device")
        for name in ("positions_q", "positions_k"):
            positions = getattr(self, name)
            if positions is None:
                continue
            if not isinstance(positions, Tensor) or positions.dtype not in (
                torch.int32,
                torch.int64,
            ):
                got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
                raise TypeError(f"rope.{name}: got {got}, allowed is an int32 or int64 tensor")
            if positions.dim() not in (1, 2):
                raise ValueError(
                    f"rope.{name}: got shape {tuple(positions.shape)}, allowed are (seqlen,) and (batch, seqlen)"
                )

    def _check_constant(self) -> None:
        for name in ("cos", "sin"):
            if getattr(self, name).requires_grad:
                raise NotImplementedError(
                    f"rope.{name}: got requires_grad=True, allowed is False: tables get no gradient; detach it"
                )

    @classmethod
    def from_theta(
        cls,
        rotary_dim: int,
        max_seqlen: int,
        theta: float = 10000.0,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> Rope:
        """The standard tables: angle of pair ``i`` at position ``p`` is ``p * theta ** (-2i / rotary_dim)``.

        Args:
            rotary_dim: even; how many features of each head rotate.
            max_seqlen: positions ``0 .. max_seqlen - 1`` get a row.

        Raises:
            ValueError: ``rotary_dim`` is odd or not positive, or ``theta`` is not positive and finite.
        """
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim: got {rotary_dim}, allowed are positive even numbers")
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen: got {max_seqlen}, allowed are 0 and more")
        if not 0.0 < theta < math.inf:
            raise ValueError(f"theta: got {theta}, allowed are positive finite numbers")
        # In float64 to the end: an angle near 1e6 radians has only 2-3 correct digits in float32.
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        positions = torch.arange(max_seqlen, dtype=torch.float64, device=device)
        angles = positions[:, None] * theta**-exponents
        return cls(angles.cos().float(), angles.sin().float(), interleaved=interleaved)

    @property
    def rotary_dim(self) -> int:
        """The number of features that rotate (twice the width of the tables)."""
        return 2 * self.cos.shape[-1]

    @property
    def n_positions(self) -> int:
        """The number of rows of the tables; positions must be less."""
        return self.cos.shape[-2]

    def at(self, positions_q: Tensor | None, positions_k: Tensor | None) -> Rope:
        """The same tables at other positions."""
        return replace(self, positions_q=positions_q, positions_k=positions_k)

    def to(self, device: torch.device | str) -> Rope:
        """The same tables and positions on ``device``."""
        return self.mapped(lambda x: x.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Rope:
        """The same rotation with ``change(x)`` in place of each tensor."""
        positions = (None if x is None else change(x) for x in (self.positions_q, self.positions_k))
        return Rope(change(self.cos), change(self.sin), self.interleaved, *positions)

    def check(self, batch: int, seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
        """Raise ValueError if the tables or positions do not fit the attention."""
        self.check_shapes(batch, seqlen_q, seqlen_k, head_dim)
        self.check_lengths(seqlen_q, seqlen_k)

    def check_shapes(self, batch: int, seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
        """Raise ValueError if the shapes of the tables or positions do not fit the attention."""
        if not 0 < self.rotary_dim <= head_dim:
            raise ValueError(
                f"rope: got tables for rotary_dim {self.rotary_dim}, allowed are 2 .. head_dim = {head_dim}"
            )
        if self.cos.dim() == 3 and self.cos.shape[0] not in (1, batch):
            raise ValueError(f"rope: got tables for batch {self.cos.shape[0]}, allowed are 1 and batch = {batch}")
        self._check_constant()
        for name, positions, seqlen in (
            ("positions_q", self.positions_q, seqlen_q),
            ("positions_k", self.positions_k, seqlen_k),
        ):
            if positions is not None and tuple(positions.shape) not in (
                (seqlen,),
                (1, seqlen),
                (batch, seqlen),
            ):
                raise ValueError(
                    f"rope.{name}: got shape {tuple(positions.shape)}, allowed are {(seqlen,)} and {(batch, seqlen)}"
                )

    def check_lengths(self, seqlen_q: int, seqlen_k: int) -> None:
        """Raise ValueError if the default positions of a sequence of these lengths are not in the tables."""
        has_rows = seqlen_k <= self.n_positions
        if self.positions_k is None and not has_rows:
            raise ValueError(
                f"rope: got tables of {self.n_positions} rows, allowed are {seqlen_k} and more, for keys at "
                f"positions 0 .. {seqlen_k - 1}; make longer tables or pass positions_k"
            )
        if self.positions_q is None and seqlen_q > seqlen_k > 0:
            raise ValueError(
                f"rope.positions_q: got None, allowed are tensors if seqlen_q = {seqlen_q} > seqlen_k = {seqlen_k}: by "
                "default the last query has the position of the last key, and the first would be before position 0"
            )
        if self.positions_q is None and seqlen_q > 0 and not has_rows:
            raise ValueError(
                f"rope: got tables of {self.n_positions} rows, allowed are {seqlen_k} and more, for queries at "
                f"positions {seqlen_k - seqlen_q} .. {seqlen_k - 1}; make longer tables or pass positions_q"
            )

    def check_positions(self) -> None:
        """Raise ValueError if a position lies outside the tables. Reads the positions: costs a GPU sync."""
        for name in ("positions_q", "positions_k"):
            positions = getattr(self, name)
            if positions is None or positions.numel() == 0:
                continue
            low, high = (int(x) for x in torch.aminmax(positions))
            if low < 0 or high >= self.n_positions:
                raise ValueError(
                    f"rope.{name}: got positions {low} .. {high}, allowed are 0 .. {self.n_positions - 1} "
                    "(the rows of the tables)"
                )

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q ``(batch, nheads_q, seqlen_q, head_dim)`` and k ``(batch, nheads_kv, seqlen_k, head_dim)``."""
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        if seqlen_k == 0:  # nothing to attend to: q is never read
            return q, k
        positions_k = self.positions_k
        if positions_k is None:
            positions_k = torch.arange(seqlen_k, device=k.device)
        positions_q = self.positions_q
        if positions_q is None:
            positions_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)
        return (
            apply_rope(q, self.cos, self.sin, positions_q, interleaved=self.interleaved),
            apply_rope(k, self.cos, self.sin, positions_k, interleaved=self.interleaved),
        )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` features of ``x``; eager, differentiable in ``x``.

    Computed in float32 (float64 for a float64 ``x``) and rounded once.

    Args:
        x: ``(batch, nheads, seqlen, head_dim)``.
        cos, sin: float32 ``(n_positions, rotary_dim / 2)`` or ``(batch, n_positions, rotary_dim / 2)``.
        positions: int ``(seqlen,)`` or ``(batch, seqlen)``, rows of the tables.
        interleaved: pair ``(2i, 2i + 1)`` rather than ``(i, i + rotary_dim / 2)``.

    Returns:
        The rotated tensor, shape and dtype of ``x``.
    """
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    cos = _rows(cos, positions).to(compute_dtype)
    sin = _rows(sin, positions).to(compute_dtype)
    rotary, rest = x[..., : 2 * half].to(compute_dtype), x[..., 2 * half :]
    if interleaved:
        a, b = rotary.unflatten(-1, (half, 2)).unbind(-1)
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotary.split(half, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows of ``table`` at ``positions``: ``(batch or 1, 1, seqlen, rotary_dim / 2)``."""
    inside = (positions >= 0) & (positions < table.shape[-2])
    positions = positions.clamp(0, max(table.shape[-2] - 1, 0))
    if table.dim() == 2:
        rows = table[positions]  # (seqlen, half) or (batch, seqlen, half)
    elif positions.dim() == 1:
        rows = table[:, positions]
    else:
        batch = max(table.shape[0], positions.shape[0])
        index = torch.arange(batch, device=table.device)[:, None]
        rows = table.expand(batch, -1, -1)[index, positions.expand(batch, -1)]
    # NaN for a position outside the tables: no entry would be right.
    return rows.masked_fill(~inside[..., None], torch.nan).unsqueeze(-3)
