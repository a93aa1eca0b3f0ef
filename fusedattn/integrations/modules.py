"""The fused twin of the reference attention, for :func:`fusedattn.fuse`."""

from __future__ import annotations

from torch import Tensor

from fusedattn.attention import attention
from fusedattn.caches import append
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask
from fusedattn.rope import Rope
from fusedattn.support import Backend
from fusedattn.transformer import ScaledDotProductAttention


class FusedScaledDotProductAttention(ScaledDotProductAttention):
    """The fused twin of ``ScaledDotProductAttention``: same arguments, same result, nothing quadratic stored.

    With ``need_weights=True`` the reference runs instead: the weights *are* the quadratic matrix.
    """

    backend: Backend | None = None
    deterministic: bool = True

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
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``; with a cache, :meth:`cached`."""
        if cache is not None:
            return self.cached(q, k, v, cache, mask, need_weights=need_weights)
        if need_weights:
            return super().forward(q, k, v, mask, rope=rope)
        if q.dim() == k.dim() == v.dim() == 3:  # one head, without a dimension for it
            if isinstance(mask, Tensor) and mask.dim() == 3:
                mask = mask.unsqueeze(1)
            out, _ = self.forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), mask, rope=rope, need_weights=False)
            return out.squeeze(1), None
        dropout_p = self.dropout_p if self.training else 0.0
        out = attention(
            q,
            k,
            v,
            mask=mask,
            rope=rope,
            scale=self.scale,
            dropout_p=dropout_p,
            deterministic=self.deterministic,
            backend=self.backend,
        )
        return out, None

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
        """As the reference does: one kernel stores the tokens, and one attends to the cache."""
        if need_weights:
            return super().cached(q, k, v, cache, mask)
        append(cache, k, v, counted=True, backend=self.backend)
        out = attention(
            q,
            cache=cache,
            mask=mask,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=self.deterministic,
            backend=self.backend,
        )
        return out, None
