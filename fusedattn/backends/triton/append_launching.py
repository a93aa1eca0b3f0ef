"""From the tensors of new tokens and of a cache to a launch; loaded only if kernels run."""

from __future__ import annotations

from torch import Tensor

from fusedattn.backends.triton.launching import contiguous_with, on_device_of, tileable
from fusedattn.backends.triton.operands import AppendTensors
from fusedattn.backends.triton.results import features_of
from fusedattn.kernels import cache_append
from fusedattn.kernels.cached import as_bytes, cache_arguments
from fusedattn.kernels.rope import Rotation, rotation_arguments
from fusedattn.kernels.sequences import Sequences, Shape

Memory = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # k, v and their scales


def append(
    k: Tensor,
    v: Tensor | None,
    memory: Memory,
    tensors: AppendTensors,
    n_sinks: int,
    interleaved: bool,
    max_seqlen: int,
) -> None:
    """Launch the kernel of :func:`fusedattn.backends.triton.appending.cache_append`, whose arguments these are."""
    if k.numel() == 0:
        return
    k_cache, v_cache, *scales = memory
    table, cu_seqlens = tensors.block_table, tensors.cu_seqlens
    capacity = k_cache.shape[2] * (1 if table is None else table.shape[1])
    cache = cache_arguments(
        k_cache,
        k_cache if v_cache is None else v_cache,
        table=table,
        rows=tensors.rows,
        left_padding=None,
        n_sinks=n_sinks,
        scales=(scales[0], scales[1]),
    )
    rotation = None
    if tensors.cos is not None and tensors.sin is not None:
        positions = None if tensors.positions is None else contiguous_with(tensors.positions, 2)
        cos, sin = (contiguous_with(x, 3) for x in (tensors.cos, tensors.sin))
        rotation = Rotation(cos, sin, positions, interleaved, from_start=True)
    n_sequences, nheads = tensors.lengths.shape[0], k.shape[1]
    shape = Shape(n_sequences, nheads, nheads, k.shape[2], capacity, max_seqlen, capacity)
    with on_device_of(k):
        cache_append.launch(
            tileable(k),
            None if v is None else tileable(v),
            as_bytes(k_cache),
            None if v_cache is None else as_bytes(v_cache),
            cache,
            Sequences(cu_seqlens, None, tensors.lengths),
            rotation_arguments(rotation),
            0 if rotation is None else rotation.cos.shape[1],
            shape,
            (features_of(k_cache), features_of(k_cache if v_cache is None else v_cache)),
        )
