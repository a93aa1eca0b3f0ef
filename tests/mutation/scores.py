"""Faults in what the kernels of ``kernels/`` do to scores and weights: functions, biases, sinks and dropout."""

from tests.mutation.fault import Fault
from tests.mutation.suites import (
    ALIBI,
    BIAS,
    BROADCAST_BIAS,
    COMMON,
    DROPPED,
    FUNCTION_INDICES,
    MEMORY,
    RELATIVE,
    SCORE,
    SINKS,
    SOFTCAP,
    STRIDES,
    budget,
    gradients,
    pair,
)

SCORES, TILE, DROPOUT, PROBLEM = "kernels/scores.py", "kernels/weights.py", "kernels/dropout.py", "kernels/problem.py"
EPILOGUE, SUMS = "kernels/epilogue.py", "kernels/sums.py"
FWD, BWD, ROWS = "kernels/attention_fwd.py", "kernels/attention_bwd.py", "kernels/attention_bwd_rows.py"
DBIAS, LAUNCHING = "kernels/attention_bwd_bias.py", "fusedattn/backends/triton/launching.py"
GRADIENT, MASKING = "kernels/score_gradient.py", "kernels/masking.py"

CAPPED = budget("soft-cap", "everything")
MODIFIED_GRADIENTS = gradients("soft-cap", "score")
BIAS_GRADIENTS = gradients("bias")
SINKS_HALVES = budget("sinks", dtype="bfloat16")
DROPPED_HALVES = budget("dropout", dtype="bfloat16")
DROPOUT_GRADIENTS = gradients("dropout")
BROADCAST = budget("batch", "key", "query", "number")

# fmt: off
FUNCTIONS = (
    Fault(SCORES, "    scores = products * scale\n", "    scores = products\n", "modified scores are not scaled", CAPPED),
    Fault(PROBLEM, "return 1.0 if self.call.score is not UNMODIFIED else self.scale", "return self.scale", "modified scores are scaled twice", CAPPED),
    Fault(SCORES, "ratio = tanh(quotient(scores, score.softcap))", "ratio = tanh(scores)", "softcap: ratio to 1", CAPPED),
    Fault(SCORES, "scores = score.softcap * ratio", "scores = ratio", "softcap: its height lost", CAPPED),
    Fault(SCORES, "derivative = 1.0 - ratio * ratio", "derivative = 1.0 - ratio", "softcap: derivative of another function", SOFTCAP),
    Fault(SCORES, "derivative = 1.0 - ratio * ratio", "derivative = (1.0 - ratio * ratio) * score.softcap", "softcap: derivative by the ratio", SOFTCAP),
    Fault(SCORES, "derivative = 1.0 - ratio * ratio", "derivative = 1.0", "softcap: no derivative", SOFTCAP),
    Fault(SCORES, "sign = tl.where(x < 0.0, -1.0, 1.0)", "sign = 1.0", "tanh: negative scores", CAPPED),
    Fault(SCORES, "-2.8853900817779268", "-1.4426950408889634", "tanh: e^-x for e^-2x", CAPPED),
    Fault(SCORES, "(2772.0 + small * 27.0)", "(2727.0 + small * 27.0)", "tanh: two digits exchanged", CAPPED),
    Fault(SCORES, "for i in tl.static_range(11)", "for i in tl.static_range(6)", "tanh: too short a fraction in float64", "tests/public/test_float64.py"),
    Fault(BWD, "delta[None, :]) * derivative", "delta[None, :])", "dk: derivative of the score lost", MODIFIED_GRADIENTS),
    Fault(BWD, "ds = p * (dp - own.delta[:, None]) * derivative  # (", "ds = p * (dp - own.delta[:, None])  # (", "dq: derivative of the score lost in full blocks", budget("soft-cap", "score")),
    Fault(BWD, "return p * (dp - own.delta[:, None]) * derivative, pairs", "return p * (dp - own.delta[:, None]), pairs", "dq: derivative of the score lost in boundary blocks", MODIFIED_GRADIENTS),
    Fault(SCORES, "derivative *= tl.cast(score.DERIVATIVE", "derivative = tl.cast(score.DERIVATIVE", "score function: derivative of the soft-cap lost", SCORE),
    Fault(SCORES, "score.DERIVATIVE(scores, sequence", "score.DERIVATIVE(score.FUNCTION(scores, sequence, head, query, key, score.function_args), sequence", "score function: derivative at the result", MODIFIED_GRADIENTS),
    Fault(SCORES, "changed = score.FUNCTION(scores, sequence, head, query, key,", "changed = score.FUNCTION(scores, sequence, head, key, query,", "score function: queries and keys exchanged", SCORE),
    Fault(SCORES, "changed = score.FUNCTION(scores, sequence, head,", "changed = score.FUNCTION(scores, sequence, 0,", "score function: head 0 for all", SCORE),
    Fault(SCORES, "score.DERIVATIVE(scores, sequence, head,", "score.DERIVATIVE(scores, sequence, 0,", "score function: derivative of head 0 for all", SCORE),
    Fault(MASKING, "tl.minimum(tl.maximum(keys, 0), place.seqlen_k - 1)", "keys", "score function: a key beyond the last", FUNCTION_INDICES),
    Fault(MASKING, "tl.minimum(tl.maximum(rows, 0), place.seqlen_q - 1)", "rows", "score function: a query before the first", FUNCTION_INDICES),
)

BIASES = (
    Fault(SCORES, "scores += widen(bias, ACC)", "scores -= widen(bias, ACC)", "bias: sign", BIAS),
    Fault(SCORES, "tl.load(pair_pointers(score.bias, place, block), mask=readable, other=0.0)", "tl.load(pair_pointers(score.bias, place, block))", "bias: read beyond its rows", MEMORY),
    Fault(SCORES, "bias=None if bias is None else pairs(bias)", "bias=None if bias is None else pairs(bias)._replace(stride_h=0)", "bias: head 0 for all", BIAS),
    Fault(SCORES, "bias=None if bias is None else pairs(bias)", "bias=None if bias is None else pairs(bias)._replace(stride_b=0)", "bias: batch 0 for all", BIAS),
    Fault(SCORES, "bias=None if bias is None else pairs(bias)", "bias=None if bias is None else pairs(bias.contiguous())._replace(stride_q=bias.shape[3], stride_k=1)", "bias: a broadcast one read as if written out", BROADCAST),
    Fault(GRADIENT, "tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs", "tl.where(pairs, p * dp, 0.0), pairs", "dbias: delta lost", BIAS_GRADIENTS),
    Fault(GRADIENT, "tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs", "tl.where(pairs, p * (dp - delta[:, None]) * numbers.scale, 0.0), pairs", "dbias: scaled as dq is", BIAS_GRADIENTS),
    Fault(GRADIENT, "tl.where(pairs, p * (dp - delta[:, None]), 0.0), pairs", "p * (dp - delta[:, None]), pairs", "dbias: hidden pairs not zeroed", BIAS),
    Fault(GRADIENT, "head_kv = place.head // (place.nheads // nheads_kv)", "head_kv = place.head % nheads_kv", "dbias: wrong KV head", BIAS),
    Fault(GRADIENT, "tile.HEAD_DIM_V, tile.BLOCK_DV, dtype_of(tile.ACC), tile.PRECISION", "tile.HEAD_DIM, tile.BLOCK_DV, dtype_of(tile.ACC), tile.PRECISION", "dbias: values as wide as keys", pair("values", "bias")),
    Fault(DBIAS, "heads_each = nheads_q if OVER_HEADS else 1", "heads_each = 1", "dbias: of the first head only", BROADCAST),
    Fault(DBIAS, "sequences_each = n_sequences if OVER_SEQUENCES else 1", "sequences_each = 1", "dbias: of the first batch only", BIAS),
    Fault(DBIAS, "tiles_m_each = tl.cdiv(n_tiles_m - own_m, n_own_m) if OVER_QUERIES else 1", "tiles_m_each = 1", "dbias: of the first queries of each part only", BROADCAST_BIAS),
    Fault(DBIAS, "tiles_n_each = tl.cdiv(n_tiles_n - own_n, n_own_n) if OVER_KEYS else 1", "tiles_n_each = 1", "dbias: of the first keys of each part only", BROADCAST_BIAS),
    Fault(DBIAS, "i % tiles_m_each * n_own_m", "i % tiles_m_each", "dbias: parts that overlap", BROADCAST_BIAS),
    Fault(DBIAS, "        i = i // tiles_n_each\n        start_m = (own_m + i % tiles_m_each", "        start_m = (own_m + i // tiles_n_each % tiles_m_each", "dbias: heads counted with the keys", BROADCAST_BIAS),
    Fault(DBIAS, "own_sequence + i // heads_each", "own_sequence + i", "dbias: batches counted with the heads", budget("number", "batch")),
    Fault(DBIAS, "            total += ds\n", "            total = ds\n", "dbias: the last of what is summed", BROADCAST),
    Fault(DBIAS, "own_n = own % n_own_n", "own_n = own % n_own_m", "dbias: tiles of keys counted as those of queries", BIAS),
    Fault(DBIAS, "(own_sequence.to(tl.int64) * (1 if OVER_HEADS else nheads_q) + own_head) * n_rows", "(own_sequence.to(tl.int64) * nheads_q + own_head) * n_rows", "dbias: written as if heads had their own", BROADCAST_BIAS),
    Fault(DBIAS, "(offs_m < n_rows)[:, None] & (offs_n < n_keys)[None, :]", "(offs_m < n_rows)[:, None]", "dbias: a tile of keys reaches into the next row", BIAS),
    Fault(DBIAS, "tl.sum(total, 0), mask=offs_n < n_keys", "tl.sum(total, 0) / n_rows, mask=offs_n < n_keys", "dbias: the mean over queries", budget("key")),
    Fault(DBIAS, "tl.sum(total, 1), mask=offs_m < n_rows)", "tl.max(total, 1), mask=offs_m < n_rows)", "dbias: the largest over keys", budget("query")),
)

DISTANCES = (
    Fault(SCORES, "return block.keys - block.rows - diagonal_at_end(place)", "return block.keys - block.rows", "distance: counted from the first query and key", RELATIVE),
    Fault(SCORES, "return block.keys - block.rows - diagonal_at_end(place)", "return block.rows - block.keys + diagonal_at_end(place)", "distance: the wrong way round", RELATIVE),
    Fault(SCORES, "scores -= slope *", "scores += slope *", "alibi: far keys get a reward", ALIBI),
    Fault(SCORES, "tl.abs(distance_of(place, block))", "(-distance_of(place, block))", "alibi: keys ahead get a reward in the kernels", ALIBI),
    Fault(SCORES, "place.sequence * score.slopes_stride + place.head", "place.sequence * score.slopes_stride", "alibi: slope of head 0 for all", ALIBI),
    Fault(SCORES, "place.sequence * score.slopes_stride + place.head", "place.head", "alibi: slopes of batch 0 for all", ALIBI),
    Fault(SCORES, "slopes.shape[1] if slopes.shape[0] > 1 else 0", "slopes.shape[1]", "alibi: shared slopes read as one row per batch", ALIBI),
    Fault(SCORES, "None if slopes is None else slopes.contiguous()", "slopes", "alibi: strides of the slopes", STRIDES),
    Fault(SCORES, "tl.maximum(distance_of(place, block), -score.reach)", "tl.maximum(distance_of(place, block), 1 - score.reach)", "relative: the first column is never read", RELATIVE),
    Fault(SCORES, "-score.reach), score.reach) + score.reach", "-score.reach), score.reach - 1) + score.reach", "relative: the last column is never read in the kernels", RELATIVE),
    Fault(SCORES, "tl.cast(place.head, tl.int64) * score.relative.stride_h", "0 * place.head", "relative: head 0 for all", RELATIVE),
    Fault(SCORES, "tl.cast(place.sequence, tl.int64) * score.relative.stride_b", "0 * place.sequence", "relative: batch 0 for all", RELATIVE),
    Fault(SCORES, "    matrix += tl.cast(block.start_m, tl.int64) * score.relative.stride_s\n", "", "relative: every tile has the rows of the first", RELATIVE),
    Fault(SCORES, "(block.rows - block.start_m) * score.relative.stride_s + column", "column", "relative: one row for a tile", RELATIVE),
    Fault(SCORES, "scores += widen(relative, ACC)", "scores += 0.5 * widen(relative, ACC)", "relative: half of it", RELATIVE),
    Fault(SCORES, "tl.load(relative_pointers(score, place, block), mask=readable, other=0.0)", "tl.load(relative_pointers(score, place, block))", "relative: read beyond its rows", MEMORY),
    Fault(SCORES, "0 if size == 1 else stride for size, stride in zip(relative.shape", "stride for size, stride in zip(relative.shape", "relative: a broadcast one read as if written out", RELATIVE),
    Fault(LAUNCHING, "relative=None if relative is None else tileable(relative)", "relative=relative", "relative: strides of the table", STRIDES),
    Fault(DBIAS, "(distance > -reach) & (distance < reach)", "(distance > 1 - reach) & (distance < reach)", "drelative: the second column left out", RELATIVE),
    Fault(DBIAS, "near = pairs & (distance > -reach)", "near = (distance > -reach)", "drelative: written for pairs beyond the last row", MEMORY),
    Fault(DBIAS, "tl.where(distance <= -reach, ds, 0.0)", "tl.where(distance < -reach, ds, 0.0)", "drelative: the edge behind left out", RELATIVE),
    Fault(DBIAS, "distance >= tl.maximum(reach, 1)", "distance > tl.maximum(reach, 1)", "drelative: the edge ahead left out", RELATIVE),
    Fault(DBIAS, "behind += tl.sum", "behind = tl.sum", "drelative: the last block behind only", RELATIVE),
    Fault(DBIAS, "ahead += tl.sum", "ahead = tl.sum", "drelative: the last block ahead only", RELATIVE),
    Fault(DBIAS, "matrix = (tl.cast(sequence, tl.int64) * nheads_q + head) * n_rows", "matrix = (tl.cast(sequence, tl.int64) * nheads_q + head) * seqlen_k", "drelative: as many rows as keys", RELATIVE),
    Fault(DBIAS, "for i in tl.range(0, blocks.n_full + blocks.n_boundary, ", "for i in tl.range(0, blocks.n_full, ", "drelative: boundary blocks left out", RELATIVE),
    Fault(DBIAS, "add_exactly(sums, first + distance + reach, ds, near)", "add_exactly(sums, first + distance + reach, ds, pairs)", "drelative: of shared tables beyond the ends", "tests/public/test_learned.py -k relative"),
    Fault(DBIAS, "add_exactly(sums, first + distance + reach, ds, near)", "add_exactly(sums, first + distance, ds, near)", "drelative: of shared tables reach too early", RELATIVE),
    Fault(DBIAS, "tl.sum(behind, 0), tl.sum(ahead, 0)", "tl.sum(ahead, 0), tl.sum(behind, 0)", "drelative: of shared tables, ends exchanged", RELATIVE),
    Fault(DBIAS, "nheads * n_columns if n_sequences > 1 else 0", "n_columns if n_sequences > 1 else 0", "drelative: sequences one column apart", "tests/public/test_learned.py -k relative"),
    Fault(DBIAS, "n_columns if nheads > 1 else 0", "0", "drelative: all heads in the first", RELATIVE),
    Fault(DBIAS, "if n_rows == 1:", "if n_rows == 0:", "drelative: a row for each query of a shared table", "tests/public/test_learned.py -k shared"),
    Fault(DBIAS, "full = torch.zeros(size,", "full = torch.empty(size,", "drelative: distances that no pair has", RELATIVE),
)

SINK = (
    Fault(EPILOGUE, "tl.where(m_new == float(\"-inf\"), 1.0, l_i * alpha", "tl.where(False, 1.0, l_i * alpha", "sinks: lse of no key and no sink", "tests/public/test_masking.py -k sink_of_nothing"),
    Fault(EPILOGUE, "l_i * alpha + exp_scaled(sink, m_new, qk_scale, EXACT))", "l_i * alpha)", "sinks: no part of the sum", SINKS),
    Fault(EPILOGUE, "sink = tl.load(sinks_ptr + rows.heads)", "sink = tl.load(sinks_ptr)", "sinks: that of head 0 for all", SINKS),
    Fault(EPILOGUE, "        m_new = tl.maximum(m_i, sink)\n", "        m_new = m_i\n", "sinks: the maximum is that of the scores", budget("empty")),
    Fault(EPILOGUE, "        acc = acc * alpha[:, None]\n", "", "sinks: out not rescaled", SINKS),
    Fault(EPILOGUE, "        rounded_l_i = rounded_l_i * alpha\n", "", "sinks: rounded weights not rescaled", SINKS_HALVES),
    Fault(EPILOGUE, "        kept_l_i = kept_l_i * alpha\n        m_i", "        m_i", "sinks: kept weights not rescaled", COMMON),
    Fault(EPILOGUE, "        m_i = m_new\n", "", "sinks: lse and row_max of the scores alone", SINKS),
    Fault(SCORES, "if bounded and softcap is None and not has_sinks:", "if bounded and softcap is None:", "sinks: beside scores that are not scaled", SINKS),
    Fault(ROWS, "sum_of_weights = 1.0 - exp_scaled(sink, shift, qk_scale, tile.EXACT) * factor", "sum_of_weights = tl.full([tile.BLOCK_M], 1.0, dtype_of(tile.ACC))", "delta: as if weights beside a sink added up to 1", gradients("sinks")),
    Fault(ROWS, "sink = tl.load(sinks_ptr + head)", "sink = tl.load(sinks_ptr)", "delta: sink of head 0 for all", SINKS),
    Fault(ROWS, "shift, qk_scale, tile.EXACT) * factor", "shift, qk_scale, tile.EXACT)", "delta: weight of a sink without its sum", gradients("sinks")),
    Fault(ROWS, "tl.where(sum_of_weights > 0.5, sum_of_weights, 1.0)", "sum_of_weights", "delta: divided by nothing where a sink has all weight", "tests/public/test_fuzz.py -k 'contract and sink'"),
    Fault(ROWS, "        problem.sinks,\n", "        None,\n", "delta: sinks forgotten", gradients("sinks")),
)

DROP = (
    Fault(DROPOUT, "zero + _group(keys), zero + _group(rows),", "zero + _group(rows), zero + _group(keys),", "dropout: queries and keys exchanged", DROPPED),
    Fault(DROPOUT, "stream = sequence * nheads + head", "stream = head", "dropout: batches draw the same", DROPPED),
    Fault(DROPOUT, "stream = sequence * nheads + head", "stream = sequence", "dropout: heads draw the same", DROPPED),
    Fault(DROPOUT, "tl.where(rows & 8 != 0,", "tl.where(keys & 8 != 0,", "dropout: two words of a counter for four pairs", DROPPED),
    Fault(DROPOUT, "(index >> 4 << 3)", "(index >> 3 << 3)", "dropout: a counter for each pair in the kernels", DROPPED),
    Fault(DROPOUT, "zero, 10)", "zero, 7)", "dropout: Philox of 7 rounds in the kernels", DROPPED),
    Fault(DROPOUT, "word >= (tl.cast(dropout.threshold, tl.uint32, bitcast=True) ^ 0x80000000)", "word.to(tl.int32, bitcast=True) >= dropout.threshold", "dropout: words from 2^31 on are negative", DROPPED),
    Fault(DROPOUT, "int(dropout_p * 2**32) - 2**31", "int(dropout_p * 2**31) - 2**31", "dropout: half as many are dropped", DROPPED),
    Fault(DROPOUT, "1.0 / (1.0 - dropout_p))", "1.0 / dropout_p)", "dropout: divided by the share that is dropped", DROPPED),
    Fault(DROPOUT, "return word >= (tl.cast", "return word < (tl.cast", "dropout: what must be kept is dropped", DROPPED),
    Fault(TILE, "tl.where(kept(call.dropout, place, block), p, 0.0)", "p", "forward: nothing dropped", DROPPED),
    Fault(TILE, "p * call.dropout.factor * tl.where(kept(call.dropout, place, block), 1.0, 0.0)", "p * call.dropout.factor", "backward: nothing dropped", DROPPED),
    Fault(TILE, "return p * call.dropout.factor * tl.where", "return p * tl.where", "backward: what is kept does not grow", DROPOUT_GRADIENTS),
    Fault(EPILOGUE, "            out = out * dropout.factor\n", "            pass\n", "forward: what is kept does not grow", DROPPED),
    Fault(SUMS, "kept_l_i = kept_l_i * alpha + tl.sum(p, 1)", "kept_l_i = kept_l_i + tl.sum(p, 1)", "rounding residual: kept weights not rescaled", COMMON),
    Fault(EPILOGUE, "    if dropout.seed_ptr is None:\n        kept_l_i = l_i\n", "", "rounding residual: no weight kept without dropout", SINKS_HALVES),
    Fault(EPILOGUE, "return kept_l_i / l_i / tl", "return 1.0 / tl", "rounding residual: as if the kept weights added up to 1", DROPPED_HALVES),
    Fault(EPILOGUE, "            exact_factor = exact_factor * dropout.factor\n", "            pass\n", "rounding residual: what is kept does not grow", DROPPED_HALVES),
    Fault(FWD, "        p = kept_only(p, call, place, block)\n        if", "        if", "forward: the repair forgets dropout", "tests/public/test_masking.py -k dropout_keeps"),
    Fault(BWD, "kept_p = drop(p, call, place, block)", "kept_p = p", "dv: dropout forgotten", DROPOUT_GRADIENTS),
    Fault(BWD, "(drop(dp, call, place, block) - delta[None, :])", "(dp - delta[None, :])", "dk: dropout forgotten", DROPOUT_GRADIENTS),
    Fault(BWD, "dp = drop(dot(own.dout_tile, tl.trans(v_tile), dtype_of(tile.ACC), tile.PRECISION), call, own.place, block)", "dp = dot(own.dout_tile, tl.trans(v_tile), dtype_of(tile.ACC), tile.PRECISION)", "dq: dropout forgotten in full blocks", DROPPED),
    Fault(BWD, "dp = drop(dp, call, own.place, block)\n", "pass\n", "dq: dropout forgotten in boundary blocks", DROPOUT_GRADIENTS),
    Fault(ROWS, "dp = drop(dp, call, place, block)\n", "pass\n", "delta: dropout forgotten", DROPOUT_GRADIENTS),
    Fault(GRADIENT, "dp = drop(dp, call, place, block)\n", "pass\n", "dbias: dropout forgotten", pair("bias", "dropout")),
    Fault(BWD, "delta, pairs, call, (place, block), tile)", "delta, pairs, call, (own.place, block), tile)", "dk, dv: dropout of the first head of the group", DROPPED),
)
# fmt: on

FAULTS = (*FUNCTIONS, *BIASES, *DISTANCES, *SINK, *DROP)
