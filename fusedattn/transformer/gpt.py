"""The decoder-only Transformer (GPT), and sampling from it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask
from fusedattn.rope import Rope
from fusedattn.transformer.attention import MultiHeadAttention, checked_head_dim
from fusedattn.transformer.blocks import TransformerBlock
from fusedattn.transformer.cache import LayerCache, ModelCache
from fusedattn.transformer.embedding import TokenEmbedding, token_mask
from fusedattn.transformer.linear_attention import LinearAttention
from fusedattn.transformer.positions import (
    LearnedPositionalEncoding,
    PositionalEncoding,
    RotaryPositionalEmbedding,
)
from fusedattn.transformer.state_cache import StateCache


class GPTModel(nn.Module):
    """Decoder-only language model after GPT-2 (Radford et al., 2019).

    A stack of causal :class:`TransformerBlock`; the embedding matrix is also the output matrix
    (Press and Wolf, 2017). Weights start from N(0, 0.02^2), those of the projections into the
    residual stream from N(0, 0.02^2 / (2 n_layers)), biases from 0.

    Args:
        vocab_size: the number of tokens.
        d_model, n_heads, d_ff, dropout, n_kv_heads, norm, activation, qk_norm: as for a block.
        n_layers: the number of blocks.
        max_len: the longest sequence.
        positions: ``"sinusoidal"`` (with embeddings scaled by ``sqrt(d_model)``), ``"learned"``
            (GPT-2) or ``"rotary"`` (all features of each head, in every block).
        attention: ``"softmax"``; ``"linear"``, a :class:`LinearAttention` in every block; a Mask, such
            as ``masks.strided(64)``: what tokens see besides the causal mask; or a module, such as
            ``TopBlockAttention(64, 8)`` or ``LinearAttention("relu")``, of which every block has a
            copy, with dropout of its own. Sparse patterns and top blocks take no cache: generate with
            ``use_cache=False``.

    Raises:
        TypeError: ``attention`` is neither a string nor a Mask nor a module.
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
        attention: str | Mask | nn.Module = "softmax",
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        allowed = "allowed are 'softmax', 'linear', a Mask and a module"
        if not isinstance(attention, str | Mask | nn.Module):
            raise TypeError(f"attention: got {type(attention).__name__}, {allowed}")
        if isinstance(attention, str) and attention not in ("softmax", "linear"):
            raise ValueError(f"attention: got {attention!r}, {allowed}")
        self.pattern: Mask = attention if isinstance(attention, Mask) else masks.full()
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
        core = LinearAttention() if attention == "linear" else attention if isinstance(attention, nn.Module) else None
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.embedding: TokenEmbedding = TokenEmbedding(vocab_size, d_model, scaled=positions == "sinusoidal")
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(
            TransformerBlock(
                d_model,
                n_heads,
                d_ff,
                dropout,
                norm=norm,
                activation=activation,
                n_kv_heads=n_kv_heads,
                rope=rope,
                attention=copy.deepcopy(core),
                qk_norm=qk_norm,
            )
            for _ in range(n_layers)
        )
        self.norm: nn.Module = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self._init_weights()

    def forward(self, ids: Tensor, mask: Mask | Tensor | None = None, *, cache: ModelCache | None = None) -> Tensor:
        """Logits ``(batch, seqlen, vocab_size)`` of the next token after each of ``ids``.

        Args:
            ids: ``(batch, seqlen)``.
            mask: besides the causal mask: a Mask; bool ``(batch, seqlen)``, True = a real token;
                or bool broadcastable to ``(batch, n_heads, seqlen, seqlen)``, True = attend. With a
                cache of keys, these are all tokens of a sequence, and their number in these shapes is
                the capacity of the cache. With a cache of states they are ``ids``: hide a token when
                it is new, and it stays hidden.
            cache: from :meth:`make_cache` or :meth:`make_paged_cache`. ``ids`` continue each of its
                sequences, at positions of its own, and are added to it.

        Raises:
            ValueError: more than ``max_len`` tokens, a mask that does not fit, or a cache that is
                full or has another batch or number of layers. If lengths are on a GPU they are not
                read: logits of a sequence that is too long are NaN.
            NotImplementedError: a cache, and parameters that need gradients, a sparse pattern, top blocks
                or, with states, a mask that is not padding.
        """
        x = self.embedding(ids)
        batch, seqlen = ids.shape
        past = 0 if cache is None else cache.longest
        if past is not None and past + seqlen > self.max_len:
            raise ValueError(f"ids: got {seqlen} tokens after {past}, allowed are max_len = {self.max_len}")
        if cache is not None:
            if self.pattern.pattern is not None:
                raise NotImplementedError("cache: got one with a sparse pattern, allowed is None (use_cache=False)")
            self._check_cache(cache, batch)
            cache.check_room(seqlen)
        if self.positions is not None:
            x = self.positions(x, 0 if cache is None else cache.lengths)
        x = self.dropout(x)
        if cache is None:
            x = self._hidden(x, token_mask(mask, batch, seqlen))
        else:
            visible = token_mask(mask, batch, seqlen if cache.capacity is None else cache.capacity)
            with cache.adding(seqlen):
                x = self._hidden(x, visible, cache.layers)
        return F.linear(self.norm(x), self.embedding.weight)

    def make_cache(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        group_size: int | None = None,
        left_padding: Tensor | None = None,
    ) -> ModelCache:
        """An empty cache, contiguous in every layer, on the device of the model.

        Layers of linear attention have a :class:`StateCache`, whose size does not depend on the tokens.

        Args:
            batch: the number of sequences.
            capacity: the tokens of each that keys have room for; by default the ``max_len`` of the
                model. States need none.
            dtype: of the numbers or codes of keys and values; by default that of the projections.
            group_size, left_padding: as in :meth:`fusedattn.KVCache.contiguous`.

        Raises:
            NotImplementedError: ``dtype`` or ``group_size`` with linear attention: states are float32
                (float64 for a float64 model).
        """
        if (dtype, group_size) != (None, None) and self._has_states():
            raise NotImplementedError(
                f"dtype, group_size: got {dtype}, {group_size} with linear attention, allowed are None: states are "
                "float32, or float64 as the model"
            )
        contiguous = functools.partial(
            KVCache.contiguous,
            batch,
            capacity=self.max_len if capacity is None else capacity,
            group_size=group_size,
            left_padding=left_padding,
            device=self.embedding.weight.device,
        )
        return self._cache(contiguous, batch, dtype, left_padding)

    def make_paged_cache(
        self,
        block_table: Tensor,
        n_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype | None = None,
        group_size: int | None = None,
        left_padding: Tensor | None = None,
    ) -> ModelCache:
        """An empty cache of ``n_pages`` pages of ``page_size`` tokens in every layer.

        Args:
            block_table: int32 ``(batch, max_pages)``: the pages of each sequence, in all layers.
            dtype, group_size, left_padding: as in :meth:`make_cache`.

        Raises:
            NotImplementedError: a layer of linear attention, which has no keys to lie in pages.
        """
        if self._has_states():
            raise NotImplementedError(
                "make_paged_cache: got a model with linear attention, whose states have no pages; allowed is make_cache"
            )
        paged = functools.partial(
            KVCache.paged, block_table, n_pages, page_size, group_size=group_size, left_padding=left_padding
        )
        return self._cache(paged, block_table.shape[0], dtype, left_padding)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        use_cache: bool = True,
        cache: ModelCache | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue ``ids`` token by token, in evaluation mode and without gradients.

        Args:
            ids: the prompts, ``(batch, seqlen)`` with ``seqlen >= 1``, not changed.
            max_new_tokens: the number of tokens to add.
            temperature: the next token is drawn from ``softmax(logits / temperature)``; 0 takes the
                likeliest.
            top_k: draw from the ``top_k`` likeliest tokens only (Fan et al., 2018).
            use_cache: keep keys and values, or the states of linear attention, instead of recomputing
                them for each token.
            cache: where to keep them; by default in a new one from :meth:`make_cache`. ``ids``
                continue its sequences. In the end it holds all tokens but the last.
            generator: the source of randomness, on the device of the model.

        Returns:
            ``(batch, seqlen + max_new_tokens)``, beginning with ``ids``.

        Raises:
            ValueError: the result would be longer than ``max_len`` or than the cache, the prompt is
                empty, a number is negative, or ``top_k`` is outside ``1 .. vocab_size``.
        """
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed is (batch, seqlen) with seqlen >= 1")
        batch, seqlen = ids.shape
        total = seqlen + max_new_tokens
        room = self.max_len - seqlen - (0 if cache is None else cache.longest or 0)
        if not 0 <= max_new_tokens <= room:
            raise ValueError(f"max_new_tokens: got {max_new_tokens}, allowed are 0 .. max_len - seqlen = {room}")
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"temperature: got {temperature}, allowed are numbers >= 0")
        if top_k is not None and not 1 <= top_k <= self.vocab_size:
            raise ValueError(f"top_k: got {top_k}, allowed are 1 .. vocab_size = {self.vocab_size}")
        if cache is not None:
            if not use_cache:
                raise ValueError("cache: got one with use_cache=False, allowed is None")
            self._check_cache(cache, batch)
            cache.check_room(total - 1 if max_new_tokens else 0)
        elif use_cache:
            cache = self.make_cache(batch, total)
        tokens = torch.cat((ids, ids.new_empty(batch, max_new_tokens)), dim=1)
        new = ids
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            for end in range(seqlen, total):
                logits = self(new, cache=cache)[:, -1]
                tokens[:, end] = _choose(logits, temperature, top_k, generator)
                new = tokens[:, : end + 1] if cache is None else tokens[:, end : end + 1]
        finally:
            for module in training:
                module.training = True
        return tokens

    def _hidden(self, x: Tensor, mask: Mask, caches: tuple[LayerCache, ...] | None = None) -> Tensor:
        visible = masks.causal() & self.pattern & mask
        for i, block in enumerate(self.blocks):
            x = block(x, visible, cache=None if caches is None else caches[i])
        return x

    def _has_states(self) -> bool:
        return any(isinstance(layer.attention, LinearAttention) for layer in self._attention_layers())

    def _attention_layers(self) -> list[MultiHeadAttention]:
        return [block.self_attention for block in self.blocks]  # type: ignore[misc]

    def _cache(
        self, make: Callable[..., KVCache], batch: int, dtype: torch.dtype | None, left_padding: Tensor | None
    ) -> ModelCache:
        """The caches of all layers, those of keys each made by ``make``."""
        weight = self.embedding.weight
        lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        if dtype is None:
            casts = weight.dtype != torch.float64 and torch.is_autocast_enabled(weight.device.type)
            dtype = torch.get_autocast_dtype(weight.device.type) if casts else weight.dtype
        caches: list[LayerCache] = []
        for layer in self._attention_layers():
            rope = None if layer.rope is None else layer.rope.tables()
            if isinstance(layer.attention, LinearAttention):
                caches.append(_state_cache(layer, layer.attention, rope, lengths, left_padding))
            else:
                caches.append(
                    make(nheads_kv=layer.n_kv_heads, head_dim=layer.head_dim, dtype=dtype, rope=rope, lengths=lengths)
                )
        return ModelCache(caches)

    def _check_cache(self, cache: ModelCache, batch: int) -> None:
        if len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache: got {len(cache.layers)} layers, allowed are {len(self.blocks)}")
        if cache.batch != batch:
            raise ValueError(f"cache: got {cache.batch} sequences, allowed is the batch of ids, {batch}")

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)))


def _state_cache(
    layer: MultiHeadAttention, core: LinearAttention, rope: Rope | None, lengths: Tensor, left_padding: Tensor | None
) -> StateCache:
    weight = layer.k_proj.weight
    return StateCache.empty(
        layer.n_kv_heads,
        core.n_features(layer.head_dim, weight),
        layer.head_dim,
        lengths=lengths,
        dtype=torch.promote_types(weight.dtype, torch.float32),
        left_padding=left_padding,
        rope=rope,
    )


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """The next token of each row: logits ``(batch, vocab_size)`` to ids ``(batch,)``."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    likeliest, ids = logits.float().topk(logits.shape[-1] if top_k is None else top_k)
    chosen = torch.multinomial((likeliest / temperature).softmax(dim=-1), 1, generator=generator)
    return ids.gather(-1, chosen)[:, 0]
