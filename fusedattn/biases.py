"""Additive biases of the scores as one value; biases combine with ``+``.

A :class:`Bias` is a description, like a mask. :meth:`Bias.dense` writes out the tensor that defines it; the kernels
read the parts and never store that tensor. Distances between a query and a key are counted as the bottom-right causal
mask counts them: the last query stands at the last key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedattn import indices
from fusedattn.shard import WHOLE, Shard

__all__ = [
    "Bias",
    "alibi",
    "alibi_slopes",
    "as_bias",
    "relative",
    "shaw",
    "t5",
    "tensor",
]


@dataclass(frozen=True, eq=False)
class Bias:
    """A term added to the scores: the sum of its parts. Build one with the functions of this module.

    With ``distance = j - i - (seqlen_k - seqlen_q)`` of query ``i`` and key ``j``, the parts are:

    Attributes:
        tensor: floating-point, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``, or None.
        slopes: float32 or float64 ``(nheads_q,)`` or ``(batch, nheads_q)``, or None; adds ``-slope * |distance|``.
        relative: floating-point, broadcastable to ``(batch, nheads_q, seqlen_q, 2 c + 1)``, or None; adds
            ``relative[b, h, i, clip(distance, -c, c) + c]``.

    The gradient of a part is that of the scores, summed over the broadcast dimensions.
    """

    tensor: Tensor | None = None
    slopes: Tensor | None = None
    relative: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tensor is not None:
            _check_floating(self.tensor, "bias", " (a bool mask goes into mask=)")
            if self.tensor.dim() > 4:
                raise ValueError(
                    f"bias: got shape {tuple(self.tensor.shape)}, "
                    "allowed is at most (batch, nheads_q, seqlen_q, seqlen_k)"
                )
        if self.slopes is not None:
            if not isinstance(self.slopes, Tensor) or self.slopes.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"slopes: got {_kind(self.slopes)}, allowed is a tensor of torch.float32 or float64")
            if self.slopes.dim() not in (1, 2):
                raise ValueError(
                    f"slopes: got shape {tuple(self.slopes.shape)}, allowed are (nheads_q,) and (batch, nheads_q)"
                )
        if self.relative is not None:
            _check_floating(self.relative, "table")
            if self.relative.dim() not in (1, 2, 3, 4) or self.relative.shape[-1] % 2 == 0:
                raise ValueError(
                    f"table: got shape {tuple(self.relative.shape)}, allowed is at most (batch, nheads_q, seqlen_q, "
                    "2 c + 1), whose last dimension is odd"
                )

    def __add__(self, other: Bias) -> Bias:
        """The sum of both biases, in float32 at least.

        Raises:
            ValueError: the shapes of two parts do not fit each other.
        """
        if not isinstance(other, Bias):
            return NotImplemented
        a, b = self.relative, other.relative
        if a is not None and b is not None:
            columns = max(a.shape[-1], b.shape[-1])
            a, b = _widened(a, columns), _widened(b, columns)
        return Bias(
            _sum(self.tensor, other.tensor, "bias"), _sum(self.slopes, other.slopes, "slopes"), _sum(a, b, "table")
        )

    def dense(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        rows: Tensor | slice | None = None,
        keys: Tensor | slice | None = None,
        lengths: tuple[Tensor, Tensor] | None = None,
        shard: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensor that defines this bias, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``.

        Differentiable in all parts.

        Args:
            seqlen_q, seqlen_k: of the attention.
            rows, keys: which queries and keys to write out, int64 ``(n,)`` or a slice; all by default.
            lengths: the number of queries and of keys in each batch, int ``(batch,)``, if batches differ in length;
                at most ``seqlen_q`` and ``seqlen_k``. Distances then follow these lengths.
            shard: the part of a larger attention that this is.
            dtype: to compute in; by default the dtype of the parts, float32 at least.

        >>> alibi(torch.tensor([0.5])).dense(1, 3).tolist()
        [[[[-1.0, -0.5, 0.0]]]]
        """
        tensors = list(self.tensors().values())
        if dtype is None:
            dtype = torch.float32
            for x in tensors:
                dtype = torch.promote_types(dtype, x.dtype)
        device = tensors[0].device if tensors else None
        if self.tensor is None:
            dense = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
        else:
            dense = indices.part_of(self.tensor, rows, keys).to(dtype)
        if self.slopes is None and self.relative is None:
            return dense
        shift: Any = shard.diagonal(seqlen_q, seqlen_k)
        if lengths is not None:
            shift = (lengths[1] - lengths[0])[:, None, None, None]
        i = indices.select(seqlen_q, rows, device)[:, None]
        distance = (indices.select(seqlen_k, keys, device) - i)[None, None] - shift
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
            slanted = -slopes[:, :, None, None].to(dtype) * distance.abs().to(dtype)
            dense = slanted if self.tensor is None else dense + slanted
        if self.relative is not None:
            table = indices.part_of(self.relative, rows, None).to(dtype)
            limit = table.shape[3] // 2
            columns = distance.clamp(-limit, limit) + limit
            batch = table.shape[0] if columns.shape[0] == 1 else columns.shape[0]
            table = table.expand(batch, -1, columns.shape[2], -1)
            dense = dense + table.gather(3, columns.expand(*table.shape[:2], -1, -1))
        return dense

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of this bias, under the name of the argument that it was passed as."""
        named = {"tensor(x)": self.tensor, "alibi(slopes)": self.slopes, "relative(table)": self.relative}
        return {name: x for name, x in named.items() if x is not None}

    def to(self, device: torch.device | str) -> Bias:
        """The same bias with its tensors on ``device``."""
        return Bias(*(None if x is None else x.to(device) for x in (self.tensor, self.slopes, self.relative)))

    def check(self, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raise ValueError if a tensor of this bias does not fit the shape of the attention."""
        if self.tensor is not None:
            _check_broadcast(
                self.tensor, "", "(batch, nheads_q, seqlen_q, seqlen_k)", (batch, nheads, seqlen_q, seqlen_k)
            )
        if self.slopes is not None and tuple(self.slopes.shape) not in ((nheads,), (1, nheads), (batch, nheads)):
            raise ValueError(
                f"bias: got slopes of shape {tuple(self.slopes.shape)}, allowed are (nheads_q,) = {(nheads,)} and "
                f"(batch, nheads_q) = {(batch, nheads)}"
            )
        if self.relative is not None:
            columns = self.relative.shape[-1]
            full = (batch, nheads, seqlen_q, columns)
            _check_broadcast(self.relative, "relative of ", f"(batch, nheads_q, seqlen_q, {columns})", full)


def tensor(x: Tensor) -> Bias:
    """Any bias, written out; differentiable.

    Args:
        x: floating-point, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)``. ``-inf`` takes all
            weight from a pair; unlike a mask, it does not contain a NaN or Inf in the key or value.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``x`` has more than four dimensions.
    """
    return Bias(tensor=x)


def alibi(slopes: Tensor) -> Bias:
    """``-slope * |distance|`` (Press et al., "Train Short, Test Long", 2022); symmetric if the mask is not causal.

    Args:
        slopes: float32 or float64 ``(nheads_q,)`` or ``(batch, nheads_q)``; differentiable. :func:`alibi_slopes`
            returns the constants of the paper.

    Raises:
        TypeError: ``slopes`` is not a tensor of float32 or float64.
        ValueError: ``slopes`` does not have one or two dimensions.
    """
    return Bias(slopes=slopes)


def alibi_slopes(nheads: int) -> Tensor:
    """The slopes of Press et al. (2022), section 3: ``2 ** (-8 h / nheads)`` for ``h = 1 .. nheads``.

    If ``nheads`` is not a power of two: the slopes for the next lower power, then every second slope for the next
    higher one, as in the paper's own code.

    Returns:
        float32 ``(nheads,)``.

    Raises:
        ValueError: ``nheads`` is not positive.
    """
    if nheads < 1:
        raise ValueError(f"nheads: got {nheads}, allowed are 1 and more")
    lower = 2 ** (nheads.bit_length() - 1)
    exponents = [-8.0 * h / lower for h in range(1, lower + 1)]
    exponents += [-4.0 * h / lower for h in range(1, 2 * (nheads - lower), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents])


def relative(table: Tensor) -> Bias:
    """``table[b, h, i, clip(distance, -c, c) + c]``: one number for each distance; differentiable.

    Args:
        table: floating-point, broadcastable to ``(batch, nheads_q, seqlen_q, 2 c + 1)``; ``(nheads_q, 1, 2 c + 1)``
            for numbers that do not depend on the query.

    Raises:
        TypeError: ``table`` is not a floating-point tensor.
        ValueError: its last dimension is even, or it has more than four dimensions.
    """
    return Bias(relative=table)


def shaw(q: Tensor, table: Tensor, *, scale: float | None = None) -> Bias:
    """Relative position representations: ``scale * q_i . table[clip(distance, -c, c) + c]``.

    Shaw et al., "Self-Attention with Relative Position Representations" (2018), eq. 4, as its section 3.3 computes it:
    one product of q with the whole table. Differentiable in both.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``, the queries of the attention, or others.
        table: ``(2 c + 1, head_dim)``, or ``(nheads_q, 2 c + 1, head_dim)`` for one table per head; dtype of q.
        scale: ``1 / sqrt(head_dim)`` by default, as for attention.

    Raises:
        ValueError: the shapes do not fit.
    """
    if q.dim() != 4 or table.dim() not in (2, 3) or table.shape[-1] != q.shape[3]:
        raise ValueError(
            f"table: got shape {tuple(table.shape)} for q of shape {tuple(q.shape)}, allowed are (2 c + 1, head_dim) "
            "and (nheads_q, 2 c + 1, head_dim) for q (batch, nheads_q, seqlen_q, head_dim)"
        )
    if table.dim() == 3 and table.shape[0] != q.shape[1]:
        raise ValueError(f"table: got {table.shape[0]} heads, allowed is nheads_q = {q.shape[1]}")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return relative(scale * (q @ table.mT))


def t5(weight: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """The relative position bias of T5: a learned number for each head and bucket of distances; differentiable.

    Raffel et al., "Exploring the Limits of Transfer Learning" (2020), section 2.1, with the buckets of its code: half
    of them hold one distance each, the others grow wider up to ``max_distance``, the last holds all beyond.

    Args:
        weight: ``(num_buckets, nheads_q)``, as ``relative_attention_bias.weight`` of transformers.
        bidirectional: with True, half of the buckets are for keys ahead of the query; with False these keys share the
            bucket of distance 0.
        max_distance: greater than the distances with a separate bucket.

    Raises:
        TypeError: ``weight`` is not a floating-point tensor.
        ValueError: there are too few buckets, or ``max_distance`` is too small for them.
    """
    _check_floating(weight, "weight")
    if weight.dim() != 2:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, allowed is (num_buckets, nheads_q)")
    buckets = weight.shape[0] // 2 if bidirectional else weight.shape[0]
    exact = buckets // 2
    if exact < 1:
        raise ValueError(
            f"weight: got {weight.shape[0]} buckets, allowed are {4 if bidirectional else 2} and more with "
            f"bidirectional={bidirectional}"
        )
    if max_distance <= exact:
        raise ValueError(f"max_distance: got {max_distance}, allowed are {exact + 1} and more for this many buckets")
    distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
    past = distance.abs() if bidirectional else (-distance).clamp(min=0)
    # In float32, rounded towards zero, as in the original: the edges of the buckets depend on both.
    growth = torch.log(past.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = torch.where(past < exact, past, wide)
    if bidirectional:
        bucket = bucket + buckets * (distance > 0)
    return relative(weight[bucket].T[:, None, :])


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """Convert an argument ``bias=`` to a :class:`Bias`: accepts one, a floating-point tensor, or None."""
    if bias is None or isinstance(bias, Bias):
        return bias
    return tensor(bias)


def _kind(x: object) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _check_floating(x: Tensor, name: str, hint: str = "") -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: got {_kind(x)}, allowed is a floating-point tensor{hint}")


def _check_broadcast(x: Tensor, name: str, dimensions: str, full: tuple[int, ...]) -> None:
    got = tuple(x.shape)
    if any(g not in (1, f) for g, f in zip(reversed(got), reversed(full), strict=False)):
        raise ValueError(f"bias: got {name}shape {got}, allowed are those that broadcast to {dimensions} = {full}")


def _widened(table: Tensor, columns: int) -> Tensor:
    """The same relative bias with more columns."""
    limit, wider = table.shape[-1] // 2, columns // 2
    return table[..., torch.arange(-wider, wider + 1, device=table.device).clamp(-limit, limit) + limit]


def _sum(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"bias: {name}: got shapes {got} to add, allowed are shapes that broadcast") from None
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype) + b.to(dtype)
