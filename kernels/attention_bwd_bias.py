"""Gradients of biases that are added to the scores, summed over the dimensions that a bias is broadcast over.

With the gradients ds of the scores::

    dbias[pair] = sum of ds over the pairs that share the entry          attention_bwd_dbias
    drelative[query, distance] = sum of ds over the keys at that distance    attention_bwd_drelative

No tensor of the size of the scores is stored, unless bias itself has that size. If all queries share a relative bias,
no tensor has a row for each query: programs add to exact sums, in any order. q and k arrive rotated.

    dbias      (sequences, nheads_q, rows, keys), float32, contiguous; 1 where broadcast over sequences or heads; if
               broadcast over queries (keys), at most PARTS rows (keys), to be summed
    drelative  (sequences, nheads_q, seqlen_q, 2 * reach + 1), float32, contiguous and 0; if all queries share the
               relative bias, one exact sum for each of its entries
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels import exact_sum, launcher
from fusedattn.kernels.attention_bwd_rows import BackwardRows
from fusedattn.kernels.exact_sum import NO_SUMS, add_exactly
from fusedattn.kernels.masking import any_keys, bounds_of, key_blocks, tile_visited
from fusedattn.kernels.parameters import NOT_SPECIALIZED, Numbers
from fusedattn.kernels.pipelining import fenced
from fusedattn.kernels.primitives import dtype_of, program_tile, strided
from fusedattn.kernels.problem import Problem, constants_of, sizes_of
from fusedattn.kernels.score_gradient import QKVDout, score_gradient
from fusedattn.kernels.scores import distance_of
from fusedattn.kernels.sequences import place_of

PARTS = 8  # programs that share the sum over queries, or over keys


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "n_sequences", "n_rows", "n_keys", "n_tiles_m", "n_tiles_n"])
def attention_bwd_dbias(
    q,
    k,
    v,
    dout,
    rows,
    dbias_ptr,
    call,
    n_sequences,
    n_rows,
    n_keys,
    n_tiles_m,
    n_tiles_n,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    heads_in_l2,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    qk_scale,
    OVER_SEQUENCES: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    OVER_QUERIES: tl.constexpr,
    OVER_KEYS: tl.constexpr,
    tile,
):
    """One program owns a tile of dbias, or one part of its sum: every PARTS-th tile of queries, or of keys."""
    inputs = QKVDout(q, k, v, dout)
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    n_own_m = tl.minimum(n_tiles_m, n_rows) if OVER_QUERIES else n_tiles_m
    n_own_n = tl.minimum(n_tiles_n, n_keys) if OVER_KEYS else n_tiles_n
    own, own_head, own_sequence = program_tile(n_own_m * n_own_n, 1 if OVER_HEADS else nheads_q, 1, REVERSED=False)
    own_m = own // n_own_n
    own_n = own % n_own_n
    # The numbers of sequences, heads and tiles that this program sums, one after the other.
    heads_each = nheads_q if OVER_HEADS else 1
    sequences_each = n_sequences if OVER_SEQUENCES else 1
    tiles_m_each = tl.cdiv(n_tiles_m - own_m, n_own_m) if OVER_QUERIES else 1
    tiles_n_each = tl.cdiv(n_tiles_n - own_n, n_own_n) if OVER_KEYS else 1
    total = tl.zeros([tile.BLOCK_M, tile.BLOCK_N], dtype_of(tile.ACC))
    for i in tl.range(0, sequences_each * heads_each * tiles_m_each * tiles_n_each, disable_licm=True):
        start_n = (own_n + i % tiles_n_each * n_own_n) * tile.BLOCK_N
        i = i // tiles_n_each
        start_m = (own_m + i % tiles_m_each * n_own_m) * tile.BLOCK_M
        i = i // tiles_m_each
        head = own_head + i % heads_each
        place = place_of(call.sequences, own_sequence + i // heads_each, head, nheads_q, seqlen_q, seqlen_k)
        bounds = bounds_of(call.mask, place, numbers)
        if tile_visited(call.mask, place, bounds, start_m, start_n, tile.BLOCK_M, tile.BLOCK_N):
            ds, _, _, _ = score_gradient(inputs, rows, call, place, bounds, numbers, nheads_kv, start_m, start_n, tile)
            total += ds

    matrix = (own_sequence.to(tl.int64) * (1 if OVER_HEADS else nheads_q) + own_head) * n_rows
    offs_m = own_m * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    offs_n = own_n * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    if OVER_QUERIES and OVER_KEYS:
        tl.store(dbias_ptr + (matrix + own_m) * n_keys + own_n, tl.sum(tl.sum(total, 1), 0))
    elif OVER_QUERIES:
        tl.store(dbias_ptr + (matrix + own_m) * n_keys + offs_n, tl.sum(total, 0), mask=offs_n < n_keys)
    elif OVER_KEYS:
        tl.store(dbias_ptr + (matrix + offs_m) * n_keys + own_n, tl.sum(total, 1), mask=offs_m < n_rows)
    else:
        inside = (offs_m < n_rows)[:, None] & (offs_n < n_keys)[None, :]
        tl.store(dbias_ptr + (matrix + offs_m)[:, None] * n_keys + offs_n[None, :], total, mask=inside)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "n_rows", "per_sequence", "per_head"])
def attention_bwd_drelative(
    q,
    k,
    v,
    dout,
    rows,
    drelative_ptr,
    sums,
    call,
    n_rows,
    per_sequence,
    per_head,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    heads_in_l2,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    qk_scale,
    tile,
):
    """One program owns a tile of queries. A query has one key at each distance below `reach`, but many beyond.

    Without `drelative_ptr` the program adds to `sums`, with strides `per_sequence` and `per_head`, 0 if shared.
    """
    inputs = QKVDout(q, k, v, dout)
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    number, head, sequence = program_tile(n_tiles, nheads_q, heads_in_l2, REVERSED=call.mask.HAS_UPPER)
    place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
    start_m = number * tile.BLOCK_M
    offs_m = start_m + tl.arange(0, tile.BLOCK_M)
    reach = call.score.reach
    n_columns = 2 * reach + 1
    if drelative_ptr is None:
        first = tl.cast(sequence, tl.int64) * per_sequence + tl.cast(head, tl.int64) * per_head
    else:
        matrix = (tl.cast(sequence, tl.int64) * nheads_q + head) * n_rows
        row_ptrs = drelative_ptr + (matrix + offs_m) * n_columns
    behind = tl.zeros([tile.BLOCK_M], dtype_of(tile.ACC))
    ahead = tl.zeros([tile.BLOCK_M], dtype_of(tile.ACC))

    bounds = bounds_of(call.mask, place, numbers)
    blocks = key_blocks(call.mask, place, bounds, start_m, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_N)
    for i in tl.range(0, blocks.n_full + blocks.n_boundary, disable_licm=True):
        start_n = any_keys(i, blocks, call.mask, place, start_m, tile.BLOCK_N)
        ds, pairs, _, block = score_gradient(
            inputs, rows, call, place, bounds, numbers, nheads_kv, start_m, start_n, tile
        )
        distance = distance_of(place, block)
        near = pairs & (distance > -reach) & (distance < reach)
        if drelative_ptr is None:
            add_exactly(sums, first + distance + reach, ds, near)
        else:
            tl.store(row_ptrs[:, None] + (distance + reach), ds, mask=near)
        behind += tl.sum(tl.where(distance <= -reach, ds, 0.0), 1)
        ahead += tl.sum(tl.where(distance >= tl.maximum(reach, 1), ds, 0.0), 1)
    if drelative_ptr is None:
        ends = first + tl.arange(0, 2) * (2 * reach)
        beyond = tl.where(tl.arange(0, 2) == 0, tl.sum(behind, 0), tl.sum(ahead, 0))
        add_exactly(sums, ends, beyond, ends >= 0)
    else:
        exists = offs_m < place.seqlen_q
        if reach > 0:
            tl.store(row_ptrs, behind, mask=exists)
            tl.store(row_ptrs + 2 * reach, ahead, mask=exists)
        else:  # both ends are the single column
            tl.store(row_ptrs, behind + ahead, mask=exists)


def launch_dbias(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    bias: torch.Tensor,
    problem: Problem,
) -> torch.Tensor:
    """The gradient of the four-dimensional ``bias``, in its shape and dtype; no tensor is empty."""
    shape, config = problem.shape, problem.configs.dq
    config = fenced(config, problem.async_products, config.BLOCK_M, q, k, v, dout)
    n_tiles_m = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    n_tiles_n = triton.cdiv(shape.max_seqlen_k, config.BLOCK_N)
    over = [size == 1 for size in bias.shape]
    n_rows = min(PARTS, n_tiles_m) if over[2] else bias.shape[2]
    n_keys = min(PARTS, n_tiles_n) if over[3] else bias.shape[3]
    n_own = (n_rows if over[2] else n_tiles_m) * (n_keys if over[3] else n_tiles_n)
    parts = torch.zeros(*bias.shape[:2], n_rows, n_keys, dtype=rows.delta.dtype, device=q.device)
    constants = constants_of(
        attention_bwd_dbias, q, v, problem, config, OVER_SEQUENCES=over[0], OVER_HEADS=over[1], OVER_QUERIES=over[2],
        OVER_KEYS=over[3],
    )  # fmt: skip
    launcher.launch(
        constants,
        n_own * bias.shape[0] * bias.shape[1],
        (*map(strided, (q, k, v, dout)), rows, parts, problem.call),
        (
            *(shape.n_sequences, n_rows, n_keys, n_tiles_m, n_tiles_n),
            *sizes_of(q, v, problem, n_tiles_m),
            problem.scale,
            problem.qk_scale,
        ),
        problem.known_call,
    )
    return parts.sum_to_size(bias.shape).to(bias.dtype)


def launch_drelative(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: BackwardRows,
    relative: torch.Tensor,
    problem: Problem,
) -> torch.Tensor:
    """The gradient of the four-dimensional ``relative``, in its shape and dtype; no tensor is empty."""
    shape, config = problem.shape, problem.configs.dq
    config = fenced(config, problem.async_products, config.BLOCK_M, k, v)
    n_sequences, nheads, n_rows, n_columns = relative.shape
    full, sums = None, NO_SUMS
    if n_rows == 1:
        sums = exact_sum.zeros(relative.numel(), rows.delta.dtype, q.device)
    else:
        size = (shape.n_sequences, shape.nheads_q, n_rows, n_columns)
        full = torch.zeros(size, dtype=rows.delta.dtype, device=q.device)
    n_tiles = triton.cdiv(shape.max_seqlen_q, config.BLOCK_M)
    launcher.launch(
        constants_of(attention_bwd_drelative, q, v, problem, config),
        n_tiles * shape.nheads_q * shape.n_sequences,
        (*map(strided, (q, k, v, dout)), rows, full, sums, problem.call),
        (
            *(n_rows, nheads * n_columns if n_sequences > 1 else 0, n_columns if nheads > 1 else 0),
            *sizes_of(q, v, problem, n_tiles),
            problem.scale,
            problem.qk_scale,
        ),
        problem.known_call,
    )
    found = exact_sum.rounded(sums).view(relative.shape) if full is None else full.sum_to_size(relative.shape)
    return found.to(relative.dtype)
