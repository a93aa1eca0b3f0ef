"""A user's function of the scores, beside its derivative: what the kernels compute is written down, not derived.

Dong et al., "FlexAttention" (2024), has the function alone and differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedattn import functions, indices


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """What becomes of each score, before the bias is added.

    Attributes:
        function: ``@triton.jit``, ``function(score, batch, head, q_index, k_index, args)`` -> score; float32 tiles in
            and out (float64 for float64 inputs).
        derivative: ``@triton.jit`` with the same arguments, of the score that went in -> d(result) / d(score).
        eager: ``function`` in torch, differentiable: score ``(batch, nheads_q, rows, keys)``, batch
            ``(batch, 1, 1, 1)``, head ``(nheads_q, 1, 1)``, q_index ``(rows, 1)``, k_index ``(keys,)``, int64. None
            where no eager code needs it.
        args: tensors, ints and floats; a tensor is a pointer in the ``@triton.jit`` functions. They get no gradient.
        function_key, derivative_key: what :func:`fusedattn.functions.registered` finds the two under.
        numbers: those of ``args``, as :func:`fusedattn.functions.written`.

    Raises:
        TypeError: ``function`` or ``derivative`` is no ``@triton.jit`` function, ``eager`` no function, or ``args`` no
            tuple of tensors, ints and floats.
    """

    function: Any
    derivative: Any
    eager: Callable[..., Tensor] | None = None
    args: tuple[Any, ...] = ()
    function_key: str = field(init=False)
    derivative_key: str = field(init=False)
    numbers: str = field(init=False)

    def __post_init__(self) -> None:
        functions.check_eager(self.eager)
        functions.check_args(self.args)
        object.__setattr__(self, "function_key", functions.register(self.function, "function"))
        object.__setattr__(self, "derivative_key", functions.register(self.derivative, "derivative"))
        object.__setattr__(self, "numbers", functions.written(self.args))

    def apply(
        self, scores: Tensor, *, rows: Tensor | None = None, keys: Tensor | None = None, first_batch: int = 0
    ) -> Tensor:
        """The result of ``eager`` for scores ``(batch, nheads_q, rows, keys)``.

        Args:
            rows, keys: which queries and keys they belong to, int64 ``(n,)``; counted from 0 by default.
            first_batch: the index of the first batch.

        Raises:
            NotImplementedError: there is no ``eager``.
        """
        if self.eager is None:
            raise NotImplementedError(
                "score_mod: got eager=None, allowed is a function of torch where the scores are written out; "
                "pass ScoreMod(function, derivative, eager=...)"
            )
        batch, nheads, n_rows, n_keys = scores.shape
        q_index = indices.select(n_rows, rows, scores.device)
        k_index = indices.select(n_keys, keys, scores.device)
        return self.eager(scores, *indices.of_scores(batch, nheads, q_index, k_index, first_batch), self.args)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of ``args``, by name."""
        return functions.tensors_of(self.args, "score_mod")

    def to(self, device: torch.device | str) -> ScoreMod:
        """The same with its tensors on ``device``."""
        return ScoreMod(self.function, self.derivative, self.eager, functions.args_to(self.args, device))
