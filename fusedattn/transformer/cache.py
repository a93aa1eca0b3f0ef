"""The caches of all layers of a model, for incremental decoding (Shazeer, "Fast Transformer Decoding", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fusedattn.kv_cache import KVCache
from fusedattn.readable import can_read


class ModelCache:
    """One :class:`fusedattn.KVCache` per layer; all of them share one tensor of lengths.

    Args:
        layers: the caches, from the first layer to the last. Layers usually share their block table too.

    Raises:
        ValueError: there is no layer, or two layers have different tensors `lengths`.
    """

    def __init__(self, layers: Sequence[KVCache]) -> None:
        if not layers:
            raise ValueError("layers: got none, allowed are 1 and more")
        for i, layer in enumerate(layers):
            if layer.lengths is not layers[0].lengths:
                raise ValueError(f"layers: got other lengths in layer {i}, allowed is the tensor of layer 0")
        self.layers = tuple(layers)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each sequence, int32 ``(batch,)``."""
        return self.layers[0].lengths

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.layers[0].batch

    @property
    def capacity(self) -> int:
        """The tokens of one sequence that the first layer has room for."""
        return self.layers[0].capacity

    @property
    def longest(self) -> int | None:
        """The length of the longest sequence, if lengths are on a CPU; None elsewhere, where reading them waits."""
        return max(self.lengths.tolist(), default=0) if can_read(self.lengths) else None

    def sequences(self, start: int, stop: int) -> ModelCache:
        """The sequences ``start .. stop - 1`` alone, in the same memory and with the same lengths.

        A prompt can so be added to one sequence of a batch.
        """
        own = slice(start, stop)
        lengths = self.lengths[own]
        return ModelCache([_part(layer, own, lengths) for layer in self.layers])

    def check_room(self, n: int) -> None:
        """Raise ValueError unless each sequence has room for `n` more tokens; on a CPU only."""
        if self.longest is not None:
            for layer in self.layers:
                layer.check_values([n] * self.batch, counted=False)


def _part(layer: KVCache, own: slice, lengths: Tensor) -> KVCache:
    """Some sequences of a cache, which lie in rows of their own unless a table says where."""

    def part(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[own]

    layer = replace(
        layer,
        lengths=lengths,
        block_table=part(layer.block_table),
        rows=part(layer.rows),
        left_padding=part(layer.left_padding),
    )
    if layer.block_table is not None or layer.rows is not None:
        return layer
    return replace(layer, k=layer.k[own], v=layer.v[own], k_scale=part(layer.k_scale), v_scale=part(layer.v_scale))
