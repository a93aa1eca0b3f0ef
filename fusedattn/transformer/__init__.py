"""The reference Transformer: textbook models in eager PyTorch.

Every attention layer here computes its attention in a :class:`ScaledDotProductAttention` or a
:class:`LinearAttention` only; ``fusedattn.fuse(model)`` replaces exactly these modules.
"""

from fusedattn.transformer.attention import (
    MultiHeadAttention,
    ScaledDotProductAttention,
    SelfAttention,
    scaled_dot_product_attention,
)
from fusedattn.transformer.blocks import DecoderLayer, EncoderLayer, Residual, TransformerBlock
from fusedattn.transformer.cache import ModelCache
from fusedattn.transformer.embedding import TokenEmbedding
from fusedattn.transformer.encoder_decoder import (
    Decoder,
    Encoder,
    Transformer,
    TransformerEncoder,
)
from fusedattn.transformer.feed_forward import FeedForward, SwiGLU
from fusedattn.transformer.gpt import GPTModel
from fusedattn.transformer.linear_attention import LinearAttention
from fusedattn.transformer.positions import (
    LearnedPositionalEncoding,
    PositionalEncoding,
    RotaryPositionalEmbedding,
)
from fusedattn.transformer.qk_norm import QueryKeyNorm
from fusedattn.transformer.state_cache import StateCache
from fusedattn.transformer.top_blocks import TopBlockAttention

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "GPTModel",
    "LearnedPositionalEncoding",
    "LinearAttention",
    "ModelCache",
    "MultiHeadAttention",
    "PositionalEncoding",
    "QueryKeyNorm",
    "Residual",
    "RotaryPositionalEmbedding",
    "ScaledDotProductAttention",
    "SelfAttention",
    "StateCache",
    "SwiGLU",
    "TokenEmbedding",
    "TopBlockAttention",
    "Transformer",
    "TransformerBlock",
    "TransformerEncoder",
    "scaled_dot_product_attention",
]
