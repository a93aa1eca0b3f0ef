"""A user's function of the scores with its derivative, which the user writes: nothing is derived.

Dong et al., "FlexAttention" (2024), takes the function alone and differentiates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import functions, indices
from fusedattn.shard import WHOLE, Shard


@dataclass(frozen=True, eq=False)
class ArgGradient:
    """How a score depends on an entry of one tensor of a :class:`ScoreMod`, so that the tensor gets a gradient.

    Attributes:
        arg: the index of the tensor in ``args``.
        index: ``@triton.jit``, ``index(batch, head, q_index, k_index, args)`` -> the index of the entry, in the
            flattened tensor, that the score of this pair uses; an index outside the tensor adds nothing. The gradient
            is fastest if the index depends on neither q_index nor k_index, slower if on one, slowest if on both.
        derivative: ``@triton.jit``, ``derivative(score, batch, head, q_index, k_index, args)`` -> d(result) / d(entry),
            at the score before the function.
        index_key, derivative_key: the keys of the two for :func:`fusedattn.functions.registered`.

    Raises:
        TypeError: ``index`` or ``derivative`` is not a ``@triton.jit`` function.
    """

    arg: int
    index: Any
    derivative: Any
    index_key: str = field(init=False)
    derivative_key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index_key", functions.register(self.index, "index"))
        object.__setattr__(self, "derivative_key", functions.register(self.derivative, "derivative"))

    def __reduce__(self) -> tuple[Any, ...]:
        own = functions.Importable(self.index), functions.Importable(self.derivative)
        return functions.rebuilt, (ArgGradient, self.arg, *own)


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function of each score, applied before the bias is added.

    Attributes:
        function: ``@triton.jit``, ``function(score, batch, head, q_index, k_index, args)`` -> score; float32 tiles in
            and out (float64 for float64 inputs).
        derivative: ``@triton.jit`` with the same arguments -> d(result) / d(score), at the score before the function.
        eager: ``function`` in torch, differentiable: score ``(batch, nheads_q, rows, keys)``, batch
            ``(batch, 1, 1, 1)``, head ``(nheads_q, 1, 1)``, q_index ``(rows, 1)``, k_index ``(keys,)``, int64. None
            if no eager code needs it.
        args: tensors, ints and floats; a tensor is a pointer in the ``@triton.jit`` functions.
        arg_gradients: define the gradients of tensors of ``args`` on the Triton backend, which derives none itself; if
            several are of one tensor, its gradient is their sum. These tensors are floating-point and contiguous; if
            their dtypes differ, the ``@triton.jit`` functions get them in the widest one.
        function_key, derivative_key: the keys of the two for :func:`fusedattn.functions.registered`.
        numbers: the numbers of ``args``, serialised by :func:`fusedattn.functions.written`.
        readers: the arg and the keys of each of ``arg_gradients``.

    Raises:
        TypeError: ``function`` or ``derivative`` is not a ``@triton.jit`` function, ``eager`` is not a function,
            ``args`` is not a tuple of tensors, ints and floats, or an arg with a gradient is not floating-point.
        ValueError: an arg with a gradient does not exist, or is not contiguous.
    """

    function: Any
    derivative: Any
    eager: Callable[..., Tensor] | None = None
    args: tuple[Any, ...] = ()
    arg_gradients: tuple[ArgGradient, ...] = ()
    function_key: str = field(init=False)
    derivative_key: str = field(init=False)
    numbers: str = field(init=False)
    readers: str = field(init=False)

    def __post_init__(self) -> None:
        functions.check_eager(self.eager)
        functions.check_args(self.args)
        for gradient in self.arg_gradients:
            _check_arg_gradient(gradient, self.args)
        object.__setattr__(self, "function_key", functions.register(self.function, "function"))
        object.__setattr__(self, "derivative_key", functions.register(self.derivative, "derivative"))
        object.__setattr__(self, "numbers", functions.written(self.args, self.learned_args))
        readers = ";".join(f"{x.arg} {x.index_key} {x.derivative_key}" for x in self.arg_gradients)
        object.__setattr__(self, "readers", readers)

    def __reduce__(self) -> tuple[Any, ...]:
        own = functions.Importable(self.function), functions.Importable(self.derivative)
        return functions.rebuilt, (ScoreMod, *own, self.eager, self.args, self.arg_gradients)

    @property
    def learned_args(self) -> tuple[int, ...]:
        """The indices of the args that get a gradient, in ascending order."""
        return tuple(sorted({gradient.arg for gradient in self.arg_gradients}))

    @property
    def learned(self) -> Tensor | None:
        """The args that get a gradient, flattened and concatenated to ``(n,)``; None if there are none."""
        parts = [self.args[i].reshape(-1) for i in self.learned_args]
        if len(parts) < 2:
            return parts[0] if parts else None
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in parts))
        return torch.cat([x.to(dtype) for x in parts])

    def with_learned(self, learned: Tensor) -> ScoreMod:
        """The same function with other args, in the form of :attr:`learned`."""
        parts = learned.split([self.args[i].numel() for i in self.learned_args])
        args = list(self.args)
        for i, part in zip(self.learned_args, parts, strict=True):
            args[i] = part.view(args[i].shape)
        return replace(self, args=tuple(args))

    def apply(
        self, scores: Tensor, *, rows: Tensor | None = None, keys: Tensor | None = None, shard: Shard = WHOLE
    ) -> Tensor:
        """The result of ``eager`` for scores ``(batch, nheads_q, rows, keys)``.

        Args:
            rows, keys: the indices of their queries and keys, int64 ``(n,)``; counted from 0 by default.
            shard: the part of the whole attention that these scores are.

        Raises:
            NotImplementedError: there is no ``eager``.
        """
        if self.eager is None:
            raise NotImplementedError(
                "score_mod: got eager=None, allowed is a function of torch if the scores are written out; "
                "pass ScoreMod(function, derivative, eager=...)"
            )
        batch, nheads, n_rows, n_keys = scores.shape
        q_index = indices.select(n_rows, rows, scores.device)
        k_index = indices.select(n_keys, keys, scores.device)
        return self.eager(scores, *indices.of_scores(batch, nheads, q_index, k_index, shard), self.args)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of ``args``, by name."""
        return functions.tensors_of(self.args, "score_mod")

    def to(self, device: torch.device | str) -> ScoreMod:
        """The same function with its tensors on ``device``."""
        return replace(self, args=functions.mapped_args(self.args, lambda x: x.to(device)))


def _check_arg_gradient(gradient: ArgGradient, args: tuple[Any, ...]) -> None:
    if not isinstance(gradient, ArgGradient):
        raise TypeError(f"arg_gradients: got {type(gradient).__name__}, allowed are fusedattn.ArgGradient")
    if not 0 <= gradient.arg < len(args):
        raise ValueError(f"arg_gradients: got arg={gradient.arg}, allowed are 0 .. {len(args) - 1}, indices of args")
    x = args[gradient.arg]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"args[{gradient.arg}]: got {got}, allowed with a gradient is a floating-point tensor")
    if not x.is_contiguous():
        raise ValueError(f"args[{gradient.arg}]: got strides {x.stride()}, allowed with a gradient are contiguous ones")
