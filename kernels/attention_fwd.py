"""Forward of attention: ``out = dropout(softmax(scores, masked)) v`` with the online softmax.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), in the loop
order of FlashAttention-2: one program owns one tile of BLOCK_M queries of one head, keeps it in registers, and
walks over the key blocks that the tile may see. What happens to scores on the way: kernels/scores.py.

    q       (batch, nheads_q, seqlen_q, head_dim)     any strides, last dimension contiguous
    out     (batch, nheads_q, seqlen_q, head_dim_v)   likewise
    k       (batch, nheads_kv, seqlen_k, head_dim)    likewise; rotated, unless few queries see it: then here
    v       (batch, nheads_kv, seqlen_k, head_dim_v)  likewise
    sinks   (nheads_q,)                               float32, or None: a logit whose weight has no value
    lse     (batch, nheads_q, seqlen_q)               contiguous, natural logarithm
    row_max, row_sum                                  likewise: the softmax of each row, kept for the backward
    rest    like out, int8: what rounding took from out, kept for the backward of 16-bit inputs, or None
    grid    (tiles of queries * nheads_q * sequences,)

Where there are few queries a program owns those of several heads, which share a KV head (kernels/grouped.py), and only
a part of their keys, whose sums kernels/combine.py brings together; the grid is then
``(splits * parts of a group * nheads_kv * sequences,)``. Which of all this a call is: kernels/grid.py.
"""

import torch
import triton
import triton.language as tl

from fusedattn.kernels import combine, launcher
from fusedattn.kernels.call import Problem, constants_of, programs_of, sizes_of
from fusedattn.kernels.descriptors import full_tile, tiles_of
from fusedattn.kernels.epilogue import Results, store_nothing, store_partials, store_results
from fusedattn.kernels.grid import tiling_of
from fusedattn.kernels.grouped import grouped_program, load_rows, row_offsets, rows_of, with_rows
from fusedattn.kernels.masking import any_keys, boundary_keys, bounds_of, key_blocks, load_key_visible, visible
from fusedattn.kernels.primitives import (
    bits_of,
    dot,
    dot_add,
    has_nan,
    head_base,
    heads,
    load_tile,
    numbered_tile,
    of_bits,
    round_to,
    split_poison,
)
from fusedattn.kernels.rope import rotate_tile, rotated, rotation_arguments
from fusedattn.kernels.scores import modified
from fusedattn.kernels.sequences import place_of
from fusedattn.kernels.softmax import exp_scaled, softmax_update
from fusedattn.kernels.weights import NOT_SPECIALIZED, kept_only


@triton.jit
def _turned(
    k_tile, rotation, place, start_n, n_positions, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr
):
    """A tile of keys, rotated here where it did not come rotated."""
    if rotation.ROTARY_DIM > 0:
        turned = rotate_tile(
            k_tile, rotation, start_n, place.seqlen_k, place.batch, place.first_k, 0, n_positions, False,
            BLOCK, BLOCK_D, ACC,
        )  # fmt: skip
        return round_to(turned, k_tile.dtype)
    else:
        return k_tile


@triton.jit
def _full_products(
    q_tile,
    k,
    k_tiles,
    k_head,
    place,
    head_kv,
    rotation_k,
    start_n,
    n_positions,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of the queries with the keys of a full block, ``(BLOCK_M, BLOCK_N)``."""
    k_tile = full_tile(k, k_tiles, k_head, place.batch, head_kv, place.first_k, start_n, HEAD_DIM, BLOCK_N, BLOCK_D)
    k_tile = _turned(k_tile, rotation_k, place, start_n, n_positions, BLOCK_N, BLOCK_D, ACC)
    return dot(q_tile, tl.trans(k_tile), ACC, PRECISION)


@triton.jit
def weights(
    scores,
    m_i,
    l_i,
    c_i,
    call,
    place,
    nheads_q,
    rows,
    keys,
    qk_scale,
    HAS_REST: tl.constexpr,
    EXACT: tl.constexpr,
    dtype: tl.constexpr,
):
    """(p, alpha, m_i, l_i, c_i) with a block of scores more; p are the weights that are kept, rounded to `dtype`."""
    p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, qk_scale, EXACT)
    p = kept_only(p, call, place, nheads_q, rows, keys)
    if HAS_REST and call.dropout.seed_ptr is not None:
        c_i = c_i * alpha + tl.sum(p, 1)
    return round_to(p, dtype), alpha, m_i, l_i, c_i


@triton.jit
def add_values(
    acc,
    w_i,
    alpha,
    p,
    v_tile,
    HAS_REST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(acc, w_i) with the weights of BLOCK keys more, and their values.

    The sum of the weights is a narrow matrix product, which costs less than widening them again. It comes first, where
    tiles below 64 rows spill otherwise, or LAST, where a pipelined loop waits for each product otherwise.
    """
    if HAS_REST:
        ones = round_to(tl.full([BLOCK, 16], 1.0, tl.float32), v_tile.dtype)
    if HAS_REST and not LAST:
        w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)
    acc = dot_add(p, v_tile, acc * alpha[:, None], ACC, PRECISION)
    if HAS_REST and LAST:
        w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)
    return acc, w_i


@triton.jit
def _attend_tile(
    place,
    tile_rows,
    head_kv,
    split,
    n_splits,
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    sinks_ptr,
    results,
    partials,
    call,
    rotation,
    rotation_k,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    softmax_scale,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    PIPELINED: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of queries, from its first key to what is written of it; all keys, or with SPLIT those of one split."""
    start_m = tile_rows.start
    offs_n = tl.arange(0, BLOCK_N)
    rows = tile_rows.queries[:, None]
    exists = tile_rows.exist[:, None]
    k_head = head_base(k, place.batch, head_kv, place.first_k)
    v_head = head_base(v, place.batch, head_kv, place.first_k)

    # (BLOCK_M, BLOCK_D)
    q_tile = load_rows(q, place, tile_rows, HEAD_DIM, BLOCK_M, BLOCK_D, HEADS)
    if rotation.ROTARY_DIM > 0:
        at_end = place.seqlen_k - place.seqlen_q
        q_tile = rotate_tile(
            q_tile, rotation, start_m, place.seqlen_q, place.batch, place.first_q, at_end, n_positions, False,
            BLOCK_M, BLOCK_D, ACC, HEADS,
        )  # fmt: skip
    q_tile = round_to(q_tile, q.ptr.dtype.element_ty)

    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    w_i = tl.zeros([BLOCK_M, 16], ACC)  # as l_i, of the weights as they are kept and rounded for the product with v
    c_i = tl.zeros([BLOCK_M], ACC)  # as l_i, of the weights that dropout keeps
    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
    HAS_REST: tl.constexpr = (partials.rounded_sum if SPLIT > 0 else results.rest) is not None
    DTYPE: tl.constexpr = v.ptr.dtype.element_ty

    bounds = bounds_of(call.mask, place, lower_start, upper_start, lower_end, upper_end)
    blocks = key_blocks(call.mask, place, bounds, start_m, BLOCK_M // HEADS, EDGE, BLOCK_N, split, SPLIT)
    first_full = blocks.start + blocks.n_left * EDGE
    stop_full = first_full + blocks.n_full * EDGE
    if PIPELINED:
        # The product of the weights of a block with its values is issued behind the product that makes the scores of
        # the next, so that it runs while these become weights. The first scores and the last product stand alone.
        if blocks.n_full > 0:
            keys = (first_full + offs_n)[None, :]
            scores = _full_products(
                q_tile, k, k_tiles, k_head, place, head_kv, rotation_k, first_full, n_positions,
                HEAD_DIM, BLOCK_N, BLOCK_D, ACC, PRECISION,
            )  # fmt: skip
            scores, _ = modified(scores, call.score, scale, place, start_m, first_full, rows, keys, exists, ACC)
            p, alpha, m_i, l_i, c_i = weights(
                scores, m_i, l_i, c_i, call, place, nheads_q, rows, keys, qk_scale, HAS_REST, EXACT, DTYPE
            )
            p = bits_of(p)
            for start_n in range(first_full + BLOCK_N, stop_full, BLOCK_N):
                keys = (start_n + offs_n)[None, :]
                scores = _full_products(
                    q_tile, k, k_tiles, k_head, place, head_kv, rotation_k, start_n, n_positions,
                    HEAD_DIM, BLOCK_N, BLOCK_D, ACC, PRECISION,
                )  # fmt: skip
                v_tile = full_tile(
                    v, v_tiles, v_head, place.batch, head_kv, place.first_k, start_n - BLOCK_N,
                    HEAD_DIM_V, BLOCK_N, BLOCK_DV,
                )  # fmt: skip
                acc, w_i = add_values(
                    acc, w_i, alpha, of_bits(p, DTYPE), v_tile, HAS_REST, True, BLOCK_N, ACC, PRECISION
                )
                scores, _ = modified(scores, call.score, scale, place, start_m, start_n, rows, keys, exists, ACC)
                p, alpha, m_i, l_i, c_i = weights(
                    scores, m_i, l_i, c_i, call, place, nheads_q, rows, keys, qk_scale, HAS_REST, EXACT, DTYPE
                )
                p = bits_of(p)
            v_tile = full_tile(
                v, v_tiles, v_head, place.batch, head_kv, place.first_k, stop_full - BLOCK_N,
                HEAD_DIM_V, BLOCK_N, BLOCK_DV,
            )  # fmt: skip
            acc, w_i = add_values(acc, w_i, alpha, of_bits(p, DTYPE), v_tile, HAS_REST, True, BLOCK_N, ACC, PRECISION)
    else:
        for start_n in range(first_full, stop_full, BLOCK_N):
            keys = (start_n + offs_n)[None, :]
            scores = _full_products(
                q_tile, k, k_tiles, k_head, place, head_kv, rotation_k, start_n, n_positions,
                HEAD_DIM, BLOCK_N, BLOCK_D, ACC, PRECISION,
            )  # fmt: skip
            scores, _ = modified(scores, call.score, scale, place, start_m, start_n, rows, keys, exists, ACC)
            v_tile = full_tile(
                v, v_tiles, v_head, place.batch, head_kv, place.first_k, start_n, HEAD_DIM_V, BLOCK_N, BLOCK_DV
            )
            p, alpha, m_i, l_i, c_i = weights(
                scores, m_i, l_i, c_i, call, place, nheads_q, rows, keys, qk_scale, HAS_REST, EXACT, DTYPE
            )
            acc, w_i = add_values(acc, w_i, alpha, p, v_tile, HAS_REST, False, BLOCK_N, ACC, PRECISION)

    edge_n = tl.arange(0, EDGE)
    for i in tl.range(0, blocks.n_boundary, num_stages=EDGE_STAGES, disable_licm=True):
        start_n = boundary_keys(i, blocks, call.mask, place, start_m, EDGE)
        keys = (start_n + edge_n)[None, :]
        key_visible = load_key_visible(call.mask, place, bounds, start_n + edge_n)
        k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, EDGE, BLOCK_D)
        k_tile = _turned(k_tile, rotation_k, place, start_n, n_positions, EDGE, BLOCK_D, ACC)
        scores = dot(q_tile, tl.trans(k_tile), ACC, PRECISION)
        pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, exists, key_visible[None, :])
        scores, _ = modified(scores, call.score, scale, place, start_m, start_n, rows, keys, pairs, ACC)
        scores = tl.where(pairs, scores, float("-inf"))
        v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, EDGE, BLOCK_DV)
        p, alpha, m_i, l_i, c_i = weights(
            scores, m_i, l_i, c_i, call, place, nheads_q, rows, keys, qk_scale, HAS_REST, EXACT, DTYPE
        )
        acc, w_i = add_values(acc, w_i, alpha, p, v_tile, HAS_REST, False, EDGE, ACC, PRECISION)

    if has_nan(acc):
        # A NaN or Inf in a value, multiplied with the zero weight of a query of this tile that may not see it, has
        # become a NaN of that query. Rare enough to start over: zeros for such values, NaN for who may see them.
        acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
        shift = tl.where(m_i == float("-inf"), 0.0, m_i)
        for i in tl.range(0, blocks.n_full + blocks.n_boundary, num_stages=1, disable_licm=True):
            start_n = any_keys(i, blocks, call.mask, place, start_m, EDGE)
            keys = (start_n + edge_n)[None, :]
            key_visible = load_key_visible(call.mask, place, bounds, start_n + edge_n)
            k_tile = load_tile(k_head, start_n, k.stride_s, key_visible, True, HEAD_DIM, EDGE, BLOCK_D)
            k_tile = _turned(k_tile, rotation_k, place, start_n, n_positions, EDGE, BLOCK_D, ACC)
            v_tile = load_tile(v_head, start_n, v.stride_s, key_visible, True, HEAD_DIM_V, EDGE, BLOCK_DV)
            v_tile, poisoned = split_poison(v_tile, ACC)
            pairs = visible(call.mask, place, bounds, start_m, start_n, rows, keys, exists, key_visible[None, :])
            scores = dot(q_tile, tl.trans(k_tile), ACC, PRECISION)
            scores, _ = modified(scores, call.score, scale, place, start_m, start_n, rows, keys, pairs, ACC)
            p = exp_scaled(scores, shift[:, None], qk_scale, EXACT)
            p = kept_only(p, call, place, nheads_q, rows, keys)
            p = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), p), 0.0)
            acc = dot_add(round_to(p, v_tile.dtype), v_tile, acc, ACC, PRECISION)

    w_i = tl.max(w_i, 1)  # all columns are the same
    if SPLIT > 0:
        store_partials(
            acc, m_i, l_i, w_i, c_i, partials, place, tile_rows, split, n_splits, nheads_q, seqlen_q,
            HEAD_DIM_V, BLOCK_DV,
        )  # fmt: skip
    else:
        store_results(
            acc, m_i, l_i, w_i, c_i, sinks_ptr, results, call.dropout, place, tile_rows, nheads_q, seqlen_q,
            softmax_scale, qk_scale, HEAD_DIM_V, BLOCK_M, BLOCK_DV, HEADS, ACC,
        )  # fmt: skip


@triton.jit(do_not_specialize=(*NOT_SPECIALIZED, "n_places"))
def attention_fwd(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    sinks_ptr,
    results,
    partials,
    call,
    rotation,
    rotation_k,
    nheads_q,
    nheads_kv,
    seqlen_q,
    seqlen_k,
    n_tiles,
    together,
    lower_start,
    upper_start,
    lower_end,
    upper_end,
    n_positions,
    scale,
    softmax_scale,
    qk_scale,
    n_places,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    PIPELINED: tl.constexpr,
    ONLY_NAN: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    if n_places is None:
        tile, head, head_kv, sequence = grouped_program(
            n_tiles, nheads_q, nheads_kv, together, HEADS, REVERSED=call.mask.HAS_UPPER
        )
        place = place_of(call.sequences, sequence, head, seqlen_q, seqlen_k)
        if SPLIT > 0:  # the tiles are splits of the keys of all queries
            start_m = 0
        else:
            start_m = tile * (BLOCK_M // HEADS)
        if call.sequences.cu_q_ptr is not None:
            if start_m >= place.seqlen_q:
                return
        tile_rows = rows_of(place, start_m, head, (head_kv + 1) * (nheads_q // nheads_kv), BLOCK_M, HEADS)
        place = with_rows(place, tile_rows, HEADS)
        if SPLIT > 0:
            # Counted again behind the queries: handed on from here, blocks cost the loops of every call registers.
            bounds = bounds_of(call.mask, place, lower_start, upper_start, lower_end, upper_end)
            blocks = key_blocks(call.mask, place, bounds, start_m, BLOCK_M // HEADS, EDGE, BLOCK_N, tile, SPLIT)
            if blocks.n_full + blocks.n_boundary == 0:
                store_nothing(partials, place, tile_rows, tile, n_tiles, nheads_q, seqlen_q, ACC, BLOCK_M)
                return
        if ONLY_NAN:
            sums = results.row_sum + row_offsets(place, tile_rows, nheads_q, seqlen_q)
            if not has_nan(tl.load(sums, mask=tile_rows.exist, other=0.0)):
                return
        _attend_tile(
            place, tile_rows, head_kv, tile, n_tiles, q, k, v, k_tiles, v_tiles, sinks_ptr, results, partials, call,
            rotation, rotation_k, nheads_q, nheads_kv, seqlen_q, seqlen_k, lower_start, upper_start, lower_end,
            upper_end, n_positions, scale, softmax_scale, qk_scale, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, EDGE,
            BLOCK_D, BLOCK_DV, ACC, PRECISION, EXACT, EDGE_STAGES, PIPELINED, HEADS, SPLIT,
        )  # fmt: skip
    else:
        # What does not depend on the tile would be computed once, ahead of the loop, and kept in registers that the
        # loops inside need. The condition, which is never false where sequences are not packed, keeps it inside too.
        for number in tl.range(tl.program_id(0), n_places, tl.num_programs(0), disable_licm=True):
            tile, head, sequence = numbered_tile(
                number, n_places, n_tiles, nheads_q, together, REVERSED=call.mask.HAS_UPPER
            )
            place = place_of(call.sequences, sequence, head, seqlen_q, seqlen_k)
            if tile * BLOCK_M < place.seqlen_q:
                tile_rows = rows_of(place, tile * BLOCK_M, head, nheads_q, BLOCK_M, HEADS)
                _attend_tile(
                    place, tile_rows, head // (nheads_q // nheads_kv), 0, 1, q, k, v, k_tiles, v_tiles, sinks_ptr,
                    results, partials, call, rotation, rotation_k, nheads_q, nheads_kv, seqlen_q, seqlen_k,
                    lower_start, upper_start, lower_end, upper_end, n_positions, scale, softmax_scale, qk_scale,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, EDGE, BLOCK_D, BLOCK_DV, ACC, PRECISION, EXACT,
                    EDGE_STAGES, PIPELINED, HEADS, SPLIT,
                )  # fmt: skip


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results, problem: Problem, *, only_nan: bool = False
) -> None:
    """Fill the results; layouts as in the module docstring, and out and rest as tensors.

    There is at least one query, and `scale` is positive: the kernel takes maxima before it scales. With `only_nan`,
    results are there, and tiles of them stay of which no row_sum is NaN.
    """
    tiling = tiling_of(problem)
    config = tiling.config
    filled, partials = Results(None, None, None, None, None), None
    if tiling.split:
        dropped = problem.call.dropout.seed_ptr is not None
        partials = combine.empty_partials(results, tiling.n_tiles, dropped=dropped)
    else:
        filled = results._replace(out=heads(results.out), rest=None if results.rest is None else heads(results.rest))
    rotation_q = problem.rotation_q
    if config.turned_before and rotation_q is not None:
        q = rotated(q, rotation_q, problem.call.sequences, problem.shape, of_queries=True)
        rotation_q = None
    n_programs, n_places = programs_of(config, tiling.n_programs, q.device)
    rotation_k = problem.rotation_k if problem.rotates_in_place else None
    constants = constants_of(
        attention_fwd, q, v, problem, config, PIPELINED=config.style == "pipelined", ONLY_NAN=only_nan,
        HEADS=tiling.heads, SPLIT=tiling.split, **config.boundary_of_keys,
    )  # fmt: skip
    launcher.launch(
        constants,
        n_programs,
        (
            heads(q),
            heads(k),
            heads(v),
            tiles_of(k, config.BLOCK_N, config.style),
            tiles_of(v, config.BLOCK_N, config.style),
            problem.sinks,
            filled,
            partials,
            problem.call,
            rotation_arguments(rotation_q),
            rotation_arguments(rotation_k),
        ),
        (*sizes_of(q, v, problem, tiling.n_tiles), problem.scale, problem.softmax_scale, problem.qk_scale, n_places),
        problem.known_call,
    )
    if partials is not None:
        combine.launch(partials, results, problem)
