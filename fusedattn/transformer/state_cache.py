"""What linear attention keeps of the tokens so far: a state in place of their keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedattn.linear.state import LinearState
from fusedattn.readable import can_read
from fusedattn.rope import Rope


@dataclass(frozen=True, eq=False)
class StateCache:
    """The state of one layer for a batch of sequences, changed in place; its size does not depend on their lengths.

    It stands where a layer of softmax attention has a :class:`fusedattn.KVCache`. Tokens cannot be taken back out of a
    state: a length that is set to 0 begins a sequence anew, and another length than that of the state is an error on a
    CPU, and gives NaN on a GPU or under a compiler.

    Attributes:
        state: of the tokens of each sequence, ``(batch, nheads_kv, n_features, head_dim_v)`` and ``(batch, nheads_kv,
            n_features)``.
        counted: int32 ``(batch,)``: the number of these tokens.
        lengths: int32 ``(batch,)``: the tokens of each sequence, changed in place before new tokens are added. Layers
            share this tensor.
        left_padding: int32 ``(batch,)``: tokens at the start of a sequence that no query sees; None for none.
        rope: tables for queries and keys, whose positions are the numbers of their tokens.

    Raises:
        TypeError, ValueError: ``left_padding`` is not such a tensor, or ``rope`` has positions.
    """

    state: LinearState
    counted: Tensor
    lengths: Tensor
    left_padding: Tensor | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        padding = self.left_padding
        if padding is not None and padding.dtype != torch.int32:
            raise TypeError(f"left_padding: got {padding.dtype}, allowed is a torch.int32 tensor")
        if padding is not None and (padding.shape, padding.device) != (self.lengths.shape, self.lengths.device):
            raise ValueError(
                f"left_padding: got shape {tuple(padding.shape)} on {padding.device}, allowed is (batch,) = "
                f"{tuple(self.lengths.shape)} on {self.lengths.device}"
            )
        if self.rope is not None and not self.rope.positions_q is self.rope.positions_k is None:
            raise ValueError("rope: got positions, allowed are tables without: positions are the numbers of tokens")

    @classmethod
    def empty(
        cls,
        nheads_kv: int,
        n_features: int,
        head_dim_v: int,
        *,
        lengths: Tensor,
        dtype: torch.dtype = torch.float32,
        left_padding: Tensor | None = None,
        rope: Rope | None = None,
    ) -> StateCache:
        """The states before the first tokens, on the device of `lengths`; ``dtype`` is float64 for float64 inputs."""
        shape = (lengths.shape[0], nheads_kv, n_features)
        kv = torch.zeros(*shape, head_dim_v, dtype=dtype, device=lengths.device)
        k_sum = torch.zeros(shape, dtype=dtype, device=lengths.device)
        return cls(LinearState(kv, k_sum), torch.zeros_like(lengths), lengths, left_padding, rope)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.lengths.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """The memory that new tokens change, besides the lengths."""
        return (*self.state, self.counted)

    def numbers(self, n: int) -> Tensor:
        """The numbers of the newest n tokens of each sequence, int64 ``(batch, n)``."""
        return (self.lengths - n)[:, None] + torch.arange(n, device=self.lengths.device)

    def visible(self, n: int) -> Tensor | None:
        """Which of the newest n tokens queries may see, bool ``(batch, n)``; None if all."""
        return None if self.left_padding is None else self.numbers(n) >= self.left_padding[:, None]

    def before(self, n: int) -> LinearState:
        """The state before the newest n tokens, which `lengths` counts already; 0 for a sequence that begins with them.

        Raises:
            ValueError: a state has other tokens than those before. On a GPU it is not read: the result is NaN.
        """
        start = self.lengths - n
        begins = start == 0
        known = begins | (start == self.counted)
        if can_read(known) and not known.all():
            raise ValueError(
                f"lengths: got {start.tolist()} before the new tokens, allowed are those of the states, "
                f"{self.counted.tolist()} and 0: a state forgets no token"
            )
        stays = known & ~begins
        instead = torch.where(begins, 0.0, math.nan).to(self.state.kv.dtype)

        def of_sequences(x: Tensor) -> Tensor:
            flags, others = (of_all.view(-1, *(1,) * (x.dim() - 1)) for of_all in (stays, instead))
            return torch.where(flags, x, others)

        return LinearState(*map(of_sequences, self.state))

    def store(self, state: LinearState) -> None:
        """Write the state of all tokens that `lengths` counts."""
        for x, new in zip(self.tensors(), (*state, self.lengths), strict=True):
            x.copy_(new)

    def sequences(self, own: slice, lengths: Tensor) -> StateCache:
        """Some sequences alone, in the same memory; `lengths` are theirs."""
        return replace(
            self,
            state=LinearState(*(x[own] for x in self.state)),
            counted=self.counted[own],
            lengths=lengths,
            left_padding=None if self.left_padding is None else self.left_padding[own],
        )
