"""The Transformer of Vaswani et al., 2017, its two halves, and the encoder-only model (BERT)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn.masks import Mask
from fusedattn.transformer.blocks import DecoderLayer, EncoderLayer
from fusedattn.transformer.embedding import TokenEmbedding, token_mask
from fusedattn.transformer.positions import LearnedPositionalEncoding, PositionalEncoding


class Encoder(nn.Module):
    """Embedding, sinusoidal positions, and a stack of :class:`EncoderLayer`.

    Args:
        vocab_size: the number of tokens.
        d_model, n_heads, d_ff, dropout, norm, activation: as for :class:`EncoderLayer`.
        n_layers: the number of layers.
        max_len: the longest input.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        max_len: int = 5000,
        dropout: float = 0.0,
        *,
        norm: str = "pre",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.embedding: TokenEmbedding = TokenEmbedding(vocab_size, d_model)
        self.positions: PositionalEncoding = PositionalEncoding(d_model, max_len, dropout)
        self.layers: nn.ModuleList = nn.ModuleList(
            EncoderLayer(d_model, n_heads, d_ff, dropout, norm=norm, activation=activation) for _ in range(n_layers)
        )
        self.norm: nn.Module = _final_norm(d_model, norm)

    def forward(self, ids: Tensor, mask: Mask | Tensor | None = None) -> Tensor:
        """Ids ``(batch, seqlen)`` to hidden states ``(batch, seqlen, d_model)``.

        Args:
            mask: a Mask; bool ``(batch, seqlen)``, True = a real token; or bool broadcastable to
                ``(batch, n_heads, seqlen, seqlen)``, True = attend.

        Raises:
            ValueError: more than ``max_len`` tokens, or a mask that does not fit.
        """
        x = self.positions(self.embedding(ids))
        mask = token_mask(mask, *ids.shape)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """Embedding, sinusoidal positions, and a stack of :class:`DecoderLayer`.

    Args: those of :class:`Encoder`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        max_len: int = 5000,
        dropout: float = 0.0,
        *,
        norm: str = "pre",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.embedding: TokenEmbedding = TokenEmbedding(vocab_size, d_model)
        self.positions: PositionalEncoding = PositionalEncoding(d_model, max_len, dropout)
        self.layers: nn.ModuleList = nn.ModuleList(
            DecoderLayer(d_model, n_heads, d_ff, dropout, norm=norm, activation=activation) for _ in range(n_layers)
        )
        self.norm: nn.Module = _final_norm(d_model, norm)

    def forward(
        self,
        ids: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
    ) -> Tensor:
        """Ids ``(batch, seqlen_tgt)`` to hidden states ``(batch, seqlen_tgt, d_model)``.

        Args:
            memory: the encoder's output, ``(batch, seqlen_src, d_model)``.
            mask: over the targets, besides the look-ahead mask; as in :meth:`Encoder.forward`.
            memory_mask: over the source, likewise: bool ``(batch, seqlen_src)`` is padding.

        Raises:
            ValueError: more than ``max_len`` tokens, or a mask that does not fit.
        """
        x = self.positions(self.embedding(ids))
        mask = token_mask(mask, *ids.shape)
        memory_mask = token_mask(memory_mask, *memory.shape[:2])
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return self.norm(x)


class Transformer(nn.Module):
    """Encoder-decoder: the distribution of each target token, given the source and earlier targets.

    Vaswani et al., "Attention Is All You Need", 2017, with two differences: LayerNorm comes before
    the sub-layers unless ``norm="post"``, and embeddings and output matrix are not shared (the
    vocabularies may differ).

    Args:
        src_vocab_size, tgt_vocab_size: sizes of the vocabularies.
        d_model, n_heads, n_layers, d_ff, dropout, norm, activation: for both stacks.
        max_len: the longest source and target.
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        max_len: int = 5000,
        dropout: float = 0.0,
        *,
        norm: str = "pre",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.encoder: Encoder = Encoder(
            src_vocab_size,
            d_model,
            n_heads,
            n_layers,
            d_ff,
            max_len,
            dropout,
            norm=norm,
            activation=activation,
        )
        self.decoder: Decoder = Decoder(
            tgt_vocab_size,
            d_model,
            n_heads,
            n_layers,
            d_ff,
            max_len,
            dropout,
            norm=norm,
            activation=activation,
        )
        self.head: nn.Linear = nn.Linear(d_model, tgt_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=d_model**-0.5)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Mask | Tensor | None = None) -> Tensor:
        """Logits ``(batch, seqlen_tgt, tgt_vocab_size)``; row ``i`` depends on ``tgt[:, : i + 1]``.

        Args:
            src: ids ``(batch, seqlen_src)``.
            tgt: ids ``(batch, seqlen_tgt)``.
            src_mask: hides source tokens from the encoder and from the decoder: bool
                ``(batch, seqlen_src)``, True = a real token; a Mask over the source keys; or bool
                broadcastable to ``(batch, n_heads, seqlen, seqlen_src)`` for both query lengths.

        Raises:
            ValueError: more than ``max_len`` tokens, or a mask that does not fit.
        """
        memory = self.encoder(src, src_mask)
        return self.head(self.decoder(tgt, memory, memory_mask=src_mask))


class TransformerEncoder(nn.Module):
    """Encoder-only model after BERT (Devlin et al., 2019): learned positions, post-norm, gelu.

    Args:
        vocab_size: the number of tokens.
        d_model, n_heads, d_ff, dropout, norm, activation: as for :class:`EncoderLayer`.
        n_layers: the number of layers.
        max_len: the longest input.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        max_len: int = 512,
        dropout: float = 0.0,
        *,
        norm: str = "post",
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.embedding: TokenEmbedding = TokenEmbedding(vocab_size, d_model, scaled=False)
        self.positions: LearnedPositionalEncoding = LearnedPositionalEncoding(d_model, max_len)
        self.embedding_norm: nn.LayerNorm = nn.LayerNorm(d_model)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.layers: nn.ModuleList = nn.ModuleList(
            EncoderLayer(d_model, n_heads, d_ff, dropout, norm=norm, activation=activation) for _ in range(n_layers)
        )
        self.norm: nn.Module = _final_norm(d_model, norm)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, mask: Mask | Tensor | None = None) -> Tensor:
        """Ids ``(batch, seqlen)`` to hidden states ``(batch, seqlen, d_model)``.

        Args:
            mask: as in :meth:`Encoder.forward`.

        Raises:
            ValueError: more than ``max_len`` tokens, or a mask that does not fit.
        """
        x = self.dropout(self.embedding_norm(self.positions(self.embedding(ids))))
        mask = token_mask(mask, *ids.shape)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)

    def mlm_logits(self, hidden: Tensor) -> Tensor:
        """Masked-language-model scores of hidden states: ``hidden E^T``, E the embedding matrix.

        ``(batch, seqlen, d_model)`` to ``(batch, seqlen, vocab_size)``.
        """
        return F.linear(hidden, self.embedding.weight)


def _final_norm(d_model: int, norm: str) -> nn.Module:
    """A LayerNorm for pre-norm, which leaves the sum of a stack unnormalised; identity for post-norm."""
    return nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
