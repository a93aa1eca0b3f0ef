"""Forward of attention: ``out = dropout(softmax(scores, masked)) v`` with the online softmax.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), in the loop
order of FlashAttention-2: one program owns one tile of BLOCK_M queries of one head, keeps it in registers, and
walks over the key blocks that the tile may see. Full blocks come first, then boundary blocks, whose pairs are masked.
If the sums then have a NaN, the program walks over all blocks again. kernels/masking.py chooses the blocks;
kernels/scores.py modifies the scores.

    q       (batch, nheads_q, seqlen_q, head_dim)     any strides, last dimension contiguous
    out     (batch, nheads_q, seqlen_q, head_dim_v)   likewise
    k       (batch, nheads_kv, seqlen_k, head_dim)    likewise; prepared, unless queries are few: then rotated here
    v       (batch, nheads_kv, seqlen_k, head_dim_v)  likewise
    sinks   (nheads_q,)                               float32, or None: a logit whose weight multiplies no value
    lse     (batch, nheads_q, seqlen_q)               contiguous, natural logarithm
    row_max, row_sum                                  likewise: the softmax of each row, kept for the backward
    largest                                           likewise, or None: the largest score of each row
    rounding_residual  like out, int8, kept for the backward of 16-bit inputs, or None
    nan_rows                                      int8, likewise, or None: tiles without such a row stay as they are
    grid    (tiles of queries * nheads_q * sequences,)

If there are few queries, a program owns the queries of several heads that share a KV head (kernels/grouped_heads.py),
and one split of the keys; kernels/combine.py combines the splits. The grid is then
``(splits * parts of a group * nheads_kv * sequences,)``. kernels/grid.py chooses.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels import combine, fp8, fp8_codes, hopper, launcher
from fusedattn.kernels.cached import first_visible, load_cached, load_factors
from fusedattn.kernels.configs import MAX_HEAD_DIM
from fusedattn.kernels.descriptors import full_tile, tiles_of
from fusedattn.kernels.epilogue import (
    NO_PARTIALS,
    NO_RESULTS,
    OptionalRows,
    Results,
    has_marked,
    store_nothing,
    store_partials,
    store_results,
)
from fusedattn.kernels.grid import tiling_of
from fusedattn.kernels.grouped_heads import grouped_program, load_rows, row_offsets, rows_of, with_rows
from fusedattn.kernels.masking import (
    any_keys,
    boundary_keys,
    bounds_of,
    key_blocks,
    load_key_visible,
    starting_at,
    visible,
)
from fusedattn.kernels.pairs import Block
from fusedattn.kernels.parameters import NOT_SPECIALIZED, QKV, Numbers
from fusedattn.kernels.pipelining import fenced
from fusedattn.kernels.primitives import (
    bits_of,
    block_d,
    dot,
    dot_add,
    dtype_of,
    has_nan,
    head_of,
    load_tile,
    numbered_tile,
    of_bits,
    round_to,
    split_poison,
    strided,
)
from fusedattn.kernels.problem import Problem, constants_of, programs_of, sizes_of
from fusedattn.kernels.qk_norm import NO_NORM, normalize_tile
from fusedattn.kernels.rope import rotate_tile, rotation_arguments
from fusedattn.kernels.scores import load_addends, modified
from fusedattn.kernels.sequences import place_of
from fusedattn.kernels.softmax import exp_scaled
from fusedattn.kernels.sums import Sums, add_values, empty_sums, online_softmax, whole, with_columns
from fusedattn.kernels.weights import kept_only


class Walk(NamedTuple):
    """The state of a program that walks over the keys of its tile of queries.

    `k` and `v` are each a :class:`~fusedattn.kernels.primitives.Head` or, in a cache,
    a :class:`~fusedattn.kernels.primitives.Strided`; `queries` and `exist` are ``(BLOCK_M, 1)``, `offs_n` is
    ``arange(BLOCK_N)``. Full blocks span the keys from `first_full` to `stop_full`.
    """

    q_tile: Any
    q_tail: Any
    k: Any
    v: Any
    head_kv: Any
    k_tiles: Any
    v_tiles: Any
    place: Any
    start_m: Any
    queries: Any
    exist: Any
    offs_n: Any
    bounds: Any
    blocks: Any
    first_full: Any
    stop_full: Any
    scales: Any


@triton.jit
def _add_coded(acc, p, factors, v_tile, tile):
    """Add the product of weights and the values of codes, ``p * factors @ v_tile``, to acc.

    Weights are rounded relative to the largest of their row: float16 would lose those of small factors, and others
    beside a key of a large factor that the row does not see.
    """
    weights = p * factors[None, :]
    if v_tile.dtype == tl.float16:
        sizes = tl.abs(weights)
        largest = tl.max(tl.where(sizes < float("inf"), sizes, 0.0), 1)
        unit = tl.maximum(largest, 1.1754943508222875e-38)  # whose reciprocal is finite
        weights = round_to(weights * (1.0 / unit)[:, None], v_tile.dtype)
        return acc + dot(weights, v_tile, dtype_of(tile.ACC), tile.PRECISION) * unit[:, None]
    else:
        return dot_add(round_to(weights, v_tile.dtype), v_tile, acc, dtype_of(tile.ACC), tile.PRECISION)


@triton.jit
def accumulate(sums, scores, v_tile, walk, call, block, qk_scale, HAS_RESIDUAL: tl.constexpr, tile):
    """Add one block to the sums: a step of the online softmax, and the product of its weights and values."""
    p, alpha, sums = online_softmax(sums, scores, call, walk.place, block, qk_scale, HAS_RESIDUAL, tile.EXACT)
    if call.cache.v_scale is not None:
        factors = _factors(call.cache.v_scale, walk, block.keys, call, tile)
        acc = _add_coded(sums.acc * alpha[:, None], p, factors, v_tile, tile)
        return Sums(sums.m_i, sums.l_i, sums.rounded_l_i, sums.kept_l_i, acc)
    elif walk.scales is not None:
        acc = fp8.add_values(sums.acc * alpha[:, None], p, v_tile, fp8.scale_of_values(walk.scales, block.start_n))
        return Sums(sums.m_i, sums.l_i, sums.rounded_l_i, sums.kept_l_i, acc)
    else:
        return add_values(sums, alpha, round_to(p, v_tile.dtype), v_tile, tile, HAS_RESIDUAL, LAST=False)


@triton.jit
def _load_rows(
    x, tiles, walk, start_n, readable, call, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    OF_KEYS: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """BLOCK_D features, from FIRST on, of BLOCK keys or values from `start_n` on, ``(BLOCK, BLOCK_D)``.

    Those that are not `readable` are 0. None: all exist, in a full block.
    """
    if walk.scales is not None:  # codes of others are 0
        return load_tile(x, fp8.with_keys(walk.scales, start_n), None, HEAD_DIM, BLOCK, BLOCK_D)
    elif call.cache.FORMAT is not None:
        keys = start_n + tl.arange(0, BLOCK)
        if readable is None:
            readable = keys < walk.place.seqlen_k
        DTYPE: tl.constexpr = walk.q_tile.dtype
        # A tuple that is assigned to a name loses its constants (docs/decisions/0007).
        if OF_KEYS:
            return load_cached(
                x, call.cache.k_scale, call.cache, walk.place, walk.head_kv, keys, readable, HEAD_DIM, BLOCK_D, DTYPE,
                FIRST,
            )  # fmt: skip
        else:
            return load_cached(
                x, call.cache.v_scale, call.cache, walk.place, walk.head_kv, keys, readable, HEAD_DIM, BLOCK_D, DTYPE,
                FIRST,
            )  # fmt: skip
    elif readable is None and FIRST == 0:
        return full_tile(x, tiles, start_n, HEAD_DIM, BLOCK, BLOCK_D)
    else:
        return load_tile(x, start_n, readable, HEAD_DIM, BLOCK, BLOCK_D, FIRST)


@triton.jit
def _load_keys(walk, start_n, readable, call, rotation_k, n_positions, BLOCK: tl.constexpr, tile):
    """BLOCK keys from `start_n` on, as in _load_rows, rotated."""
    k_tile = _load_rows(
        walk.k, walk.k_tiles, walk, start_n, readable, call, tile.HEAD_DIM, BLOCK, tile.BLOCK_D, OF_KEYS=True
    )
    return _rotated_keys(k_tile, rotation_k, walk.place, start_n, n_positions, tile)


@triton.jit
def _load_values(walk, k_tile, start_n, readable, call, BLOCK: tl.constexpr, tile):
    """The values of BLOCK keys, as in _load_rows, or these keys themselves."""
    if tile.SHARES_V:
        return k_tile
    elif walk.scales is not None:
        start_n = fp8.with_keys(walk.scales, start_n)
        return fp8.load_values(walk.v, start_n, tile.HEAD_DIM_V, BLOCK, tile.BLOCK_DV)
    else:
        return _load_rows(
            walk.v, walk.v_tiles, walk, start_n, readable, call, tile.HEAD_DIM_V, BLOCK, tile.BLOCK_DV, OF_KEYS=False
        )


@triton.jit
def _factors(scale, walk, keys, call, tile):
    """The factors of the scores or weights of `keys`, ``(1, BLOCK)``, in a cache; ``(BLOCK,)``."""
    of_keys = tl.reshape(keys, (keys.shape[1],))
    readable = of_keys < walk.place.seqlen_k
    return load_factors(scale, call.cache, walk.place, walk.head_kv, of_keys, readable, dtype_of(tile.ACC))


@triton.jit
def _products(walk, k_tile, start_n, readable, keys, call, tile):
    """Products of the queries and a tile of `keys`, ``(1, BLOCK)``, from `start_n` on."""
    if walk.scales is not None:
        return fp8.dot_codes(walk.q_tile, tl.trans(k_tile)) * fp8.scale_of_products(walk.scales, start_n)
    products = dot(walk.q_tile, tl.trans(k_tile), dtype_of(tile.ACC), tile.PRECISION)
    if tile.TAIL > 0:  # features behind the first HEAD_DIM
        END: tl.constexpr = tile.HEAD_DIM + tile.TAIL
        k_tail = _load_rows(
            walk.k, None, walk, start_n, readable, call, END, k_tile.shape[0], walk.q_tail.shape[1], OF_KEYS=True,
            FIRST=tile.HEAD_DIM,
        )  # fmt: skip
        products += dot(walk.q_tail, tl.trans(k_tail), dtype_of(tile.ACC), tile.PRECISION)
    if call.cache.FORMAT is not None:
        products = products * _factors(call.cache.k_scale, walk, keys, call, tile)[None, :]
    return products


@triton.jit
def _rotated_keys(k_tile, rotation_k, place, start_n, n_positions, tile):
    """Rotate a tile of keys, unless it arrives rotated."""
    if rotation_k.ROTARY_DIM > 0:
        BLOCK: tl.constexpr = k_tile.shape[0]
        rotated_tile = rotate_tile(
            k_tile, rotation_k, place, start_n, n_positions, BLOCK, tile.BLOCK_D, dtype_of(tile.ACC),
            OF_QUERIES=False, TRANSPOSE=False,
        )  # fmt: skip
        return round_to(rotated_tile, k_tile.dtype)
    else:
        return k_tile


@triton.jit
def _full_products(walk, start_n, call, rotation_k, n_positions, tile):
    """(products, addends, block, k_tile) of the queries and the keys of the full block at `start_n`."""
    block = Block(walk.start_m, start_n, walk.queries, (start_n + walk.offs_n)[None, :])
    addends = load_addends(call.score, walk.place, block, walk.exist)
    k_tile = _load_keys(walk, start_n, None, call, rotation_k, n_positions, tile.BLOCK_N, tile)
    return _products(walk, k_tile, start_n, None, block.keys, call, tile), addends, block, k_tile


@triton.jit
def _full_blocks(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL: tl.constexpr, tile):
    """Add all full blocks to the sums."""
    for start_n in range(walk.first_full, walk.stop_full, tile.BLOCK_N):
        products, addends, block, k_tile = _full_products(walk, start_n, call, rotation_k, numbers.n_positions, tile)
        scores, _ = modified(products, addends, call.score, numbers.scale, walk.place, block, None, dtype_of(tile.ACC))
        v_tile = _load_values(walk, k_tile, start_n, None, call, tile.BLOCK_N, tile)
        sums = accumulate(sums, scores, v_tile, walk, call, block, numbers.qk_scale, HAS_RESIDUAL, tile)
    return sums


@triton.jit
def _full_blocks_pipelined(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL: tl.constexpr, tile):
    """Add all full blocks, at least one, to the sums.

    The product of a block's weights and values is issued after the product for the scores of the next block, and runs
    while these scores become weights. The first scores and the last product overlap with nothing.
    """
    DTYPE: tl.constexpr = walk.v.ptr.dtype.element_ty
    n_positions = numbers.n_positions
    products, addends, block, k_tile = _full_products(walk, walk.first_full, call, rotation_k, n_positions, tile)
    scores, _ = modified(products, addends, call.score, numbers.scale, walk.place, block, None, dtype_of(tile.ACC))
    p, alpha, sums = online_softmax(sums, scores, call, walk.place, block, numbers.qk_scale, HAS_RESIDUAL, tile.EXACT)
    p = bits_of(round_to(p, DTYPE))
    for start_n in range(walk.first_full + tile.BLOCK_N, walk.stop_full, tile.BLOCK_N):
        products, addends, block, k_tile = _full_products(walk, start_n, call, rotation_k, n_positions, tile)
        v_tile = _load_values(walk, k_tile, start_n - tile.BLOCK_N, None, call, tile.BLOCK_N, tile)
        sums = add_values(sums, alpha, of_bits(p, DTYPE), v_tile, tile, HAS_RESIDUAL, LAST=True)
        scores, _ = modified(products, addends, call.score, numbers.scale, walk.place, block, None, dtype_of(tile.ACC))
        p, alpha, sums = online_softmax(
            sums, scores, call, walk.place, block, numbers.qk_scale, HAS_RESIDUAL, tile.EXACT
        )
        p = bits_of(round_to(p, DTYPE))
    v_tile = _load_values(walk, k_tile, walk.stop_full - tile.BLOCK_N, None, call, tile.BLOCK_N, tile)
    return add_values(sums, alpha, of_bits(p, DTYPE), v_tile, tile, HAS_RESIDUAL, LAST=True)


@triton.jit
def _masked_keys(walk, start_n, call, rotation_k, n_positions, tile):
    """(block, key_visible, k_tile) of BOUNDARY keys; a key that no query may see is 0."""
    offs_n = start_n + tl.arange(0, tile.BOUNDARY)
    block = Block(walk.start_m, start_n, walk.queries, offs_n[None, :])
    key_visible = load_key_visible(call.mask, walk.place, walk.bounds, offs_n)
    k_tile = _load_keys(walk, start_n, key_visible, call, rotation_k, n_positions, tile.BOUNDARY, tile)
    return block, key_visible, k_tile


@triton.jit
def _boundary_blocks(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL: tl.constexpr, tile):
    """Add all boundary blocks to the sums."""
    place = walk.place
    for i in tl.range(0, walk.blocks.n_boundary, num_stages=tile.BOUNDARY_STAGES, disable_licm=True):
        start_n = boundary_keys(i, walk.blocks, call.mask, place, walk.start_m, tile.BOUNDARY)
        block, key_visible, k_tile = _masked_keys(walk, start_n, call, rotation_k, numbers.n_positions, tile)
        pairs = visible(call.mask, place, walk.bounds, block, walk.exist, key_visible[None, :])
        addends = load_addends(call.score, place, block, pairs)
        scores = _products(walk, k_tile, start_n, key_visible, block.keys, call, tile)
        scores, _ = modified(scores, addends, call.score, numbers.scale, place, block, None, dtype_of(tile.ACC))
        scores = tl.where(pairs, scores, float("-inf"))
        v_tile = _load_values(walk, k_tile, start_n, key_visible, call, tile.BOUNDARY, tile)
        sums = accumulate(sums, scores, v_tile, walk, call, block, numbers.qk_scale, HAS_RESIDUAL, tile)
    return sums


@triton.jit
def _repaired(m_i, walk, call, rotation_k, numbers, tile):
    """Recompute acc from all blocks, with 0 in place of NaN and Inf values, and NaN for queries that see one.

    In the first pass, such a value times the weight 0 of a query that may not see it gave that query a NaN.
    """
    place = walk.place
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_DV], dtype_of(tile.ACC))
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    for i in tl.range(0, walk.blocks.n_full + walk.blocks.n_boundary, num_stages=1, disable_licm=True):
        start_n = any_keys(i, walk.blocks, call.mask, place, walk.start_m, tile.BOUNDARY)
        block, key_visible, k_tile = _masked_keys(walk, start_n, call, rotation_k, numbers.n_positions, tile)
        v_tile = _load_values(walk, k_tile, start_n, key_visible, call, tile.BOUNDARY, tile)
        if walk.scales is not None:
            v_tile, poisoned = fp8.split_poison(v_tile)
        else:
            v_tile, poisoned = split_poison(v_tile, dtype_of(tile.ACC))
        pairs = visible(call.mask, place, walk.bounds, block, walk.exist, key_visible[None, :])
        addends = load_addends(call.score, place, block, pairs)
        scores = _products(walk, k_tile, start_n, key_visible, block.keys, call, tile)
        scores, _ = modified(scores, addends, call.score, numbers.scale, place, block, None, dtype_of(tile.ACC))
        p = exp_scaled(scores, shift[:, None], numbers.qk_scale, tile.EXACT)
        p = kept_only(p, call, place, block)
        if call.cache.v_scale is not None:
            factors = _factors(call.cache.v_scale, walk, block.keys, call, tile)
            finite = tl.abs(factors) < float("inf")
            p = tl.where(pairs, tl.where((poisoned | ~finite)[None, :], float("nan"), p), 0.0)
            acc = _add_coded(acc, p, tl.where(finite, factors, 0.0), v_tile, tile)
        else:
            p = tl.where(pairs, tl.where(poisoned[None, :], float("nan"), p), 0.0)
            if walk.scales is not None:
                acc = fp8.add_values(acc, p, v_tile, fp8.scale_of_values(walk.scales, start_n))
            else:
                acc = dot_add(round_to(p, v_tile.dtype), v_tile, acc, dtype_of(tile.ACC), tile.PRECISION)
    return acc


@triton.jit
def _bounds(call, place, numbers):
    """The :class:`~fusedattn.kernels.masking.Bounds` of a sequence."""
    bounds = bounds_of(call.mask, place, numbers)
    if call.cache.FORMAT is not None:
        bounds = starting_at(bounds, first_visible(call.cache, place))
    return bounds


@triton.jit
def _attend(
    place, rows, head_kv, nheads_q, nheads_kv, split, split_keys, IS_SPLIT: tl.constexpr, inputs, call, norm_q,
    rotation_q, rotation_k, numbers, PIPELINED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, tile,
):  # fmt: skip
    """The :class:`Sums` of a tile of queries over all of its keys, or over one split of them."""
    offs_n = tl.arange(0, tile.BLOCK_N)
    queries = rows.queries[:, None]
    exist = rows.exist[:, None]
    scales = None
    place_of_q = place
    if call.cache.FORMAT is not None:
        k = inputs.k
        v = inputs.v
    elif inputs.scales.q_scale_ptr is not None:
        place_of_q = fp8.place_of_codes(place, call.sequences)
        scales = fp8.scales_of_head(
            inputs.scales, place_of_q, nheads_q, nheads_kv, rows.head, head_kv, rows.start, tile.BOUNDARY
        )
        k = head_of(inputs.k, place.batch, head_kv, place_of_q.first_k)
        v = fp8.values_of_head(inputs.v, place_of_q, head_kv)
    else:
        k = head_of(inputs.k, place.batch, head_kv, place.first_k)
        v = head_of(inputs.v, place.batch, head_kv, place.first_k)
    q_tile = load_rows(inputs.q, place_of_q, rows, tile.HEAD_DIM, tile.BLOCK_M, tile.BLOCK_D, tile.HEADS)
    if norm_q.NORMALIZES:
        q_tile = normalize_tile(
            q_tile, norm_q, rows.head, place.first_q, rows.queries, rows.exist, place.batch, tile.HEAD_DIM,
            tile.BLOCK_D, dtype_of(tile.ACC),
        )  # fmt: skip
    if rotation_q.ROTARY_DIM > 0:
        q_tile = rotate_tile(
            q_tile, rotation_q, place, rows.start, numbers.n_positions, tile.BLOCK_M, tile.BLOCK_D, dtype_of(tile.ACC),
            OF_QUERIES=True, TRANSPOSE=False, HEADS=tile.HEADS,
        )  # fmt: skip
    if inputs.scales.q_scale_ptr is None:
        q_tile = round_to(q_tile, inputs.q.ptr.dtype.element_ty)
    q_tail = None
    if tile.TAIL > 0:
        END: tl.constexpr = tile.HEAD_DIM + tile.TAIL
        WIDTH: tl.constexpr = block_d(tile.TAIL)
        q_tail = load_rows(inputs.q, place, rows, END, tile.BLOCK_M, WIDTH, tile.HEADS, tile.HEAD_DIM)

    sums = empty_sums(tile.BLOCK_M, tile.BLOCK_DV, dtype_of(tile.ACC))
    sums = with_columns(sums, tile.BLOCK_N, tile.EXACT)
    bounds = _bounds(call, place, numbers)
    blocks = key_blocks(
        call.mask, place, bounds, rows.start, tile.BLOCK_M // tile.HEADS, tile.BOUNDARY, tile.BLOCK_N,
        split, split_keys, IS_SPLIT, ALIGNED=inputs.scales.q_scale_ptr is not None,
    )  # fmt: skip
    first_full = blocks.start + blocks.n_left * tile.BOUNDARY
    stop_full = first_full + blocks.n_full * tile.BOUNDARY
    walk = Walk(
        q_tile, q_tail, k, v, head_kv, inputs.k_tiles, inputs.v_tiles, place, rows.start, queries, exist, offs_n,
        bounds, blocks, first_full, stop_full, scales,
    )  # fmt: skip
    if PIPELINED:
        if blocks.n_full > 0:
            sums = _full_blocks_pipelined(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL, tile)
    else:
        sums = _full_blocks(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL, tile)
    if tile.BOUNDARY != tile.BLOCK_N:
        sums = with_columns(whole(sums, tile.EXACT), tile.BOUNDARY, tile.EXACT)
    sums = _boundary_blocks(sums, walk, call, rotation_k, numbers, HAS_RESIDUAL, tile)
    sums = whole(sums, tile.EXACT)
    acc = sums.acc
    if has_nan(acc):  # rare enough to start over
        acc = _repaired(sums.m_i, walk, call, rotation_k, numbers, tile)
    return Sums(sums.m_i, sums.l_i, sums.rounded_l_i, sums.kept_l_i, acc)


@triton.jit(do_not_specialize=(*NOT_SPECIALIZED, "n_tile_ids", "split_keys"))
def attention_fwd(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    scales,
    sinks_ptr,
    results,
    partials,
    nan_rows,
    call,
    norm_q,
    rotation_q,
    rotation_k,
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
    softmax_scale,
    qk_scale,
    n_tile_ids,
    split_keys,
    PIPELINED: tl.constexpr,
    tile,
):
    inputs = QKV(q, k, v, k_tiles, v_tiles, scales)
    numbers = Numbers(lower_start, upper_start, lower_end, upper_end, n_positions, scale, qk_scale)
    IS_SPLIT: tl.constexpr = partials.weighted is not None
    HAS_RESIDUAL: tl.constexpr = (partials.rounded_sum if IS_SPLIT else results.rounding_residual) is not None
    if n_tile_ids is None:
        number, head, head_kv, sequence = grouped_program(
            n_tiles, nheads_q, nheads_kv, heads_in_l2, tile.HEADS, REVERSED=call.mask.HAS_UPPER
        )
        place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
        if IS_SPLIT:  # the tiles are splits of the keys of all queries
            start_m = 0
        else:
            start_m = number * (tile.BLOCK_M // tile.HEADS)
        if call.sequences.cu_q_ptr is not None:
            if start_m >= place.seqlen_q:
                return
        stop_head = (head_kv + 1) * (nheads_q // nheads_kv)
        rows = rows_of(place, start_m, head, stop_head, tile.BLOCK_M, tile.HEADS)
        place = with_rows(place, rows, tile.HEADS)
        if nan_rows is not None:
            if not has_marked(nan_rows, row_offsets(place, rows), rows.exist):
                return
        if IS_SPLIT:
            # _attend counts the blocks again: passed on from here, they would cost the loops of every call registers.
            bounds = _bounds(call, place, numbers)
            blocks = key_blocks(
                call.mask, place, bounds, start_m, tile.BLOCK_M // tile.HEADS, tile.BOUNDARY, tile.BLOCK_N,
                number, split_keys, IS_SPLIT,
            )  # fmt: skip
            if blocks.n_full + blocks.n_boundary == 0:
                store_nothing(partials, place, rows, number, n_tiles, tile)
                return
        sums = _attend(
            place, rows, head_kv, nheads_q, nheads_kv, number, split_keys, IS_SPLIT, inputs, call, norm_q, rotation_q,
            rotation_k, numbers, PIPELINED, HAS_RESIDUAL, tile,
        )  # fmt: skip
        if IS_SPLIT:
            store_partials(sums, partials, place, rows, number, n_tiles, tile)
        else:
            store_results(sums, sinks_ptr, results, call.dropout, place, rows, softmax_scale, qk_scale, tile)
    else:
        # Values that do not depend on the tile must be computed inside the loop: ahead of it, they would take registers
        # that the inner loops need. The condition, never false unless sequences are packed, keeps them inside too.
        for tile_id in tl.range(tl.program_id(0), n_tile_ids, tl.num_programs(0), disable_licm=True):
            number, head, sequence = numbered_tile(
                tile_id, n_tile_ids, n_tiles, nheads_q, heads_in_l2, REVERSED=call.mask.HAS_UPPER
            )
            place = place_of(call.sequences, sequence, head, nheads_q, seqlen_q, seqlen_k)
            if number * tile.BLOCK_M < place.seqlen_q:
                rows = rows_of(place, number * tile.BLOCK_M, head, nheads_q, tile.BLOCK_M, tile.HEADS)
                head_kv = head // (nheads_q // nheads_kv)
                sums = _attend(
                    place, rows, head_kv, nheads_q, nheads_kv, 0, 0, IS_SPLIT, inputs, call, norm_q, rotation_q,
                    rotation_k, numbers, PIPELINED, HAS_RESIDUAL, tile,
                )  # fmt: skip
                store_results(sums, sinks_ptr, results, call.dropout, place, rows, softmax_scale, qk_scale, tile)


def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results, problem: Problem) -> None:
    """Fill `results`, which are tensors; layouts as in the module docstring.

    There is at least one query. The scale is positive, because the kernel takes maxima before it scales.
    """
    prologue_q, nan_rows = problem.prologue_q, None
    if hopper.chosen and hopper.takes(q, k, v, results, problem):
        q, prologue_q = prologue_q.prepared(q), prologue_q.done
        from fusedattn.kernels import hopper_fwd  # Gluon is loaded only where it runs

        nan_rows = hopper_fwd.launch(q, k, v, results, problem)
        if nan_rows is None:
            return
    tiling = tiling_of(problem, for_backward=results.rounding_residual is not None)
    config = tiling.config
    scales = fp8.NO_SCALES
    if problem.codes is not None:
        q, k, v, scales = fp8_codes.quantized(q, k, v, problem)
        prologue_q = prologue_q.done
    config = fenced(config, problem.async_products, config.BLOCK_M, k, v, has_descriptors=True)
    if k.dtype != q.dtype and config.BLOCK_M >= 64:  # codes go through registers
        config = config.unpipelined if q.shape[3] <= 128 else config.unpipelined.narrow
    filled, partials = NO_RESULTS, NO_PARTIALS
    if tiling.split_keys:
        dropped = problem.call.dropout.seed_ptr is not None
        partials = combine.empty_partials(results, tiling.n_tiles, dropped=dropped)
    else:
        filled = results.strided()
    # In a tile with queries of several heads, these have the same weights.
    if config.prerotate_q or (tiling.heads > 1 and prologue_q.norm is not None and prologue_q.norm.has_head_weights):
        q, prologue_q = prologue_q.prepared(q), prologue_q.done
    n_programs, n_tile_ids = programs_of(config.persistent, tiling.n_programs, q.device)
    rotation_k = problem.prologue_k.rotation if problem.rotates_in_place else None
    # Values that are the first features of the keys are read once, unless keys are rotated after they are read.
    shares_v = q.shape[3] > results.out.shape[3] == MAX_HEAD_DIM and rotation_k is None
    shares_v = shares_v and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    constants = constants_of(
        attention_fwd,
        q,
        results.out,
        problem,
        config,
        config.boundary_of_keys | {"HEADS": tiling.heads, "SHARES_V": shares_v},
        PIPELINED=config.style == "pipelined",
    )
    launcher.launch(
        constants,
        n_programs,
        (
            strided(q),
            strided(k),
            strided(v),
            tiles_of(k, config.BLOCK_N, config.style),
            tiles_of(v, config.BLOCK_N, config.style),
            scales,
            problem.sinks,
            filled,
            partials,
            None if nan_rows is None else OptionalRows(nan_rows),
            problem.call,
            NO_NORM if prologue_q.norm is None else prologue_q.norm_arguments(q),
            rotation_arguments(prologue_q.rotation),
            rotation_arguments(rotation_k),
        ),
        (
            *sizes_of(q, results.out, problem, tiling.n_tiles),
            *(problem.scale, problem.softmax_scale, problem.qk_scale, n_tile_ids, tiling.split_keys),
        ),
        problem.known_call,
    )
    if tiling.split_keys:
        combine.launch(partials, results, problem)
