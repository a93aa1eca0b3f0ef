"""From the tensors of a call of linear attention to the launches of its kernels; loaded only if kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.backends.triton.launching import on_device_of, precision_of, tileable
from fusedattn.kernels import linear_features, linear_outputs, linear_rows, linear_states
from fusedattn.kernels.linear_chunks import Chunks, FeatureMap, LinearTile, chunk_size, linear_tile
from fusedattn.kernels.linear_states import RowNumbers, State
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState

NO_STATE = State(None, None)
NO_NUMBERS = RowNumbers(None, None)


@dataclass
class Problem:
    """One call: its tensors as the kernels take them, and the chunks of its queries and of its keys.

    Attributes:
        n_chunks: of each sequence of a batch.
        n_all: of all sequences together; for packed ones, an upper bound.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    initial: State
    chunks: Chunks
    n_sequences: int
    n_chunks_q: int
    n_chunks_k: int
    n_all_q: int
    n_all_k: int
    tile: LinearTile
    feature_map: FeatureMap
    causal: bool

    def new_state(self, n: int) -> State:
        """Uninitialised states of n chunks or sequences."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        kv = self.q.new_empty(n, self.k.shape[1], self.k.shape[3], self.v.shape[3], dtype=dtype)
        return State(kv, kv.new_empty(kv.shape[:3]))

    def states(self, x: Tensor, y: Tensor, numbers: RowNumbers, initial: State, *, is_reversed: bool) -> tuple[State, State]:
        """The state that each row sees, of each chunk or, if not causal, each sequence; and that of all rows."""
        final = self.new_state(self.n_sequences)
        of_chunks = self.new_state(self.n_all_k) if self.causal else NO_STATE
        linear_states.launch(
            x,
            y,
            None if is_reversed else self.valid,
            numbers,
            self.chunks,
            initial,
            of_chunks,
            final,
            self.n_chunks_q if is_reversed else self.n_chunks_k,
            self.tile,
            self.feature_map,
            is_reversed=is_reversed,
        )
        return of_chunks if self.causal else final, final


def _problem(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> Problem:
    size = chunk_size(k.shape[3])
    n_chunks_q, n_chunks_k = (-(-x.shape[2] // size) for x in (q, k))
    chunks, n_sequences = Chunks(None, None, None), q.shape[0]
    n_all_q, n_all_k = n_sequences * n_chunks_q, n_sequences * n_chunks_k
    cu_seqlens = options.cu_seqlens
    if cu_seqlens is not None:
        n_sequences = cu_seqlens.shape[0] - 1
        n_all_q = n_all_k = k.shape[2] // size + n_sequences
        chunks = _chunks_of(cu_seqlens, size, n_all_k)
    state = options.initial_state
    return Problem(
        *(tileable(x) for x in (q, k, v)),
        options.valid if options.valid is None else options.valid.contiguous(),
        NO_STATE if state is None else State(*(x.contiguous() for x in state)),
        chunks,
        n_sequences,
        n_chunks_q,
        n_chunks_k,
        n_all_q,
        n_all_k,
        linear_tile(k.shape[3], v.shape[3], q.dtype, precision_of(q.dtype)),
        _feature_map(options.feature_map),
        options.causal,
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
    den = problem.new_state(0)[0].new_empty(q.shape[:3] if options.normalize else 0)
    with on_device_of(q):
        state, final = problem.states(problem.k, problem.v, NO_NUMBERS, problem.initial, is_reversed=False)
        linear_outputs.launch(
            problem.q,
            problem.k,
            problem.v,
            problem.valid if problem.causal else None,
            NO_NUMBERS,
            problem.chunks,
            state,
            out,
            den if options.normalize else None,
            problem.n_chunks_q,
            problem.n_all_q,
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
    out: Tensor,
    den: Tensor,
    options: LinearOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of :func:`fusedattn.linear.triton_backend.linear_attention_bwd`."""
    problem = _problem(q, k, v, options)
    dout = tileable(dout)
    dq, dk, dv = (_new_rows(x, x.shape[3], options) for x in (q, k, v))
    numbers = RowNumbers(torch.empty_like(den), torch.empty_like(den)) if options.normalize else NO_NUMBERS
    of_rows = (numbers, problem.chunks)
    constants = (problem.tile, problem.feature_map)
    with on_device_of(q):
        if options.normalize:
            linear_rows.launch(out, dout, den, *of_rows, problem.n_chunks_q, problem.n_all_q, problem.tile)
        state, _ = problem.states(problem.k, problem.v, NO_NUMBERS, problem.initial, is_reversed=False)
        given = State(*(x.contiguous() for x in dstate))
        dstates, dinitial = problem.states(problem.q, dout, numbers, given, is_reversed=True)
        valid_in_chunk = problem.valid if problem.causal else None
        linear_features.launch(
            problem.q, problem.k, dout, problem.v, valid_in_chunk, *of_rows, state, dq,
            problem.n_chunks_q, problem.n_all_q, *constants, is_causal=problem.causal, transposed=False,
        )  # fmt: skip
        linear_features.launch(
            problem.k, problem.q, problem.v, dout, problem.valid, *of_rows, dstates, dk,
            problem.n_chunks_k, problem.n_all_k, *constants, is_causal=problem.causal, transposed=True,
        )  # fmt: skip
        linear_outputs.launch(
            problem.k, problem.q, dout, problem.valid, *of_rows, dstates, dv, None,
            problem.n_chunks_k, problem.n_all_k, *constants, is_causal=problem.causal, transposed=True,
        )  # fmt: skip
    return dq, dk, dv, *dinitial
