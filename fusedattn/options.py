"""What a call computes, checked: the options, and where packed sequences lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusedattn.biases import Bias
from fusedattn.masks import Mask
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod


@dataclass(eq=False)  # and not frozen: of a short call, making this would be a fiftieth
class Options:
    """The keyword arguments of :func:`fusedattn.attention` that say what is computed, checked; scale positive."""

    mask: Mask
    rope: Rope | None
    bias: Bias | None
    scale: float
    softcap: float | None
    score_mod: ScoreMod | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None


@dataclass(frozen=True)
class Packed:
    """Where sequences lie that share a batch of 1: int32 ``(n_sequences + 1,)`` each, and lengths none exceeds."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def n_sequences(self) -> int:
        """How many there are."""
        return self.cu_seqlens_q.shape[0] - 1
