"""Faults in ``kernels/``."""

from tests.mutation.fault import Fault

FWD, BWD, ROWS = "kernels/attention_fwd.py", "kernels/attention_bwd.py", "kernels/attention_bwd_rows.py"
MASKING, PRIMITIVES, ROPE = "kernels/masking.py", "kernels/primitives.py", "kernels/rope.py"

ATTENTION = "tests/test_attention.py"
MASKS = "tests/test_masking.py"
BLOCKS = "tests/test_blocks.py -k test_blocks"
NAN = "tests/test_masking.py -k 'triton and (reaches or infinite or nan or no_query)'"
EMPTY = "tests/test_masking.py -k 'triton and nothing'"
ROTARY = "tests/test_gradcheck.py -k 'of_a_feature and (rope or tables or positions or more)'"
TABLES = "tests/test_rope.py"
TURNED = "tests/test_attention.py -k 'test_budget and RoPE and float32'"
EXACT = "tests/test_attention.py -k 'test_budget and float32'"
HALVES = "tests/test_attention.py -k 'test_budget and bfloat16'"
GRADIENTS = "tests/test_gradcheck.py -k of_a_feature"
MEMORY = "tests/test_memory.py"
LARGE = "tests/test_large_tensors.py"
COMMON = "tests/test_attention.py -k common"
STRIDES = "tests/test_strides.py -k 'not torch'"

# fmt: off
FORWARD = (
    Fault(FWD, "query_exists = offs_m < seqlen_q", "query_exists = offs_m <= seqlen_q", "forward: one query too many", MEMORY),
    Fault(FWD, "head // (nheads_q // nheads_kv)", "head % nheads_kv", "forward: wrong KV head"),
    Fault(FWD, "valid_ptr += batch.to(tl.int64) * seqlen_k", "valid_ptr += 0", "forward: padding of batch 0 for all", "tests/test_attention.py -k 'test_budget and uneven'"),
    Fault(FWD, "m_i = tl.full([BLOCK_M], float(\"-inf\"), ACC)", "m_i = tl.full([BLOCK_M], 0.0, ACC)", "forward: maxima start at 0", EMPTY),
    Fault(FWD, "acc = dot_add(p, v, acc * alpha[:, None], ACC, PRECISION)", "acc = dot_add(p, v, acc, ACC, PRECISION)", "forward: no rescaling in full blocks", nth=0),
    Fault(FWD, "acc = dot_add(p, v, acc * alpha[:, None], ACC, PRECISION)", "acc = dot_add(p, v, acc, ACC, PRECISION)", "forward: no rescaling in boundary blocks", nth=1),
    Fault(FWD, "w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)", "w_i = dot_add(p, ones, w_i, ACC, PRECISION)", "forward: rounded weights not rescaled in full blocks", COMMON, nth=0),
    Fault(FWD, "w_i = dot_add(p, ones, w_i * alpha[:, None], ACC, PRECISION)", "w_i = dot_add(p, ones, w_i, ACC, PRECISION)", "forward: rounded weights not rescaled in boundary blocks", COMMON, nth=1),
    Fault(FWD, "scores = tl.where(pairs, scores, float(\"-inf\"))", "scores = tl.where(pairs, scores, 0.0)", "forward: hidden scores are 0"),
    Fault(FWD, "range(full_stop, stop, BLOCK_N)", "range(start, stop, BLOCK_N)", "forward: full blocks counted twice"),
    Fault(FWD, "range(start, full_stop, BLOCK_N)", "range(start, full_stop - BLOCK_N, BLOCK_N)", "forward: a full block left out"),
    Fault(FWD, "if has_nan(acc):", "if has_nan(acc) & (l_i[0] < 0):", "forward: NaN behind a mask not repaired", NAN),
    Fault(FWD, "tl.where(poisoned[None, :], float(\"nan\"), p)", "tl.where(poisoned[None, :], 0.0, p)", "forward: a visible NaN becomes 0", NAN),
    Fault(FWD, "p = tl.where(pairs, tl.where(poisoned[None, :], float(\"nan\"), p), 0.0)", "p = tl.where(poisoned[None, :], float(\"nan\"), p)", "forward: the repair forgets the mask", NAN),
    Fault(FWD, "unseen = l_i == 0.0", "unseen = l_i < 0.0", "forward: 0 / 0 in rows that see nothing", EMPTY),
    Fault(FWD, "m_i * scale + tl.log(l_i)", "m_i + tl.log(l_i)", "forward: lse of unscaled scores"),
    Fault(FWD, "m_i * scale + tl.log(l_i)", "m_i * scale + tl.math.log2(l_i)", "forward: lse in base 2"),
    Fault(FWD, "tl.where(m_i == float(\"inf\"), float(\"nan\"), m_i)", "tl.where(m_i == float(\"inf\"), float(\"inf\"), m_i)", "forward: an infinite score passes for an empty row", NAN),
    Fault(FWD, "tl.where(unseen[:, None], 0.0, acc / l_i[:, None])", "acc / l_i[:, None]", "forward: a NaN value in a row of scores of -inf", "tests/test_fuzz.py -k 'contract_holds and inf'"),
    Fault(FWD, "m_i = tl.where(unseen, float(\"inf\"), m_i)", "m_i = tl.where(unseen, 0.0, m_i)", "forward: empty rows get weights in the backward", EMPTY),
    Fault(FWD, "m_i = tl.where(unseen, float(\"inf\"), m_i)", "m_i = tl.where(m_i == float(\"-inf\"), float(\"inf\"), m_i)", "forward: a row of NaN passes for an empty one", "tests/test_masking.py -k all_nan"),
    Fault(FWD, "tl.store(row_sum_ptr + row_base + offs_m, l_i, mask=query_exists)", "tl.store(row_sum_ptr + row_base + offs_m, l_i * 1.01, mask=query_exists)", "forward: row sums off by 1 %"),
    Fault(FWD, "encode_rest(acc / tl.where(unseen, 1.0, w_i)[:, None], out)", "encode_rest(acc / l_i[:, None], out)", "forward: rest without the rounding of the weights", COMMON),
    Fault(FWD, "rest_head = head_base(rest_ptr, batch, head, stride_ob, stride_oh)", "rest_head = head_base(rest_ptr, batch, 0, stride_ob, stride_oh)", "forward: rest of head 0 only", COMMON),
    Fault(FWD, "row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q", "row_base = (batch * nheads_q + head) * seqlen_q", "forward: int32 row offsets", LARGE),
    Fault(FWD, "        *k.stride()[:3],\n        *v.stride()[:3],", "        *k.stride()[:3],\n        *k.stride()[:3],", "forward: strides of k for v", STRIDES),
    Fault(FWD, "scale * LOG2E.value", "scale", "forward: base-2 exponents without log2 e"),
)

BACKWARD = (
    Fault(BWD, "ds = p * (dp - delta[None, :])", "ds = p * dp", "dk: delta lost", GRADIENTS),
    Fault(BWD, "    if MASKED:\n        ds = tl.where(pairs, ds, 0.0)\n", "", "dk: hidden pairs not zeroed", NAN),
    Fault(BWD, "head = head_kv * group + i // n_boundary", "head = head_kv + i // n_boundary", "dk, dv: wrong query heads in boundary blocks"),
    Fault(BWD, "head = head_kv * group + i // n_full", "head = head_kv + i // n_full", "dk, dv: wrong query heads in full blocks"),
    Fault(BWD, "for i in range(0, group * n_full)", "for i in range(0, n_full)", "dk, dv: full blocks of the first head only"),
    Fault(BWD, "for i in range(0, group * n_boundary)", "for i in range(0, n_boundary)", "dk, dv: boundary blocks of the first head only"),
    Fault(BWD, "    start += n_boundary * BLOCK_M\n", "", "dk, dv: full blocks start at the boundary"),
    Fault(BWD, "seen = (rows >= 0) & (rows < seqlen_q)", "seen = rows < seqlen_q", "dk, dv: rows before the first", MEMORY),
    Fault(BWD, "seen = seen & (rows + diagonal >= key_start)", "seen = seen & (rows + diagonal > key_start)", "dk, dv: the row that sees one key is lost", "tests/test_gradcheck.py -k 'of_a_feature or left'"),
    Fault(BWD, "            seen = seen & (rows + diagonal >= key_start)\n", "            pass\n", "dk: NaN of a row above the diagonal", EMPTY),
    Fault(BWD, "            seen = seen & (shift != float(\"inf\"))\n", "", "dk: NaN of a row that a boolean mask empties", EMPTY),
    Fault(BWD, "p = tl.where(pairs, softmax_weights(scores, qk_scale, shift[None, :], factor[None, :], EXACT), 0.0)", "p = softmax_weights(scores, qk_scale, shift[None, :], factor[None, :], EXACT)", "dv: hidden pairs not zeroed", GRADIENTS),
    Fault(BWD, "dk * scale", "dk", "dk: scale dropped", GRADIENTS),
    Fault(BWD, "dq * scale", "dq", "dq: scale dropped", GRADIENTS),
    Fault(BWD, "position_offset, True,", "position_offset, False,", "dk: turned forward, not back", ROTARY, nth=0),
    Fault(BWD, "position_offset, True,", "position_offset, False,", "dq: turned forward, not back", ROTARY, nth=1),
    Fault(BWD, "seen = shift != float(\"inf\")\n    delta", "seen = rows < seqlen_q\n    delta", "dq: reads rows that see nothing", EMPTY,
          equivalent="what such a row holds stays in its own scores, and the mask of pairs makes its ds 0; not reading it saves time"),
    Fault(BWD, "ds = p * (dp - delta[:, None])\n", "ds = p * dp\n", "dq: delta lost in full blocks", GRADIENTS),
    Fault(BWD, "tl.where(pairs, p * (dp - delta[:, None]), 0.0)", "tl.where(pairs, p * dp, 0.0)", "dq: delta lost in boundary blocks", GRADIENTS),
    Fault(BWD, "tl.where(pairs, p * (dp - delta[:, None]), 0.0)", "p * (dp - delta[:, None])", "dq: hidden pairs not zeroed", GRADIENTS),
    Fault(BWD, "if has_nan(dq):", "if has_nan(dq) & (delta[0] != delta[0]):", "dq: NaN behind a mask not repaired", NAN),
    Fault(BWD, "ds = tl.where(pairs, tl.where(poisoned[None, :], float(\"nan\"), ds), 0.0)", "ds = tl.where(pairs & ~poisoned[None, :], ds, 0.0)", "dq: a visible NaN becomes 0", NAN),
    Fault(BWD, "range(full_stop, stop, BLOCK_N)", "range(full_stop, stop - BLOCK_N, BLOCK_N)", "dq: the last block left out"),
    Fault(BWD, "*v.stride()[:3], *dout.stride()[:3])", "*k.stride()[:3], *dout.stride()[:3])", "backward: strides of k for v", STRIDES),
    Fault(BWD, "*v.stride()[:3], *dout.stride()[:3])", "*v.stride()[:3], *q.stride()[:3])", "backward: strides of q for dout", STRIDES),
    Fault(BWD, "*dk.stride()[:3], *dv.stride()[:3]", "*dk.stride()[:3], *dk.stride()[:3]", "backward: strides of dk for dv", STRIDES),
    Fault(BWD, "**constants, **LAUNCH_OPTIONS, **rotation_arguments(rotation_k)", "**constants, **LAUNCH_OPTIONS, **rotation_arguments(rotation_q)", "dk: positions of q", ROTARY),
    Fault(BWD, "row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q", "row_base = (batch * nheads_q + head) * seqlen_q", "dk, dv: int32 row offsets", LARGE, nth=0),
    Fault(BWD, "row_base = (batch.to(tl.int64) * nheads_q + head) * seqlen_q", "row_base = (batch * nheads_q + head) * seqlen_q", "dq: int32 row offsets", LARGE, nth=2),
    Fault(BWD, "valid_ptr += batch.to(tl.int64) * seqlen_k", "valid_ptr += batch * seqlen_k", "dk, dv: int32 offset of the padding mask", LARGE, nth=0),
    Fault(BWD, "head_kv = head // (nheads_q // nheads_kv)", "head_kv = head % nheads_kv", "dq: wrong KV head"),
    Fault(ROWS, "        out = decode_rest(out, rest)\n", "", "delta: from the rounded out", COMMON),
    Fault(ROWS, "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr", "delta: sign of dlse, 16 bits", HALVES, nth=0),
    Fault(ROWS, "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr", "delta: sign of dlse, float32", GRADIENTS, nth=1),
    Fault(ROWS, "row_max * qk_scale + tl.math.log2(row_sum)", "row_max * qk_scale", "backward: weights not divided by their sum", HALVES),
    Fault(ROWS, "row_max * qk_scale + tl.math.log2(row_sum)", "row_max * qk_scale + tl.log(row_sum)", "backward: natural logarithm of the sum", HALVES),
    Fault(ROWS, "factor = 1.0 / tl.load(row_sum_ptr + rows, mask=exists, other=1.0)", "factor = tl.load(row_sum_ptr + rows, mask=exists, other=1.0)", "backward: weights multiplied by their sum"),
    Fault(ROWS, "delta += tl.sum(tl.where(pairs, p * dp, 0.0), 1)", "delta += tl.sum(p * dp, 1)", "delta: 0 times a hidden NaN", NAN),
    Fault(ROWS, "delta = delta / tl.where(total == 0.0, 1.0, total)", "delta = delta / total", "delta: 0 / 0 in rows that see nothing", EMPTY,
          equivalent="a row that sees nothing has no visible pair, and the mask of pairs drops whatever its delta is multiplied with"),
    Fault(ROWS, "delta = delta / tl.where(total == 0.0, 1.0, total)", "delta = delta + 0.0 * total", "delta: weights do not add up to 1", COMMON),
    Fault(ROWS, "head // (nheads_q // nheads_kv)", "head % nheads_kv", "delta: wrong KV head"),
    Fault(ROWS, "seen = row_max != float(\"inf\")", "seen = exists", "delta, 16 bits: NaN of a row that sees nothing", EMPTY,
          equivalent="a row that sees nothing has no visible pair, and the mask of pairs drops whatever its delta is multiplied with"),
)

WHAT_IS_SEEN = (
    Fault(MASKING, "tl.minimum(stop, tl.minimum(start_m + BLOCK_M, seqlen_q) + diagonal)", "tl.minimum(stop, tl.minimum(start_m + BLOCK_M, seqlen_q) + diagonal - 1)", "key_blocks: stops one key early", BLOCKS),
    Fault(MASKING, "tl.minimum(start_m + BLOCK_M, seqlen_q) + diagonal", "start_m + BLOCK_M + diagonal", "key_blocks: visits blocks in vain", BLOCKS),
    Fault(MASKING, "tl.minimum(full_stop, start_m + diagonal + 1)", "tl.minimum(full_stop, start_m + diagonal + 2)", "key_blocks: a full block reaches over the diagonal", BLOCKS),
    Fault(MASKING, "// BLOCK_N * contiguous", "// BLOCK_N", "key_blocks: gaps in the padding overlooked", BLOCKS),
    Fault(MASKING, "n_full = tl.maximum(full_stop - key_start, 0) // BLOCK_N * contiguous", "n_full = (full_stop - key_start) // BLOCK_N * contiguous", "key_blocks: a negative number of full blocks", BLOCKS),
    Fault(MASKING, "first = tl.maximum(start_n - diagonal, 0)", "first = tl.maximum(start_n - diagonal + 1, 0)", "query_blocks: starts one query late", BLOCKS),
    Fault(MASKING, "first = tl.maximum(start_n - diagonal, 0)", "first = 0", "query_blocks: visits blocks in vain", BLOCKS),
    Fault(MASKING, "start_n + BLOCK_N - 1 - diagonal", "start_n + BLOCK_N - 2 - diagonal", "query_blocks: a full block reaches over the diagonal", BLOCKS),
    Fault(MASKING, "(start_n + BLOCK_N <= key_start) | (start_n >= key_stop)", "(start_n + BLOCK_N <= key_start) | (start_n + 1 >= key_stop)", "query_blocks: the last key left out", BLOCKS),
    Fault(MASKING, "(start_n + BLOCK_N <= key_start) |", "(start_n + BLOCK_N < key_start) |", "query_blocks: a tile that ends at the first key is visited in vain", BLOCKS),
    Fault(MASKING, "(start_n >= key_start) & (start_n + BLOCK_N <= key_stop)", "(start_n >= key_start)", "query_blocks: full beyond the last key", BLOCKS),
    Fault(MASKING, "(start_n >= key_start) & (start_n + BLOCK_N <= key_stop)", "(start_n + BLOCK_N <= key_stop)", "query_blocks: full before the first key", BLOCKS),
    Fault(MASKING, " & (contiguous != 0)", "", "query_blocks: gaps in the padding overlooked", BLOCKS),
    Fault(MASKING, "(offs_n >= key_start) & (offs_n < key_stop)", "(offs_n >= key_start) & (offs_n <= key_stop)", "one key beyond the last", MEMORY),
    Fault(MASKING, "(tl.load(valid_ptr + offs_n, mask=inside, other=0) != 0)", "(tl.load(valid_ptr + offs_n, mask=inside, other=0) != 2)", "padding between valid keys is visible", "tests/test_attention.py -k 'test_budget and float32 and uneven'"),
    Fault(MASKING, "offs_n <= offs_m + diagonal", "offs_n < offs_m + diagonal", "causal: a query does not see itself", "tests/test_attention.py -k 'test_budget and float32 and causal'"),
    Fault(MASKING, "offs_n <= offs_m + diagonal", "offs_n <= offs_m + diagonal + 1", "causal: a query sees one ahead", "tests/test_attention.py -k 'test_budget and float32 and causal'"),
    Fault(MASKING, "other=0) != 0)\n    return pairs", "other=0) == 0)\n    return pairs", "boolean: polarity", "tests/test_attention.py -k 'test_budget and float32 and boolean'"),
    Fault(MASKING, "(offs_m - start_m) * stride_aq + (offs_n - start_n) * stride_ak", "(offs_m - start_m) * stride_ak + (offs_n - start_n) * stride_aq", "boolean: transposed", "tests/test_attention.py -k 'test_budget and float32 and boolean'"),
    Fault(MASKING, "tl.cast(start_m, tl.int64) * stride_aq", "start_m * stride_aq", "boolean: int32 offset of a tile", LARGE),
    Fault(MASKING, "tl.store(base, tl.minimum(first, stop))", "tl.store(base, first)", "key range: nothing valid", "tests/test_blocks.py -k key_range"),
    Fault(MASKING, "tl.where(seen, offs + 1, 0)", "tl.where(seen, offs, 0)", "key range: the last key left out", BLOCKS),
    Fault(MASKING, "count += tl.sum(seen.to(tl.int32), 0)", "count = tl.sum(seen.to(tl.int32), 0)", "key range: gaps counted in the last block only", "tests/test_blocks.py -k key_range"),
    Fault(MASKING, "first = tl.minimum(first, tl.min(", "first = tl.minimum(seqlen_k, tl.min(", "key range: first key of the last block", "tests/test_blocks.py -k key_range"),
    Fault(MASKING, "row = valid_ptr + batch.to(tl.int64) * seqlen_k", "row = valid_ptr + batch * seqlen_k", "key range: int32 offset", LARGE),
    Fault(MASKING, "tl.load(row + offs, mask=offs < seqlen_k, other=0)", "tl.load(row + offs)", "key range: reads beyond its row", MEMORY),
    Fault(MASKING, "base = key_range_ptr + batch.to(tl.int64) * 3", "base = key_range_ptr + 0 * batch", "key range of batch 0 for all", "tests/test_attention.py -k 'test_budget and float32 and padding'", nth=0),
)

ARITHMETIC = (
    Fault(PRIMITIVES, "return tile, head_and_batch % nheads, head_and_batch // nheads", "return tile, head_and_batch // nheads, head_and_batch % nheads", "programs: heads and batches exchanged", EXACT),
    Fault(PRIMITIVES, "tl.cast(batch, tl.int64) * stride_b", "batch * stride_b", "int32 offset of a batch", LARGE),
    Fault(PRIMITIVES, "tl.cast(head, tl.int64) * stride_h", "head * stride_h", "int32 offset of a head", LARGE),
    Fault(PRIMITIVES, "tl.cast(start, tl.int64) * stride", "start * stride", "load_tile: int32 offset of a tile", LARGE, nth=0),
    Fault(PRIMITIVES, "tl.cast(start, tl.int64) * stride", "start * stride", "store_tile: int32 offset of a tile", LARGE, nth=1),
    Fault(PRIMITIVES, "(offs_d < HEAD_DIM)[None, :], other=0.0)", "(offs_d < BLOCK_D)[None, :], other=0.0)", "load_tile: features beyond head_dim, checked", MEMORY, nth=0),
    Fault(PRIMITIVES, "mask=(offs_d < HEAD_DIM)[None, :], other=0.0)", "mask=(offs_d < BLOCK_D)[None, :], other=0.0)", "load_tile: features beyond head_dim, unchecked", MEMORY),
    Fault(PRIMITIVES, "(start + offs < n_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]", "(start + offs < n_rows)[:, None]", "store_tile: features beyond head_dim", MEMORY),
    Fault(PRIMITIVES, "(start + offs < n_rows)[:, None]", "(start + offs <= n_rows)[:, None]", "store_tile: one row too many", MEMORY),
    Fault(PRIMITIVES, "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = bits >> 16", "bfloat16 truncated", HALVES),
    Fault(PRIMITIVES, "tl.abs(widen(x, ACC)) < float(\"inf\")", "tl.abs(widen(x, ACC)) <= float(\"inf\")", "an infinity is not poison", NAN),
    Fault(PRIMITIVES, "(2.0**-7 / 127.0)", "(2.0**-8 / 127.0)", "rest: half of a bfloat16 unit", COMMON),
    Fault(PRIMITIVES, "(2.0**-10 / 127.0)", "(2.0**-11 / 127.0)", "rest: half of a float16 unit", COMMON),
    Fault(PRIMITIVES, "return near + rest.to(tl.float32)", "return near - rest.to(tl.float32)", "rest: sign", COMMON),
    Fault(PRIMITIVES, "steps = (exact - near) / _rest_unit(near, rounded.dtype)", "steps = (exact - near) * 0.0", "rest: nothing kept", COMMON),
    Fault(PRIMITIVES, "shift = tl.where(m_new == float(\"-inf\"), 0.0, m_new)", "shift = m_new", "softmax: -inf minus -inf", EMPTY),
    Fault(PRIMITIVES, "l_i * alpha + tl.sum(p, 1)", "l_i + tl.sum(p, 1)", "softmax: sums not rescaled", EXACT),
    Fault(PRIMITIVES, "m_new = tl.maximum(m_i, tl.max(scores, 1))", "m_new = tl.max(scores, 1)", "softmax: maximum of the last block", EXACT),
    Fault(PRIMITIVES, "exp_scaled(scores, shift, qk_scale, True) * factor", "exp_scaled(scores, shift, qk_scale, True)", "backward: weights not normalised", GRADIENTS),
    Fault(PRIMITIVES, "tl.math.exp2((scores - row_max) * qk_scale)", "tl.exp((scores - row_max) * qk_scale)", "softmax: base e for base 2, float32", EXACT),
    Fault(PRIMITIVES, "tl.math.exp2(scores * qk_scale - row_max * qk_scale)", "tl.exp(scores * qk_scale - row_max * qk_scale)", "softmax: base e for base 2, 16 bits", HALVES),
    Fault(PRIMITIVES, "mask=exists, other=float(\"inf\"))\n    if EXACT:", "mask=exists, other=0.0)\n    if EXACT:", "backward: rows that do not exist get weights", MEMORY),
    Fault(PRIMITIVES, "return dtype.itemsize > 2", "return dtype.itemsize > 4", "float32 by the formulas of 16 bits", COMMON),
    Fault(PRIMITIVES, "max(16, triton.next_power_of_2(head_dim))", "triton.next_power_of_2(head_dim)", "tiles narrower than a product takes", "tests/test_attention.py -k wide"),
)

ROTATION = (
    Fault(ROPE, "sign = tl.where(is_first, 1.0, -1.0)", "sign = tl.where(is_first, -1.0, 1.0)", "rope: sign of the transpose", ROTARY),
    Fault(ROPE, "        sign = tl.where(is_first, -1.0, 1.0)", "        sign = tl.where(is_first, 1.0, -1.0)", "rope: sign of the sine", ROTARY),
    Fault(ROPE, "is_first = offs_d % 2 == 0", "is_first = offs_d % 2 == 1", "rope: sign of the sine, interleaved", TURNED),
    Fault(ROPE, "pair = offs_d % HALF", "pair = offs_d // 2", "rope: angles of the other pairing", ROTARY),
    Fault(ROPE, "partner = tl.where(rotates, offs_d ^ 1, offs_d)", "partner = offs_d ^ 1", "rope: partner of a feature that does not rotate", "tests/test_rope.py -k left_alone"),
    Fault(ROPE, "positions = rows + position_offset", "positions = rows", "rope: queries not aligned to the last key", TABLES),
    Fault(ROPE, "in_table = (positions >= 0) & (positions < n_positions)", "in_table = positions < n_positions", "rope: a negative position reads before the table", TABLES),
    Fault(ROPE, "in_table = (positions >= 0) & (positions < n_positions)", "in_table = (positions >= 0) & (positions <= n_positions)", "rope: one position beyond the table", TABLES),
    Fault(ROPE, "tl.where(no_entry[:, None] & rotates[None, :], float(\"nan\"), cos)", "tl.where(no_entry[:, None] & rotates[None, :], 1.0, cos)", "rope: a position outside the table does not turn", "tests/test_masking.py -k positions"),
    Fault(ROPE, "(exists & in_table)[:, None] & rotates[None, :]", "(exists & in_table)[:, None]", "rope: entries for features that do not rotate", TABLES),
    Fault(ROPE, "table = batch.to(tl.int64) * stride_tb + positions.to(tl.int64)[:, None] * HALF", "table = batch * stride_tb + positions.to(tl.int32)[:, None] * HALF", "rope: int32 offsets in the tables", LARGE),
    Fault(ROPE, "n_positions * half if self.cos.shape[0] > 1 else 0", "0", "rope: tables of batch 0 for all", TURNED),
    Fault(ROPE, "n_positions * half if self.cos.shape[0] > 1 else 0", "n_positions * half", "rope: shared tables read as one per batch", TURNED),
    Fault(ROPE, "x.stride(0) if x is not None and x.shape[0] > 1 else 0", "0", "rope: positions of batch 0 for all", TURNED),
    Fault(ROPE, "stride_xs=x.stride(2)", "stride_xs=out.stride(2)", "rope: strides of the copy for those of x", "tests/test_strides.py -k seqlen_first"),
    Fault(ROPE, "return x * cos + swapped * sin", "return x * cos - swapped * sin", "rope: all turns backwards", TURNED),
)

# fmt: on

FAULTS = (*FORWARD, *BACKWARD, *WHAT_IS_SEEN, *ARITHMETIC, *ROTATION)
