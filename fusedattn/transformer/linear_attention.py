"""Linear attention as a layer of the Transformer: products of features take the place of the softmax."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fusedattn import feature_maps
from fusedattn.feature_maps import AnyFeatureMap
from fusedattn.linear.state import LinearState
from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.transformer.attention import check_no_gradient, check_shapes
from fusedattn.transformer.cache import LayerCache, with_state
from fusedattn.transformer.state_cache import StateCache


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    feature_map: AnyFeatureMap = "elu+1",
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor]:
    """``out_i = sum_j w_ij v_j`` with ``w_ij = phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j)``, over visible keys.

    Katharopoulos et al., "Transformers are RNNs" (2020), equation 4, written out for all pairs. Arguments and results
    are those of :func:`fusedattn.transformer.scaled_dot_product_attention`, besides:

    Args:
        feature_map: phi, as in :func:`fusedattn.linear_attention`.
        rope: rotates q and k before phi.

    Returns:
        ``(output, weights)``. A query whose products add up to 0 has output and weights 0.

    Raises:
        ValueError, TypeError: the shapes do not fit together, or the mask or the feature map is none.
    """
    check_shapes(q, k, v)
    batch, heads, seqlen_q = q.shape[:3]
    kv_heads, seqlen_k = k.shape[1:3]
    mask = as_mask(mask)
    mask.check(batch, heads, seqlen_q, seqlen_k)
    if rope is not None:
        rope.check(batch, seqlen_q, seqlen_k, q.shape[3])
        q, k = rope.rotate(q, k)
    q, k, left = feature_maps.split(feature_map, q, k)
    phi = feature_maps.eager(left)
    phi_q, phi_k = phi(q), phi(k)
    if kv_heads != heads:
        phi_k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (phi_k, v))
    visible = mask.dense(seqlen_q, seqlen_k, batch=batch, nheads=heads, device=q.device)
    products = (phi_q @ phi_k.mT).to(torch.promote_types(q.dtype, torch.float32))
    products = products.masked_fill(~visible, 0.0)  # (batch, heads, seqlen_q, seqlen_k)
    total = products.sum(dim=-1, keepdim=True)
    weights = torch.where(total == 0, 0.0, products / total.masked_fill(total == 0, 1.0)).to(v.dtype)
    return weights @ v, weights


def continued_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    causal: bool = True,
    valid: Tensor | None = None,
    feature_map: AnyFeatureMap = "elu+1",
) -> tuple[Tensor, LinearState]:
    """:func:`linear_attention` of n more tokens, after those that a state is the sum of.

    ``out_i = phi(q_i) S_i / (phi(q_i) . s_i)`` with ``S_i = S + sum_j phi(k_j) v_j^T`` and ``s_i = s + sum_j phi(k_j)``
    (Katharopoulos et al., 2020, equations 18 to 20), over the visible new keys; those of one call are written out in
    pairs.

    Args:
        q, k, v: ``(batch, heads or kv_heads, n, head_dim)``, rotated.
        state: of all tokens before, ``(batch, kv_heads, n_features, head_dim)`` and ``(batch, kv_heads, n_features)``,
            float32 (float64 for float64 inputs).
        causal: query i sees new keys ``j <= i``; otherwise all of them.
        valid: bool ``(batch, n)``, True = a real token; others stay out of the state.

    Returns:
        ``(output, state)``: output as that of :func:`linear_attention`, in the dtype of the state.
    """
    kv_heads, dtype = k.shape[1], state.kv.dtype
    q, k, left = feature_maps.split(feature_map, q, k)
    phi = feature_maps.eager(left)
    phi_q, phi_k, wide_v = phi(q).to(dtype), phi(k).to(dtype), v.to(dtype)
    if valid is not None:
        phi_k, wide_v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (phi_k, wide_v))
    phi_q = phi_q.unflatten(1, (kv_heads, -1))  # (batch, kv_heads, group, n, n_features)
    with torch.autocast(q.device.type, enabled=False):  # which would add up in 16 bits
        products = phi_q @ phi_k[:, :, None].mT  # (batch, kv_heads, group, n, n)
        products = products.tril() if causal else products
        total = products.sum(dim=-1, keepdim=True) + phi_q @ state.k_sum[:, :, None, :, None]
        output = products @ wide_v[:, :, None] + phi_q @ state.kv[:, :, None]
        state = LinearState(state.kv + phi_k.mT @ wide_v, state.k_sum + phi_k.sum(dim=2))
    output = torch.where(total == 0, 0.0, output / total)
    return output.flatten(1, 2), state


def causal_and_valid(mask: Mask, seqlen_q: int, seqlen_k: int, attention: str) -> tuple[bool, Tensor | None]:
    """Whether a mask is causal, and its padding, bool ``(batch, seqlen_k)`` or None.

    Raises:
        NotImplementedError: it is another mask, which ``attention`` cannot have.
    """
    band = mask.band(seqlen_q, seqlen_k)
    is_causal = band == (None, 0) and seqlen_q == seqlen_k
    if not replace(mask, bands=frozenset(), valid=None).is_full or not (is_causal or band == (None, None)):
        raise NotImplementedError(
            f"mask: got another mask than {attention} attention can have, allowed are causal() with as many queries as "
            "keys, padding(valid), both, and none"
        )
    return is_causal, mask.valid


class LinearAttention(nn.Module):
    """:func:`linear_attention` in place of a :class:`ScaledDotProductAttention`; ``fuse(model)`` makes it linear.

    Args:
        feature_map: as in :func:`fusedattn.linear_attention`.

    Raises:
        TypeError, ValueError: ``feature_map`` is none.
    """

    def __init__(self, feature_map: AnyFeatureMap = "elu+1") -> None:
        super().__init__()
        feature_maps.check(feature_map)
        self.feature_map = feature_map

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        rope: Rope | None = None,
        cache: LayerCache | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``; with a cache, :meth:`cached`."""
        if cache is not None:
            return self.cached(q, k, v, with_state(cache), mask, need_weights=need_weights)
        output, weights = linear_attention(q, k, v, mask, feature_map=self.feature_map, rope=rope)
        return output, weights if need_weights else None

    def cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: StateCache,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, None]:
        """Attend from the newest tokens to all of their sequence, and add them to its state.

        Args:
            q, k, v: ``(batch, heads or kv_heads, n, head_dim)``, of the last n tokens of each sequence, not rotated.
            cache: its lengths count the n tokens already. Its rope rotates q and k.
            mask: over the n tokens, causal, padding ``(batch, n)``, both or none. Without a causal mask each query sees
                all of them. Tokens that are hidden stay so.

        Returns:
            ``(output, None)``, output as :meth:`forward`.

        Raises:
            TypeError: states have another dtype than those of k and v.
            ValueError: the shapes do not fit, or lengths are not those of the state (NaN on a GPU).
            NotImplementedError: another mask, k or v would need a gradient, or ``need_weights``: a state has no keys.
        """
        if need_weights:
            raise NotImplementedError("need_weights: got True with a state, which has no keys; allowed is False")
        _check_cached(q, k, v, cache)
        mask, n = as_mask(mask), q.shape[2]
        mask.check(cache.batch, q.shape[1], n, n)
        causal, valid = causal_and_valid(mask, n, n, "linear")
        shown = cache.visible(n)
        valid = shown if valid is None else valid if shown is None else valid & shown
        if cache.rope is not None:
            numbers = cache.numbers(n)
            q, k = cache.rope.at(numbers, numbers).rotate(q, k)
        output, state = self.continued(q, k, v, cache.before(n), causal, valid)
        cache.store(state)
        return output.to(v.dtype), None

    def continued(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, causal: bool, valid: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """:func:`continued_linear_attention` with the features of this layer."""
        return continued_linear_attention(q, k, v, state, causal=causal, valid=valid, feature_map=self.feature_map)

    def n_features(self, head_dim: int, like: Tensor) -> int:
        """How many features the map makes of ``head_dim`` numbers, with the dtype and on the device of ``like``."""
        x = like.new_zeros(1, 1, 1, head_dim)
        return feature_maps.split(self.feature_map, x, x)[1].shape[-1]

    def extra_repr(self) -> str:
        return f"feature_map={self.feature_map!r}"


def _check_cached(q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> None:
    check_shapes(q, k, v)
    kv_heads, head_dim_v = cache.state.kv.shape[1], cache.state.kv.shape[3]
    allowed = (cache.batch, kv_heads, q.shape[2])
    if k.shape[:3] != allowed or v.shape[3] != head_dim_v:
        raise ValueError(
            f"k, v: got {tuple(k.shape)}, {tuple(v.shape)}, allowed are {(*allowed, 'head_dim')}, "
            f"{(*allowed, head_dim_v)}"
        )
    if torch.promote_types(k.dtype, torch.float32) != cache.state.kv.dtype:
        raise TypeError(f"k, v: got {k.dtype}, allowed are dtypes whose states have {cache.state.kv.dtype}")
    check_no_gradient(k, v)
