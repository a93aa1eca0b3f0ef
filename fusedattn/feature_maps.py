"""Feature maps of linear attention: ``phi(q) . phi(k)`` takes the place of ``exp(scale * q . k)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import functions

__all__ = [
    "AnyFeatureMap",
    "Favor",
    "FeatureMap",
]


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1.0


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def _identity(x: Tensor) -> Tensor:
    return x


# Those that have names, in torch.
NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": _elu_plus_one,
    "relu": F.relu,
    "softmax": _softmax,
    "identity": _identity,
}


_MADE: dict[str, FeatureMap] = {}


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A function of each number of q and k, with its derivative: kernels apply both to tiles in registers.

    Attributes:
        function: ``@triton.jit``, ``function(x)`` -> features; float32 tiles in and out (float64 for float64 inputs).
        derivative: ``@triton.jit``, ``derivative(x)`` -> d(features) / dx, at x.
        eager: ``function`` in torch, differentiable. None if no eager code needs it: the ``torch`` backend, and
            derivatives of gradients.
        key: the keys of the two for :func:`fusedattn.functions.registered`, of which operators make the map again.

    Raises:
        TypeError: ``function`` or ``derivative`` is not a ``@triton.jit`` function, or ``eager`` not a function.
    """

    function: Any
    derivative: Any
    eager: Callable[[Tensor], Tensor] | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        functions.check_eager(self.eager)
        of_function = functions.register(self.function, "function")
        object.__setattr__(self, "key", f"{of_function} {functions.register(self.derivative, 'derivative')}")
        _MADE[self.key] = self  # here, and not in a call, which a compiler may trace

    def __reduce__(self) -> tuple[Any, ...]:
        own = functions.Importable(self.function), functions.Importable(self.derivative)
        return functions.rebuilt, (FeatureMap, *own, self.eager)


@dataclass(frozen=True, eq=False)
class Favor:
    """Positive random features of the softmax kernel (FAVOR+; Choromanski et al., "Rethinking Attention", 2021).

    For x scaled by ``head_dim ** -0.25``, ``phi(x) = exp(w x - |x|^2 / 2) / sqrt(n_features)``, with one feature for
    each row w of a random matrix. The expected value of ``phi(q) . phi(k)`` is ``exp(q . k / sqrt(head_dim))``, so that
    linear attention approximates softmax attention: the variance falls with n_features, and grows with the lengths of q
    and k.

    :meth:`of_queries` divides the features of each query by the largest of them, which normalised attention does not
    see. Features of keys are not divided by anything: they are added to those of other calls in a state. float16 holds
    them while ``w x - |x|^2 / 2`` is below 11.

    Attributes:
        projection: the matrix, floating-point ``(n_features, head_dim)``.

    Raises:
        TypeError, ValueError: ``projection`` is not such a tensor.
    """

    projection: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.projection, Tensor) or not self.projection.is_floating_point():
            got = self.projection.dtype if isinstance(self.projection, Tensor) else type(self.projection).__name__
            raise TypeError(f"projection: got {got}, allowed is a floating-point tensor")
        if self.projection.dim() != 2:
            raise ValueError(f"projection: got shape {tuple(self.projection.shape)}, allowed is (n_features, head_dim)")

    @classmethod
    def draw(
        cls,
        head_dim: int,
        n_features: int,
        *,
        generator: torch.Generator | None = None,
        orthogonal: bool = True,
        device: torch.device | str | None = None,
    ) -> Favor:
        """A new matrix of normal rows, float32.

        Args:
            head_dim: of q and k.
            n_features: the features of each token; the error falls as ``1 / sqrt(n_features)``.
            generator: of random numbers, on `device`.
            orthogonal: make each block of head_dim rows orthogonal, with the lengths of normal rows: the same expected
                value, and less variance.
            device: by default torch's.

        Raises:
            ValueError: a size is not positive.
        """
        for name, x in (("head_dim", head_dim), ("n_features", n_features)):
            if x < 1:
                raise ValueError(f"{name}: got {x}, allowed are positive numbers")
        n_rows = -(-n_features // head_dim) * head_dim if orthogonal else n_features
        rows = torch.randn(n_rows, head_dim, generator=generator, device=device, dtype=torch.float32)
        if orthogonal:
            lengths = rows.norm(dim=1, keepdim=True)
            directions, triangles = torch.linalg.qr(torch.randn(
                n_rows // head_dim, head_dim, head_dim, generator=generator, device=device, dtype=torch.float32
            ))  # fmt: skip
            # The signs that QR chooses prefer some directions (Mezzadri, "How to generate random matrices", 2007).
            directions = directions * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
            rows = directions.flatten(0, 1) * lengths
        return cls(rows[:n_features])

    def of_queries(self, q: Tensor) -> Tensor:
        """Features ``(..., n_features)`` in the dtype of ``q``, ``(..., head_dim)``; the largest of each query is 1."""
        exponents = self._exponents(q)
        return (exponents - exponents.detach().amax(dim=-1, keepdim=True)).exp().to(q.dtype)

    def of_keys(self, k: Tensor) -> Tensor:
        """Features ``(..., n_features)`` in the dtype of ``k``, ``(..., head_dim)``."""
        return (self._exponents(k).exp() / math.sqrt(self.projection.shape[0])).to(k.dtype)

    def _exponents(self, x: Tensor) -> Tensor:
        head_dim = self.projection.shape[1]
        if x.shape[-1] != head_dim:
            raise ValueError(f"q, k: got head_dim {x.shape[-1]}, allowed is that of the projection, {head_dim}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.to(dtype) * head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.projection.to(x).mT - x.square().sum(dim=-1, keepdim=True) / 2


AnyFeatureMap = str | FeatureMap | Favor | Callable[[Tensor], Tensor]
"""What ``linear_attention`` takes: a name of NAMED, or a map that is a value."""


def check(feature_map: AnyFeatureMap) -> None:
    """Raise TypeError or ValueError unless this is a feature map."""
    if isinstance(feature_map, str):
        if feature_map not in NAMED:
            raise ValueError(
                f"feature_map: got {feature_map!r}, allowed are {', '.join(map(repr, NAMED))}, a FeatureMap, and a "
                "function of torch"
            )
    elif not isinstance(feature_map, FeatureMap | Favor) and not callable(feature_map):
        raise TypeError(
            f"feature_map: got {type(feature_map).__name__}, allowed are a name, a FeatureMap, and a function of torch"
        )


def split(feature_map: AnyFeatureMap, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, str | FeatureMap]:
    """q, k and the feature map that is left to apply to them: functions of torch are applied here.

    Raises:
        TypeError: the feature map is none.
        ValueError: its name is unknown, or its features do not keep the other dimensions of q and k.
    """
    check(feature_map)
    if isinstance(feature_map, str | FeatureMap):
        return q, k, feature_map
    if isinstance(feature_map, Favor):
        return feature_map.of_queries(q), feature_map.of_keys(k), "identity"
    found = feature_map(q), feature_map(k)
    for name, x, features in (("q", q, found[0]), ("k", k, found[1])):
        if not isinstance(features, Tensor) or features.shape[:-1] != x.shape[:-1]:
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(
                f"feature_map: got {got} for {name} of shape {tuple(x.shape)}, allowed are features in its last "
                "dimension"
            )
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in found)
    return q, k, "identity"


def key_of(feature_map: str | FeatureMap) -> str:
    """A feature map as a string, as operators take it."""
    return feature_map if isinstance(feature_map, str) else feature_map.key


def of_key(key: str) -> str | FeatureMap:
    """The inverse of :func:`key_of`; KeyError if this process has no such functions."""
    if key in NAMED:
        return key
    if key not in _MADE:
        return FeatureMap(*map(functions.registered, key.split(" ")))
    return _MADE[key]


def eager(feature_map: str | FeatureMap) -> Callable[[Tensor], Tensor]:
    """A feature map as a function of torch.

    Raises:
        NotImplementedError: it is a FeatureMap without ``eager``.
    """
    if isinstance(feature_map, str):
        return NAMED[feature_map]
    if feature_map.eager is None:
        raise NotImplementedError(
            "feature_map: got FeatureMap(..., eager=None), allowed is a function of torch for backend 'torch' and for "
            "derivatives of gradients"
        )
    return feature_map.eager
