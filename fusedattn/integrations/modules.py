"""The fused twins of the reference attention, for :func:`fusedattn.fuse`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedattn.attention import attention
from fusedattn.caches import append
from fusedattn.kv_cache import KVCache
from fusedattn.linear.attention import linear_attention
from fusedattn.linear.state import LinearState
from fusedattn.masks import Mask, as_mask
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.support import Backend
from fusedattn.transformer import LinearAttention, ScaledDotProductAttention
from fusedattn.transformer.cache import LayerCache, with_keys
from fusedattn.transformer.linear_attention import causal_and_valid
from fusedattn.transformer.positions import LearnedPositionalEncoding, PositionalEncoding, rows_at

if TYPE_CHECKING:
    from fusedattn.distributed import Context


class FusedScaledDotProductAttention(ScaledDotProductAttention):
    """The fused twin of ``ScaledDotProductAttention``: same arguments, same result, nothing quadratic stored.

    With ``need_weights=True`` the reference runs instead: the weights *are* the quadratic matrix.
    """

    backend: Backend | None = None
    deterministic: bool = True
    context: Context | None = None

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
        if need_weights:
            if self.context is not None:
                self.context.refuse(NotImplementedError("need_weights: got True with a context, allowed is False"))
            return super().forward(q, k, v, mask, rope=rope, qk_norm=qk_norm)
        if q.dim() == k.dim() == v.dim() == 3:  # one head, without a dimension for it
            if isinstance(mask, Tensor) and mask.dim() == 3:
                mask = mask.unsqueeze(1)
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            out, _ = self.forward(q, k, v, mask, rope=rope, qk_norm=qk_norm, need_weights=False)
            return out.squeeze(1), None
        dropout_p = self.dropout_p if self.training else 0.0
        out = attention(
            q,
            k,
            v,
            mask=mask,
            rope=rope,
            qk_norm=qk_norm,
            scale=self.scale,
            dropout_p=dropout_p,
            deterministic=self.deterministic,
            context=self.context,
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
        if self.context is not None:
            self.context.refuse(NotImplementedError("cache: got a cache and a context, allowed is one of them"))
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


class FusedLinearAttention(LinearAttention):
    """The fused twin of ``LinearAttention``: same arguments, same result, in time and memory linear in the length.

    With ``need_weights=True`` the reference runs instead: the weights are the quadratic matrix.
    """

    backend: Backend | None = None
    deterministic: bool = True  # in any case

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
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``; with a cache, :meth:`cached`.

        Raises:
            NotImplementedError: without weights, a mask that is neither causal nor padding nor both.
        """
        if need_weights or cache is not None:
            return super().forward(q, k, v, mask, rope=rope, cache=cache, need_weights=need_weights)
        causal, valid = causal_and_valid(as_mask(mask), q.shape[2], k.shape[2], "linear")
        if rope is not None:
            rope.check(q.shape[0], q.shape[2], k.shape[2], q.shape[3])
            q, k = rope.rotate(q, k)
        out = linear_attention(q, k, v, feature_map=self.feature_map, causal=causal, valid=valid, backend=self.backend)
        return out, None

    def continued(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, causal: bool, valid: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """As the reference does: a prompt in chunks, and one more token from the state alone."""
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            causal=causal,
            valid=valid,
            initial_state=state,
            return_state=True,
            backend=self.backend,
        )


class SplitPositionalEncoding(PositionalEncoding):
    """The twin of ``PositionalEncoding`` for tokens that a context splits among processes."""

    context: Context

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """``x``, ``(batch, seqlen, d_model)``, the tokens of this process, plus the rows of their positions."""
        return self.dropout(x + _rows(self.table, x, self.context, offset))


class SplitLearnedPositionalEncoding(LearnedPositionalEncoding):
    """The twin of ``LearnedPositionalEncoding`` for tokens that a context splits among processes."""

    context: Context

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """``x``, ``(batch, seqlen, d_model)``, the tokens of this process, plus the vectors of their positions."""
        return self.dropout(x + _rows(self.embedding.weight, x, self.context, offset))


def _rows(table: Tensor, x: Tensor, context: Context, offset: int | Tensor) -> Tensor:
    """The rows of a table at the positions of the tokens of this process."""
    if isinstance(offset, Tensor) or offset != 0:
        context.refuse(
            NotImplementedError("offset: got a value with a context, allowed is 0: a context takes no cache")
        )
    positions = context.positions(x.shape[1], x.device)
    try:
        return rows_at(table, x, positions)
    except Exception as error:  # the other processes have gone on to their next call
        context.refuse(error)
