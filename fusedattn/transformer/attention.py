"""Scaled dot-product attention and the layers built on it.

Heads are laid out ``(batch, heads, seqlen, head_dim)``; in masks, True means "may attend".
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope, apply_rope
from fusedattn.transformer.cache import LayerCache, with_keys
from fusedattn.transformer.positions import RotaryPositionalEmbedding
from fusedattn.transformer.qk_norm import QueryKeyNorm


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T, masked) v`` (Vaswani et al., 2017, equation 1).

    Args:
        q: ``(batch, heads, seqlen_q, head_dim)``, or ``(batch, seqlen_q, head_dim)`` for one head.
        k, v: ``(batch, kv_heads, seqlen_k, head_dim)``, or without heads as q. ``kv_heads`` divides
            ``heads``: query head ``h`` reads key head ``h // (heads / kv_heads)`` (grouped queries;
            Ainslie et al., 2023). The head_dim of v may differ.
        mask: a Mask, or a bool tensor broadcastable to ``(batch, heads, seqlen_q, seqlen_k)`` (to
            ``(batch, seqlen_q, seqlen_k)`` without heads), or None: attend to everything. Causal
            masks are aligned bottom-right unless they say otherwise.
        rope: rotates q and k first (Su et al., 2021).
        qk_norm: normalises q and k before the rotation (Henry et al., 2020).
        scale: by default ``1 / sqrt(head_dim)``.
        dropout_p: probability of dropping a weight on its way to ``v``.

    Returns:
        ``(output, weights)``: output like q with the head_dim and dtype of v; weights
        ``(batch, heads, seqlen_q, seqlen_k)``, in the dtype of v, before dropout. The softmax is
        computed in float32 (float64 for float64 inputs). A query that may attend to nothing has
        output 0 and weights 0, and gives no gradient.

    Raises:
        ValueError: the shapes of q, k, v, mask or rope do not fit together.
        TypeError: the mask is neither a Mask nor a bool tensor.
    """
    if q.dim() == k.dim() == v.dim() == 3:
        if isinstance(mask, Tensor) and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        output, weights = scaled_dot_product_attention(
            q.unsqueeze(1),
            k.unsqueeze(1),
            v.unsqueeze(1),
            mask,
            rope=rope,
            qk_norm=qk_norm,
            scale=scale,
            dropout_p=dropout_p,
        )
        return output.squeeze(1), weights.squeeze(1)

    check_shapes(q, k, v)
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    mask = as_mask(mask)
    mask.check(batch, heads, seqlen_q, seqlen_k)
    if qk_norm is not None:
        qk_norm.check(q, kv_heads)
        q, k = qk_norm.apply(q, k)
    if rope is not None:
        rope.check(batch, seqlen_q, seqlen_k, head_dim)
        q, k = rope.rotate(q, k)
    if kv_heads != heads:
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))

    hidden = ~mask.dense(seqlen_q, seqlen_k, batch=batch, nheads=heads, device=q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    scores = q @ k.mT  # (batch, heads, seqlen_q, seqlen_k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    # The lowest number instead of -inf: a row that sees nothing stays finite until it is set to 0.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).masked_fill(hidden, 0.0).to(v.dtype)
    return F.dropout(weights, dropout_p) @ v, weights


class ScaledDotProductAttention(nn.Module):
    """:func:`scaled_dot_product_attention` as a module without parameters.

    The layers of this package compute attention only through an instance of this class, so that a
    fused implementation can take its place.

    Args:
        dropout: probability of dropping a weight in training, in [0, 1).
        scale: by default ``1 / sqrt(head_dim)``.

    Raises:
        ValueError: ``dropout`` is outside [0, 1).
    """

    def __init__(self, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: got {dropout}, allowed are probabilities in [0, 1)")
        self.dropout_p: float = float(dropout)
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        rope: Rope | None = None,
        qk_norm: QKNorm | None = None,
        cache: LayerCache | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``; with a cache, :meth:`cached`."""
        if cache is not None:
            return self.cached(q, k, v, with_keys(cache), mask, need_weights=need_weights)
        output, weights = scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            rope=rope,
            qk_norm=qk_norm,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return output, weights if need_weights else None

    def cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Store the keys and values of the newest tokens, and attend from these tokens to all of their sequence.

        Args:
            q, k, v: ``(batch, heads or kv_heads, n, head_dim)``, of the last n tokens of each sequence, not rotated.
            cache: its lengths count the n tokens already. Its rope rotates q and k.
            mask: as in :func:`scaled_dot_product_attention`, with the capacity of the cache for ``seqlen_k``. It counts
                from the end of each sequence: causal masks let the last query see the last key.

        Returns:
            As :meth:`forward`, with weights of ``(batch, heads, n, capacity)``: 0 behind the last token.

        Raises:
            ValueError: the shapes do not fit, or the cache has no place for a token.
            TypeError: the dtype is not that of the cache, which does not hold codes.
            NotImplementedError: k or v would need a gradient.
        """
        q_rotated, keys, values, seen = _stored(q, k, v, cache, mask)
        output, weights = scaled_dot_product_attention(
            q_rotated,
            keys,
            values,
            seen,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return output.to(v.dtype), weights.to(v.dtype) if need_weights else None

    def extra_repr(self) -> str:
        return f"dropout={self.dropout_p}, scale={self.scale}"


class MultiHeadAttention(nn.Module):
    """``Concat(head_1, ..., head_h) W_o``, ``head_i = Attention(Q W_q_i, K W_k_i, V W_v_i)``.

    Vaswani et al., 2017, section 3.2.2. Self-attention when only ``query`` is given,
    cross-attention when the keys and values come from elsewhere.

    Args:
        d_model: width of queries, keys, values and output.
        n_heads: number of heads, each of width ``d_model / n_heads``.
        dropout: dropout on the attention weights, in training.
        n_kv_heads: fewer heads for keys and values: grouped-query attention (Ainslie et al., 2023),
            with 1 multi-query attention (Shazeer, 2019). By default ``n_heads``.
        rope: rotates queries and keys; one module may serve many layers.
        bias: whether the four projections have a bias.
        qk_norm: whether each query and key is normalised before the rotation, with learned weights:
            :class:`QueryKeyNorm`.
        attention: computes the heads from q, k and v, such as a ``LinearAttention``; by default
            ``ScaledDotProductAttention(dropout)``.

    Raises:
        ValueError: ``n_heads`` does not divide ``d_model``, ``n_kv_heads`` does not divide
            ``n_heads``, or ``rope`` rotates more features than a head has.
        TypeError: ``rope`` is not a RotaryPositionalEmbedding.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float = 0.0,
        n_kv_heads: int | None = None,
        rope: RotaryPositionalEmbedding | None = None,
        bias: bool = True,
        attention: nn.Module | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        head_dim = checked_head_dim(d_model, n_heads, "n_heads")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads: got {n_kv_heads}, allowed are divisors of {n_heads}")
        if rope is not None and not isinstance(rope, RotaryPositionalEmbedding):
            raise TypeError(f"rope: got {type(rope).__name__}, allowed are RotaryPositionalEmbedding and None")
        if rope is not None and rope.rotary_dim > head_dim:
            raise ValueError(f"rope: got rotary_dim {rope.rotary_dim}, allowed are 2 .. {head_dim}")
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.q_proj: nn.Linear = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.k_proj: nn.Linear = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.v_proj: nn.Linear = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.out_proj: nn.Linear = nn.Linear(n_heads * head_dim, d_model, bias=bias)
        self.rope = rope
        self.qk_norm: QueryKeyNorm | None = QueryKeyNorm(head_dim) if qk_norm else None
        self.attention: nn.Module = ScaledDotProductAttention(dropout) if attention is None else attention

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        cache: LayerCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from ``query`` to ``key``.

        Args:
            query: ``(batch, seqlen_q, d_model)``.
            key: ``(batch, seqlen_k, d_model)``; by default ``query``.
            value: like ``key``; by default ``key``.
            mask: a Mask, or bool broadcastable to ``(batch, n_heads, seqlen_q, seqlen_k)``, True =
                attend. With a cache of keys, ``seqlen_k`` is its capacity, and a Mask counts from the
                end of each sequence; with a state, ``seqlen_k`` is ``seqlen_q``.
            need_weights: also return the weights.
            cache: holds the keys and values of earlier tokens, rotated by ``rope``, or for a
                ``LinearAttention`` their state, a :class:`StateCache`. Those of ``query``, the newest
                tokens, are added to it; its lengths count them already. Each query attends to all
                keys of its sequence.

        Returns:
            ``(batch, seqlen_q, d_model)``, with ``need_weights`` a pair of that and the weights
            ``(batch, n_heads, seqlen_q, seqlen_k)`` before dropout. If a query may attend to
            nothing, its heads are 0 and its output is the bias of ``out_proj``.

        Raises:
            ValueError: an input is not ``(batch, seqlen, d_model)``, the shapes do not fit, the
                cache is full or does not rotate keys as this layer does, or projections that are
                split among processes do not keep each query head with its key and value head.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_input(x, name, self.d_model)
        q, k, v = self._heads(self.q_proj(query), self.k_proj(key), self.v_proj(value))
        options: dict[str, Any] = {}
        if self.qk_norm is not None:
            if cache is None and isinstance(self.attention, ScaledDotProductAttention):
                options["qk_norm"] = self.qk_norm()
            else:  # a cache keeps normalised keys
                q, k = self.qk_norm().apply(q, k)
        if cache is None:
            rope = None if self.rope is None else self.rope.tables()
            heads, weights = self.attention(q, k, v, mask, rope=rope, need_weights=need_weights, **options)
        else:
            _check_rope(cache, self.rope)
            heads, weights = self.attention(q, k, v, mask, cache=cache, need_weights=need_weights)
        output = self.out_proj(heads.transpose(1, 2).flatten(-2))
        return (output, weights) if need_weights else output

    def _heads(self, *projected: Tensor) -> list[Tensor]:
        """q, k and v as ``(batch, heads, seqlen, head_dim)``; of all heads, or of those of a process."""
        of_q, of_k, of_v = (x.shape[-1] for x in projected)
        if of_k % self.head_dim or of_k != of_v or of_q * self.n_kv_heads != of_k * self.n_heads:
            raise ValueError(
                f"q_proj, k_proj, v_proj: got {of_q}, {of_k} and {of_v} features, allowed are {self.n_heads} query "
                f"heads and {self.n_kv_heads} KV heads of {self.head_dim}, or the same share of both"
            )
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected]


class SelfAttention(nn.Module):
    """Multi-head self-attention whose heads share one projection, scaled by ``1 / sqrt(d_model)``.

    Many tutorials use this variant. Head ``i`` gets the slice ``x_i`` of width ``head_dim`` of the
    input, and all heads use the same three ``head_dim x head_dim`` matrices::

        head_i = softmax((x_i W_q) (x_i W_k)^T / sqrt(d_model)) (x_i W_v)
        output = Concat(head_1, ..., head_h) W_o + b_o

    It differs from :class:`MultiHeadAttention` (Vaswani et al., 2017), whose projections mix the
    heads and whose scale is ``1 / sqrt(head_dim)``.

    Args:
        d_model: width of the input and output.
        heads: number of heads, each of width ``d_model / heads``.

    Raises:
        ValueError: ``heads`` does not divide ``d_model``.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.heads = heads
        self.head_dim: int = checked_head_dim(d_model, heads, "heads")
        self.values: nn.Linear = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys: nn.Linear = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries: nn.Linear = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out: nn.Linear = nn.Linear(heads * self.head_dim, d_model)
        self.attention: ScaledDotProductAttention = ScaledDotProductAttention(scale=1.0 / math.sqrt(d_model))

    def forward(self, values: Tensor, keys: Tensor, query: Tensor, mask: Mask | Tensor | None = None) -> Tensor:
        """Attend from ``query`` to ``keys``; note the order of the arguments.

        Args:
            values, keys: ``(batch, seqlen_k, d_model)``.
            query: ``(batch, seqlen_q, d_model)``.
            mask: a Mask, or bool broadcastable to ``(batch, heads, seqlen_q, seqlen_k)``, True =
                attend.

        Returns:
            ``(batch, seqlen_q, d_model)``.

        Raises:
            ValueError: an input is not ``(batch, seqlen, d_model)``, or the shapes do not fit.
        """
        for name, x in (("values", values), ("keys", keys), ("query", query)):
            _check_input(x, name, self.d_model)
        shape = (self.heads, self.head_dim)
        q = self.queries(query.unflatten(-1, shape)).transpose(1, 2)
        k = self.keys(keys.unflatten(-1, shape)).transpose(1, 2)
        v = self.values(values.unflatten(-1, shape)).transpose(1, 2)
        heads, _ = self.attention(q, k, v, mask, need_weights=False)
        return self.fc_out(heads.transpose(1, 2).flatten(-2))


def checked_head_dim(d_model: int, heads: int, name: str) -> int:
    """``d_model / heads``, or a ValueError that names the argument ``name``."""
    if d_model < 1:
        raise ValueError(f"d_model: got {d_model}, allowed are positive numbers")
    if heads < 1 or d_model % heads:
        raise ValueError(f"{name}: got {heads}, allowed are divisors of d_model = {d_model}")
    return d_model // heads


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    got = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v: {got}, allowed are (batch, heads, seqlen, head_dim) and, for all three, "
            "(batch, seqlen, head_dim)"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q, k, v: {got}, allowed are one batch, one head_dim of q and k, and one number of "
            "heads and length of k and v"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k, v: {got}, allowed are numbers of heads that divide q's")


def _stored(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, mask: Mask | Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Store the newest keys and values; returns rotated queries, all keys and values, and which keys each query sees.

    Arguments and errors are those of :meth:`ScaledDotProductAttention.cached`. The first three results have one dtype;
    the last is bool, broadcastable to ``(batch, heads, n, capacity)``.
    """
    _check_cached(q, k, v, cache)
    n, rope = q.shape[2], cache.rope
    cache.check_values([n] * cache.batch)
    cache.write(k, v, positions=None if rope is None else rope.positions_k)
    if rope is not None:
        positions = (cache.lengths - n)[:, None] + torch.arange(n, device=q.device)
        positions = positions if rope.positions_q is None else rope.positions_q
        q = apply_rope(q, rope.cos, rope.sin, positions, interleaved=rope.interleaved)
    keys, values, exists = cache.dense()
    mask = as_mask(mask)
    mask.check(cache.batch, q.shape[1], n, cache.capacity)
    lengths = torch.full_like(cache.lengths, n), cache.kept()
    seen = mask.dense(n, cache.capacity, batch=cache.batch, nheads=q.shape[1], lengths=lengths, device=q.device)
    wide = torch.promote_types(q.dtype, keys.dtype)
    return q.to(wide), keys.to(wide), values.to(wide), seen & exists[:, None, None]


def _check_cached(q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> None:
    check_shapes(q, k, v)
    sizes = (cache.batch, cache.k.shape[1], q.shape[2])
    allowed = (*sizes, cache.head_dim), (*sizes, cache.head_dim_v)
    if (tuple(k.shape), tuple(v.shape)) != allowed:
        raise ValueError(f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, allowed are {allowed[0]}, {allowed[1]}")
    if cache.format is None and not q.dtype == k.dtype == v.dtype == cache.k.dtype:
        raise TypeError(f"q, k, v: got {q.dtype}, {k.dtype}, {v.dtype}, allowed is that of the cache, {cache.k.dtype}")
    check_no_gradient(k, v)


def check_no_gradient(k: Tensor, v: Tensor) -> None:
    """Raise NotImplementedError if keys or values that go into a cache would need a gradient."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise NotImplementedError("k, v: got requires_grad=True, allowed with a cache is torch.no_grad()")


def _check_rope(cache: LayerCache, rope: RotaryPositionalEmbedding | None) -> None:
    """Raise ValueError unless a cache rotates keys as a layer with this `rope` does."""
    got = None if cache.rope is None else (cache.rope.rotary_dim, cache.rope.interleaved)
    allowed = None if rope is None else (rope.rotary_dim, rope.interleaved)
    if got != allowed:
        raise ValueError(
            f"cache: got rope with (rotary_dim, interleaved) {got}, allowed is that of the layer, {allowed}; "
            "make the cache with rope=layer.rope.tables()"
        )


def _check_input(x: Tensor, name: str, d_model: int) -> None:
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is (batch, seqlen, d_model = {d_model})")
