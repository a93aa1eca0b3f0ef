"""The options of a call: every argument besides q, k and v."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from torch import Tensor

from fusedattn.biases import Bias
from fusedattn.fp8 import FP8
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.shard import WHOLE, Shard


class Keywords(TypedDict, total=False):
    """The keyword arguments, for type checkers; :func:`fusedattn.attention` says what each means."""

    mask: Mask | Tensor | None
    rope: Rope | None
    qk_norm: QKNorm | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    score_mod: ScoreMod | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    deterministic: bool
    num_splits: int | None
    precision: FP8 | None
    backend: Literal["triton", "torch"] | None


@dataclass(frozen=True)
class Packed:
    """Where packed sequences lie in a batch of 1: int32 ``(n_sequences + 1,)`` each, and lengths none exceeds.

    `cu_seqlens_k` is None if the keys lie in a cache.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def n_sequences(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    """The lengths of packed sequences; waits for a GPU."""
    return [stop - start for start, stop in itertools.pairwise(cu_seqlens.tolist())]


@dataclass(eq=False)  # not frozen: that would take a fiftieth of a short call
class Options:
    """One call of :func:`fusedattn.attention` or :func:`fusedattn.attention_varlen`, besides q, k and v.

    :func:`fusedattn.prepare.prepared` checks them and fills in the defaults. After that the scale is positive, and
    dropout has a seed.

    Attributes:
        packed: where the sequences lie; None if each batch is one sequence.
        shard: the part of a larger attention that this call computes.
        cache: the cache whose memory k and v are; None if they are tensors of this call.
        precision: how the operands of products are rounded; None: not further than their dtype.
        num_splits: the programs that share the keys of a small tile of queries; None for a fixed number of keys each.
    """

    mask: Mask
    rope: Rope | None = None
    bias: Bias | None = None
    scale: float = 1.0
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    deterministic: bool = True
    return_lse: bool = False
    return_max: bool = False
    packed: Packed | None = None
    shard: Shard = WHOLE
    cache: KVCache | None = None
    num_splits: int | None = None
    qk_norm: QKNorm | None = None
    precision: FP8 | None = None

    def of_numbers(self) -> dict[str, Any]:
        """The options that decide the numbers, as keyword arguments of :func:`fusedattn.reference.attention`."""
        return {name: getattr(self, name) for name in _OF_NUMBERS}

    def of_scores(self) -> dict[str, Any]:
        """The options that decide the scores, as keyword arguments of :func:`fusedattn.reference.largest_scores`."""
        return {name: x for name, x in self.of_numbers().items() if name not in _AFTER_SCORES}

    def returned(
        self, out: Tensor, lse: Tensor | None, largest: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """What the caller asked for: out, or a tuple of out and lse, largest or both."""
        if self.return_max and largest is not None:
            return (out, lse, largest) if self.return_lse and lse is not None else (out, largest)
        return (out, lse) if self.return_lse and lse is not None else out


_NOT_OF_NUMBERS = frozenset({"deterministic", "return_lse", "return_max", "packed", "cache", "num_splits", "precision"})
# Listed once: torch.compile of torch 2.11 cannot trace vars() of an object.
_OF_NUMBERS = tuple(option.name for option in fields(Options) if option.name not in _NOT_OF_NUMBERS)
_AFTER_SCORES = frozenset({"sinks", "dropout_p", "dropout_seed"})
