"""Translate the arguments of ``flash_attn`` to those of :func:`fusedattn.attention`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedattn import biases, masks

NO_WINDOW = (-1, -1)


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The equivalent keyword arguments of :func:`fusedattn.attention`."""
    return {
        "mask": masks.window(*limits_of(causal, window_size)),
        "bias": None if alibi_slopes is None else biases.alibi(alibi_slopes),
        "scale": softmax_scale,
        "softcap": None if softcap <= 0.0 else softcap,
        "dropout_p": dropout_p,
    }


def limits_of(causal: bool, window_size: Sequence[int]) -> tuple[int | None, int | None]:
    """The number of keys before and behind its own key that a query sees; None for no limit."""
    if len(window_size) != 2:
        raise ValueError(f"window_size: got {len(window_size)} numbers, allowed are two, (left, right)")
    left, right = (_limit(x) for x in window_size)
    return left, 0 if causal else right


def _limit(x: Any) -> int | None:
    limit = whole("window_size", x)
    return None if limit < 0 else limit


def whole(name: str, x: Any) -> int:
    """``x`` as an int; waits for an integer tensor of one element.

    Raises:
        TypeError: ``x`` is neither.
    """
    try:
        return operator.index(x)
    except TypeError:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {got}, allowed are ints") from None


def check_shape(name: str, x: Any, shape: str, n: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``x`` is a tensor with the dimensions of `shape`, `n` as the third last."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, allowed is a torch.Tensor")
    if x.dim() != shape.count(",") + 1 or (n is not None and x.shape[-3] != n):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {shape}")


def with_contiguous_features(x: Tensor) -> Tensor:
    """``x``, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
