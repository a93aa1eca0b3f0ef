"""From the tensors of a call of linear attention to the launches of its kernels; loaded only if kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.backends.triton.launching import on_device_of, precision_of, tileable
from fusedattn.kernels import linear_features, linear_outputs, linear_states
from fusedattn.kernels.linear_chunks import ChunkCounts, Chunks, FeatureMap, LinearTile, linear_tile
from fusedattn.kernels.linear_states import RowNumbers, State
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState

NO_STATE = State(None, None)
NO_NUMBERS = RowNumbers(None, None)


@dataclass
class Problem:
    """One call: its tensors as the kernels take them, and the chunks of its queries and of its keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    initial: State
    chunks: Chunks
    n_sequences: int
    of_queries: ChunkCounts
    of_keys: ChunkCounts
    tile: LinearTile
    feature_map: FeatureMap
    causal: bool

    @property
    def valid_queries(self) -> Tensor | None:
        """The hidden tokens, where they are counted as queries."""
        return self.valid if self.causal else None

    def new_state(self, n: int) -> State:
        """Uninitialised states of n chunks or sequences."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        kv = self.q.new_empty(n, self.k.shape[1], self.k.shape[3], self.v.shape[3], dtype=dtype)
        return State(kv, kv.new_empty(kv.shape[:3]))

    def states(
        self, x: Tensor, y: Tensor, numbers: RowNumbers, initial: State, *, is_reversed: bool
    ) -> tuple[State, State]:
        """The state that each row sees, of each chunk or, if not causal, each sequence; and that of all rows."""
        final = self.new_state(self.n_sequences)
        of_chunks = self.new_state(self.of_keys.all) if self.causal else NO_STATE
        linear_states.launch(
            x,
            y,
            None if is_reversed else self.valid,
            numbers,
            self.chunks,
            initial,
            of_chunks,
            final,
            self.of_queries if is_reversed else self.of_keys,
            self.tile,
            self.feature_map,
            is_reversed=is_reversed,
        )
        return of_chunks if self.causal else final, final


def _problem(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> Problem:
    tile = linear_tile(k.shape[3], v.shape[3], q.dtype, precision_of(q.dtype))
    size = tile.CHUNK.value
    chunks, n_sequences, cu_seqlens = Chunks(None, None, None), q.shape[0], options.cu_seqlens
    each_q, each_k = (-(-x.shape[2] // size) for x in (q, k))
    of_queries, of_keys = ChunkCounts(each_q, n_sequences * each_q), ChunkCounts(each_k, n_sequences * each_k)
    if cu_seqlens is not None:
        n_sequences = cu_seqlens.shape[0] - 1
        of_queries = of_keys = ChunkCounts(0, k.shape[2] // size + n_sequences)
        chunks = _chunks_of(cu_seqlens, size, of_keys.all)
    state = options.initial_state
    return Problem(
        q=tileable(q),
        k=tileable(k),
        v=tileable(v),
        valid=None if options.valid is None else options.valid.contiguous(),
        initial=NO_STATE if state is None else State(state.kv.contiguous(), state.k_sum.contiguous()),
        chunks=chunks,
        n_sequences=n_sequences,
        of_queries=of_queries,
        of_keys=of_keys,
        tile=tile,
        feature_map=_feature_map(options.feature_map),
        causal=options.causal,
    )


def _chunks_of(cu_seqlens: Tensor, size: int, n_all: int) -> Chunks:
    """The chunks of packed sequences, numbered one sequence after the other, computed on the device."""
    counts = (cu_seqlens.diff() + (size - 1)) // size
    first = torch.zeros_like(cu_seqlens)
    torch.cumsum(counts, 0, out=first[1:])
    numbers = torch.arange(n_all, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(first[1:], numbers, right=True, out_int32=True)
    return Chunks(cu_seqlens, first, sequence.clamp_(max=cu_seqlens.shape[0] - 2))


def _feature_map(feature_map: str | feature_maps.FeatureMap) -> FeatureMap:
    if isinstance(feature_map, str):
        return FeatureMap(tl.constexpr(feature_map), tl.constexpr(None), tl.constexpr(None))
    return FeatureMap(tl.constexpr(""), tl.constexpr(feature_map.function), tl.constexpr(feature_map.derivative))


def _new_rows(like: Tensor, n_features: int, options: LinearOptions) -> Tensor:
    """A result for rows; tokens of no packed sequence have 0."""
    new: Any = like.new_empty if options.cu_seqlens is None else like.new_zeros
    return new(*like.shape[:3], n_features)


def forward(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of :func:`fusedattn.linear.triton_backend.linear_attention_fwd`."""
    problem = _problem(q, k, v, options)
    out = _new_rows(q, v.shape[3], options)
    # A result of the operator, also for tokens of no sequence.
    new: Any = q.new_empty if options.cu_seqlens is None else q.new_zeros
    den = new(q.shape[:3] if options.normalize else 0, dtype=torch.promote_types(q.dtype, torch.float32))
    with on_device_of(q):
        state, final = problem.states(problem.k, problem.v, NO_NUMBERS, problem.initial, is_reversed=False)
        linear_outputs.launch(
            problem.q,
            problem.k,
            problem.v,
            problem.valid_queries,
            NO_NUMBERS,
            problem.chunks,
            state,
            out,
            den if options.normalize else None,
            problem.of_queries,
            problem.tile,
            problem.feature_map,
            is_causal=problem.causal,
            transposed=False,
        )
    return out, den, *final


def backward(
    dout: Tensor,
    dstate: LinearState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Tensor,
    options: LinearOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of :func:`fusedattn.linear.triton_backend.linear_attention_bwd`."""
    problem = _problem(q, k, v, options)
    dout = tileable(dout)
    dq, dk, dv = (_new_rows(x, x.shape[3], options) for x in (q, k, v))
    numbers = RowNumbers(torch.empty_like(den), torch.empty_like(den)) if options.normalize else NO_NUMBERS
    q, k, v = problem.q, problem.k, problem.v
    of_rows = numbers, problem.chunks
    constants = problem.tile, problem.feature_map
    with on_device_of(q):
        state, _ = problem.states(k, v, NO_NUMBERS, problem.initial, is_reversed=False)
        linear_features.launch(
            *(q, k, dout, v, problem.valid_queries, *of_rows, state, dq),
            *(den if options.normalize else None, problem.of_queries, *constants),
            is_causal=problem.causal,
            transposed=False,
        )
        given = State(dstate.kv.contiguous(), dstate.k_sum.contiguous())
        dstates, dinitial = problem.states(q, dout, numbers, given, is_reversed=True)
        linear_features.launch(
            *(k, q, v, dout, problem.valid, *of_rows, dstates, dk, None, problem.of_keys, *constants),
            is_causal=problem.causal,
            transposed=True,
        )
        linear_outputs.launch(
            *(k, q, dout, problem.valid, *of_rows, dstates, dv, None, problem.of_keys, *constants),
            is_causal=problem.causal,
            transposed=True,
        )
    return dq, dk, dv, *dinitial
