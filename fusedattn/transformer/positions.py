"""Position encodings of a Transformer: sinusoids, learned vectors, rotations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedattn.readable import can_read
from fusedattn.rope import Rope, apply_rope


class PositionalEncoding(nn.Module):
    """Adds the sinusoids of Vaswani et al., 2017, section 3.5::

        PE[p, 2i] = sin(p / 10000^(2i / d_model))    PE[p, 2i + 1] = cos(p / 10000^(2i / d_model))

    An odd ``d_model`` ends with a sine.

    Args:
        d_model: width of the input.
        max_len: positions ``0 .. max_len - 1`` exist.
        dropout: dropout on the sum, in training.
    """

    table: Tensor

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        positions = torch.arange(max_len, dtype=torch.float64)
        frequencies = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angles = positions[:, None] * frequencies  # (max_len, ceil(d_model / 2))
        table = torch.empty(max_len, d_model)
        table[:, 0::2] = angles.sin()
        table[:, 1::2] = angles[:, : d_model // 2].cos()
        self.register_buffer("table", table, persistent=False)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """``x``, ``(batch, seqlen, d_model)``, plus rows ``offset .. offset + seqlen - 1``.

        Args:
            offset: an int, or int ``(batch,)``: one for each sequence. On a GPU such a tensor is not
                read; a position outside ``0 .. max_len - 1`` gives NaN there.

        Raises:
            ValueError: a position outside ``0 .. max_len - 1``, or an ``x`` of another width.
        """
        return self.dropout(x + _rows(self.table, x, offset))


class LearnedPositionalEncoding(nn.Module):
    """Adds one learned vector per position (Gehring et al., 2017; BERT; GPT-2).

    Args:
        d_model: width of the input.
        max_len: positions ``0 .. max_len - 1`` exist.
        dropout: dropout on the sum, in training.
    """

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding: nn.Embedding = nn.Embedding(max_len, d_model)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """``x``, ``(batch, seqlen, d_model)``, plus rows ``offset .. offset + seqlen - 1``.

        Args:
            offset: an int, or int ``(batch,)``: one for each sequence. On a GPU such a tensor is not
                read; a position outside ``0 .. max_len - 1`` gives NaN there.

        Raises:
            ValueError: a position outside ``0 .. max_len - 1``, or an ``x`` of another width.
        """
        return self.dropout(x + _rows(self.embedding.weight, x, offset))


class RotaryPositionalEmbedding(nn.Module):
    """Holds the tables of :class:`fusedattn.Rope` (Su et al., 2021) and moves them with the model.

    ``cos`` and ``sin``, float32 ``(max_len, rotary_dim / 2)``, stay float32 when the model is cast:
    in half precision neighbouring positions would coincide. They are not in the state dict.

    Args:
        rotary_dim: the number of features of each head that rotate; even.
        max_len: positions ``0 .. max_len - 1`` exist.
        theta: base of the frequencies.
        interleaved: pair features ``(2i, 2i + 1)`` rather than ``(i, i + rotary_dim / 2)``.

    Raises:
        ValueError: ``rotary_dim`` is odd or not positive.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary_dim: int, max_len: int, theta: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.max_len = max_len
        self.theta = theta
        self.interleaved = interleaved
        rope = Rope.from_theta(rotary_dim, max_len, theta)
        self.register_buffer("cos", rope.cos, persistent=False)
        self.register_buffer("sin", rope.sin, persistent=False)

    def tables(self, positions_q: Tensor | None = None, positions_k: Tensor | None = None) -> Rope:
        """The tables as a :class:`fusedattn.Rope` for attention.

        Args:
            positions_q, positions_k: int ``(seqlen,)`` or ``(batch, seqlen)``; by default keys
                count from 0 and the last query stands at the last key.
        """
        return Rope(self.cos, self.sin, self.interleaved, positions_q, positions_k)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """``x``, ``(batch, heads, seqlen, head_dim)``, rotated; computed in float32, rounded once.

        Args:
            positions: int ``(seqlen,)`` or ``(batch, seqlen)``; by default ``0 .. seqlen - 1``.

        Raises:
            ValueError: the shapes do not fit, or a position is outside ``0 .. max_len - 1``.
        """
        if x.dim() != 4:
            raise ValueError(f"x: got shape {tuple(x.shape)}, allowed is (batch, heads, seqlen, head_dim)")
        batch, _, seqlen, head_dim = x.shape
        if positions is None:
            positions = torch.arange(seqlen, device=x.device)
        rope = self.tables(positions, positions)
        rope.check(batch, seqlen, seqlen, head_dim)
        rope.check_positions()
        return apply_rope(x, self.cos, self.sin, positions, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return (
            f"rotary_dim={self.rotary_dim}, max_len={self.max_len}, theta={self.theta}, interleaved={self.interleaved}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositionalEmbedding:
        # A cast rounds the tables, and leaving the meta device loses them: recompute them.
        was_meta = self.cos.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta or self.cos.dtype != torch.float32:
            rope = Rope.from_theta(self.rotary_dim, self.max_len, self.theta, device="cpu")
            self.cos, self.sin = rope.cos.to(self.cos.device), rope.sin.to(self.cos.device)
        return self


def _rows(table: Tensor, x: Tensor, offset: int | Tensor) -> Tensor:
    """Rows ``offset .. offset + seqlen - 1`` of ``table``, in the dtype of ``x``."""
    max_len, d_model = table.shape
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x: got shape {tuple(x.shape)}, allowed is (batch, seqlen, d_model = {d_model})")
    if isinstance(offset, Tensor):
        return _rows_of_sequences(table, x, offset)
    _check_positions(offset, offset + x.shape[1], max_len)
    return table[offset : offset + x.shape[1]].to(x.dtype)


def rows_at(table: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """Rows of ``table`` at ``positions``, int64 ``(seqlen,)``, in the dtype of ``x``, ``(batch, seqlen, d_model)``.

    Raises:
        ValueError: a position outside the table, or an ``x`` of another width. On a GPU positions are not read: one
            outside gives NaN.
    """
    if x.dim() != 3 or x.shape[-1] != table.shape[1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, allowed is (batch, seqlen, d_model = {table.shape[1]})")
    max_len = table.shape[0]
    if positions.numel() and can_read(positions):
        _check_positions(int(positions.min()), int(positions.max()) + 1, max_len)
    inside = (positions >= 0) & (positions < max_len)
    return table[positions.clamp(0, max_len - 1)].to(x.dtype).masked_fill(~inside[..., None], torch.nan)


def _rows_of_sequences(table: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Rows that start at another offset in each sequence, ``(batch, seqlen, d_model)``."""
    if tuple(offsets.shape) != (x.shape[0],):
        raise ValueError(f"offset: got shape {tuple(offsets.shape)}, allowed is (batch,) = {(x.shape[0],)}")
    return rows_at(table, x, offsets[:, None] + torch.arange(x.shape[1], device=offsets.device))


def _check_positions(start: int, end: int, max_len: int) -> None:
    if start < 0 or end > max_len:
        raise ValueError(f"x: got positions {start} .. {end - 1}, allowed are 0 .. max_len - 1 = {max_len - 1}")
