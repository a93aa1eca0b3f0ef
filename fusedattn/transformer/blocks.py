"""Transformer blocks: attention and feed-forward, each inside a residual connection."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fusedattn import masks
from fusedattn.masks import Mask
from fusedattn.transformer.attention import MultiHeadAttention
from fusedattn.transformer.cache import LayerCache
from fusedattn.transformer.feed_forward import FeedForward, SwiGLU
from fusedattn.transformer.positions import RotaryPositionalEmbedding


class Residual(nn.Module):
    """A residual connection with its LayerNorm, around a sub-layer ``f``::

        "post":  LayerNorm(x + dropout(f(x)))       Vaswani et al., 2017, section 5.4
        "pre":   x + dropout(f(LayerNorm(x)))       Xiong et al., 2020

    Args:
        d_model: width of the input.
        dropout: dropout on the output of the sub-layer, in training.
        norm: ``"pre"`` or ``"post"``.

    Raises:
        ValueError: ``norm`` is neither.
    """

    def __init__(self, d_model: int, dropout: float = 0.0, norm: str = "pre") -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm: got {norm!r}, allowed are 'pre' and 'post'")
        self.is_pre: bool = norm == "pre"
        self.norm: nn.LayerNorm = nn.LayerNorm(d_model)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """``(batch, seqlen, d_model)`` to the same."""
        if self.is_pre:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class TransformerBlock(nn.Module):
    """Self-attention, then feed-forward, each in a :class:`Residual`.

    With a causal mask it is the block of a decoder-only model, without one the layer of an encoder.

    Args:
        d_model: width of the input and output.
        n_heads: attention heads.
        d_ff: inner width of the feed-forward network; by default ``4 * d_model``.
        dropout: on attention weights, inside the feed-forward network and on both sub-layers.
        norm: ``"pre"`` or ``"post"``.
        activation: ``"relu"``, ``"gelu"``, ``"silu"``, or ``"swiglu"`` for :class:`SwiGLU`.
        n_kv_heads, rope, attention, qk_norm: as in :class:`MultiHeadAttention`.

    Raises:
        ValueError: an argument has none of these values.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        *,
        norm: str = "pre",
        activation: str = "relu",
        n_kv_heads: int | None = None,
        rope: RotaryPositionalEmbedding | None = None,
        attention: nn.Module | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.self_attention: MultiHeadAttention = MultiHeadAttention(
            d_model, n_heads, dropout, n_kv_heads, rope, attention=attention, qk_norm=qk_norm
        )
        self.feed_forward: FeedForward | SwiGLU
        if activation == "swiglu":
            self.feed_forward = SwiGLU(d_model, d_ff, dropout)
        else:
            self.feed_forward = FeedForward(d_model, d_ff, dropout, activation)
        self.self_attention_residual: Residual = Residual(d_model, dropout, norm)
        self.feed_forward_residual: Residual = Residual(d_model, dropout, norm)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``(batch, seqlen, d_model)`` to the same.

        Args:
            mask, cache: as in :meth:`MultiHeadAttention.forward`.
        """
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, mask=mask, cache=cache))
        return self.feed_forward_residual(x, self.feed_forward)


class EncoderLayer(TransformerBlock):
    """The layer of an encoder: a :class:`TransformerBlock` whose mask hides only padding."""


class DecoderLayer(TransformerBlock):
    """Masked self-attention, cross-attention to the encoder's output, feed-forward.

    Vaswani et al., 2017, section 3.1; each sub-layer is in a :class:`Residual`. The look-ahead mask
    is part of the layer. Arguments are those of :class:`TransformerBlock`; ``rope`` applies to the
    self-attention only, because source and target count positions separately.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        *,
        norm: str = "pre",
        activation: str = "relu",
        n_kv_heads: int | None = None,
        rope: RotaryPositionalEmbedding | None = None,
    ) -> None:
        super().__init__(
            d_model,
            n_heads,
            d_ff,
            dropout,
            norm=norm,
            activation=activation,
            n_kv_heads=n_kv_heads,
            rope=rope,
        )
        self.cross_attention: MultiHeadAttention = MultiHeadAttention(d_model, n_heads, dropout, n_kv_heads)
        self.cross_attention_residual: Residual = Residual(d_model, dropout, norm)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
    ) -> Tensor:
        """``(batch, seqlen_tgt, d_model)`` to the same.

        Args:
            memory: the encoder's output, ``(batch, seqlen_src, d_model)``.
            mask: over the targets, besides the look-ahead mask; bool tensors broadcast to
                ``(batch, n_heads, seqlen_tgt, seqlen_tgt)``, True = attend.
            memory_mask: over the source; bool tensors broadcast to
                ``(batch, n_heads, seqlen_tgt, seqlen_src)``.
        """
        look_ahead = masks.causal() & masks.as_mask(mask)
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, mask=look_ahead))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention(y, memory, mask=memory_mask))
        return self.feed_forward_residual(x, self.feed_forward)
