"""The decoder-only Transformer (GPT), and sampling from it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.masks import Mask
from fusedattn.transformer.attention import checked_head_dim
from fusedattn.transformer.blocks import TransformerBlock
from fusedattn.transformer.cache import KVCache
from fusedattn.transformer.embedding import TokenEmbedding, token_mask
from fusedattn.transformer.positions import (
    LearnedPositionalEncoding,
    PositionalEncoding,
    RotaryPositionalEmbedding,
)


class GPTModel(nn.Module):
    """Decoder-only language model after GPT-2 (Radford et al., 2019).

    A stack of causal :class:`TransformerBlock`; the embedding matrix is also the output matrix
    (Press and Wolf, 2017). Weights start from N(0, 0.02^2), those of the projections into the
    residual stream from N(0, 0.02^2 / (2 n_layers)), biases from 0.

    Args:
        vocab_size: the number of tokens.
        d_model, n_heads, d_ff, dropout, n_kv_heads, norm, activation: as for a block.
        n_layers: the number of blocks.
        max_len: the longest sequence.
        positions: ``"sinusoidal"`` (with embeddings scaled by ``sqrt(d_model)``), ``"learned"``
            (GPT-2) or ``"rotary"`` (all features of each head, in every block).

    Raises:
        ValueError: an argument has none of these values, or head_dim is odd with ``"rotary"``.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        max_len: int = 1024,
        dropout: float = 0.0,
        positions: str = "sinusoidal",
        n_kv_heads: int | None = None,
        norm: str = "pre",
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        head_dim = checked_head_dim(d_model, n_heads, "n_heads")
        rope = None
        self.positions: PositionalEncoding | LearnedPositionalEncoding | None = None
        if positions == "sinusoidal":
            self.positions = PositionalEncoding(d_model, max_len)
        elif positions == "learned":
            self.positions = LearnedPositionalEncoding(d_model, max_len)
        elif positions == "rotary":
            rope = RotaryPositionalEmbedding(head_dim, max_len)
        else:
            raise ValueError(f"positions: got {positions!r}, allowed are 'sinusoidal', 'learned', 'rotary'")
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.embedding = TokenEmbedding(vocab_size, d_model, scaled=positions == "sinusoidal")
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                d_model,
                n_heads,
                d_ff,
                dropout,
                norm=norm,
                activation=activation,
                n_kv_heads=n_kv_heads,
                rope=rope,
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self._init_weights()

    def forward(self, ids: Tensor, mask: Mask | Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """Logits ``(batch, seqlen, vocab_size)`` of the next token after each of ``ids``.

        Args:
            ids: ``(batch, seqlen)``.
            mask: besides the causal mask: a Mask; bool ``(batch, seqlen)``, True = a real token;
                or bool broadcastable to ``(batch, n_heads, seqlen, seqlen)``, True = attend. With a
                cache, keys are those of the cached tokens and then those of ``ids``.
            cache: from :meth:`make_cache`; ``ids`` continue its tokens and are added to it.

        Raises:
            ValueError: more than ``max_len`` tokens, a mask that does not fit, or a cache with a
                different number of layers.
        """
        x = self.embedding(ids)
        batch, seqlen = ids.shape
        past = 0 if cache is None else cache.length
        if past + seqlen > self.max_len:
            raise ValueError(f"ids: got {seqlen} tokens after {past}, allowed are max_len = {self.max_len}")
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache: got {len(cache.layers)} layers, allowed are {len(self.blocks)}")
        if self.positions is not None:
            x = self.positions(x, past)
        x = self.dropout(x)
        visible = masks.causal() & token_mask(mask, batch, past + seqlen)
        for i, block in enumerate(self.blocks):
            x = block(x, visible, cache=None if cache is None else cache.layers[i])
        return F.linear(self.norm(x), self.embedding.weight)

    def make_cache(self, max_len: int | None = None) -> KVCache:
        """An empty cache for ``max_len`` tokens; by default for the ``max_len`` of the model."""
        return KVCache(len(self.blocks), self.max_len if max_len is None else max_len)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue ``ids`` token by token, in evaluation mode and without gradients.

        Args:
            ids: the prompts, ``(batch, seqlen)`` with ``seqlen >= 1``, not changed.
            max_new_tokens: the number of tokens to add.
            temperature: the next token is drawn from ``softmax(logits / temperature)``; 0 takes the
                likeliest.
            top_k: draw from the ``top_k`` likeliest tokens only (Fan et al., 2018).
            use_cache: keep keys and values instead of recomputing them for each token.
            generator: the source of randomness, on the device of the model.

        Returns:
            ``(batch, seqlen + max_new_tokens)``, beginning with ``ids``.

        Raises:
            ValueError: the result would be longer than ``max_len``, the prompt is empty, a number
                is negative, or ``top_k`` is outside ``1 .. vocab_size``.
        """
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed is (batch, seqlen) with seqlen >= 1")
        total = ids.shape[1] + max_new_tokens
        if max_new_tokens < 0 or total > self.max_len:
            raise ValueError(
                f"max_new_tokens: got {max_new_tokens}, allowed are 0 .. "
                f"max_len - seqlen = {self.max_len - ids.shape[1]}"
            )
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"temperature: got {temperature}, allowed are numbers >= 0")
        if top_k is not None and not 1 <= top_k <= self.vocab_size:
            raise ValueError(f"top_k: got {top_k}, allowed are 1 .. vocab_size = {self.vocab_size}")
        tokens = ids.clone()
        cache = self.make_cache(total) if use_cache else None
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            for _ in range(max_new_tokens):
                new = tokens if cache is None else tokens[:, cache.length :]
                logits = self(new, cache=cache)[:, -1]
                chosen = _choose(logits, temperature, top_k, generator)
                tokens = torch.cat((tokens, chosen.to(tokens.dtype)), dim=1)
        finally:
            for module in training:
                module.training = True
        return tokens

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)))


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """The next token of each row: logits ``(batch, vocab_size)`` to ids ``(batch, 1)``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, ids = logits.float().topk(logits.shape[-1] if top_k is None else top_k)
    chosen = torch.multinomial((likeliest / temperature).softmax(dim=-1), 1, generator=generator)
    return ids.gather(-1, chosen)
