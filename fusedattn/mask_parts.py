"""The parts of a mask, one class for each kind, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fusedattn import functions, indices
from fusedattn.shard import WHOLE, Shard

CausalAlign = Literal["bottom_right", "top_left"]

ALIGNMENTS: tuple[CausalAlign, ...] = ("bottom_right", "top_left")


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees keys ``i + shift - left .. i + shift + right``.

    Attributes:
        left, right: ints, which may be negative; None for no limit on that side.
        align: ``shift`` is ``seqlen_k - seqlen_q`` for ``"bottom_right"`` and 0 for ``"top_left"``.
    """

    left: int | None
    right: int | None
    align: CausalAlign

    def __post_init__(self) -> None:
        check_align(self.align)
        for name, x in (("left", self.left), ("right", self.right)):
            if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
                raise TypeError(f"{name}: got {type(x).__name__}, allowed are an int and None (no limit)")


@dataclass(frozen=True, eq=False)
class Prefix:
    """A causal mask under which every query also sees the keys ``j < lengths[batch]``.

    Attributes:
        lengths: int32 or int64 ``(batch,)``.
        align: the alignment of the causal mask.
    """

    lengths: Tensor
    align: CausalAlign

    def __post_init__(self) -> None:
        check_align(self.align)
        check_int(self.lengths, "lengths", "(batch,)")


@dataclass(frozen=True, eq=False)
class Documents:
    """A query sees the keys of its own document.

    Attributes:
        q, k: the document of each query and key, int32 or int64 ``(batch, seqlen_q)`` and ``(batch, seqlen_k)``.
    """

    q: Tensor
    k: Tensor

    def __post_init__(self) -> None:
        check_int(self.q, "ids_q", "(batch, seqlen_q)")
        check_int(self.k, "ids_k", "(batch, seqlen_k)")


@dataclass(frozen=True, eq=False)
class Layout:
    """Query ``i`` sees key ``j`` iff ``blocks[..., i // block_q, j // block_k]``.

    Attributes:
        blocks: bool, broadcastable to ``(batch, nheads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``.
        block_q, block_k: positive multiples of 16.
    """

    blocks: Tensor
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        check_bool(self.blocks, "blocks")
        if self.blocks.dim() > 4:
            raise ValueError(
                f"blocks: got shape {tuple(self.blocks.shape)}, "
                "allowed is at most (batch, nheads_q, blocks of queries, blocks of keys)"
            )
        for x in (self.block_q, self.block_k):
            if isinstance(x, bool) or not isinstance(x, int):
                raise TypeError(f"block_size: got {type(x).__name__}, allowed are an int and two ints")
            if x <= 0 or x % 16:
                raise ValueError(f"block_size: got {x}, allowed are positive multiples of 16")

    def dense(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """Broadcasts to ``(batch, nheads_q, len(q_index), len(k_index))``."""
        return indices.part_of(self.blocks, q_index // self.block_q, k_index // self.block_k)


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """A function that says which pairs are visible.

    Attributes:
        function: ``@triton.jit``, ``function(batch, head, q_index, k_index, args)`` -> bool tile.
        eager: the same in torch; the indices are int64 tensors that broadcast to
            ``(batch, nheads_q, seqlen_q, seqlen_k)``, and so must the bool result. None if no eager code needs it.
        args: tensors, ints and floats; a tensor is a pointer in ``function`` and a tensor in ``eager``.
        key: the key of ``function`` for :func:`fusedattn.functions.registered`.
        numbers: the numbers of ``args``, serialised by :func:`fusedattn.functions.written`.
    """

    function: Any
    eager: Callable[..., Tensor] | None = None
    args: tuple[Any, ...] = ()
    key: str = field(init=False)
    numbers: str = field(init=False)

    def __post_init__(self) -> None:
        functions.check_eager(self.eager)
        functions.check_args(self.args)
        object.__setattr__(self, "key", functions.register(self.function))
        object.__setattr__(self, "numbers", functions.written(self.args))

    def __reduce__(self) -> tuple[Any, ...]:
        return functions.rebuilt, (MaskFunction, functions.Importable(self.function), self.eager, self.args)

    def dense(
        self, batch: int | None, nheads: int | None, q_index: Tensor, k_index: Tensor, shard: Shard = WHOLE
    ) -> Tensor:
        """The result of ``eager``; broadcasts to ``(batch, nheads, len(q_index), len(k_index))``."""
        if self.eager is None:
            raise NotImplementedError(
                "mask: got function(fn) with eager=None, allowed is a function of torch if the mask is written "
                "out; pass function(fn, eager=...)"
            )
        if batch is None or nheads is None:
            raise ValueError(
                f"batch, nheads: got {batch} and {nheads}, allowed are ints for a mask with a function, whose result "
                "may depend on both"
            )
        dense = self.eager(*indices.of_scores(batch, nheads, q_index, k_index, shard), self.args)
        check_bool(dense, "eager's result")
        return dense


def check_align(align: str) -> None:
    """Raise ValueError unless this is an alignment."""
    if align not in ALIGNMENTS:
        raise ValueError(f"align: got {align!r}, allowed are {ALIGNMENTS}")


def check_bool(t: Tensor, name: str) -> None:
    """Raise TypeError unless this is a bool tensor."""
    if not isinstance(t, Tensor) or t.dtype != torch.bool:
        got = f"a {t.dtype} tensor" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}, allowed is a torch.bool tensor (True = attend)")


def check_int(t: Tensor, name: str, dimensions: str) -> None:
    """Raise TypeError or ValueError unless this is an int32 or int64 tensor of these dimensions."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        got = f"a {t.dtype} tensor" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}, allowed is an int32 or int64 tensor")
    if t.dim() != (1 if dimensions == "(batch,)" else 2):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, allowed is {dimensions}")
