"""Linear attention as a layer of the Transformer: products of features take the place of the softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedattn import feature_maps
from fusedattn.feature_maps import AnyFeatureMap
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.transformer.attention import check_shapes, stored


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
    weights = (products / total.masked_fill(total == 0, 1.0)).to(v.dtype)
    return weights @ v, weights


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
        cache: KVCache | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``.

        With a cache, as :meth:`ScaledDotProductAttention.cached`; the newest queries attend to all keys in it.
        """
        dtype = v.dtype
        if cache is not None:
            q, k, v, mask = stored(q, k, v, cache, mask)
            rope = None
        output, weights = linear_attention(q, k, v, mask, feature_map=self.feature_map, rope=rope)
        return output.to(dtype), weights.to(dtype) if need_weights else None

    def extra_repr(self) -> str:
        return f"feature_map={self.feature_map!r}"
