"""The caches of all layers of a model, for incremental decoding (Shazeer, "Fast Transformer Decoding", 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from fusedattn.kv_cache import KVCache
from fusedattn.readable import can_read
from fusedattn.transformer.state_cache import StateCache

LayerCache = KVCache | StateCache


class ModelCache:
    """One cache per layer; all of them share one tensor of lengths.

    A layer of softmax attention has a :class:`fusedattn.KVCache`, one of linear attention a :class:`StateCache`.

    Args:
        layers: the caches, from the first layer to the last. Layers usually share their block table too.

    Raises:
        ValueError: there is no layer, or two layers have different tensors `lengths`.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        if not layers:
            raise ValueError("layers: got none, allowed are 1 and more")
        for i, layer in enumerate(layers):
            if layer.lengths is not layers[0].lengths:
                raise ValueError(f"layers: got other lengths in layer {i}, allowed is the tensor of layer 0")
        self.layers: tuple[LayerCache, ...] = tuple(layers)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each sequence, int32 ``(batch,)``."""
        return self.layers[0].lengths

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.layers[0].batch

    @property
    def capacity(self) -> int | None:
        """The tokens of one sequence that the first layer with keys has room for; None if all layers have states."""
        return next((layer.capacity for layer in self.layers if isinstance(layer, KVCache)), None)

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
                if isinstance(layer, KVCache):
                    layer.check_values([n] * self.batch, counted=False)

    @contextmanager
    def adding(self, n: int) -> Iterator[None]:
        """Count `n` more tokens of each sequence, which layers add inside; after an error there, nothing has changed.

        What a cache of keys holds behind its lengths does not matter, but a state holds its tokens for ever.
        """
        before = [(x, x.clone()) for layer in self.layers if isinstance(layer, StateCache) for x in layer.tensors()]
        self.lengths.add_(n)
        try:
            yield
        except BaseException:
            self.lengths.sub_(n)
            for x, held in before:
                x.copy_(held)
            raise


def with_keys(cache: LayerCache) -> KVCache:
    """The cache of a layer, or TypeError if it holds a state."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: got a {type(cache).__name__}, allowed is a KVCache")
    return cache


def with_state(cache: LayerCache) -> StateCache:
    """The cache of a layer, or TypeError if it holds keys."""
    if not isinstance(cache, StateCache):
        raise TypeError(f"cache: got a {type(cache).__name__}, allowed is a StateCache")
    return cache


def _part(layer: LayerCache, own: slice, lengths: Tensor) -> LayerCache:
    """Some sequences of a cache, which lie in rows of their own unless a table says where."""
    if isinstance(layer, StateCache):
        return layer.sequences(own, lengths)

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
