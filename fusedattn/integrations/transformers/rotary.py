"""Attention layers of Llama and similar models, with the norm of q and k and the rotation inside the attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.granite.modeling_granite import GraniteAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from fusedattn.integrations.transformers.attention import attention_function
from fusedattn.integrations.transformers.norms import normalized, qk_norm_of
from fusedattn.rope import Rope


class _RopeInside(nn.Module):
    """The forward of these layers; their rotation is half-split and covers all features.

    The forward of transformers' own class runs with a cache, which keeps rotated keys, with tables of fewer features,
    and if another attention implementation has been chosen since.
    """

    config: Any
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers' own class: ``(batch, seqlen, hidden_size)``, and the weights or None."""
        whole = position_embeddings[0].shape[-1] == self.head_dim
        if past_key_values is not None or self.config._attn_implementation != "fusedattn" or not whole:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))  # (batch, seqlen, nheads, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        qk_norm = None
        if hasattr(self, "q_norm"):
            qk_norm = qk_norm_of(self, q, k)
            q, k = (q, k) if qk_norm is not None else normalized(self, q, k)
        # Both halves of a table are the same: (batch or 1, seqlen, head_dim).
        cos, sin = (table[..., : self.head_dim // 2].float() for table in position_embeddings)
        out, weights = attention_function(
            self,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self._sliding_window(),
            softcap=getattr(self, "attn_logit_softcapping", None),
            rope=Rope(cos, sin),
            qk_norm=qk_norm,
            **kwargs,
        )
        return self.o_proj(out.flatten(-2)), weights

    def _sliding_window(self) -> int | None:
        return getattr(self, "sliding_window", None)


class FusedLlamaAttention(_RopeInside, LlamaAttention):
    """Llama 1 to 3."""


class FusedGraniteAttention(_RopeInside, GraniteAttention):
    """Granite: a scale of the scores from the config."""


class FusedMistralAttention(_RopeInside, MistralAttention):
    """Mistral: a sliding window in all layers."""

    def _sliding_window(self) -> int | None:
        return getattr(self.config, "sliding_window", None)


class FusedQwen2Attention(_RopeInside, Qwen2Attention):
    """Qwen 2: a sliding window in some layers."""


class FusedQwen3Attention(_RopeInside, Qwen3Attention):
    """Qwen 3: normalised q and k."""


class FusedQwen3MoeAttention(_RopeInside, Qwen3MoeAttention):
    """Qwen 3, mixture of experts: normalised q and k."""


class FusedOlmo2Attention(_RopeInside, Olmo2Attention):
    """OLMo 2: q and k normalised across heads."""


class FusedOlmo3Attention(_RopeInside, Olmo3Attention):
    """OLMo 3: q and k normalised across heads, a sliding window in most layers."""


class FusedGemma2Attention(_RopeInside, Gemma2Attention):
    """Gemma 2: capped scores, a sliding window in every other layer."""


class FusedGemma3Attention(_RopeInside, Gemma3Attention):
    """Gemma 3: normalised q and k, a sliding window in most layers."""


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaAttention: FusedLlamaAttention,
    GraniteAttention: FusedGraniteAttention,
    MistralAttention: FusedMistralAttention,
    Qwen2Attention: FusedQwen2Attention,
    Qwen3Attention: FusedQwen3Attention,
    Qwen3MoeAttention: FusedQwen3MoeAttention,
    Olmo2Attention: FusedOlmo2Attention,
    Olmo3Attention: FusedOlmo3Attention,
    Gemma2Attention: FusedGemma2Attention,
    Gemma3Attention: FusedGemma3Attention,
}
