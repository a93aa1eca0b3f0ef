"""Attention to the blocks of keys that each query scores highest."""

from __future__ import annotations

from torch import Tensor, nn

from fusedattn import masks
from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.transformer.attention import ScaledDotProductAttention
from fusedattn.transformer.cache import LayerCache
from fusedattn.transformer.linear_attention import causal_and_valid


class TopBlockAttention(nn.Module):
    """Mixture of block attention (MoBA; Lu et al., 2025), in place of a :class:`ScaledDotProductAttention`.

    Each query of each head attends to ``k`` blocks of keys: with a causal mask to its own block, up to itself, and to
    the ``k - 1`` earlier ones whose mean key has the largest product with it. q and k are rotated first. Hidden keys
    have no part in a mean, and a block of hidden keys is not chosen. Choosing has no gradient, and takes
    ``(batch, n_heads, seqlen_q, blocks)`` numbers; ``fuse(model)`` makes the attention to what is chosen sparse.

    Args:
        block_size: keys of a block, 1 and more. Multiples of 16 are fastest.
        k: blocks of each query, 1 and more; all if there are fewer.
        dropout, scale: as for :class:`ScaledDotProductAttention`.

    Raises:
        TypeError, ValueError: ``block_size`` or ``k`` is not a positive int, or ``dropout`` is outside [0, 1).
    """

    def __init__(self, block_size: int, k: int, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        for name, x in (("block_size", block_size), ("k", k)):
            if isinstance(x, bool) or not isinstance(x, int):
                raise TypeError(f"{name}: got {type(x).__name__}, allowed is an int")
            if x < 1:
                raise ValueError(f"{name}: got {x}, allowed are 1 and more")
        self.block_size = block_size
        self.k = k
        self.attention: ScaledDotProductAttention = ScaledDotProductAttention(dropout, scale)

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
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``.

        Arguments and results are those of :func:`scaled_dot_product_attention`, with heads.

        Raises:
            NotImplementedError: a cache, or a mask that is neither causal nor padding nor both: the mean of keys that a
                query may not see would tell it about them.
            ValueError: the shapes do not fit together.
        """
        if cache is not None:
            raise NotImplementedError("cache: got one with top blocks, allowed is None (use_cache=False)")
        mask = as_mask(mask)
        causal, valid = causal_and_valid(mask, q.shape[-2], k.shape[-2], "top-block")
        if rope is not None:
            rope.check(q.shape[0], q.shape[-2], k.shape[-2], q.shape[-1])
            q, k = rope.rotate(q, k)
        scores = masks.mean_pooled_scores(q, k, self.block_size, causal=causal, valid=valid)
        chosen = masks.top_blocks(scores, self.k, (1, self.block_size))
        output, weights = self.attention(q, k, v, mask & chosen, need_weights=need_weights)
        return output, weights

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, k={self.k}"
