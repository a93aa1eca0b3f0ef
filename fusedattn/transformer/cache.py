"""The key/value cache of incremental decoding (Shazeer, "Fast Transformer Decoding", 2019)."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values, before rotation, of the tokens that one attention layer has seen.

    The first :meth:`append` allocates the memory, ``(batch, n_kv_heads, max_len, head_dim)``, with
    the batch, heads, dtype and device of its keys and values. A cache is meant for
    ``torch.no_grad()``: autograd refuses a backward through memory that was written again.

    Args:
        max_len: the capacity in tokens.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return those of all tokens so far.

        Args:
            k, v: ``(batch, n_kv_heads, seqlen, head_dim)``.

        Returns:
            Views ``(batch, n_kv_heads, length, head_dim)`` of the cache, in the order of arrival.

        Raises:
            ValueError: the cache is full, or batch, heads or head_dim changed between two calls.
            TypeError: the dtype changed between two calls.
        """
        if self.keys is None or self.values is None:
            self.keys, self.values = self._allocate(k), self._allocate(v)
        start, end = self.length, self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(
                f"cache: got {k.shape[2]} tokens after {self.length}, allowed are max_len = {self.max_len} in all"
            )
        for name, new, stored in (("k", k, self.keys), ("v", v, self.values)):
            want = (*stored.shape[:2], end - start, stored.shape[3])
            if tuple(new.shape) != want:
                raise ValueError(f"{name}: got shape {tuple(new.shape)}, allowed is {want}")
            if new.dtype != stored.dtype:
                raise TypeError(f"{name}: got {new.dtype}, allowed is the cache's {stored.dtype}")
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _allocate(self, x: Tensor) -> Tensor:
        batch, heads, _, head_dim = x.shape
        return x.new_empty(batch, heads, self.max_len, head_dim)


class KVCache:
    """One :class:`LayerCache` per layer of a model.

    Args:
        n_layers: the number of layers of the model.
        max_len: the capacity in tokens.

    Raises:
        ValueError: either is not positive.
    """

    def __init__(self, n_layers: int, max_len: int) -> None:
        if n_layers < 1 or max_len < 1:
            raise ValueError(f"n_layers, max_len: got {n_layers}, {max_len}, allowed are positive numbers")
        self.layers = [LayerCache(max_len) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self.layers[0].length
